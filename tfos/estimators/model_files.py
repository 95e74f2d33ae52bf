"""Model files: the models of a directory by the number of their fit, on every file system of tfos.

    model_dir/model-00001.keras    after the first fit; written whole, then renamed
    model_dir/servers/             checkpoints of the servers, while they train

Covers: reading, writing, the newest one.      Does not: know Keras.
Runs in: the driver.
"""

from __future__ import annotations

import re

from feeding.errors import PathError
from feeding.filesystem.location import Location, parse
from feeding.filesystem.registry import filesystem_for
from tfos.errors import SettingsError

_NAME = re.compile(r"model-(\d{5})\.keras")


def servers_dir(model_dir: str) -> str:
    """Return where the servers save."""
    return str(_child(model_dir, "servers"))


def write_model(path: str, content: bytes) -> None:
    """Write a model's file; an older one stays until the new one is whole.

    Args:
        path: path or URL of the file.
        content: of a `.keras` file.

    Raises:
        SettingsError: the path is refused.
        OSError: the file system failed.
    """
    place = str(_location(path))
    filesystem_for(place).write(place, content)


def read_model(path: str) -> bytes:
    """Return the bytes of a model's file.

    Args:
        path: path or URL of the file.

    Raises:
        SettingsError: the path is refused, or there is no file.
        OSError: the file system failed.
    """
    place = _location(path)
    try:
        with filesystem_for(str(place)).open(str(place)) as file:
            return bytes(file.read_range(0, file.size_bytes))
    except FileNotFoundError as error:
        raise SettingsError(f"no model is at {path}; save() writes one") from error


def fit_file(model_dir: str, number: int) -> str:
    """Return the path of the model after a fit.

    Args:
        model_dir: of all fits.
        number: of the fit, from 1.
    """
    return str(_child(model_dir, f"model-{number:05d}.keras"))


def newest_fit(model_dir: str) -> int:
    """Return the number of the newest model; 0: there is none."""
    place = _location(model_dir)
    try:
        names = [each.name for each in filesystem_for(str(place)).entries(str(place))]
    except FileNotFoundError:
        return 0
    return max((int(found[1]) for name in names if (found := _NAME.fullmatch(name))), default=0)


def has_servers(model_dir: str) -> bool:
    """Return whether servers have saved there."""
    place = servers_dir(model_dir)
    return filesystem_for(place).exists(place)


def _child(directory: str, name: str) -> str:
    return str(_location(directory).child(name))


def _location(path: str) -> Location:
    try:
        return parse(path)
    except PathError as error:
        raise SettingsError(f"no model can be at {path!r}: {error}") from error
