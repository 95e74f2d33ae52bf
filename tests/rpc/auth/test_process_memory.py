"""What a process that holds the secret allows others: no core dump, and no look by this user."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, resource, sys
from rpc.auth import process_memory
resource.setrlimit(resource.RLIMIT_CORE, (4096, 4096))
getattr(process_memory, sys.argv[1])()
print(*resource.getrlimit(resource.RLIMIT_CORE), ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))
"""


@pytest.mark.attack("A16")
@pytest.mark.attack("A17")
@pytest.mark.parametrize(
    ("call", "shown"), [("forbid_core_dumps", "0 4096 1"), ("forbid_reading", "0 4096 0")]
)
def test_the_soft_limit_is_zero_and_the_memory_is_private(call: str, shown: str):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, call], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == shown.split()
