"""The limit of open files: raised as far as a server needs it, or named before anybody waits."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.waiting import WAIT_S

pytestmark = pytest.mark.slow

COORDINATOR = """
import io
from tfos.config import ClusterConfig
from tfos.console.console import Console
from tfos.control.authority import ClusterAuthority
from tfos.control.coordinator import Coordinator
from tfos.topology import plan
made = Coordinator(plan(300, 1), ClusterConfig(), Console(enabled=False, stream=io.StringIO()))
made.start("127.0.0.1", ClusterAuthority("c").driver())
made.close()
"""
SERVER = """
from ps.server.server import PSServer, ServerSettings
from rpc.auth.handshake import Credentials
settings = ServerSettings(rank=2, num_servers=3, num_workers=300)
PSServer(settings, Credentials.generate()).close()
"""
TABLES = """
from ps.client.client import PSClient
from ps.server.server import PSServer, ServerSettings
from rpc.auth.handshake import Credentials, Identity, Role
from tests.support.ps_cluster import filled
from tests.support.tables import table, with_tables
credentials, manifest = Credentials.generate(), with_tables(table(), size=60)
settings = ServerSettings(rank=0, num_servers=1, num_workers=300)
server = PSServer(settings, credentials)
server.bind_inproc("alone")
server.start()
PSClient([server.endpoint], credentials, Identity(Role.WORKER, 0), num_workers=300).seed(
    manifest, filled(manifest)
)
"""
LISTENER = """
from rpc.auth.handshake import Credentials, Identity, Role
from rpc.server.listener import Listener
Listener(print, Credentials.generate(), Identity(Role.WORKER, 0)).close()
"""


def _run(program: str, soft: int, hard: int) -> subprocess.CompletedProcess[str]:
    limited = (
        f"import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        f"{program}\nprint(*resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    )
    return subprocess.run(
        [sys.executable, "-c", limited], capture_output=True, text=True, timeout=WAIT_S, check=False
    )


@pytest.mark.fault("F19")
@pytest.mark.parametrize(
    ("program", "who", "hard", "num_connections"),
    [
        (COORDINATOR, "the driver's server of 300 nodes", 256, 300),
        (SERVER, "ps:2 of 300 workers", 350, 308),
        # Room for one connection of each worker, and not for that of its lookups beside it.
        (TABLES, "ps:0 of 300 workers, one for pushes and one for rows of tables", 600, 608),
    ],
    ids=["driver", "server", "tables"],
)
def test_a_process_that_may_not_open_enough_files_says_so_at_once(
    program: str, who: str, hard: int, num_connections: int
):
    run = _run(program, 256, hard)
    assert run.returncode == 1
    error = run.stderr.strip().splitlines()[-1]
    assert error.partition("SettingsError: ")[2].startswith(f"{who} needs a limit of ")
    told = f" open files for {num_connections} connections, but the hard limit of this process is"
    assert f"{told} {hard} " in error
    needed = int(error.partition("a limit of ")[2].split()[0])
    assert num_connections + 64 < needed < 2 * num_connections + 200


@pytest.mark.parametrize(
    ("program", "hard", "expected"),
    [
        (COORDINATOR, 4096, range(800, 1200)),
        (SERVER, 1024, [1024]),
        (SERVER, 600, [600]),
        (LISTENER, 512, [512]),
    ],
    ids=["driver", "server", "server without tables", "listener"],
)
def test_the_soft_limit_is_raised_as_far_as_the_hard_one_allows(program, hard, expected):
    run = _run(program, 256, hard)
    assert run.returncode == 0, run.stderr
    soft, still_hard = map(int, run.stdout.split())
    assert soft in expected
    assert still_hard == hard
