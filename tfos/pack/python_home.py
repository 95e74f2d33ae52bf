"""Where the parts of a Python environment are, and why one cannot be packed.

Covers: interpreter, standard library, directories of packages, tfos's own source; the refusals.
Does not: choose files (tfos.pack.contents), look for shared libraries (tfos.pack.libraries).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tfos
from tfos.errors import UnsupportedError
from tfos.pack.programs import run

OWN_PACKAGES = ("feeding", "ps", "pyspark_tfrecord", "rpc", "tfos")
OWN_DISTRIBUTION = "tfos"
ASK_TIMEOUT_S = 60.0
_SITE = "import site, sys; print(site.getsitepackages([sys.prefix])[0])"


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonHome:
    """Places of one environment."""

    prefix: Path
    """Prefix of the environment, which is a virtual one if it is not `base`."""
    base: Path
    """Prefix of the interpreter and the standard library."""
    executable: Path
    """The interpreter itself, no link to it."""
    version: str
    """`3.11`."""
    stdlib: Path
    site_name: str
    """Where an interpreter looks for packages, relative to its prefix."""
    packages: tuple[Path, ...]
    """Directories of the installed packages."""
    own_root: Path
    """Directory that has tfos, feeding, ps and rpc: one of `packages`, or a checkout."""

    @classmethod
    def running(cls) -> PythonHome:
        """Return the environment of this process.

        Raises:
            UnsupportedError: the environment cannot be packed; with the next step.
        """
        if sys.platform != "linux" or sys.implementation.name != "cpython":
            raise UnsupportedError(
                f"this is {sys.implementation.name} on {sys.platform}; tfos pack packs CPython on "
                "Linux, because executors run what it packs: run it on a host like theirs"
            )
        # a virtual environment of this interpreter knows which one it came from
        executable = Path(getattr(sys, "_base_executable", "") or sys.executable).resolve()
        base = Path(sys.base_prefix).resolve()
        found = (sysconfig.get_path(name) for name in ("purelib", "platlib"))
        home = cls(
            prefix=Path(sys.prefix).resolve(),
            base=base,
            executable=executable,
            version="{}.{}".format(*sys.version_info),
            stdlib=Path(sysconfig.get_path("stdlib")).resolve(),
            site_name=os.path.relpath(_first_site(executable), base),
            packages=tuple(dict.fromkeys(Path(path).resolve() for path in found)),
            own_root=Path(tfos.__file__).resolve().parents[1],
        )
        home.check()
        return home

    def check(self) -> None:
        """Refuse what cannot be packed.

        Raises:
            UnsupportedError: the environment cannot be packed; with both facts and the next step.
        """
        if (self.prefix / "conda-meta").is_dir():
            raise UnsupportedError(
                f"{self.prefix} is a conda environment, whose libraries are conda packages: "
                "conda-pack packs it whole, and `tfos warm` compiles the kernels"
            )
        if not (self.stdlib / "os.py").is_file() or not self.stdlib.is_relative_to(self.base):
            raise UnsupportedError(
                f"{self.executable} has no standard library at {self.stdlib} (os.py) below "
                f"{self.base}; make the virtual environment with a whole Python"
            )
        if self.prefix == self.base and (self.stdlib / "EXTERNALLY-MANAGED").exists():
            raise UnsupportedError(
                f"{self.executable} is the system's Python, whose packages belong to the system: "
                f"make a virtual environment ({self.executable} -m venv DIRECTORY), install tfos "
                "there and run its tfos pack"
            )
        if not Path(self.site_name).parts or self.site_name.startswith(".."):
            raise UnsupportedError(
                f"{self.executable} looks for packages at {self.site_name}, outside of {self.base};"
                " use a Python without such a site-packages"
            )
        self._check_other_places()
        for directory in self.packages:
            _check_editable(directory)
            _check_path_files(directory)

    def _check_other_places(self) -> None:
        """Refuse packages that this environment takes from places that are not packed."""
        settings = self.prefix / "pyvenv.cfg"
        if settings.exists() and _shares_packages(settings.read_text()):
            raise UnsupportedError(
                f"{self.prefix} takes packages from {self.base}, too "
                "(include-system-site-packages); make one without --system-site-packages"
            )
        own = Path(site.getusersitepackages())
        if site.ENABLE_USER_SITE and any(own.glob("*.dist-info")):
            raise UnsupportedError(
                f"this Python takes packages from {own}, too, which are not packed; make a virtual "
                "environment, or set PYTHONNOUSERSITE=1 if none of them is needed"
            )


def _first_site(executable: Path) -> Path:
    """Ask the interpreter without its environment where it would look for packages."""
    done = run([executable, "-I", "-S", "-c", _SITE], ASK_TIMEOUT_S)
    if done.returncode:
        raise UnsupportedError(f"{executable} does not run alone: {done.stderr.strip()[-500:]}")
    return Path(done.stdout.strip())


def _shares_packages(settings: str) -> bool:
    pairs = (line.partition("=") for line in settings.splitlines())
    return any(
        key.strip() == "include-system-site-packages" and value.strip().lower() == "true"
        for key, _, value in pairs
    )


def _check_editable(directory: Path) -> None:
    found = dict(_editable(importlib.metadata.distributions(path=[str(directory)])))
    found.pop(OWN_DISTRIBUTION, None)  # its packages are known, wherever they are
    if found:
        name, url = min(found.items())
        raise UnsupportedError(
            f"{name} is installed from {url} as editable: its files are not in {directory}. Run "
            f"`pip install {url.removeprefix('file://')}`, without -e, and pack again"
            + (f"; so are {', '.join(sorted(found)[1:])}" if len(found) > 1 else "")
        )


def _editable(
    distributions: Iterable[importlib.metadata.Distribution],
) -> Iterator[tuple[str, str]]:
    """Yield name and URL of the distributions that PEP 610 marks as editable."""
    for each in distributions:
        origin = json.loads(each.read_text("direct_url.json") or "{}")
        if origin.get("dir_info", {}).get("editable"):
            yield each.metadata["Name"], origin.get("url", "")


def _check_path_files(directory: Path) -> None:
    for file in sorted(directory.glob("*.pth")):
        for line in file.read_text(errors="replace").splitlines():
            if not line.strip() or line.startswith(("#", "import ", "import\t")):
                continue
            path = (directory / line.strip()).resolve()
            if path.exists() and not path.is_relative_to(directory):
                raise UnsupportedError(
                    f"{file} adds {path} to the module path, which is not packed; install what is "
                    "there as packages, or remove the file"
                )
