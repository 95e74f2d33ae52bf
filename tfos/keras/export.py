"""Export: `ctx.export(model, path)` writes the trained model as a plain file that needs no tfos.

Covers: pulling the servers' parameters, writing next to the target or on this host first, renaming
when complete and on the disk; `load_model` for files that Keras itself cannot open.
Does not: checkpoint optimizer slots (ps).      Threads: the caller's.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import keras

from feeding.errors import PathError
from feeding.filesystem.local import LocalFileSystem, sync_tree
from feeding.filesystem.location import LOCAL, parse
from feeding.filesystem.temp_files import staging_name
from tfos.errors import SettingsError
from tfos.files import transfer
from tfos.files.export_target import SAVED_MODEL, refuse_other_content
from tfos.files.paths import refuse_container, user_location
from tfos.keras.built import has_built_layers


class PathContext(Protocol):
    """The part of `NodeContext` that exporting uses."""

    @property
    def staging_dir(self) -> str:
        """Directory for files before their transfer to another file system."""

    def absolute_path(self, path: str) -> str:
        """Return the path with scheme and directory."""


Save = Callable[[Any, Path], None]
"""Writes a model: to a `.keras` file, or to a directory that does not exist yet."""


def save_as_it_is(model: Any, target: Path) -> None:
    """Write a model as Keras does; a distributed one pulls first. See Save."""
    if target.name.endswith(".keras"):
        model.save(target)
    else:
        model.export(target, verbose=False)


def export(
    model: keras.Model,
    path: str | os.PathLike[str],
    ctx: PathContext,
    save: Save = save_as_it_is,
) -> str:
    """Write the model with the servers' newest parameters; see NodeContext.export.

    Args:
        model: any Keras model, distributed or not.
        path: a path or a URL.
        ctx: the node's context.
        save: writes the model to a path of this host.

    Returns:
        The absolute path or URL that was written.

    Raises:
        SettingsError: as for `check_exportable`; or a SavedModel of a model that was never called;
            or the path is refused, or is in a container's directory.
        OSError: the disk or the file system failed.
    """
    check_exportable(model)
    target = user_location(ctx.absolute_path(os.fspath(path)), "the model")
    if not (model.built or _is_file(target.name)):
        raise SettingsError(
            f"a SavedModel at {target} would be the call of {type(model).__name__}, but only its "
            "layers were called. Export to a path that ends in .keras (with Embeddings, use "
            'tables="beside"), or export the models that it is made of'
        )
    refuse_container(target, "the model", os.environ)
    refuse_other_content(target)
    if target.scheme == LOCAL:
        _export_here(model, Path(target.path), save)
        return target.path
    with tempfile.TemporaryDirectory(prefix="tfos-export-", dir=ctx.staging_dir) as staging:
        whole = Path(staging) / ("model.keras" if _is_file(target.name) else "model")
        with _named(whole):
            save(model, whole)
        try:
            transfer.upload(whole, target, last=SAVED_MODEL)
        except PathError as error:
            raise SettingsError(f"cannot export to {target}: {error}") from error
    return str(target)


def check_exportable(model: object) -> None:
    """Refuse what has no weights to export.

    Raises:
        SettingsError: it is not a Keras model, or neither it nor all its layers were ever built.
    """
    if not isinstance(model, keras.Model):
        raise SettingsError(f"ctx.export takes a Keras model, got {type(model).__qualname__}")
    is_built = model.built and model.weights  # Keras' build makes none of an own class
    if not (is_built or has_built_layers(model)):
        raise SettingsError(
            "the model was never built, so it has no weights to export; train it first, or call it "
            "once, model(x[:1])"
        )


def load_model(
    path: str | os.PathLike[str],
    custom_objects: Mapping[str, Any] | None = None,
    compile: bool = True,  # noqa: A002 - Keras' name
    safe_mode: bool = True,
) -> keras.Model:
    """Load a `.keras` file from a path or URL; for a local path just `keras.models.load_model`.

    Args:
        path: path or URL, absolute or relative to this process's directory.
        custom_objects: classes and functions that the model uses, by their registered names.
        compile: whether to restore optimizer, losses and metrics, too.
        safe_mode: whether to refuse lambdas, which would run code from the file.

    Returns:
        The model.

    Raises:
        SettingsError: the path is refused.
        OSError: there is no such file, or the file system failed.
    """
    # By name: the layer is a package above this one. A file that names it needs its class.
    importlib.import_module("tfos.keras.embedding.layer")
    place = user_location(os.fspath(path), "the model")
    with transfer.on_disk(place, "model.keras") as local:
        return keras.models.load_model(
            local, custom_objects=custom_objects, compile=compile, safe_mode=safe_mode
        )


def _is_file(name: str) -> bool:
    return name.endswith(".keras")


def _export_here(model: Any, target: Path, save: Save) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    suffix = ".keras" if _is_file(target.name) else ""
    temporary = target.with_name(f"{staging_name(target.name)}{suffix}")
    try:
        with _named(target):
            save(model, temporary)
            sync_tree(temporary)
        _replace(temporary, target)
    finally:
        _remove(temporary)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Name the file in an error of a write; TensorFlow's own of a full disk becomes an OSError."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise
    except Exception as error:
        full = os.strerror(errno.ENOSPC)
        if full not in str(error):
            raise
        raise OSError(errno.ENOSPC, full, str(path)) from error


def _replace(temporary: Path, target: Path) -> None:
    fs = LocalFileSystem()
    if not target.is_dir():
        fs.rename(temporary, target, overwrite=True)
        return
    # A directory cannot be renamed over one with content.
    transfer.replace_directory(fs, parse(str(temporary)), parse(str(target)))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
