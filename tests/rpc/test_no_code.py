"""Bytes from a socket never become code: nothing in reach could do it, and a canary lives."""

from __future__ import annotations

import ast
import marshal
import pickle
from pathlib import Path
from typing import ClassVar

import pytest

from rpc.auth.handshake import Credentials, ServerHandshake, Session
from rpc.client.connection import Connection
from rpc.errors import AuthError, ProtocolError, RemoteError
from rpc.transport.inproc import stream_pair
from rpc.wire.frame import FrameKind, Sealer, decode_error
from tests.support.rpc import SERVER, WAIT_S, RawClient, bed

pytestmark = pytest.mark.socket

ROOT = Path(__file__).parent.parent.parent
NETWORK_CODE = sorted(
    path
    for place in ("rpc", "ps", "feeding", "tfos/control", "tfos/node/child_link.py")
    for path in ([ROOT / place] if place.endswith(".py") else (ROOT / place).rglob("*.py"))
)
BANNED_MODULES = {
    *("pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml"),
    *("multiprocessing", "code", "codeop", "imp", "runpy"),
}
BANNED_CALLS = {"eval", "exec", "compile", "__import__", "breakpoint"}
KERNEL_TEXT = {"ps/optim/kernels.py compile", "ps/optim/kernels.py exec"}
"""The loops around a rule's formula: text made of names in ps.optim.rules, nothing from a peer."""
FACES = {"rpc/lazy.py import_module"}
"""The rooms' public names, loaded from the modules that a table in each room's face names."""
BANNED_ATTRIBUTES = {"loads", "Unpickler", "find_class", "import_module"}


def _allows_pickle(word: ast.keyword) -> bool:
    return word.arg == "allow_pickle" and getattr(word.value, "value", None) is not False


def _violations(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "").split(".")[0]]
        bad = [name for name in names if name in BANNED_MODULES]
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name) and called.id in BANNED_CALLS:
                bad.append(called.id)
            if isinstance(called, ast.Attribute) and called.attr in BANNED_ATTRIBUTES:
                bad.append(called.attr)
            if any(_allows_pickle(word) for word in node.keywords):
                bad.append("allow_pickle")
        found += [f"{path}:{getattr(node, 'lineno', 0)} {name}" for name in bad]
    return found


def _without_line(violation: str) -> str:
    place, name = violation.split()
    return f"{Path(place.rpartition(':')[0]).relative_to(ROOT)} {name}"


@pytest.mark.attack("A07")
def test_network_code_reaches_nothing_that_runs_what_it_reads():
    assert len(NETWORK_CODE) > 20
    found = [line for path in NETWORK_CODE for line in _violations(path)]
    assert {_without_line(line) for line in found} == KERNEL_TEXT | FACES


@pytest.mark.attack("A07")
def test_the_check_itself_finds_what_it_looks_for(tmp_path):
    bad = tmp_path / "bad.py"
    lines = ("import pickle", "from marshal import loads", "eval('1')", "x.loads(b'')")
    bad.write_text("\n".join([*lines, "x.save(1, allow_pickle=True)"]))
    found = [line.split()[1] for line in _violations(bad)]
    assert found == ["pickle", "marshal", "eval", "loads", "allow_pickle"]


class Canary:
    """Unpickling it would be noticed."""

    died: ClassVar[list[str]] = []

    def __reduce__(self):
        return (Canary.died.append, ("unpickled",))


@pytest.fixture
def poison(monkeypatch):
    """Pickled and marshalled code; loading either by the standard functions fails the test."""
    data = [pickle.dumps(Canary()), marshal.dumps(compile("1/0", "canary", "eval"))]
    Canary.died.clear()

    def refuse(*args: object, **kwargs: object) -> None:
        Canary.died.append("loaded")

    for name in ("loads", "load", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    load = marshal.loads  # the import system needs it

    def watch(code: bytes, /) -> object:
        if bytes(code) in data:
            Canary.died.append("loaded")
        return load(code)

    monkeypatch.setattr(marshal, "loads", watch)
    yield data
    assert Canary.died == []


@pytest.mark.attack("A07")
def test_a_canary_in_every_field_lives(poison):
    for data in poison:
        with bed() as made:
            with RawClient(made.address) as raw:
                raw.send(data * 10)
                raw.until_closed()
            with made.connect() as connection:
                with pytest.raises(RemoteError):
                    connection.call(data, [data], timeout_s=WAIT_S)
                reply = connection.call(b"echo", [data], timeout_s=WAIT_S)
                assert bytes(reply.payload) == data
            with RawClient(made.address) as raw:
                raw.send(raw.authenticate(made.credentials).sealed(data, len(data)) + data)
                raw.receive(48)
                raw.send(data)
        with pytest.raises(AuthError):
            ServerHandshake(SERVER, Credentials.generate()).feed(data[:8])
        with pytest.raises(ProtocolError):
            decode_error(data)


@pytest.mark.attack("A07")
def test_a_canary_in_a_reply_lives(poison):
    for data in poison:
        ours, theirs = stream_pair()
        connection = Connection(ours, Session(SERVER, bytes(32), bytes(32)))
        pending = connection.start(b"", timeout_s=WAIT_S)
        theirs.sendmsg([memoryview(Sealer(bytes(32)).seal(FrameKind.ERROR, 1, data, 0))])
        with pytest.raises(ProtocolError, match="malformed"):
            pending.result(WAIT_S)
        theirs.close()
