"""Does a dense network learn as much with several workers as with one process?

Figures: LRN-<mode>-<workers>: accuracy on 4,000 held-out rows after the same number of rows.
Method: a network 784-800-700-10 with Adam(0.001), batch 128, on generated rows (40 clusters per
    class in a random 24-dimensional subspace, noise in all 784). Each worker is a process of its
    own that takes the next batch of one shared order; the server is `python -m ps.server`. The
    reference is the same loop in one process with Adam in numpy. Seeds are the repeats.
Caveats: the network is plain numpy, one thread per worker, so that figures tell of updates and not
    of TensorFlow; how old gradients are depends on the machine, so `staleness` says it.
Bar: every default within 0.02 of the reference.
Last result: docs/decisions/009-staleness-aware-rates.md.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ps.manifest.manifest import Adam, GroupSpec, Hyper, Manifest, ParamSpec
from rpc.auth.handshake import Role
from scripts.benchmarks.harness import Figure, report
from tfos.bench.servers import BenchServers, server_group

Array = np.ndarray[Any, Any]

LAYERS = (784, 800, 700, 10)
BATCH = 128
RATE = 0.001
HELD_OUT = 4000
JOIN_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Mode:
    """One way to train, as its manifest says it."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


MODES = (
    Mode("async"),
    Mode("async-aware", {"staleness_aware": True}),
    Mode("ssp-1", {"consistency": "ssp", "staleness_bound": 1}),
    Mode("ssp-1-aware", {"consistency": "ssp", "staleness_bound": 1, "staleness_aware": True}),
    Mode("sync", {"consistency": "sync"}),
)


def rows(seed: int, count: int) -> tuple[Array, Array]:
    """Return inputs and labels, the same for the same seed in every process."""
    random = np.random.default_rng(seed)
    basis = random.standard_normal((24, LAYERS[0])).astype(np.float32) / np.float32(24**0.5)
    centres = 1.6 * random.standard_normal((400, 24)).astype(np.float32)
    cluster = random.integers(0, 400, count)
    inner = centres[cluster] + random.standard_normal((count, 24)).astype(np.float32)
    noise = random.standard_normal((count, LAYERS[0])).astype(np.float32)
    return inner @ basis + np.float32(0.5) * noise, cluster % 10


def manifest(mode: Mode) -> Manifest:
    """Describe the network; kernels and biases of all layers in one group."""
    params = []
    for number, (fan_in, fan_out) in enumerate(itertools.pairwise(LAYERS)):
        params.append(ParamSpec(f"dense-{number}/kernel", (fan_in, fan_out)))
        params.append(ParamSpec(f"dense-{number}/bias", (fan_out,)))
    return Manifest(groups=(GroupSpec("t", "float32", Adam(), tuple(params)),), **mode.options)


def views(flat: Array) -> list[tuple[Array, Array]]:
    """Return (kernel, bias) of each layer as views of the flat buffer."""
    found, start = [], 0
    for fan_in, fan_out in itertools.pairwise(LAYERS):
        middle, stop = start + fan_in * fan_out, start + fan_in * fan_out + fan_out
        found.append((flat[start:middle].reshape(fan_in, fan_out), flat[middle:stop]))
        start = stop
    return found


def initial(seed: int) -> Array:
    """Glorot's uniform kernels and biases of 0, as Keras has them."""
    random = np.random.default_rng(1000 + seed)
    flat = np.zeros(sum(i * o + o for i, o in itertools.pairwise(LAYERS)), np.float32)
    for kernel, _ in views(flat):
        limit = (6 / sum(kernel.shape)) ** 0.5
        kernel[:] = random.uniform(-limit, limit, kernel.shape)
    return flat


def forward(flat: Array, inputs: Array) -> list[Array]:
    """Return the activations of all layers, the inputs first and the logits last."""
    activations = [inputs]
    layers = views(flat)
    for number, (kernel, bias) in enumerate(layers):
        value = activations[-1] @ kernel + bias
        activations.append(np.maximum(value, 0) if number < len(layers) - 1 else value)
    return activations


def gradient(flat: Array, inputs: Array, labels: Array) -> Array:
    """Return the gradient of the mean cross-entropy, laid out as the parameters."""
    activations = forward(flat, inputs)
    logits = activations[-1] - activations[-1].max(axis=1, keepdims=True)
    error = np.exp(logits)
    error /= error.sum(axis=1, keepdims=True)
    error[np.arange(len(labels)), labels] -= 1
    error /= np.float32(len(labels))
    out = np.empty_like(flat)
    pairs = list(zip(views(flat), views(out), strict=True))
    for number in reversed(range(len(pairs))):
        (kernel, _), (kernel_out, bias_out) = pairs[number]
        np.matmul(activations[number].T, error, out=kernel_out)
        error.sum(axis=0, out=bias_out)
        if number:
            error = (error @ kernel.T) * (activations[number] > 0)
    return out


def accuracy(flat: Array, inputs: Array, labels: Array) -> float:
    """Return the share of rows whose largest logit is their label's."""
    return float((forward(flat, inputs)[-1].argmax(axis=1) == labels).mean())


def alone(seed: int, steps: int) -> float:
    """Train in this process, Adam written out, and return the accuracy."""
    inputs, labels = rows(seed, HELD_OUT + steps * BATCH)
    flat = initial(seed)
    first, second = np.zeros_like(flat), np.zeros_like(flat)
    for step in range(1, steps + 1):
        start = HELD_OUT + (step - 1) * BATCH
        found = gradient(flat, inputs[start : start + BATCH], labels[start : start + BATCH])
        first += (found - first) * np.float32(0.1)
        second += (found * found - second) * np.float32(0.001)
        alpha = np.float32(RATE * (1 - 0.999**step) ** 0.5 / (1 - 0.9**step))
        flat -= first * alpha / (np.sqrt(second) + np.float32(1e-7))
    return accuracy(flat, inputs[:HELD_OUT], labels[:HELD_OUT])


def work(
    rank: int,
    group: BenchServers,
    run: tuple[int, int, Mode],
    taken: Any,
) -> None:
    """One worker: take the next batch of the common order until there is none."""
    seed, steps, mode = run
    inputs, labels = rows(seed, HELD_OUT + steps * BATCH)
    values = {"t": initial(seed)}
    with group.client(rank) as client:
        if rank == 0:
            client.seed(manifest(mode), values)
        client.attach()
        client.rendezvous("start", b"", timeout_s=JOIN_TIMEOUT_S)
        client.pull(values)
        while True:
            with taken.get_lock():
                step = taken.value
                taken.value += 1
            if step >= steps:
                break
            start = HELD_OUT + step * BATCH
            found = gradient(
                values["t"], inputs[start : start + BATCH], labels[start : start + BATCH]
            )
            client.push_pull({"t": found}, values, hyper=Hyper(RATE), rows=BATCH)
        client.finish()


def together(seed: int, steps: int, mode: Mode, num_workers: int) -> tuple[float, float]:
    """Train with worker processes; return the accuracy and the mean staleness of a gradient."""
    spawn = multiprocessing.get_context("spawn")
    taken = spawn.Value("q", 0)
    run = (seed, steps, mode)
    with server_group(num_workers=num_workers) as group:
        workers = [
            spawn.Process(target=work, args=(rank, group, run, taken))
            for rank in range(num_workers)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(JOIN_TIMEOUT_S)
        if any(worker.exitcode for worker in workers):
            raise RuntimeError(f"workers ended with {[worker.exitcode for worker in workers]}")
        with group.client(role=Role.DRIVER) as client:
            client.attach()
            values = {"t": np.empty_like(initial(seed))}
            client.pull(values)
            (stats,) = client.stats()
    inputs, labels = rows(seed, HELD_OUT + steps * BATCH)
    return accuracy(values["t"], inputs[:HELD_OUT], labels[:HELD_OUT]), mean(stats.staleness)


def mean(histogram: Sequence[int]) -> float:
    """Return about the mean of a histogram with the bins 0, 1, 2..3, 4..7, ..."""
    middles = [0.0, 1.0, *(1.5 * 2 ** (n - 1) - 0.5 for n in range(2, len(histogram)))]
    total = sum(histogram)
    return sum(m * n for m, n in zip(middles, histogram, strict=True)) / total if total else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true", help="only show that it still works")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--modes", nargs="*", default=[mode.name for mode in MODES])
    args = parser.parse_args()
    if args.toy:
        args.repeats, args.steps, args.workers, args.modes = 1, 4, [2], ["async"]
    os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")  # of the workers
    reference = [alone(seed, args.steps) for seed in range(args.repeats)]
    for mode in (mode for mode in MODES if mode.name in args.modes):
        for num_workers in args.workers:
            results = [
                together(seed, args.steps, mode, num_workers) for seed in range(args.repeats)
            ]
            figure = Figure(
                f"LRN-{mode.name}-{num_workers}",
                f"accuracy of a dense network, {mode.name}, {num_workers} workers",
                "1",
                "higher",
            )
            report(
                figure,
                [found for found, _ in results],
                reference,
                "the same loop in one process",
                difference=round(
                    statistics.mean(found for found, _ in results) - statistics.mean(reference), 4
                ),
                staleness=round(statistics.mean(age for _, age in results), 2),
            )


if __name__ == "__main__":
    main()
