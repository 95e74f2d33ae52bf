"""What a node loads before it works: compiled kernels, and the modules to compile ahead.

Covers: a process that imports what nodes import, fits a small model if Keras is there, compiles
every kernel, and leaves a list of the modules and the kernels' files in a directory.
Does not: choose what is packed.
Runs in: its own process, `python -m tfos.pack.warming DIRECTORY`; imports TensorFlow.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tfos.errors import UnsupportedError
from tfos.pack.programs import run

TIMEOUT_S = 1800.0
NODE_MODULES = (
    *("tfos.node.supervisor.supervisor", "tfos.node.supervisor.tensorboard", "tfos.node.task"),
    *("tfos.node.ps_process", "ps.server.server", "tfos.worker.process", "tfos.cluster"),
    *("tfos.feed.entry", "tfos.keras.fit.distribute", "tfos.cli.main", "pyspark_tfrecord"),
)
OPTIONAL_MODULES = ("pandas", "pyspark.worker", "pyspark.sql", "tensorboard.main", "hdfs_native")
_LIST = "modules.json"
_OF_SPARK = ("pyspark", "py4j")
_GENERATED = "__autograph_generated_file"
"""Prefix of modules that TensorFlow writes, loads and removes."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Warmed:
    """What a warm process has loaded."""

    modules: tuple[Path, ...] = ()
    """Source files of the imported modules."""
    of_spark: frozenset[Path] = frozenset()
    """Modules among them that a cluster has of its own."""
    kernels: tuple[tuple[str, Path], ...] = ()
    """Files of compiled kernels, each with its place below the packages."""


def warmed(directory: Path) -> Warmed:
    """Run the process; it takes minutes where no kernel has been compiled before.

    Args:
        directory: where its results go.

    Raises:
        UnsupportedError: the process failed; with its last words.
    """
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-m", __name__, str(directory)]
    done = run(command, TIMEOUT_S, environment=environ)
    if done.returncode:
        raise UnsupportedError(
            f"this environment does not run what a node runs (exit {done.returncode}):\n"
            f"{done.stderr.strip()[-2000:]}"
        )
    found = json.loads((directory / _LIST).read_text())
    modules, of_spark = ([_place(name) for name in found[key]] for key in ("modules", "of_spark"))
    files = sorted(path for path in directory.glob("*/__pycache__/*/*"))
    kernels = tuple((str(path.relative_to(directory)), path) for path in files)
    return Warmed(tuple(modules), frozenset(of_spark), kernels)


def _place(name: str) -> Path:
    """Return where a module was found; a link is packed as the file that it leads to."""
    path = Path(name)
    return path.parent.resolve() / path.name


def _run(directory: Path) -> None:
    for name in NODE_MODULES:
        importlib.import_module(name)
    for name in OPTIONAL_MODULES:
        _import_if_there(name)
    with tempfile.TemporaryDirectory(prefix="tfos-pack-") as scratch:
        _read_records(Path(scratch))
        if importlib.util.find_spec("keras") and importlib.util.find_spec("tensorflow"):
            _fit(Path(scratch))
    from ps.cli.warm import warm_all

    warm_all()
    _copy_kernels(directory)
    (directory / _LIST).write_text(json.dumps(_loaded()))


def _loaded() -> dict[str, list[str]]:
    """Return the source files of the modules of this process, and those of Spark's among them."""
    found = {
        path: name.partition(".")[0] in _OF_SPARK
        for name, module in list(sys.modules.items())
        if (path := getattr(module, "__file__", None) or "").endswith(".py")
        and not Path(path).name.startswith(_GENERATED)
    }
    of_spark = [path for path, is_sparks in found.items() if is_sparks]
    return {"modules": sorted(found), "of_spark": sorted(of_spark)}


def _import_if_there(name: str) -> None:
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - any package may fail in any way
        _logger.info("%s is not imported: %r", name, error)


def _read_records(scratch: Path) -> None:
    """Write and read a TFRecord file of each kind of column, and lines of text."""
    import pyarrow as pa

    from feeding.formats.text.source import TextSource
    from feeding.formats.tfrecord.from_arrow import ExampleEncoder
    from feeding.formats.tfrecord.source import TFRecordSource
    from feeding.reading.reader import DirectReader

    numbers = {"i": [1, 2], "f": [0.5, 1.5], "many": [[1, 2], [3]], "x": [[0.5], [1.5]]}
    batch = pa.record_batch({**numbers, "s": ["a", "b"]})
    (scratch / "records").write_bytes(ExampleEncoder(batch.schema).encode(batch).tobytes())
    (scratch / "lines").write_text("one\ntwo\n")
    for source in (TFRecordSource(str(scratch / "records")), TextSource(str(scratch / "lines"))):
        DirectReader(source, 0, 1).next_batch(2)


def _fit(scratch: Path) -> None:
    import keras
    import numpy as np

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse", metrics=["mae"])
    model.fit(np.zeros((4, 2)), np.zeros((4, 1)), verbose=0)
    model.save(scratch / "model.keras")
    keras.saving.load_model(scratch / "model.keras")


def _copy_kernels(directory: Path) -> None:
    from feeding.formats.kernel_cache import CACHE as OF_FEEDING
    from ps.jit.cache import CACHE as OF_PS

    for room, cache in (("ps", OF_PS), ("feeding", OF_FEEDING)):
        source = cache.directory.path()
        target = directory / room / "__pycache__" / source.name
        target.mkdir(parents=True)
        for path in source.glob("*.nb[ic]"):
            shutil.copyfile(path, target / path.name)


if __name__ == "__main__":
    _run(Path(sys.argv[1]))
