"""How fast is a DeepFM with a million ids trained, and how well, beside what a user would take?

Figures: P14 (examples/s) and P14c (CPU ms a step) with Adagrad; P14a the same with Adam, against
    ParameterServerStrategy; P14q: AUC on held-out rows.
Method: 26 columns of Zipf ids, 1,000,000 in all, 16 numbers and a first-order weight for each; 13
    numbers; a perceptron 400-400-400; batches of 512 from TFRecord files, the same for all sides.
    Ours is 1 PS and 2 workers, asynchronous, with the defaults of `ctx.distribute`. The references
    (reference/deepfm_*.py): TensorFlow's ParameterServerStrategy, 1 PS and 2 workers, tf-keras,
    ten steps a call; plain `fit` of Keras 3 and of tf-keras in one process; the compute floor, two
    processes that do what a step needs with rows of their own and without a server. All of them are
    started, then take turns of some steps. Workers of either side have one intra-op thread,
    references of one process TensorFlow's default. CPU ms are those of all processes of a side.
    P14q is one pass over 415,744 rows by fresh processes for each seed; sync and hybrid beside
    tf-keras in one process with batches of 1,024, async beside it with 512.
Caveats: rows are made on first sight, so early turns make more of them. A side that stands still
    keeps its memory. ParameterServerStrategy reads the files in another order in each worker, so
    there a pass leaves some rows out and takes others twice. In hybrid rows change by gradients of
    each worker's 512 rows, as in async, so its AUC is above that of batches of 1,024
    (docs/guides/recommenders.md).
Bars: P14 at least 1.3 of ParameterServerStrategy, 0.6 of the floor, 4 of Keras 3, 0.9 of tf-keras;
    P14c at most 0.7; P14a at least 5; P14q within 0.0005 (sync, hybrid) and 0.001 (async).
Last result: docs/guides/performance.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from examples.recommender.criteo_rows import CriteoRows, save
from scripts.benchmarks import deepfm_worker
from scripts.benchmarks.deepfm_model import BATCH_SIZE, TOY, Size
from scripts.benchmarks.deepfm_turns import Side, Spent, Task, side
from scripts.benchmarks.harness import Figure, report
from tfos.bench.reference.tensorflow_ps import free_port
from tfos.bench.servers import server_group

NUM_WORKERS = 2
NUM_FILES = 8
OPTIMIZERS = ["Adagrad", "Adam"]
REFERENCES = "scripts.benchmarks.reference.deepfm_"
OURS = "ours"
NAMES = {
    "pss": "TF ParameterServerStrategy, 1 PS + 2 workers, 10 steps a call",
    "floor": "compute floor: 2 processes with rows of their own",
    "keras": "plain Keras 3 fit in one process",
    "tf_keras": "tf-keras fit in one process",
}


@dataclass
class Turns:
    """What the turns of one side took, per step of a batch of 512."""

    examples_per_s: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)

    def take(self, spent: Spent, steps: int) -> None:
        """Take one turn.

        Args:
            spent: what it took.
            steps: steps of all processes together.
        """
        self.examples_per_s.append(steps * BATCH_SIZE / spent.wall_s)
        self.cpu_ms.append(spent.cpu_s / steps * 1e3)


def written(size: Size, directory: Path) -> Task:
    """Write the files and return the task of a process that trains with them.

    Args:
        size: size of the model and its data.
        directory: directory for the files.
    """
    rows = CriteoRows(size.num_ids)
    held_out = range(size.num_examples, size.num_examples + size.num_held_out)
    files = save(rows, directory / "train", range(size.num_examples), NUM_FILES)
    (held_out_file,) = save(rows, directory / "held-out", held_out, 1)
    return Task(files, held_out_file, size.num_ids, list(size.hidden), "Adagrad")


@contextlib.contextmanager
def ours(
    task: Task, distribute: Mapping[str, Any], num_workers: int = NUM_WORKERS
) -> Iterator[Side]:
    """Start a server and workers.

    Args:
        task: task of each worker.
        distribute: keywords of `ctx.distribute`.
        num_workers: workers that train together.
    """
    with server_group(num_workers=num_workers, unix=True) as servers:
        places = [
            deepfm_worker.settings_of(servers, rank, num_workers) for rank in range(num_workers)
        ]
        tasks = [replace(task, more={**each, "distribute": dict(distribute)}) for each in places]
        with side({"scripts.benchmarks.deepfm_worker": tasks}, servers.pids) as found:
            yield found


def reference(name: str, task: Task, num_examples: int) -> Any:
    """Return the context of one reference's processes.

    Args:
        name: one of NAMES.
        task: task of each process.
        num_examples: examples of one pass.
    """
    if name == "floor":
        ranks = [{"rank": rank, "num_workers": NUM_WORKERS} for rank in range(NUM_WORKERS)]
        return side({REFERENCES + name: [replace(task, more=more) for more in ranks]})
    if name != "pss":
        return side({REFERENCES + name: [task]})
    places = {"ps": 1, "worker": NUM_WORKERS}
    cluster = {
        job: [f"127.0.0.1:{free_port()}" for _ in range(count)] for job, count in places.items()
    }
    servers = [
        json.dumps([cluster, job, index]) for job, count in places.items() for index in range(count)
    ]
    more = {"cluster": cluster, "steps": num_examples // BATCH_SIZE}
    return side({REFERENCES + name: [*servers, replace(task, more=more)]})


def measured(task: Task, size: Size, references: Sequence[str], repeats: int) -> dict[str, Turns]:
    """Start all sides and let them take turns; returns what each took.

    Args:
        task: task of each process.
        size: the data's size.
        references: names of those that take part.
        repeats: turns of each side.
    """
    found = {name: Turns() for name in (OURS, *references)}
    num_steppers = {**dict.fromkeys(found, size.num_workers), "keras": 1, "tf_keras": 1}
    with ExitStack() as running:
        sides = {OURS: running.enter_context(ours(task, {}, size.num_workers))}
        for name in references:
            sides[name] = running.enter_context(reference(name, task, size.num_examples))
        for each in sides.values():
            each.train(max(1, size.turn_steps // 3))
        for _ in range(repeats):
            for name, each in sides.items():
                found[name].take(each.train(size.turn_steps), size.turn_steps * num_steppers[name])
    return found


def report_speed(optimizer: str, found: dict[str, Turns]) -> None:
    """Print the figures of one optimizer.

    Args:
        optimizer: name of its class.
        found: turns by side.
    """
    what = f"DeepFM, {optimizer}, batch {BATCH_SIZE}, 1 PS + {NUM_WORKERS} workers, async"
    speed = Figure("P14" if optimizer == "Adagrad" else "P14a", what, "examples/s", "higher")
    mine = found[OURS]
    for name, turns in found.items():
        if name == OURS and len(found) > 1:
            continue
        cpu = {
            "ours_cpu_ms": round(statistics.median(mine.cpu_ms), 2),
            "reference_cpu_ms": round(statistics.median(turns.cpu_ms), 2),
        }
        theirs = turns.examples_per_s if name != OURS else []
        report(speed, mine.examples_per_s, theirs, NAMES.get(name, ""), **cpu)
        if optimizer == "Adagrad" and name in (OURS, "pss"):
            cost = Figure("P14c", f"{what}: CPU of all processes", "ms a step", "lower")
            report(cost, mine.cpu_ms, turns.cpu_ms if theirs else [], NAMES.get(name, ""))


def auc_of(context: Any) -> float:
    """Return the AUC that processes answer with after one pass, the chief first."""
    with context as running:
        return float(running.answers()[0])


def report_quality(task: Task, size: Size, seeds: Sequence[int]) -> None:
    """Train one pass for each seed in each mode, and print the AUCs.

    Args:
        task: task of each process.
        size: the data's size.
        seeds: seeds of the initial weights and rows.
    """
    sides: dict[int, dict[str, dict[str, Any]]] = {
        512: {"async": {}},
        1024: {"sync": {"consistency": "sync"}, "hybrid": {"consistency": "hybrid"}},
    }
    passes = [replace(task, turns=False, seed=seed) for seed in seeds]
    pss = [auc_of(reference("pss", each, size.num_examples)) for each in passes]
    for batch_size, modes in sides.items():
        alone = [
            auc_of(reference("tf_keras", replace(each, batch_size=batch_size), size.num_examples))
            for each in passes
        ]
        for mode, keywords in modes.items():
            mine = [auc_of(ours(each, keywords)) for each in passes]
            figure = Figure(
                "P14q", f"DeepFM, AUC after {size.num_examples} rows, {mode}", "1", "higher"
            )
            others = {f"tf-keras fit in one process, batch {batch_size}": alone, NAMES["pss"]: pss}
            for name, theirs in others.items():
                gap = statistics.mean(mine) - statistics.mean(theirs)
                report(figure, mine, theirs, name, difference_of_means=round(gap, 5))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--toy", action="store_true", help="only show that it still works")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seeds", type=int, default=3, help="passes of each mode for the AUC")
    parser.add_argument("--optimizers", nargs="*", default=OPTIMIZERS, choices=OPTIMIZERS)
    parser.add_argument("--references", nargs="*", default=list(NAMES), choices=NAMES)
    args = parser.parse_args()
    if args.toy:  # no reference: each is one more start of TensorFlow
        args.repeats, args.seeds, args.optimizers, args.references = 1, 0, ["Adagrad"], []
    size = TOY if args.toy else Size()
    with tempfile.TemporaryDirectory(prefix="tfos-bench-") as directory:
        task = written(size, Path(directory))
        for optimizer in args.optimizers:
            of_optimizer = replace(task, optimizer=optimizer)
            # Of Adam there is one bar: the slots of all rows make the others slower still.
            against = [name for name in args.references if optimizer == "Adagrad" or name == "pss"]
            report_speed(optimizer, measured(of_optimizer, size, against, args.repeats))
        if args.seeds:
            report_quality(task, size, range(args.seeds))


if __name__ == "__main__":
    main()
