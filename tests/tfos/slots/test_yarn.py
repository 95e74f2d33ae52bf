"""The question to YARN: not asked of other masters, and a failure of it is no failure of ours."""

from __future__ import annotations

import types

from tfos.slots.yarn import YarnContainers


def test_only_yarn_has_containers():
    assert YarnContainers(types.SimpleNamespace(master="local[2]")).count() is None


def test_a_silent_resource_manager_is_asked_once_and_nothing_is_known():
    asked = []

    class Jvm:
        @property
        def org(self):
            asked.append(1)
            raise ConnectionError("refused")

    containers = YarnContainers(types.SimpleNamespace(master="yarn", _jvm=Jvm()))
    assert [containers.count(), containers.count()] == [None, None]
    assert len(asked) == 1
