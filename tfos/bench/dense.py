"""How close do pull, push and push_pull of 64 MB of parameters come to a plain socket?

Figures: P01, P01g, P02, P03.
Method: one client, one server process, authenticated, header MAC on, 64 tensors in one flat float32
    buffer: over loopback TCP for P01 and P03, with integrity="payload" and with security="tls" for
    P01g, by the way that is chosen on one host for P02. Push adds without an optimizer. The
    reference is one buffer over one raw TCP socket (reference/raw_socket.py); for P03 it is raw
    push + raw pull + the same Adam kernel in this process, one after the other. Both take turns.
Caveats: on two cores both ends share them, so overlap of receiving and applying gains little; where
    others want the cores too, shared memory gains least, because its two sides copy in turns.
Bars: P01 at least 0.85 of the raw socket each, P01g is reported, P02 at least 1.5; P03 at most 1.1
    of the sum.
Last result: docs/guides/performance.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ps.client.client import PSClient
from ps.dense.shard import DenseShard
from ps.errors import PSError
from ps.manifest.manifest import Adam, Add, GroupSpec, Hyper, Manifest, ParamSpec, RuleConfig
from tfos.bench.harness import Bench, Figure, interleave, timed
from tfos.bench.reference.raw_socket import RawPeer
from tfos.bench.servers import Protection, served, served_for

NUM_TENSORS = 64
MIB = 1 << 20
REPEATS = 9
HYPER = Hyper(learning_rate=1e-3)
GROUP = "trainable"
RAW = "raw TCP socket on loopback"


def manifest(rule: RuleConfig, num_elements: int) -> Manifest:
    """One group of equal tensors.

    Args:
        rule: the group's rule.
        num_elements: float32 parameters.
    """
    shape = (num_elements // NUM_TENSORS,)
    params = tuple(ParamSpec(f"tensor_{index}", shape) for index in range(NUM_TENSORS))
    return Manifest(groups=(GroupSpec(name=GROUP, dtype="float32", rule=rule, params=params),))


@dataclass(frozen=True)
class Way:
    """How the bytes travel."""

    id: str
    name: str
    same_host: bool = False
    protection: Protection = "header"


WAYS = (
    Way("P01", "TCP"),
    Way("P01g", 'TCP, integrity="payload"', protection="payload"),
    Way("P01g", 'TCP, security="tls"', protection="tls"),
    Way("P02", "same host", same_host=True),
)
GIVEN = Way("dense", "given servers")


def pull_and_push(bench: Bench, client: PSClient, raw: RawPeer, num_bytes: int, way: Way) -> None:
    """Each direction alone.

    Args:
        bench: takes the figures.
        client: attached.
        raw: the plain socket to compare with.
        num_bytes: size of the parameters.
        way: the transport, and names of the figures.
    """
    repeats = bench.repeats(REPEATS)
    gradient = np.ones(num_bytes // 4, np.float32)
    into = np.zeros_like(gradient)
    data = gradient.data.cast("B")
    raw_into = memoryview(bytearray(num_bytes))
    client.seed(manifest(Add(), gradient.size), {GROUP: into})
    client.attach(timeout_s=60)
    measures = (
        lambda: client.push({GROUP: gradient}, hyper=HYPER, rows=1),
        lambda: raw.push(data),
        lambda: client.pull({GROUP: into}),
        lambda: raw.pull(raw_into),
    )
    for measure in measures:
        measure()  # connections, buffers and pages are there afterwards
    seconds = interleave(repeats, *(lambda m=m: timed(m) for m in measures))
    if not np.array_equal(into, np.full_like(into, into[0])) or into[0] < repeats:
        raise PSError("the pulled values are not the sum of what was pushed; report this")
    speeds = [[num_bytes / 1e9 / value for value in values] for values in seconds]
    for index, name in enumerate(("push", "pull")):
        ours, reference = speeds[2 * index : 2 * index + 2]
        text = f"dense {name} of {num_bytes / MIB:g} MiB, {way.name}"
        bench.report(Figure(way.id, text, "GB/s", "higher"), ours, reference, RAW)


def push_pull_adam(bench: Bench, raw: RawPeer, num_bytes: int) -> None:
    """P03: the whole round trip of a training step against its parts in sequence.

    Args:
        bench: takes the figure.
        raw: the plain socket to compare with.
        num_bytes: size of the parameters.
    """
    gradient = np.full(num_bytes // 4, 1e-3, np.float32)
    into = np.zeros_like(gradient)
    data = gradient.data.cast("B")
    raw_into = memoryview(bytearray(num_bytes))
    shape = manifest(Adam(), gradient.size)
    local = DenseShard(shape, rank=0, num_servers=1, num_workers=1)

    def apply_here() -> None:
        for bucket in local.buckets:
            local.apply(bucket.id, gradient[bucket.start : bucket.stop], HYPER)

    def parts() -> None:
        raw.push(data)
        apply_here()
        raw.pull(raw_into)

    with served() as client:
        client.seed(shape, {GROUP: into})
        client.attach(timeout_s=60)

        def ours() -> None:
            client.push_pull({GROUP: gradient}, {GROUP: into}, hyper=HYPER, rows=1)

        for measure in (ours, parts):
            measure()
        seconds = interleave(bench.repeats(REPEATS), lambda: timed(ours), lambda: timed(parts))
    figure = Figure("P03", f"push_pull + Adam of {num_bytes / MIB:g} MiB, TCP", "s", "lower")
    bench.report(
        figure, seconds[0], seconds[1], "raw push + Adam kernel here + raw pull, in sequence"
    )


def run(bench: Bench) -> None:
    """Measure P01, P01g, P02 and P03; of given servers each direction alone."""
    num_bytes = MIB if bench.toy else 64 * MIB
    with RawPeer(num_bytes) as raw:
        if bench.given_servers is not None:
            with served_for(bench) as client:
                pull_and_push(bench, client, raw, num_bytes, GIVEN)
            return
        for way in WAYS:
            with served(unix=way.same_host, protection=way.protection) as client:
                pull_and_push(bench, client, raw, num_bytes, way)
        push_pull_adam(bench, raw, num_bytes)
