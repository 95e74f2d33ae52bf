"""The check at `import tfos` that Python finds tfos's own packages feeding, ps and rpc.

Covers: these three short top-level names, which other distributions and a user's files have too.
Does not: import the three packages, or anything beyond the standard library.
"""

from __future__ import annotations

import importlib.util
import os
from importlib.machinery import ModuleSpec

PACKAGES = ("feeding", "ps", "rpc")
MARK = b'_PART_OF = "tfos"'
"""A line of each package's `__init__.py`. pip lets two distributions write one file, silently."""


def check_packages(root: str) -> None:
    """Raise if one of the packages is missing, is another one, or was written over.

    Args:
        root: the directory, or zip file, that has the package tfos.

    Raises:
        ImportError: a package is missing or another one; with both paths and what to do.
    """
    for name in PACKAGES:
        spec = _found(name)
        needed = os.path.join(root, name, "__init__.py")
        if spec is None or spec.origin is None:
            raise _incomplete(name, needed)
        if not _is_inside(spec.origin, os.path.dirname(needed)):
            raise _another(name, needed, spec.origin)
        if not _is_ours(spec):
            raise _written_over(name, needed)


def _found(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ValueError:  # an imported module without a spec: no file of ours
        return ModuleSpec(name, None, origin=f"a module that a program made and named {name}")


def _is_inside(origin: str, directory: str) -> bool:
    """Whether a package's `__init__` is in the directory; links are followed."""
    found = os.path.dirname(origin)
    return found == directory or os.path.realpath(found) == os.path.realpath(directory)


def _is_ours(spec: ModuleSpec) -> bool:
    """Whether the source has our mark; packages without sources and other loaders are believed."""
    origin, get_data = spec.origin, getattr(spec.loader, "get_data", None)
    if origin is None or get_data is None or not origin.endswith(".py"):
        return True
    return MARK in get_data(origin)


def _incomplete(name: str, needed: str) -> ImportError:
    return ImportError(
        f"tfos needs its own package {name!r} at {needed}, but nothing is there. The installation "
        f"is incomplete, as after the removal of another distribution that had a package {name!r}. "
        f"{_reinstall()}",
        name=name,
    )


def _another(name: str, needed: str, found: str) -> ImportError:
    owners = [owner for owner in _owners(name) if _installed_at(owner, found)]
    directory = os.path.dirname(os.path.dirname(needed))
    if owners:
        step = f"It is from the distribution {owners[0]}: run `pip uninstall {owners[0]}`"
    else:
        step = "No installed distribution has it: rename it, if it is yours"
    return ImportError(
        f"tfos needs its own package {name!r} at {needed}, but Python finds {found} first. "
        f"{step}, or put {directory} before it on sys.path (PYTHONPATH).",
        name=name,
        path=found,
    )


def _written_over(name: str, needed: str) -> ImportError:
    owners = " ".join(_owners(name)) or "DISTRIBUTION"
    return ImportError(
        f"tfos needs its own package {name!r} at {needed}, but the file there is not tfos's: "
        f"another distribution has a package {name!r} too and was installed over it. "
        f"Run `pip uninstall {owners}`. {_reinstall()}",
        name=name,
        path=needed,
    )


def _reinstall() -> str:
    return (
        "Install tfos again: `pip install --force-reinstall --no-deps` with its wheel or checkout."
    )


def _owners(name: str) -> list[str]:
    """Return the other distributions that have this top-level name."""
    from importlib import metadata  # reads the files of every installed distribution

    found = metadata.packages_distributions().get(name, [])
    return sorted(set(found) - {"tfos"})


def _installed_at(owner: str, found: str) -> bool:
    """Whether the file that Python found is in the directory that the distribution is in."""
    from importlib import metadata

    try:
        root = os.path.realpath(str(metadata.distribution(owner).locate_file("")))
    except metadata.PackageNotFoundError:  # its directory is not called as its name wants
        return False
    return os.path.realpath(found).startswith(root + os.sep)
