"""How much faster are reading and adding all parameters than with TensorFlow's parameter server?

Figure: P04.
Method: 64 MiB of parameters in 64 float32 tensors. Ours: pull, then push with a plain add, of one
    client in this process and one server process, by the way that is chosen on one host. The
    reference: TensorFlow's ParameterServerStrategy with a ClusterCoordinator, one worker and one
    server, each a process with its own gRPC; a compiled function on the worker reads all variables,
    another does assign_add on all of them (reference/tensorflow_ps.py). Seconds of both together,
    and of each alone; both sides take turns. CPU seconds of all processes of a side are reported,
    too: they hang less on who else uses the machine.
Caveats: the reference's seconds hold one schedule and join for each of the two, about a
    millisecond.
Bar: read + add at least 3 times as fast.
Last result: docs/guides/performance.md.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import psutil

from ps.errors import PSError
from ps.manifest.manifest import Add
from tfos.bench.dense import GROUP, HYPER, MIB, NUM_TENSORS, manifest
from tfos.bench.harness import Bench, Figure, interleave, timed
from tfos.bench.reference.tensorflow_ps import tensorflow_peer
from tfos.bench.servers import server_group

REPEATS = 9
PEER = "TensorFlow's ParameterServerStrategy"


def cpu_seconds(pids: Sequence[int]) -> float:
    """Return the CPU seconds that these processes have used so far, user's and system's."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(each.user + each.system for each in times)


def run(bench: Bench) -> None:
    """Measure P04."""
    num_bytes = MIB if bench.toy else 64 * MIB
    gradient = np.ones(num_bytes // 4, np.float32)
    into = np.zeros_like(gradient)
    repeats = bench.repeats(REPEATS)
    with (
        tensorflow_peer(num_bytes, 4 if bench.toy else NUM_TENSORS) as peer,
        server_group(unix=True) as group,
        group.client() as client,
    ):
        sides = ((os.getpid(), *group.pids), peer.pids)
        client.seed(manifest(Add(), gradient.size), {GROUP: into})
        client.attach(timeout_s=60)
        measures = (
            lambda: timed(lambda: client.pull({GROUP: into})),
            lambda: timed(lambda: client.push({GROUP: gradient}, hyper=HYPER, rows=1)),
            peer.read,
            peer.add,
        )
        interleave(2, *measures)  # traced, connected, and pages are there
        before = [cpu_seconds(pids) for pids in sides]
        pull_s, push_s, read_s, add_s = interleave(repeats, *measures)
        used_s = [cpu_seconds(pids) - spent for pids, spent in zip(sides, before, strict=True)]
        client.pull({GROUP: into})
        found = (into.min(), into.max(), *peer.values())
    if set(found) != {repeats + 2.0}:
        raise PSError(f"{repeats + 2} were added, the values are {found}; report this")
    both = [a + b for a, b in zip(pull_s, push_s, strict=True)]
    peers = [a + b for a, b in zip(read_s, add_s, strict=True)]
    cpu = {
        "cpu_s_of_read_and_add": round(used_s[0] / repeats, 4),
        "reference_cpu_s": round(used_s[1] / repeats, 4),
    }
    for what, moved, ours, reference in (
        ("read + add", 2 * num_bytes, both, peers),
        ("read", num_bytes, pull_s, read_s),
        ("add", num_bytes, push_s, add_s),
    ):
        mine, others = ([moved / 1e9 / value for value in side] for side in (ours, reference))
        name = f"{what} of {num_bytes / MIB:g} MiB, same host"
        bench.report(Figure("P04", name, "GB/s", "higher"), mine, others, PEER, **cpu)
