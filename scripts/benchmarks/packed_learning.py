"""Does a model end as well from packed gradients as from exact ones?

Figures: AUC-<compression>: area under the ROC curve on held-out rows, reference: the same training
    without compression. `difference` is of the means.
Method: logistic regression with an L2 penalty, 123 binary features of which about 14 are set, 24 %
    positive rows; two workers (threads with a client each) in sync mode, momentum SGD, the same
    batches for every compression; the server is `python -m ps.server`. Seeds are the repeats.
    --libsvm TRAIN TEST reads real rows of that shape instead, for example a9a and a9a.t.
Caveats: the model is small and convex: it shows that errors are fed back, not what int8 does to a
    deep network.
Bar: every compression within 0.001 of exact.
Last result: docs/architecture/performance-notes.md.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ps.client.client import PSClient
from ps.compression.format import FORMATS, Compression
from ps.manifest.manifest import SGD, GroupSpec, Hyper, Manifest, ParamSpec
from scripts.benchmarks import deepfm_model
from scripts.benchmarks.harness import report
from tfos.bench.harness import Figure
from tfos.bench.servers import server_group

Array = np.ndarray[Any, Any]

NUM_FEATURES = 123
NUM_WORKERS = 2
BATCH = 256
RATE = 0.1
PENALTY = 1e-4
JOIN_TIMEOUT_S = 300.0
KINDS: tuple[Compression, ...] = ("none", *FORMATS)


class Rows(NamedTuple):
    """Features, float32 with a column of ones at the end, and labels, 0 or 1."""

    features: Array
    labels: Array


def generated(seed: int, count: int) -> Rows:
    """Rows whose labels follow a logistic model that is the same for every seed."""
    truth = np.random.default_rng(1).standard_normal(NUM_FEATURES)
    shares = 0.7 * np.random.default_rng(2).random(NUM_FEATURES) ** 6
    random = np.random.default_rng(1000 + seed)
    features = random.random((count, NUM_FEATURES)) < shares
    odds = features @ truth
    odds += -1.6 - shares @ truth
    labels = random.random(count) < 1 / (1 + np.exp(-odds))
    return _rows(features, labels)


def from_libsvm(path: Path) -> Rows:
    """Rows of a libsvm file: a label, then `number:value` of the features that are not 0."""
    lines = path.read_text().splitlines()
    features = np.zeros((len(lines), NUM_FEATURES), np.float32)
    labels = np.zeros(len(lines))
    for row, line in enumerate(lines):
        label, *pairs = line.split()
        labels[row] = float(label) > 0
        for number, _, value in (pair.partition(":") for pair in pairs):
            features[row, int(number) - 1] = float(value)
    return _rows(features, labels)


def _rows(features: Array, labels: Array) -> Rows:
    ones = np.ones((len(features), 1), np.float32)
    return Rows(np.hstack([features.astype(np.float32), ones]), labels.astype(np.float32))


def manifest(kind: Compression) -> Manifest:
    """Describe the model: one weight per feature, and the bias."""
    params = (ParamSpec("weights", (NUM_FEATURES + 1,)),)
    group = GroupSpec("model", "float32", SGD(momentum=0.9), params, compression=kind)
    return Manifest(groups=(group,), consistency="sync")


def zeros() -> dict[str, Array]:
    """The first values."""
    return {"model": np.zeros(NUM_FEATURES + 1, np.float32)}


def gradient(weights: Array, rows: Rows) -> Array:
    """Return the gradient of mean cross-entropy and penalty."""
    chances = 1 / (1 + np.exp(-(rows.features @ weights)))
    found = rows.features.T @ (chances - rows.labels) / np.float32(len(rows.labels))
    return np.ascontiguousarray(found + np.float32(PENALTY) * weights, np.float32)


def train(clients: Sequence[PSClient], rows: Rows, steps: int, seed: int) -> Array:
    """Train with one thread per client, which are attached; return the weights."""
    errors: list[BaseException] = []

    def work(rank: int, client: PSClient) -> None:
        random = np.random.default_rng((seed, rank))
        values = zeros()
        try:
            for _ in range(steps):
                chosen = random.integers(0, len(rows.labels), BATCH)
                batch = Rows(rows.features[chosen], rows.labels[chosen])
                pushed = {"model": gradient(values["model"], batch)}
                client.push_pull(pushed, values, hyper=Hyper(RATE), rows=BATCH)
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)
            client.leave()

    threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in enumerate(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_TIMEOUT_S)
    if errors:
        raise errors[0]
    found = zeros()
    clients[0].pull(found)
    return found["model"]


def auc(weights: Array, rows: Rows) -> float:
    """Return the area under the ROC curve of a model."""
    return deepfm_model.auc(rows.labels, rows.features @ weights)


def trained_by_servers(kind: Compression, rows: Rows, steps: int, seed: int) -> Array:
    """Train with a server process of its own."""
    with (
        server_group(num_workers=NUM_WORKERS) as group,
        contextlib.ExitStack() as open_clients,
    ):
        clients = [open_clients.enter_context(group.client(rank)) for rank in range(NUM_WORKERS)]
        clients[0].seed(manifest(kind), zeros())
        for client in clients:
            client.attach()
        return train(clients, rows, steps, seed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--toy", action="store_true", help="only show that it still works")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--libsvm", type=Path, nargs=2, metavar=("TRAIN", "TEST"))
    args = parser.parse_args()
    kinds = KINDS
    if args.toy:
        args.repeats, args.steps, kinds = 1, 5, ("none", "int8")
    if args.libsvm:
        rows, held_out = map(from_libsvm, args.libsvm)
    else:
        rows, held_out = generated(0, 32_000), generated(1, 16_000)
    found = {
        kind: [
            auc(trained_by_servers(kind, rows, args.steps, seed), held_out)
            for seed in range(args.repeats)
        ]
        for kind in kinds
    }
    for kind in kinds[1:]:
        difference = statistics.mean(found[kind]) - statistics.mean(found["none"])
        figure = Figure(f"AUC-{kind}", f"AUC from gradients packed as {kind}", "1", "higher")
        report(
            figure, found[kind], found["none"], "exact gradients", difference=round(difference, 6)
        )


if __name__ == "__main__":
    main()
