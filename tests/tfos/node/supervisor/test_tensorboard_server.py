"""Which Host a request to TensorBoard may name."""

from __future__ import annotations

from typing import Any

import pytest

from tfos.node.supervisor.tensorboard_server import HostCheck


def _answer(host: str | None) -> str:
    told: list[str] = []

    def application(_environ: dict[str, Any], start_response: Any) -> list[bytes]:
        start_response("200 OK", [])
        return [b"scalars"]

    check = HostCheck(application, ("chief-a.example", "10.0.0.7"))
    environ = {} if host is None else {"HTTP_HOST": host}
    body = b"".join(check(environ, lambda status, _headers: told.append(status)))
    assert (body == b"scalars") is (told == ["200 OK"])
    return told[0]


@pytest.mark.attack("A22")
@pytest.mark.parametrize(
    ("host", "is_answered"),
    [
        ("localhost:6006", True),
        ("LOCALHOST", True),
        ("127.0.0.1:6006", True),
        ("[::1]:6006", True),
        ("10.0.0.7:6006", True),
        ("10.0.0.8:6006", True),
        ("Chief-A.example:6006", True),
        ("evil.example:6006", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("[::1].evil.example", False),
        ("chief-a.example.evil", False),
        ("", False),
        (None, False),
    ],
)
def test_a_rebound_name_reads_nothing(host: str | None, is_answered: bool):
    assert _answer(host).startswith("200" if is_answered else "403")
