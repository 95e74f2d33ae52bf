"""How small is a delta checkpoint, and what do checkpoints cost the training beside them?

Figures: P19, P18.
Method: P19: a table of 1,000,000 rows (dim 16, float32, Adagrad) on one server process; a full
    save, then pushes to 1 % of the rows, drawn evenly, then a delta. Bytes of all files of both.
    P18: one sync worker computes (a product of matrices) and pushes 4 M parameters with Adam to a
    server. In turn 1 s of steps during which a driver saves everything, and 1 s without; what a
    save adds to the steps beside it, it adds to 10 s of training.
Caveats: bytes do not depend on the machine; the seconds of saves are reported too. P18 needs
    cores of its own, and one thread for the product (OPENBLAS_NUM_THREADS=1); else what is measured
    is who gets a core. `save_cpu_s` is what a save costs the server wherever it runs.
Bar: a delta at 1 % of the rows has at most 0.02 of the full save's bytes; saves every 10 s take at
    most 1.03 times the training's time.
Last result: docs/guides/performance.md.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import psutil

from ps.client.client import PSClient
from ps.client.saving.saver import SaveOptions
from ps.manifest.manifest import Adagrad, Adam, GroupSpec, Hyper, Manifest, ParamSpec, TableSpec
from rpc.auth.handshake import Role
from tfos.bench.harness import Bench, Figure, timed
from tfos.bench.servers import served, server_group

DIM = 16
REPEATS = 5
AT_ONCE = 1 << 16
MANIFEST = Manifest(groups=(), tables=(TableSpec(name="rows", dim=DIM, rule=Adagrad()),))
OPTIONS = SaveOptions(full_every=1000)


SAVE_EVERY_S = 10.0
PART_S = 1.0
"""Seconds of training in one measurement of P18, longer if the save takes longer."""
TRAINING_REPEATS = 30
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
    size = NUM_PARAMS // 100 if bench.toy else NUM_PARAMS
    with (
        tempfile.TemporaryDirectory(prefix="tfos-bench-") as directory,
        server_group() as group,
        group.client() as client,
        group.client(role=Role.DRIVER) as driver,
        ThreadPoolExecutor(1) as beside,
    ):
        spec = GroupSpec("all", "float32", Adam(), (ParamSpec("w", (size,)),))
        client.seed(Manifest(groups=(spec,), consistency="sync"), {"all": np.zeros(size, "f4")})
        driver.attach()
        step = _step_of(client, size)
        save = partial(driver.save, Path(directory), None, options=SaveOptions(keep=1))
        warm = partial(_train, step, WARM_STEPS, group.pids[0])
        warm()
        save_s = [timed(save)]
        num_steps = max(2, round((0.1 if bench.toy else PART_S) / warm().step_s))
        train = partial(_train, step, num_steps, group.pids[0])
        parts = [train()]
        for _ in range(bench.repeats(TRAINING_REPEATS)):
            saved = beside.submit(timed, save)
            parts += [train(saved), train()]
            save_s.append(saved.result())
    plain_s = [(before.step_s + after.step_s) / 2 for before, after in pairwise(parts[::2])]
    steps = SAVE_EVERY_S / median(plain_s)
    reference = [steps * step_s for step_s in plain_s]
    added_s = [
        part.seconds - part.steps * step_s
        for part, step_s in zip(parts[1::2], plain_s, strict=True)
    ]
    ours = [without + more for without, more in zip(reference, added_s, strict=True)]
    cpu_s = median(part.server_cpu_s / part.steps for part in parts[::2])
    saves_cpu_s = [part.server_cpu_s - part.steps * cpu_s for part in parts[1::2]]
    figure = Figure("P18", f"training with a checkpoint every {SAVE_EVERY_S:g} s", "s", "lower")
    more = {"steps": round(steps), "save_s": round(median(save_s), 3)}
    more["save_cpu_s"] = round(median(saves_cpu_s), 3)
    bench.report(figure, ours, reference, "without", **more)


class _Part(NamedTuple):
    """Some steps of training."""

    seconds: float
    steps: int
    server_cpu_s: float

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps


def _step_of(client: PSClient, size: int) -> Callable[[], None]:
    """Return a step: some work, then a push of everything."""
    matrix = np.ones((700, 700), np.float32)
    grads = {"all": np.full(size, 1e-3, np.float32)}
    values = {"all": np.empty(size, np.float32)}

    def step() -> None:
        np.matmul(matrix, matrix)
        client.push_pull(grads, values, hyper=Hyper(1e-3), rows=32)

    return step


def _train(
    step: Callable[[], None], num_steps: int, pid: int, beside: Future[float] | None = None
) -> _Part:
    """Time this many steps with the server `pid`, and more until what runs `beside` is over."""
    steps = 0
    server = psutil.Process(pid)
    begun_s, begun_cpu_s = time.perf_counter(), sum(server.cpu_times()[:2])
    while steps < num_steps or (beside is not None and not beside.done()):
        step()
        steps += 1
    seconds = time.perf_counter() - begun_s
    return _Part(seconds, steps, sum(server.cpu_times()[:2]) - begun_cpu_s)


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
