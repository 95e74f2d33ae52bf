"""Endpoint of a process: its TCP address, Unix socket, in-process name and host.

Pure data. The client tries the transports in turn (client.connect).
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import socket
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec

from rpc.field_texts import with_field_texts

_Word: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[^\x00-\x20\x7f-\xa0]{0,255}\Z")]
"""What a peer says: without spaces and control characters, since errors and logs show it."""
_Path: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f]{0,255}\Z")]


@with_field_texts
class Endpoint(msgspec.Struct, frozen=True):
    """TCP address of a process and, for peers on the same host, its Unix socket.

    `boot_id` identifies the host where IP addresses do not (containers, NAT, loopback).
    """

    host: _Word
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    unix_path: _Path = ""
    boot_id: _Word = ""
    inproc: _Word = ""

    @property
    def is_near(self) -> bool:
        """Whether the process is on this host: bytes to it pass no network."""
        if self.inproc:
            return True
        return self.boot_id == boot_id() if self.boot_id else is_loopback(self.host)

    def __str__(self) -> str:
        if self.inproc:
            return f"inproc:{self.inproc}"
        return f"{bracketed(self.host)}:{self.port}" if self.port else f"unix:{self.unix_path}"


def bracketed(host: str) -> str:
    """Return a host as it stands before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def is_loopback(host: str) -> bool:
    """Whether a host name or address is loopback; names are not resolved."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


@functools.cache
def boot_id() -> str:
    """Return the kernel's boot id, the same for all processes of one running host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def namespace_id(kind: str) -> str:
    """Return the boot id and this process' namespace of a kind: a host's containers have their own.

    Args:
        kind: Linux' name of it: "net" for what loopback reaches, "pid" for what a pid means.
    """
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink(f"/proc/self/ns/{kind}")
    return f"{boot_id()} {namespace}"


def advertised_host() -> str:
    """Return this host's address on its default route, IPv4 before IPv6, else loopback."""
    return _routed(socket.AF_INET) or _routed(socket.AF_INET6) or "127.0.0.1"


def is_wildcard(host: str) -> bool:
    """Whether a socket that is bound to this listens at all addresses of the host."""
    return host in ("", "0.0.0.0", "::")


def reached_at(bound: str) -> str:
    """Return the host to announce to peers for a socket that is bound to an address.

    Empty: the socket listens at all addresses of this host, which has no route to choose one by
    and no name of which others reach the address.

    Args:
        bound: the address, or one that stands for all of this host.
    """
    if not is_wildcard(bound):
        return bound
    found = _routed(socket.AF_INET6) if bound == "::" else ""
    return found or _routed(socket.AF_INET) or _named()  # a socket at :: takes both


def _named() -> str:
    """Return the address of this host's own name; empty: it has none that others reach."""
    try:
        host = socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""
    return "" if is_loopback(host) else host


def _routed(family: socket.AddressFamily) -> str:
    """Return the address of this host's default route; empty: it has none."""
    beyond = "192.0.2.1" if family == socket.AF_INET else "2001:db8::1"
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Connecting a datagram socket sends nothing; it only chooses the route.
            probe.connect((beyond, 9))
            host = str(probe.getsockname()[0])
    except OSError:
        return ""
    # One of IPv6 needs the name of an interface, which is another one at each host.
    needs_scope = family == socket.AF_INET6 and ipaddress.ip_address(host).is_link_local
    return "" if needs_scope else host
