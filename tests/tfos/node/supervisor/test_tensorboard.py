"""TensorBoard's keeper: addresses, and starts that go wrong."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import msgspec
import pytest

from rpc import endpoint
from tests.support.nodes import node_settings
from tfos.control.messages import TensorBoardUp
from tfos.node.supervisor import children, tensorboard
from tfos.node.supervisor.event_loop import EventLoop


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://0.0.0.0:6006/", "http://10.0.0.7:6006/"),
        ("http://[::]:6006/", "http://10.0.0.7:6006/"),
        ("http://127.0.0.1:6006/", "http://127.0.0.1:6006/"),
        ("http://host-b:6006/x0.0.0.0/", "http://host-b:6006/x0.0.0.0/"),
    ],
)
def test_the_address_of_all_is_shown_as_one_that_the_driver_can_open(url, expected):
    assert tensorboard.reachable_url(url, "10.0.0.7") == expected


def test_an_ipv6_address_stands_in_brackets():
    assert tensorboard.reachable_url("http://[::]:6006/", "fd00::7") == "http://[fd00::7]:6006/"


@pytest.mark.attack("A23")
def test_the_address_of_all_is_not_hidden_behind_loopback():
    url = "http://0.0.0.0:6006/"
    assert tensorboard.reachable_url(url, "127.0.0.1") == url


@pytest.mark.attack("A23")
@pytest.mark.parametrize(
    ("settings", "bound"),
    [
        ({"loopback": True}, "127.0.0.1"),
        ({"loopback": False, "driver_loopback": endpoint.namespace_id("net")}, "127.0.0.1"),
        ({"loopback": False, "driver_loopback": "another host"}, "10.0.0.7"),
        ({"loopback": False, "driver_loopback": f"{endpoint.boot_id()} net:[1]"}, "10.0.0.7"),
    ],
)
@pytest.mark.parametrize("asked", ["", "10.9.9.9"])
def test_it_binds_loopback_where_that_suffices_and_what_the_user_asks_for(
    settings, bound, asked, monkeypatch, tmp_path
):
    started: list[tuple[str, ...]] = []

    def spawn(_module: str, body: bytes, *_: Any, **__: Any) -> Any:
        started.append(msgspec.msgpack.decode(body, type=tensorboard.TensorBoardSpec).arguments)
        raise OSError("far enough")

    monkeypatch.setattr(children, "spawn", spawn)
    own = node_settings(**settings)
    own = dataclasses.replace(own, tensorboard=dataclasses.replace(own.tensorboard, host=asked))
    spec: Any = types.SimpleNamespace(
        bundle=types.SimpleNamespace(settings=own),
        executor=types.SimpleNamespace(host="10.0.0.7", cwd=""),
        sys_path=(),
    )
    workspace: Any = types.SimpleNamespace(subdirectory=lambda _: tmp_path)
    tensorboard.TensorBoardChild(EventLoop(), lambda _: None).start(spec, workspace, {})
    (arguments,) = started
    assert arguments.count("--host") == 1
    assert arguments[arguments.index("--host") + 1] == (asked or bound)
    assert "--bind_all" not in arguments


@pytest.mark.fault("F58")
def test_a_full_disk_costs_tensorboard_and_not_the_node():
    def subdirectory(name: str) -> Any:
        raise OSError(28, "No space left on device")

    reports: list[TensorBoardUp] = []
    settings = node_settings(loopback=True)
    spec: Any = types.SimpleNamespace(
        bundle=types.SimpleNamespace(settings=settings),
        executor=types.SimpleNamespace(host="127.0.0.1"),
    )
    workspace: Any = types.SimpleNamespace(subdirectory=subdirectory)
    tensorboard.TensorBoardChild(EventLoop(), reports.append).start(spec, workspace, {})
    (report,) = reports
    assert report.url == ""
    assert "No space left" in report.reason
