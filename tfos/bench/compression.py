"""What does a push of 64 MB of gradients cost packed as fp16, bf16 or int8, in bytes and seconds?

Figures: PACK, one line per format: seconds of a push, the reference is the same push uncompressed;
    `bytes` is what the server has counted.
Method: one client and, for each format, one server process, loopback TCP, 64 tensors in one flat
    float32 buffer of normal numbers, the server adds. All formats take turns.
Caveats: packing pays where the network is slower than packing and unpacking; loopback is not, so
    here it costs. To see a slower link, run it in a network namespace of its own:
        unshare -rn bash -c 'ip link set lo up mtu 1500 &&
            tc qdisc add dev lo root tbf rate 1gbit burst 256kb latency 50ms &&
            tfos bench compression'
Bar: none; on a link of 1 Gbit/s int8 should take about a quarter of the time.
Last result: docs/architecture/performance-notes.md.
"""

from __future__ import annotations

import contextlib
from functools import partial

import msgspec
import numpy as np

from ps.client.client import PSClient
from ps.compression.format import FORMATS, Compression
from ps.manifest.manifest import Add, Manifest
from tfos.bench.dense import GROUP, HYPER, MIB, manifest
from tfos.bench.harness import Bench, Figure, interleave, timed
from tfos.bench.servers import served

REPEATS = 9
KINDS: tuple[Compression, ...] = ("none", *FORMATS)


def packed(kind: Compression, num_elements: int) -> Manifest:
    """Return the manifest of `dense`, with compression.

    Args:
        kind: the packed format.
        num_elements: float32 parameters.
    """
    plain = manifest(Add(), num_elements)
    groups = tuple(msgspec.structs.replace(spec, compression=kind) for spec in plain.groups)
    return msgspec.structs.replace(plain, groups=groups)


def bytes_of(client: PSClient) -> int:
    """Return the payload that the server has received so far."""
    return sum(server.bytes_in for server in client.stats())


def run(bench: Bench) -> None:
    """Measure pushes of each format in turns."""
    num_bytes = MIB if bench.toy else 64 * MIB
    random = np.random.default_rng(0)
    gradient = {GROUP: random.standard_normal(num_bytes // 4, np.float32)}
    values = {GROUP: np.zeros(num_bytes // 4, np.float32)}
    with contextlib.ExitStack() as running:
        clients = {kind: running.enter_context(served()) for kind in KINDS}
        for kind, client in clients.items():
            client.seed(packed(kind, num_bytes // 4), values)
        pushes = {
            kind: partial(client.push, gradient, hyper=HYPER, rows=1)
            for kind, client in clients.items()
        }
        sizes = {}
        for kind, push in pushes.items():
            before = bytes_of(clients[kind])
            push()
            sizes[kind] = bytes_of(clients[kind]) - before
            push()  # the two buffers of what is left change places: both have their pages now
        repeats = bench.repeats(REPEATS)
        seconds = interleave(repeats, *(partial(timed, push) for push in pushes.values()))
    for kind, ours in zip(KINDS[1:], seconds[1:], strict=True):
        figure = Figure("PACK", f"push of {num_bytes / MIB:g} MiB as {kind}, TCP", "s", "lower")
        share = round(sizes[kind] / sizes["none"], 4)
        bench.report(figure, ours, seconds[0], "uncompressed", bytes=sizes[kind], share=share)
