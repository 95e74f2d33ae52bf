"""`ctx.export(model, path)`: the trained model as a plain file that needs no tfos.

Covers: taking the servers' parameters, writing beside the target, renaming when complete.
Does not: checkpoint optimizer slots (ps).      Threads: the caller's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

import keras

from tfos.errors import SettingsError, UnsupportedError


class PathContext(Protocol):
    """The part of `NodeContext` that exporting uses."""

    def absolute_path(self, path: str) -> str:
        """Return the path with scheme and directory."""


def export(model: Any, path: str, ctx: PathContext) -> Path:
    """Write the model with the servers' newest parameters.

    Call it on one worker, usually `if ctx.is_chief:`. An existing file or directory is replaced
    once the new one is complete; before that it stays as it was.

    Args:
        model: any Keras model, distributed or not.
        path: ending in `.keras`: one file for `keras.models.load_model`; otherwise a directory for
            TensorFlow Serving (SavedModel). Relative paths mean `ctx.working_dir`.
        ctx: the node's context.

    Returns:
        The absolute path that was written.

    Raises:
        UnsupportedError: the path is on a file system that this version does not write.
        SettingsError: not a Keras model, or one that was never built.
    """
    if not isinstance(model, keras.Model):
        raise SettingsError(f"ctx.export takes a Keras model, got {type(model).__qualname__}")
    if not model.built:
        raise SettingsError(
            "the model was never built, so it has no weights to export; train it first, or call "
            "model.build(input_shape)"
        )
    target = local_path(ctx.absolute_path(os.fspath(path)))
    target.parent.mkdir(parents=True, exist_ok=True)
    suffix = ".keras" if target.suffix == ".keras" else ""
    temporary = target.with_name(f".{target.stem}.{uuid.uuid4().hex[:12]}{suffix}")
    try:
        if suffix:
            model.save(temporary)  # of a distributed model: pulls first
        else:
            model.export(temporary, verbose=False)
        _replace(temporary, target)
    finally:
        _remove(temporary)
    return target


def local_path(location: str) -> Path:
    """Return the path that a location with scheme means on this machine.

    Raises:
        UnsupportedError: it is not local.
    """
    parts = urlsplit(location)
    if parts.scheme not in ("", "file"):
        raise UnsupportedError(
            f"cannot export to {location!r}: this version writes to local and mounted paths only; "
            f"use file:///shared/dir, or export locally and copy it to {parts.scheme}://"
        )
    return Path(unquote(parts.path) if parts.scheme else location)


def _replace(temporary: Path, target: Path) -> None:
    if not target.is_dir():
        temporary.replace(target)
        return
    # A directory cannot be renamed over one with content: move the old one aside first.
    old = target.with_name(f".{target.name}.old-{uuid.uuid4().hex[:12]}")
    target.rename(old)
    try:
        temporary.replace(target)
    except OSError:
        old.rename(target)
        raise
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
