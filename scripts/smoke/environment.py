"""A virtual environment with tfos from a wheel, and nothing of the checkout.

Covers: finding an interpreter, making the environment, running programs in it.
Does not: judge what they print (scripts/smoke/checks.py).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from ps.jit.cache import CACHE
from scripts.smoke.cells import HERE, Cell

INSTALL_S = 1200.0
RUN_S = 900.0
"""A fresh environment compiles kernels first, and the machine may be busy."""
PLACES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "SPARK_HOME", "SPARK_CONF_DIR")
"""Variables that could lead a program back to the checkout or its environment."""


class SmokeFailed(Exception):
    """A step of a cell failed; the text is the end of what it printed."""


class NoInterpreter(Exception):
    """This machine has no Python of the version that the cell wants."""


def interpreter(version: str) -> str:
    """Return the path of a Python of this minor version, on PATH or among pyenv's.

    Raises:
        NoInterpreter: there is none that can make virtual environments.
    """
    if version in ("", "{}.{}".format(*sys.version_info)):
        return str(Path(sys.base_prefix, "bin", "python3"))
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    found = sorted(pyenv.glob(f"{version}.*/bin/python{version}"), reverse=True)
    for candidate in (f"python{version}", *map(str, found)):
        with contextlib.suppress(OSError):
            works = [candidate, "-c", "import ensurepip, venv"]
            if subprocess.run(works, capture_output=True, timeout=60, check=False).returncode == 0:
                return shutil.which(candidate) or candidate
    raise NoInterpreter(f"no Python {version} with venv")


class Environment:
    """A virtual environment with the wheel, below a directory outside of the checkout."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.python = str(directory / "venv" / "bin" / "python")
        self._variables: dict[str, str] = {}

    @classmethod
    def made(cls, cell: Cell, wheel: Path, directory: Path) -> Environment:
        """Make the environment of a cell.

        Args:
            cell: its Python and pins. The one called `here` has all but tfos from the environment
                of this process, by a `.pth` line; Python does not read the `.pth` files of a
                directory that came in that way, so no editable installation comes with it.
            wheel: wheel of tfos.
            directory: an empty one, outside of the checkout.
        """
        made = cls(directory)
        venv = directory / "venv"
        made.run([interpreter(cell.python), "-m", "venv", "--without-pip", str(venv)], INSTALL_S)
        pip = [sys.executable, "-m", "pip", "--python", made.python, "install", "--quiet"]
        pip += ["--no-compile", "--disable-pip-version-check"]
        if cell.name == HERE:
            (packages,) = venv.glob("lib/python*/site-packages")
            (packages / "packages-of-here.pth").write_text(sysconfig.get_path("purelib") + "\n")
            made.run([*pip, "--no-deps", "--no-index", str(wheel)], INSTALL_S)
        else:
            made.run([*pip, f"{wheel}[cpu]", *cell.pins], INSTALL_S)
        made._set_variables()
        if cell.name == HERE:
            made._save_time()
        return made

    def _set_variables(self) -> None:
        """Give Spark a home whose work directory is not inside the installed pyspark."""
        code = "import pyspark; print(pyspark.__path__[0])"
        installed = Path(self.run([self.python, "-c", code]).strip())
        home = self.directory / "spark"
        (home / "work").mkdir(parents=True)
        for entry in ("bin", "jars", "python", "sbin"):
            (home / entry).symlink_to(installed / entry)
        self._variables = {
            "SPARK_HOME": str(home),
            "PATH": f"{Path(self.python).parent}:{os.environ['PATH']}",
            "PYSPARK_PYTHON": self.python,
            "PYSPARK_DRIVER_PYTHON": self.python,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "CUDA_VISIBLE_DEVICES": "-1",
        }

    def _save_time(self) -> None:
        """Use what other tests have made: compiled kernels of equal sources, Spark's home."""
        self._variables["TFOS_KERNEL_CACHE"] = str(CACHE.directory.path().parent)
        if "SPARK_HOME" in os.environ:
            self._variables["SPARK_HOME"] = os.environ["SPARK_HOME"]

    def submit(self, master: str, program: Path, *arguments: str) -> str:
        """Run a program by spark-submit and return what it printed."""
        submit = Path(self._variables["SPARK_HOME"], "bin", "spark-submit")
        command = [str(submit), "--master", master]
        command += ["--driver-memory", "512m", "--conf", "spark.executor.memory=512m"]
        command += ["--conf", "spark.ui.enabled=false"]
        command += ["--conf", "spark.log.level=WARN", str(program), *arguments]
        return self.run(command)

    def run(self, command: list[str], timeout_s: float = RUN_S) -> str:
        """Run a command outside of the checkout and return what it printed.

        Raises:
            SmokeFailed: its exit status is not 0, or it took longer than `timeout_s`.
        """
        inherited = {key: value for key, value in os.environ.items() if key not in PLACES}
        with self._running(command, {**inherited, **self._variables}) as process:
            try:
                output, _ = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                output, _ = process.communicate()
                output += f"\nended after {timeout_s:.0f} s"
        if process.returncode != 0:
            shown = " ".join(command)
            raise SmokeFailed(f"{shown}\nexit status {process.returncode}:\n{output[-6000:]}")
        return output

    @contextlib.contextmanager
    def _running(
        self, command: list[str], variables: dict[str, str]
    ) -> Iterator[subprocess.Popen[str]]:
        """Run a process in a group of its own, which ends with the block."""
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            cwd=self.directory,
            env=variables,
            start_new_session=True,  # a driver, its JVM and executors end together
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
