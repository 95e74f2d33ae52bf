"""Listening sockets: bound once and kept until closed.

Covers: binding TCP and Unix sockets, the Unix socket's private directory, who holds a TCP port that
is taken (from /proc, for the error text).
Does not: authenticate clients (server.authenticator).
Threads: an acceptor belongs to one thread; `close` may come from any.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Protocol

from rpc.endpoint import bracketed
from rpc.errors import PortInUse, SettingsError
from rpc.limits import Limits
from rpc.transport.stream import SocketStream, Stream, address_text, configure

_LISTEN = "0A"


def describe_holder(port: int) -> str:
    """Return `pid 4711 (python, user bob)`, or what is visible without privileges."""
    inodes = _listening_inodes(port)
    if not inodes:
        return "another socket (closed since, or not listening)"
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and _holds(process, inodes):
            return _describe(process)
    return "a process of another user or container"


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(fields[9])
    return inodes


def _holds(process: Path, inodes: set[str]) -> bool:
    try:
        descriptors = list((process / "fd").iterdir())
    except OSError:
        return False
    for descriptor in descriptors:
        # A descriptor may be closed between the listing and the reading.
        with contextlib.suppress(OSError):
            link = os.readlink(descriptor)
            if link.startswith("socket:[") and link[8:-1] in inodes:
                return True
    return False


def _describe(process: Path) -> str:
    try:
        # The kernel cuts it after 15 bytes, maybe inside of a letter.
        name = (process / "comm").read_text(encoding="utf-8", errors="replace").strip()
        uid = process.stat().st_uid
    except OSError:
        return f"pid {process.name}"
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    return f"pid {process.name} ({name}, user {user})"


_BACKLOG = 1024
_MAX_UNIX_PATH_BYTES = 107
_BELOW_TEMPORARY_BYTES = len("/tfos-12345678/rpc-12345678/s")


class Acceptor(Protocol):
    """Yields the streams of clients that are not authenticated yet."""

    def fileno(self) -> int:
        """Return a descriptor that is readable while a client waits."""
        ...

    def accept(self) -> Stream | None:
        """Return the next stream, None if no client waits; OSError when descriptors ran out."""
        ...

    def close(self) -> None:
        """Stop listening; idempotent."""
        ...


class SocketAcceptor:
    """A listening TCP or Unix socket; it listens from the start, to keep its port.

    Args:
        sock: bound; it may listen already.
        limits: limits of the streams that are accepted.
    """

    def __init__(self, sock: socket.socket, limits: Limits) -> None:
        self._sock = sock
        self._limits = limits
        sock.listen(_BACKLOG)
        sock.setblocking(False)

    def fileno(self) -> int:
        """See Acceptor."""
        return self._sock.fileno()

    def accept(self) -> Stream | None:
        """See Acceptor."""
        try:
            sock, address = self._sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        where = address_text(address) if address else f"unix:{_peer_pid_text(sock)}"
        try:
            return SocketStream(sock, where, self._limits)
        except OSError:
            # The client reset the connection before its options were set.
            sock.close()
            return None

    def close(self) -> None:
        """See Acceptor."""
        self._sock.close()


def bound_tcp(host: str, port: int, limits: Limits) -> socket.socket:
    """Return a TCP socket that listens already, to keep its port.

    Args:
        host: address to bind; empty for all.
        port: 0 lets the kernel choose.
        limits: sizes of the socket's buffers.

    Raises:
        PortInUse: another socket holds the port; the text names the holder where /proc shows it.
        SettingsError: the port is not valid.
        OSError: the host is not an address of this machine, or this user may not bind the port; the
            text has both.
    """
    if not 0 <= port < 1 << 16:  # getaddrinfo takes it modulo 65536
        raise SettingsError(f"port {port} is not valid: choose one in 0..65535, 0 for any free one")
    where = f"{bracketed(host)}:{port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise _refusal(where, error) from error
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        configure(sock, limits)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"{where} is held by {describe_holder(port)};"
                " choose another port, or 0 for any free one"
            ) from error
        raise _refusal(where, error) from error
    except BaseException:
        sock.close()
        raise
    return sock


def _refusal(where: str, error: OSError) -> OSError:
    return OSError(
        error.errno,
        f"cannot listen at {where}: {error.strerror}; name an address of this host, and a port "
        "that this user may bind",
    )


class UnixAcceptor(SocketAcceptor):
    """Listens on a socket in a directory of its own that only this user may enter."""

    def __init__(self, directory: str | None, limits: Limits) -> None:
        """Make the directory (below `directory`, default the temporary one) and bind.

        Args:
            directory: parent of the socket's private directory; None: the temporary one.
            limits: limits of the streams that are accepted.

        Raises:
            OSError: the directory cannot be made, or its path is too long for a Unix socket.
        """
        self._directory = short_private_directory(directory)
        self.path = str(self._directory / "s")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(self.path)
            super().__init__(sock, limits)
        except BaseException:
            sock.close()
            shutil.rmtree(self._directory, ignore_errors=True)
            raise

    def close(self) -> None:
        """See Acceptor; also removes the directory."""
        super().close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        with contextlib.suppress(OSError):
            self._directory.rmdir()


def short_private_directory(parent: str | None) -> Path:
    """Make a directory (mode 0700) in which a Unix socket of the name `s` can be bound.

    Args:
        parent: where it is made; None: `short_temporary_directory`.

    Raises:
        OSError: it cannot be made, or its path is too long.
    """
    made = Path(tempfile.mkdtemp(prefix="rpc-", dir=parent or short_temporary_directory()))
    if len(os.fsencode(made / "s")) <= _MAX_UNIX_PATH_BYTES:
        return made
    made.rmdir()
    raise OSError(
        errno.ENAMETOOLONG,
        f"a Unix socket's path has at most {_MAX_UNIX_PATH_BYTES} bytes; name a shorter directory, "
        "or set TMPDIR to one",
        str(made.parent),
    )


def short_temporary_directory() -> str:
    """Return the temporary directory, or /tmp where that is too deep for Unix sockets.

    There is room for a directory of its user, and in that one of `short_private_directory`.
    """
    usual = tempfile.gettempdir()
    is_short = len(os.fsencode(usual)) <= _MAX_UNIX_PATH_BYTES - _BELOW_TEMPORARY_BYTES
    return usual if is_short or not os.access("/tmp", os.W_OK | os.X_OK) else "/tmp"


def _peer_pid_text(sock: socket.socket) -> str:
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    except OSError:
        return "?"
    return f"pid {int.from_bytes(raw[:4], 'little')}"
