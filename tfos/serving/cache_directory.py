"""Cache directory of indexes: its place, its privacy, and one builder per index at a time.

Covers: the places, owner and mode, the lock of a builder, free space.
Does not: know what an index holds (tfos.serving.index_files).
Threads: any.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from feeding.filesystem.location import LOCAL
from rpc.jit.cache_directory import made_private, user_cache
from tfos.errors import ExportError, SettingsError
from tfos.files.paths import user_location
from tfos.serving.file_lock import try_lock, unlock

CACHE_VARIABLE = "TFOS_SERVING_CACHE"
_BY_VARIABLE = f"set {CACHE_VARIABLE}, for Spark's tasks by spark.executorEnv.{CACHE_VARIABLE}"
"""Remedy for users of a column or cluster, who do not call load()."""
BUILD_TIMEOUT_S = 3600.0
"""Longest time that a process waits while another one builds the same index."""
_LOOK_S = 0.1


def cache_directory(given: str | os.PathLike[str] | None) -> Path:
    """Return the directory for indexes; created with mode 0700.

    Args:
        given: a directory of this host; None: $TFOS_SERVING_CACHE, else `tfos/serving` below
            $XDG_CACHE_HOME, else the first usable of: below ~/.cache, Spark's temporary
            directories, this host's.

    Raises:
        SettingsError: it is not a local directory, or other users could change it.
    """
    refused: SettingsError | None = None
    for place in _default_places() if given is None else [_local(given)]:
        try:
            return _made(place)
        except SettingsError as error:
            refused = refused or error
    raise refused or SettingsError(
        f"this user has no directory for indexes; give load() a cache_dir, or {_BY_VARIABLE}"
    )


def _made(path: Path) -> Path:
    try:
        return made_private(path)
    except OSError as error:
        raise SettingsError(
            f"indexes cannot be kept in {path}: {error.strerror or error}; give load() a cache_dir "
            f"of your own on a local disk, or {_BY_VARIABLE}"
        ) from error


def _local(given: str | os.PathLike[str]) -> Path:
    location = user_location(given, "cache_dir")
    if location.scheme != LOCAL:
        raise SettingsError(
            f"cache_dir is mapped into memory and must be on a local disk, got {location}"
        )
    return Path(location.path).absolute()


def _default_places() -> Iterator[Path]:
    """Yield the places to try; a place that the user named is the only one."""
    configured, home = os.environ.get(CACHE_VARIABLE), user_cache()
    if configured:
        yield _local(configured)
        return
    if home is not None:
        yield home / "tfos" / "serving"
    if os.environ.get("XDG_CACHE_HOME"):
        return
    # In YARN's containers HOME is /home, or another user's.
    scratch = os.environ.get("SPARK_EXECUTOR_DIRS", "").split(os.pathsep)
    for variable in ("LOCAL_DIRS", "SPARK_LOCAL_DIRS"):
        scratch += os.environ.get(variable, "").split(",")
    scratch = [*filter(None, scratch), tempfile.gettempdir()]
    name = f"tfos-serving-{os.geteuid()}"
    yield from (Path(each, name).absolute() for each in scratch if os.path.isdir(each))


@contextmanager
def only_builder(directory: Path, name: str, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of an index; the kernel releases it if this process ends.

    Args:
        directory: directory of the cache.
        name: name of the index.
        on_wait: called once if another process has the lock.

    Raises:
        ExportError: the other process did not finish in time.
        SettingsError: this process cannot write there.
    """
    path = builder_lock(directory, name)
    deadline_s = time.monotonic() + BUILD_TIMEOUT_S
    has_waited = False
    while (descriptor := _try_builder_lock(path, name)) is None:
        if not has_waited:
            on_wait()
        has_waited = True
        if time.monotonic() > deadline_s:
            raise ExportError(
                f"another process has been building {directory / name} for more than "
                f"{BUILD_TIMEOUT_S:.0f} s; end it, or remove {path}"
            )
        time.sleep(_LOOK_S)
    try:
        yield
    finally:
        unlock(descriptor)


def builder_lock(directory: Path, name: str) -> Path:
    """Return the file that an index's builder locks.

    Args:
        directory: directory of the cache.
        name: name of the index.
    """
    return directory / f".{name}.lock"


def _try_builder_lock(path: Path, name: str) -> int | None:
    try:
        return try_lock(path, creates=True)
    except OSError as error:
        if is_full(error):
            raise
        raise SettingsError(
            f"the index {name} is not in {path.parent}, and cannot be built there: "
            f"{error.strerror}. Give load() a cache_dir that this process can write, build the "
            f"index first, or {_BY_VARIABLE}"
        ) from error


def has_room(directory: Path, nbytes: int) -> bool:
    """Return whether the disk has room for an index.

    Args:
        directory: directory of the cache.
        nbytes: bytes that the index will take.
    """
    return nbytes <= shutil.disk_usage(directory).free


def no_room(directory: Path, nbytes: int) -> ExportError:
    """Return the error for a full disk.

    Args:
        directory: directory of the cache.
        nbytes: bytes that the index takes.
    """
    free = shutil.disk_usage(directory).free
    why = "but only"
    if free >= nbytes:  # as df says, which knows neither quotas nor the number of files
        why = "which a quota or the number of files (df -i) may not allow, though"
    return ExportError(
        f"the index takes {nbytes / 1e6:.1f} MB in {directory}, {why} {free / 1e6:.1f} MB are "
        "free. Remove old indexes there, or give load() a cache_dir on another disk"
    )


def is_full(error: OSError) -> bool:
    """Return whether the disk or the user's quota is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)
