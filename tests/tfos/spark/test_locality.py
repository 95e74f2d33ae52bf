"""Jobs that do not wait for slots near their data, and the application's setting after them."""

from __future__ import annotations

import types
from typing import Any

import pytest

from tfos.spark.locality import WAIT, no_locality_wait


class Settings(dict[str, str]):
    """Stands for Java's SparkConf."""

    def contains(self, key: str) -> bool:
        return key in self

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def remove(self, key: str) -> None:
        del self[key]


def application(settings: Settings) -> Any:
    java = types.SimpleNamespace(sc=lambda: types.SimpleNamespace(conf=lambda: settings))
    return types.SimpleNamespace(applicationId="one", _jsc=java)


def test_no_job_waits_until_the_last_of_several_has_ended():
    settings = Settings()
    first, second = (no_locality_wait(application(settings)) for _ in range(2))
    with second:
        with first:
            assert settings == {WAIT: "0s"}
        assert settings == {WAIT: "0s"}
    assert settings == {}


def test_a_job_that_fails_leaves_no_setting():
    settings = Settings()
    with pytest.raises(ValueError, match="rows"), no_locality_wait(application(settings)):
        raise ValueError("rows")
    assert settings == {}


@pytest.mark.parametrize("name", [WAIT, f"{WAIT}.process", f"{WAIT}.node", f"{WAIT}.rack"])
def test_a_wait_that_the_user_has_set_stays(name):
    settings = Settings({name: "10s"})
    with no_locality_wait(application(settings)):
        assert settings == {name: "10s"}
    assert settings == {name: "10s"}


def test_the_end_of_the_jvm_hides_no_error():
    settings = Settings()

    def fail() -> None:
        settings.clear()  # so remove() raises, as py4j does
        raise ValueError("rows")

    with pytest.raises(ValueError, match="rows"), no_locality_wait(application(settings)):
        fail()
