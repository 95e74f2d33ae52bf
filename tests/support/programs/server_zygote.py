"""Parameter servers forked from a process that has loaded the kernels: a start costs milliseconds.

Usage: python -m tests.support.programs.server_zygote SOCKET_FD
Each message on the socket is the JSON list of a server's arguments, with three descriptors: its
standard output, its standard error, and a pipe for its exit status. The answer is its process id.
The program ends, and its servers with it, when the other end of the socket is closed.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import socket
import sys
from contextlib import suppress

from ps.cli.serve import main as serve
from ps.optim import kernels
from tests.support.forked_servers import MAX_REQUEST_BYTES, NUMBER
from tests.support.ps_cluster import ADD, make_manifest

PR_SET_PDEATHSIG = 1
MAX_DESCRIPTORS = 1024


def be_server(arguments: list[str], stdout: int, stderr: int) -> None:
    """Do what `python -m ps.server` does, in a process that was forked for it."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.closerange(3, MAX_DESCRIPTORS)
        status = serve(arguments)
    except SystemExit as end:  # argparse refuses arguments with it
        status = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def start(asked: socket.socket, request: bytes, descriptors: list[int]) -> tuple[int, int]:
    """Fork a server; returns its process id and where its exit status goes."""
    stdout, stderr, result = descriptors
    pid = os.fork()
    if pid == 0:
        be_server(json.loads(request), stdout, stderr)
    os.close(stdout)
    os.close(stderr)
    asked.send(NUMBER.pack(pid))
    return pid, result


def tell_end(pid: int, result: int) -> None:
    _, status = os.waitpid(pid, 0)
    with suppress(BrokenPipeError):  # the test has closed its end
        os.write(result, NUMBER.pack(os.waitstatus_to_exitcode(status)))
    os.close(result)


def main() -> None:
    kernels.warm_for(make_manifest(rule=ADD, consistency="sync"))
    asked = socket.socket(fileno=int(sys.argv[1]))
    with selectors.DefaultSelector() as events:
        events.register(asked, selectors.EVENT_READ)
        while True:
            for key, _ in events.select():
                if key.data is None:
                    request, descriptors, _, _ = socket.recv_fds(asked, MAX_REQUEST_BYTES, 3)
                    if not request:
                        return
                    server = start(asked, request, descriptors)
                    events.register(os.pidfd_open(server[0]), selectors.EVENT_READ, server)
                else:
                    events.unregister(key.fd)
                    os.close(key.fd)
                    tell_end(*key.data)


if __name__ == "__main__":
    main()
