"""Cache of compiled kernels: its directory, its owner check, the decorator that uses it.

Covers: the cache directory (name, owner, mode, fallbacks) and the decorator that uses it.
Does not: hold kernels (ps.optim.kernels).      Runs in: PS processes; imported by
ps.optim.kernels alone.

numba's cache is pickle, so a directory is used only if no other user can write it. It also keeps a
kernel when a function or constant that the kernel *imports* has changed, and forgets it when the
installation moves or is unpacked. Therefore a digest of all kernel sources is both the directory's
name and the stamp inside, in place of numba's path and modification time.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core import caching, compiler

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "TFOS_KERNEL_CACHE"
_ROOM = Path(__file__).resolve().parent.parent
_SOURCES = (
    *("optim/formulas.py", "optim/codegen.py", "optim/kernels.py"),
    *("tables/hash_index.py", "tables/initializers.py", "tables/kernels.py"),
    *("compression/format.py", "compression/kernels.py"),
    *("jit/cache.py", "jit/intrinsics.py"),
)


@cache
def source_digest() -> str:
    """Return the digest of everything that kernels are made from."""
    digest = hashlib.blake2b(numba.__version__.encode(), digest_size=8)
    for name in _SOURCES:
        digest.update((_ROOM / name).read_bytes())
    return digest.hexdigest()


def _others_cannot_write(directory: Path, owners: tuple[int, ...]) -> bool:
    try:
        status = directory.lstat()
    except OSError:
        return False
    is_private = not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(status.st_mode) and status.st_uid in owners and is_private


def _usable(directory: Path) -> bool:
    """Create the directory if needed; say whether it is ours alone and can be written."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _others_cannot_write(directory, (os.geteuid(),)):
            logger.warning("kernel cache %s is not ours alone, so it is not used", directory)
            return False
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


def _roots() -> Iterator[Path]:
    configured = os.environ.get(CACHE_VARIABLE)
    if configured:
        yield Path(configured)
    yield _ROOM / "__pycache__"
    try:
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tfos"
    except RuntimeError:  # no home directory for this user id
        return


def _private_directory() -> Path:
    path = Path(tempfile.mkdtemp(prefix="tfos-kernels-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def _copy_packed(source: Path, target: Path) -> None:
    """Fill a new cache from one that this user may read but not write (a packed environment)."""
    for packed in source.glob("*.nb[ic]"):
        temporary = target / f".{packed.name}.{os.getpid()}"
        shutil.copyfile(packed, temporary)
        temporary.replace(target / packed.name)


@cache
def directory() -> Path:
    """Return this process's kernel cache, the first usable one of the documented places.

    `$TFOS_KERNEL_CACHE`, beside the installed package, the user's cache directory, and at last a
    private temporary directory that is removed at exit. A place that is readable, trusted and
    filled, but not writable, is copied into the one used.
    """
    name = f"kernels-{source_digest()}"
    packed: Path | None = None
    for root in _roots():
        path = root / name
        if _usable(path):
            break
        if packed is None and _others_cannot_write(path, (os.geteuid(), 0)):
            packed = path
    else:
        path = _private_directory()
    if packed is not None and not any(path.glob("*.nbi")):
        with suppress(OSError):  # a full disk: what is missing is compiled
            _copy_packed(packed, path)
    return path


class _Locator(caching._CacheLocator):  # type: ignore[misc]  # numba is untyped
    """Tells numba our directory and stamp; numba's own depend on paths and times."""

    def __init__(self, py_func: Callable[..., Any]) -> None:
        self._line = py_func.__code__.co_firstlineno

    def get_cache_path(self) -> str:
        return str(directory())

    def get_source_stamp(self) -> str:
        return source_digest()

    def get_disambiguator(self) -> str:
        return str(self._line)

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], _py_file: str) -> _Locator:
        return cls(py_func)


class _CacheImpl(caching.CompileResultCacheImpl):  # type: ignore[misc]  # numba is untyped
    _locator_classes = (_Locator,)


class _Cache(caching.FunctionCache):  # type: ignore[misc]  # numba is untyped
    """One signature's files, so that processes which start at once write the same or others.

    numba numbers the files of a function's signatures in an index that it reads, changes and
    replaces without a lock: two processes give one number to two signatures, or to two CPUs that
    share a disk, and the kernel of one is then taken for the other's.
    """

    _impl_class = _CacheImpl

    def __init__(self, function: Callable[..., Any], signature: tuple[Any, ...], cpu: Any) -> None:
        super().__init__(function)
        key = hashlib.blake2b(repr((signature, cpu)).encode(), digest_size=8).hexdigest()
        self._cache_file = caching.IndexDataCacheFile(
            self._cache_path, f"{self._impl.filename_base}-{key}", source_digest()
        )

    @contextmanager
    def _guard_against_spurious_io_errors(self) -> Iterator[None]:
        """Go on without files that are damaged or cannot be written; forget them."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - pickle raises anything for damaged bytes
            index = Path(self._cache_file._index_path)
            logger.warning("kernel cache file %s cannot be used: %r", index, error)
            with suppress(OSError):
                index.unlink(missing_ok=True)


class _WithoutAliases(compiler.Compiler):  # type: ignore[misc]  # numba is untyped
    """Tells LLVM that the arrays do not overlap: no checks before loops, which cost short rows."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.state.flags.noalias = True


def kernel(function: Callable[..., Any]) -> Any:
    """Make a top-level function a kernel: compiled by `load`, running without the GIL.

    No fast math: operations are neither reordered nor contracted, or parity with Keras would end.
    """
    return numba.njit(nogil=True, fastmath=False, error_model="numpy")(function)


def kernel_of_distinct_arrays(function: Callable[..., Any]) -> Any:
    """As `kernel`, for functions that are never given overlapping arrays."""
    options = {"nogil": True, "fastmath": False, "error_model": "numpy"}
    return numba.njit(pipeline_class=_WithoutAliases, **options)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Make a formula callable from kernels, by the same rules."""
    return numba.njit(fastmath=False, error_model="numpy")(function)


def load(dispatcher: Any, signature: tuple[Any, ...]) -> bool:
    """Take a kernel from the cache or compile it; return False if it was loaded already.

    Not to be entered by two threads at once.

    Args:
        dispatcher: the kernel, decorated by `kernel`.
        signature: numba types of its arguments.
    """
    if signature in dispatcher.overloads:
        return False
    cpu = dispatcher.targetctx.codegen().magic_tuple()
    dispatcher._cache = _Cache(dispatcher.py_func, signature, cpu)
    dispatcher.disable_compile(False)
    dispatcher.compile(signature)
    dispatcher.disable_compile()  # a wrong argument is an error, not seconds of compiling
    return True
