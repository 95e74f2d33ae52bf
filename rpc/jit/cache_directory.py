"""Cache directory of compiled kernels: where it is, and that no other user can change it.

Covers: the places that are tried, owner and mode of the directory and of all its parents, copying
from a packed environment.
Does not: know numba (rpc.jit.kernel_cache).
Threads: any; the choice is made once.

numba's files are pickle: anyone who can write or replace them runs code.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "TFOS_KERNEL_CACHE"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def why_unsafe(directory: Path, *, also: tuple[int, ...] = (), below: Path | None = None) -> str:
    """Return how a user other than this one and root could change what a directory holds, or "".

    Args:
        directory: as `real_path` returned it, and as it is then used: a symbolic link in its place
            or above it is refused.
        also: further user ids that may own it and its parents.
        below: parents up to this one are trusted; None: no parent is.
    """
    owners = (os.geteuid(), 0, *also)
    parents = itertools.takewhile(lambda parent: parent != below, directory.parents)
    try:
        status, above = directory.lstat(), {parent: parent.lstat() for parent in parents}
    except OSError as error:
        return f"{error.strerror}"
    if not stat.S_ISDIR(status.st_mode) or status.st_uid not in owners:
        return f"it is no directory of user {owners[0]}"
    if status.st_mode & _OTHERS_WRITE:
        return _writable("it", status)
    for parent, status in above.items():
        if not stat.S_ISDIR(status.st_mode):
            return f"{parent} is a symbolic link, which may lead elsewhere later"
        if status.st_uid not in owners:
            return f"{parent} belongs to user {status.st_uid}, who could replace it"
        # In a sticky directory nobody but an entry's owner, who was checked, can rename it.
        if status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX:
            return _writable(str(parent), status)
    return ""


def _writable(name: str, status: os.stat_result) -> str:
    mode = f"{stat.S_IMODE(status.st_mode):04o}"
    return f"others can write {name} (mode {mode}); let only its owner do so (chmod go-w)"


def real_path(directory: Path) -> Path:
    """Return a directory's path without symbolic links above it: what to check, and what to use.

    A check of what a link leads to says nothing of where it leads when a file is opened.

    Args:
        directory: absolute path; it may not exist yet.
    """
    return Path(os.path.realpath(directory.parent), directory.name)


def made_private(directory: Path) -> Path:
    """Make a directory of this user alone, with those above it; return its `real_path`.

    Args:
        directory: absolute path.

    Raises:
        OSError: it cannot be made, or others could change what it holds.
    """
    made = real_path(directory)
    make(made)
    if reason := why_unsafe(made):
        raise OSError(f"{made} is not used: {reason}")
    return made


def make(directory: Path) -> None:
    """Make a directory of mode 0700, and those above it that are missing, which others only read.

    Args:
        directory: absolute path; it may exist already.

    Raises:
        OSError: it cannot be made.
    """
    for parent in reversed(directory.parents):
        if not parent.exists():
            # `parents=True` has no mode: a umask of 002 lets a group replace what is inside.
            parent.mkdir(mode=0o755, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)


def user_cache() -> Path | None:
    """Return the user's cache directory, absolute; None: this user id has no home directory."""
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return home.absolute()


class CacheDirectory:
    """The cache directory of one room in this process.

    Args:
        room: directory of the installed package.
        digest: digest of all that the kernels are made from.
    """

    def __init__(self, room: Path, digest: str) -> None:
        self._room = room.resolve()
        self.name = f"kernels-{digest}"
        self._lock = threading.Lock()
        self._chosen: Path | None = None

    def path(self) -> Path:
        """Return this process's directory, the first usable one of the documented places.

        `$TFOS_KERNEL_CACHE`, beside the installed package, the user's cache directory, and at last
        a private temporary directory that is removed at exit. A place that is readable, trusted
        and filled, but not writable, is copied into the one used, or used itself where no other can
        be trusted.
        """
        with self._lock:
            if self._chosen is None:
                self._chosen = self._choose()
            return self._chosen

    def is_safe(self) -> bool:
        """Whether nobody else can change the directory now; to be asked before every load."""
        reason = self._unsafe(self.path())
        if reason:
            logger.warning(
                "kernels in %s are neither used nor kept: %s; set %s to a directory of your own",
                self.path(),
                reason,
                CACHE_VARIABLE,
            )
        return not reason

    def forget(self) -> None:
        """Choose again at the next use."""
        with self._lock:
            self._chosen = None

    def _choose(self) -> Path:
        packed: Path | None = None
        for root in self._roots():
            path = real_path(root / self.name)
            if self._is_usable(path):
                break
            if packed is None and not self._unsafe(path):
                packed = path
        else:
            path = _private_directory()
            if packed is not None and self._unsafe(path):
                return packed  # in a pod, everybody may write what a volume is mounted at
        if packed is not None and not any(path.glob("*.nbi")):
            with suppress(OSError):  # a full disk: what is missing is compiled
                _copy_packed(packed, path)
        return path

    def _roots(self) -> Iterator[Path]:
        configured = os.environ.get(CACHE_VARIABLE)
        if configured:
            yield Path(configured).absolute()
        if self._room.is_dir():  # not in a zip file
            yield self._room / "__pycache__"
        home = user_cache()
        if home is not None:
            yield home / "tfos"

    def _unsafe(self, path: Path) -> str:
        if not path.is_relative_to(self._room):
            return why_unsafe(path)
        # Anyone who can change the package itself runs code in this process anyway.
        return why_unsafe(path, also=(self._room.stat().st_uid,), below=self._room)

    def _is_usable(self, path: Path) -> bool:
        """Create the directory if needed; say whether it is ours alone and can be written."""
        try:
            make(path)
            reason = self._unsafe(path)
            if reason:
                logger.warning(
                    "kernel cache %s is not used, it is not ours alone: %s", path, reason
                )
                return False
            with tempfile.TemporaryFile(dir=path):
                return True
        except OSError:
            return False


def _private_directory() -> Path:
    path = real_path(Path(tempfile.mkdtemp(prefix="tfos-kernels-")).absolute())
    atexit.register(_remove, path, os.getpid())
    return path


def _remove(path: Path, maker: int) -> None:
    if os.getpid() == maker:  # a child that was forked calls the same functions at its exit
        shutil.rmtree(path, ignore_errors=True)


def _copy_packed(source: Path, target: Path) -> None:
    """Fill a new cache from one that this user may read but not write (a packed environment)."""
    for packed in source.glob("*.nb[ic]"):
        temporary = target / f".{packed.name}.{os.getpid()}"
        shutil.copyfile(packed, temporary)
        temporary.replace(target / packed.name)
