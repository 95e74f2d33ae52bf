"""How small is a delta checkpoint, and what do checkpoints cost the training beside them?

Figures: P19, P18.
Method: P19: a table of 1,000,000 rows (dim 16, float32, Adagrad) on one server process; a full
    save, then pushes to 1 % of the rows, drawn evenly, then a delta. Bytes of all files of both.
    P18: one sync worker computes (a product of matrices) and pushes 4 M parameters with Adam to a
    server that saves itself every 10 s, and to one that does not; in turn 25 s of steps of each.
Caveats: bytes do not depend on the machine; the seconds of both saves stand beside them. P18 needs
    an idle machine: its difference is smaller than what another process does.
Bar: a delta at 1 % of the rows has at most 0.02 of the full save's bytes; saves every 10 s take at
    most 1.03 times the training's time.
Last result: docs/performance.md.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ps.checkpoint_reader import steps_on_disk
from ps.client import PSClient
from ps.params import Adagrad, Adam, GroupSpec, Hyper, Manifest, ParamSpec, TableSpec
from ps.saver import SaveOptions
from ps.storage import storage_at
from rpc.handshake import Identity, Role
from tfos.bench.harness import Bench, Figure, interleave, timed
from tfos.bench.servers import served, server_group

DIM = 16
REPEATS = 5
AT_ONCE = 1 << 16
MANIFEST = Manifest(groups=(), tables=(TableSpec(name="rows", dim=DIM, rule=Adagrad()),))
OPTIONS = SaveOptions(full_every=1000)


SAVE_EVERY_S = 10.0
TRAINING_S = 25.0
"""Of each side of P18 in one repeat: two or three saves."""
TRAINING_REPEATS = 5
WARM_STEPS = 10
NUM_PARAMS = 4_000_000


def nbytes(step: Path) -> int:
    """Return the bytes of a step's files."""
    return sum(path.stat().st_size for path in step.iterdir())


def run(bench: Bench) -> None:
    """Measure P19, then P18."""
    measure_delta(bench)
    measure_training(bench)


def measure_training(bench: Bench) -> None:
    """Measure P18."""
    every_s, training_s = (0.2, 0.5) if bench.toy else (SAVE_EVERY_S, TRAINING_S)
    size = NUM_PARAMS // 100 if bench.toy else NUM_PARAMS
    with tempfile.TemporaryDirectory(prefix="tfos-bench-") as directory:
        root = Path(directory) / "saves"
        saving = ("--save-dir", str(root), "--save-every", str(every_s), "--save-keep", "1000")
        with server_group(arguments=saving) as first, server_group() as second:
            sides = [
                PSClient(each.endpoints, each.credentials, Identity(Role.WORKER, 0), num_workers=1)
                for each in (first, second)
            ]
            works = [partial(_train, client, size) for client in sides]
            for client in sides:
                group = GroupSpec("all", "float32", Adam(), (ParamSpec("w", (size,)),))
                manifest = Manifest(groups=(group,), consistency="sync")
                client.seed(manifest, {"all": np.zeros(size, np.float32)})
            for work in works:
                work(WARM_STEPS)
            num_steps = max(2, round(training_s * WARM_STEPS / works[1](WARM_STEPS)))
            measures = [partial(work, num_steps) for work in works]
            ours, reference = interleave(bench.repeats(TRAINING_REPEATS), *measures)
            num_saves = len(steps_on_disk(storage_at(root)))
            for client in sides:
                client.close()
    figure = Figure("P18", f"training with a checkpoint every {every_s:g} s", "s", "lower")
    bench.report(figure, ours, reference, "without", steps=num_steps, saves=num_saves)


def _train(client: PSClient, size: int, num_steps: int) -> float:
    """Return the seconds of so many steps: some work, then a push of everything."""
    matrix = np.ones((700, 700), np.float32)
    grads = {"all": np.full(size, 1e-3, np.float32)}
    values = {"all": np.empty(size, np.float32)}

    def steps() -> None:
        for _ in range(num_steps):
            np.matmul(matrix, matrix)
            client.push_pull(grads, values, hyper=Hyper(1e-3), rows=32)

    return timed(steps)


def measure_delta(bench: Bench) -> None:
    """Measure P19."""
    num_rows = 20_000 if bench.toy else 1_000_000
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix="tfos-bench-") as directory, served() as client:
        root = Path(directory)
        client.seed(MANIFEST, {})

        def push(ids: np.ndarray[Any, Any]) -> None:
            for start in range(0, ids.size, AT_ONCE):
                part = ids[start : start + AT_ONCE]
                grads = random.standard_normal((part.size, DIM), np.float32)
                client.tables.push({"rows": (part, grads)}, hyper=Hyper(0.1))

        push(np.arange(num_rows))
        full_s = timed(partial(client.save, root, 0, options=OPTIONS))
        delta_bytes: list[float] = []
        delta_s: list[float] = []
        for step in range(1, bench.repeats(REPEATS) + 1):
            push(random.choice(num_rows, num_rows // 100, replace=False))
            delta_s.append(timed(partial(client.save, root, step, options=OPTIONS)))
            delta_bytes.append(nbytes(root / f"step-{step}"))
        full_bytes = [float(nbytes(root / "step-0"))]
    figure = Figure("P19", "delta of a table at 1 % of its rows", "bytes", "lower")
    seconds = {"full_s": round(full_s, 3), "delta_s": round(float(np.median(delta_s)), 3)}
    bench.report(figure, delta_bytes, full_bytes, "full checkpoint", **seconds)
