"""The stock TensorBoard, with a check of the host name that a browser asks for.

Covers: starting TensorBoard in this process, which Host a request may name.
Does not: watch it (tfos.node.supervisor.tensorboard), ask for a login: TensorBoard has none.
Runs in: TensorBoard's own process.

A site that a user visits can point its own name at 127.0.0.1 (DNS rebinding); the browser then
shows it everything that TensorBoard serves. The request still carries the site's name, so names
that nobody gave to this host are refused; addresses cannot be rebound.
"""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from types import ModuleType
from typing import Any

from rpc.http_page import host_name

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class HostCheck:
    """A WSGI application that answers requests by address, `localhost` or a known name only.

    Args:
        application: answers the permitted requests.
        names: names of this host that users know.
    """

    def __init__(self, application: Application, names: Collection[str]) -> None:
        self._application = application
        self._names = {"localhost", *(name.lower() for name in names)}

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        """Answer one request."""
        name = host_name(str(environ.get("HTTP_HOST", "")))
        if name.lower() in self._names or _is_address(name):
            return self._application(environ, start_response)
        body = (
            b"ask by the address of this host or by localhost, or name this host in "
            b"tensorboard_host or a proxy in page_hosts of reserve()\n"
        )
        start_response(
            "403 Forbidden",
            [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))],
        )
        return [body]


def run(arguments: Sequence[str], names: Collection[str]) -> None:
    """Serve until the process ends, without TensorFlow.

    TensorBoard imports TensorFlow if it can: seconds of start and half a GB for nothing, because
    its own reader serves local event files. The module below is its documented switch.

    Args:
        arguments: arguments of TensorBoard's command line.
        names: names of this host that users know.
    """
    sys.modules["tensorboard.compat.notf"] = ModuleType("tensorboard.compat.notf")
    from tensorboard import default, main_lib, program

    def serve(application: Application, flags: Any) -> Any:
        return program.create_port_scanning_werkzeug_server(HostCheck(application, names), flags)

    main_lib.global_init()
    board = program.TensorBoard(plugins=default.get_plugins(), server_class=serve)
    board.configure(["tensorboard", *arguments])
    board.main()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
