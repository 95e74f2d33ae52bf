"""What is run in the environment of a cell, and where it imports tfos from.

0. The command `tfos`.
1. The program of README.md, on three executor processes; it writes line.keras, which Keras loads.
2. scripts/smoke/program.py: Spark's Arrow interfaces and Parquet files that workers read.
3. examples/ps_linear.py: parameter servers with numpy alone.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from scripts.smoke.cells import ROOT
from scripts.smoke.environment import Environment, SmokeFailed

LOADED = """
import sys
import keras
import numpy as np

line = keras.models.load_model(sys.argv[1])
print("2a + b at (2, 1):", float(line.predict(np.array([[2.0, 1.0]]), verbose=0)[0, 0]))
"""
VERSIONS = """
import json, platform
from importlib import metadata

names = ("pyspark", "numpy", "pyarrow", "keras", "tensorflow-cpu", "numba", "grpcio")
print(json.dumps({"python": platform.python_version(), **{n: metadata.version(n) for n in names}}))
"""
PLACES = """
import feeding, ps, pyspark_tfrecord, rpc, tfos

for package in (feeding, ps, pyspark_tfrecord, rpc, tfos):
    print("place:", package.__file__)
"""


def readme_program(text: str) -> str:
    """Return the whole program among README.md's blocks of Python."""
    blocks: list[str] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return next(block for block in blocks if "TFCluster.reserve" in block and "import" in block)


def versions(environment: Environment) -> dict[str, str]:
    """Return name and version of Python and of what the table shows."""
    found: dict[str, str] = json.loads(environment.run([environment.python, "-c", VERSIONS]))
    return found


def places(environment: Environment, output: str, count: int) -> None:
    """Check the lines `place: FILE` of a program: as many as expected, all in the environment.

    Raises:
        SmokeFailed: the checkout, or another installation, was imported.
    """
    found = re.findall(r"^place: (.*)$", output, re.MULTILINE)
    inside = str(environment.directory / "venv")
    strange = sorted({place for place in found if not place.startswith(f"{inside}/")})
    if strange or len(found) < count:
        raise SmokeFailed(
            f"{len(found)} modules reported their place, expected {count}; "
            f"not in {inside}: {strange}"
        )


def run_commands(environment: Environment) -> None:
    """Run the command that pip installed."""
    command = str(Path(environment.python).parent / "tfos")
    for arguments in (["--version"], ["bench"], ["inspect", "--help"]):
        environment.run([command, *arguments])


def run_readme(environment: Environment) -> None:
    """Run the README's program; the model that it exports has learnt 2a + b."""
    places(environment, environment.run([environment.python, "-c", PLACES]), 5)
    program = environment.directory / "readme.py"
    program.write_text(readme_program((ROOT / "README.md").read_text()))
    environment.submit("local-cluster[3,1,1024]", program)
    exported = environment.directory / "line.keras"
    if not exported.is_file():
        raise SmokeFailed("the README's program wrote no line.keras")
    said = environment.run([environment.python, "-c", LOADED, str(exported)])
    if abs(float(said.split()[-1]) - 5.0) > 0.5:
        raise SmokeFailed(f"the README's program did not learn 2a + b, 5 at (2, 1): {said}")


def run_paths(environment: Environment) -> None:
    """Run DataFrames, TFRecord and Parquet; driver and workers say where they import tfos from."""
    program = _copied(environment, ROOT / "scripts" / "smoke" / "program.py")
    output = environment.submit("local[4]", program, str(environment.directory / "data"))
    places(environment, output, 2 * 5)


def run_numpy(environment: Environment) -> None:
    """Run parameter servers and their clients, which need numpy and no Spark."""
    program = _copied(environment, ROOT / "examples" / "ps_linear.py")
    environment.run([environment.python, str(program)])


def _copied(environment: Environment, program: Path) -> Path:
    """Python puts a program's own directory first on sys.path: it must not be the checkout's."""
    return Path(shutil.copy(program, environment.directory))


ALL = (run_commands, run_readme, run_paths, run_numpy)
"""Checks, in the order of the table's columns."""
