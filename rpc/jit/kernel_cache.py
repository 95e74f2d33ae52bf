"""Kernel cache: numba's files of compiled kernels in a directory that no other user can change.

Covers: the digest of the sources, one signature's files, kernels that are compiled on first use and
kernels that are loaded before.
Does not: choose the directory (rpc.jit.cache_directory), hold kernels (ps.jit, feeding.formats).
Runs in: PS processes, and whatever reads or writes files by kernels; imports numba.

numba's own cache trusts any directory it can write, keeps a kernel when a function or constant that
the kernel *imports* has changed, and forgets it when the installation moves or is unpacked.
Therefore a digest of all kernel sources is both the directory's name and the stamp inside, in place
of numba's path and modification time.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numba
from numba.core import caching

from rpc.jit.cache_directory import CacheDirectory

logger = logging.getLogger(__name__)

_OWN_SOURCES = (Path(__file__), Path(__file__).with_name("cache_directory.py"))


class KernelCache:
    """Compiled kernels of one room.

    Args:
        room: directory of the installed package.
        sources: files below it that kernels are made from; all of them, or a changed function would
            be taken for its old self.
    """

    def __init__(self, room: Path, sources: tuple[str, ...]) -> None:
        self._room = room
        self._sources = sources
        self._loading = threading.Lock()

    @functools.cached_property
    def digest(self) -> str:
        """Digest of everything that the kernels are made from."""
        digest = hashlib.blake2b(numba.__version__.encode(), digest_size=8)
        for path in (*(self._room / name for name in self._sources), *_OWN_SOURCES):
            digest.update(_content(path))
        return digest.hexdigest()

    @functools.cached_property
    def directory(self) -> CacheDirectory:
        """Where the files are."""
        return CacheDirectory(self._room, self.digest)

    def keep(self, dispatcher: Any) -> Any:
        """Let a function of `numba.njit` keep its compiled signatures here; returns it."""
        dispatcher._cache = _KernelFiles(self, dispatcher.py_func)
        return dispatcher

    def load(self, dispatcher: Any, signature: tuple[Any, ...]) -> bool:
        """Take a kernel from the cache or compile it; return False if it was loaded already.

        One at a time; other threads wait.

        Args:
            dispatcher: numba's, of the kernel.
            signature: numba types of its arguments.
        """
        with self._loading:
            if signature in dispatcher.overloads:
                return False
            self.keep(dispatcher)
            dispatcher.disable_compile(False)
            dispatcher.compile(signature)
            dispatcher.disable_compile()  # a wrong argument is an error, not seconds of compiling
            return True


def _content(source: Path) -> bytes:
    """Return the source of a module, or its bytecode where it has no source; also in a zip file."""
    paths = (source, source.with_suffix(".pyc"))
    archive = next((each for each in source.parents if each.is_file()), None)
    if archive is None:
        return next((each for each in paths if each.exists()), source).read_bytes()
    with zipfile.ZipFile(archive) as opened:  # as of --py-files
        names = [each.relative_to(archive).as_posix() for each in paths]
        return opened.read(next((each for each in names if each in opened.NameToInfo), names[0]))


class _KernelFiles(caching._Cache):  # type: ignore[misc]  # numba is untyped
    """The files of one kernel; nothing is touched before its first use."""

    def __init__(self, cache: KernelCache, function: Callable[..., Any]) -> None:
        self._cache = cache
        self._function = function

    @property
    def cache_path(self) -> str:
        return str(self._cache.directory.path())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        files = self._files(sig, target_context.codegen().magic_tuple())
        return files and files.load_overload(sig, target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        files = self._files(sig, data.codegen.magic_tuple())
        if files:
            files.save_overload(sig, data)

    def enable(self) -> None:
        """It is always enabled."""

    def disable(self) -> None:
        """It is always enabled."""

    def flush(self) -> None:
        """Files of other sources are in other directories."""

    def _files(self, signature: Any, cpu: Any) -> _SignatureFiles | None:
        if not self._cache.directory.is_safe():
            return None
        return _SignatureFiles(self._cache, self._function, (signature, cpu))


class _CacheImpl(caching.CompileResultCacheImpl):  # type: ignore[misc]  # numba is untyped
    """Rebuilds kernels; paths and stamps are not numba's."""

    def __init__(self, cache: KernelCache, function: Callable[..., Any]) -> None:
        # Not numba's own: it asks the environment which class names the directory.
        self._locator = _Locator(cache, function)
        name = f"{function.__module__}.{function.__qualname__}"
        self._filename_base = self.get_filename_base(name, getattr(sys, "abiflags", ""))
        self._lineno = function.__code__.co_firstlineno  # numba's warnings name it


class _Locator:
    """Tells numba our directory and stamp; numba's own depend on paths and times."""

    def __init__(self, cache: KernelCache, function: Callable[..., Any]) -> None:
        self._cache = cache
        self._py_file = function.__code__.co_filename
        self._line = function.__code__.co_firstlineno

    def get_disambiguator(self) -> str:
        return str(self._line)

    def get_cache_path(self) -> str:
        return str(self._cache.directory.path())

    def get_source_stamp(self) -> str:
        return self._cache.digest

    def ensure_cache_path(self) -> None:
        """It exists since it was chosen."""


class _SignatureFiles(caching.FunctionCache):  # type: ignore[misc]  # numba is untyped
    """One signature's files, so that processes which start at once write the same or others.

    numba numbers the files of a function's signatures in an index that it reads, changes and
    replaces without a lock: two processes give one number to two signatures, or to two CPUs that
    share a disk, and the kernel of one is then taken for the other's.
    """

    def __init__(
        self, cache: KernelCache, function: Callable[..., Any], signature_and_cpu: tuple[Any, Any]
    ) -> None:
        self._impl_class = functools.partial(_CacheImpl, cache)
        super().__init__(function)
        key = hashlib.blake2b(repr(signature_and_cpu).encode(), digest_size=8).hexdigest()
        self._cache_file = caching.IndexDataCacheFile(
            self._cache_path, f"{self._impl.filename_base}-{key}", cache.digest
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
