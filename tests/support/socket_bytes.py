"""Count the bytes of every TCP socket of a process, through the kernel's sock_diag interface."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST_DUMP = 0x301
_INET_DIAG_INFO = 2
_NLMSG_DONE = 3
_MSG_HEADER = struct.Struct("=IHHII")
_DIAG_BYTES = 72
_INODE_OFFSET = 68
_BYTES_ACKED_OFFSET = 120


def tcp_bytes_by_inode() -> dict[int, int]:
    """Map the inode of each TCP socket of this host to the bytes it sent and received so far."""
    counts: dict[int, int] = {}
    for family in (socket.AF_INET, socket.AF_INET6):
        counts.update(_dump(family))
    return counts


def _dump(family: int) -> dict[int, int]:
    request = struct.pack(
        "=BBBxI48x", family, socket.IPPROTO_TCP, 1 << (_INET_DIAG_INFO - 1), 0xFFF
    )
    header = _MSG_HEADER.pack(
        _MSG_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST_DUMP, 1, 0
    )
    counts: dict[int, int] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as link:
        link.settimeout(5)
        link.send(header + request)
        while True:
            data = link.recv(1 << 16)
            while len(data) >= _MSG_HEADER.size:
                length, kind, *_ = _MSG_HEADER.unpack_from(data)
                if kind == _NLMSG_DONE:
                    return counts
                inode, total = _parse(data[_MSG_HEADER.size : length])
                if inode:
                    counts[inode] = total
                data = data[(length + 3) & ~3 :]


def _parse(message: bytes) -> tuple[int, int]:
    if len(message) < _DIAG_BYTES:
        return 0, 0
    (inode,) = struct.unpack_from("=I", message, _INODE_OFFSET)
    rest = message[_DIAG_BYTES:]
    while len(rest) >= 4:
        length, kind = struct.unpack_from("=HH", rest)
        if length < 4:
            break
        if kind == _INET_DIAG_INFO and length - 4 >= _BYTES_ACKED_OFFSET + 16:
            acked, received = struct.unpack_from("=QQ", rest, 4 + _BYTES_ACKED_OFFSET)
            return inode, acked + received
        rest = rest[(length + 3) & ~3 :]
    return inode, 0


def process_sockets(pid: int) -> set[int]:
    """Return the inodes of the sockets that process `pid` holds open."""
    inodes: set[int] = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(fd)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(int(target[8:-1]))
    return inodes


def process_tcp_bytes(pid: int) -> int:
    """Bytes that the open TCP sockets of `pid` have sent and received since they were opened."""
    counts = tcp_bytes_by_inode()
    return sum(counts.get(inode, 0) for inode in process_sockets(pid))
