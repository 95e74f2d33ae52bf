"""Model files: a directory's models by number of their fit, on every file system of tfos.

    model_dir/model-00001.keras    after the first fit; written whole, then renamed
    model_dir/servers-00001/       checkpoints of the servers, while that fit and those that go on
                                   from it train
    model_dir/model-00001.json     which of these directories holds the state of that model, and its
                                   step there
    model_dir/fit-00001            marks the number as taken; written by the one fit that has it

Covers: reading, writing, the newest one.      Does not: know Keras.
Runs in: the driver.
"""

from __future__ import annotations

import contextlib
import json
import re
import warnings
from dataclasses import dataclass
from itertools import chain

from feeding.filesystem.registry import filesystem_for
from ps.checkpoint.choice import latest
from ps.checkpoint.inspect import clock_of, passed_over
from ps.errors import CheckpointError
from tfos.errors import SettingsError
from tfos.files.checkpoint_storage import Storages
from tfos.files.paths import user_location

_MODEL = re.compile(r"model-(\d{5})\.keras")
_SERVERS = re.compile(r"servers-(\d{5})")
_TAKEN = re.compile(r"fit-(\d{5})")


@dataclass(frozen=True, slots=True)
class SavedFit:
    """The newest state of a model's directory."""

    model: int
    """Number of the newest model; 0: no fit has ended."""
    servers: int | None
    """Number of the servers' directory with its state or a newer one; None: there is none."""
    is_behind: bool = False
    """Whether servers have saved since: a fit that continued from the model has not ended."""


def servers_dir(model_dir: str, number: int) -> str:
    """Return where the servers of a fit save, and those of fits that go on from it.

    Args:
        model_dir: directory of all fits.
        number: number of the fit, from 1.
    """
    return _child(model_dir, f"servers-{number:05d}")


def take_number(model_dir: str) -> int:
    """Return a number that no other fit has or gets, not even from another driver.

    Numbers of fits that failed are not used again.

    Args:
        model_dir: directory of all fits.

    Raises:
        SettingsError: the path is refused, or nothing can be written there.
    """
    try:
        number = max((0, *chain(*_numbers(model_dir, _MODEL, _SERVERS, _TAKEN))))
        while True:
            number += 1
            place = _child(model_dir, f"fit-{number:05d}")
            with contextlib.suppress(FileExistsError):  # another driver was faster
                filesystem_for(place).write(place, b"", overwrite=False)
                return number
    except OSError as error:
        raise SettingsError(
            f"model_dir={model_dir} takes no models: {error}. Pass a directory that the driver "
            "can write"
        ) from error


def write_fit(
    model_dir: str, number: int, content: bytes, servers: int | None, updates: int = 0
) -> int | None:
    """Write the model after a fit; return the number of the directory with its servers' state.

    None if the newest checkpoint there is older than the model, as after a failed last save.

    Args:
        model_dir: directory of all fits.
        number: number of the fit, from 1.
        content: bytes of a `.keras` file.
        servers: number of the directory in which the fit's servers saved; None: the fit had no
            servers.
        updates: number of updates of the servers' parameters at the end of the fit.
    """
    found: dict[str, int | None] = {}
    if servers is not None:
        with contextlib.suppress(CheckpointError):  # unreadable now: unknown
            found["step"] = step = _newest_step(model_dir, servers)
            place = Storages()(servers_dir(model_dir, servers))
            saved = 0 if step is None else clock_of(place, step)
            servers = None if saved < updates else servers
    write_model(_record(model_dir, number), json.dumps({"servers": servers, **found}).encode())
    write_model(fit_file(model_dir, number), content)
    return servers


def newest_state(model_dir: str) -> SavedFit:
    """Return the state that the next fit continues from.

    A directory without a whole checkpoint of a server is skipped: its fit ended before the
    first checkpoint.

    Raises:
        SettingsError: there is neither a model nor a checkpoint of servers.
    """
    try:
        models, all_servers = _numbers(model_dir, _MODEL, _SERVERS)
    except OSError as error:
        raise SettingsError(f"model_dir={model_dir} cannot be read: {error}") from error
    model = max(models, default=0)
    newer = [number for number in all_servers if number > model]  # from fits that have not ended
    for number in sorted(newer, reverse=True):
        if _has_saved(model_dir, number):
            return SavedFit(model, number, is_behind=True)
    if not model:
        raise SettingsError(f"{model_dir} has no model and no checkpoint of a fit")
    return SavedFit(model, None) if len(newer) == len(all_servers) else state_of(model_dir, model)


def state_of(model_dir: str, model: int) -> SavedFit:
    """Return the initial state of a fit that continues from a model.

    Without servers, and with a warning, if they have neither that state nor a newer one.

    Args:
        model_dir: directory of all fits.
        model: number of the model.

    Raises:
        SettingsError: the file beside the model is not a fit's record.
    """
    record = _record(model_dir, model)
    try:
        found = json.loads(read_model(record))
        servers = found["servers"]
        is_known = servers is not None and "step" in found
    except (ValueError, KeyError, TypeError) as error:
        raise SettingsError(
            f"{record} is not a fit's record: {error}. load({fit_file(model_dir, model)!r}) takes "
            "the model without the servers' state"
        ) from error
    if is_known:
        with contextlib.suppress(CheckpointError):  # unreadable now: unknown
            return _compared(model_dir, model, servers, found["step"])
    return SavedFit(model, servers)


def _compared(model_dir: str, model: int, servers: int, step: int | None) -> SavedFit:
    """Return the state of a model whose servers had saved `step`, or nothing, when it was written.

    Raises:
        CheckpointError: the directory cannot be read.
    """
    newest = _newest_step(model_dir, servers)
    if newest == step:
        return SavedFit(model, servers)
    directory = servers_dir(model_dir, servers)
    if newest is not None and (
        step is None or newest > step or step in passed_over(Storages()(directory), newest)
    ):
        return SavedFit(model, servers, is_behind=True)
    warnings.warn(
        f"{directory} has no whole checkpoint of step {step} any more, which belongs to "
        f"{fit_file(model_dir, model)}, nor a newer one: the next fit starts with the model and "
        "fresh servers",
        stacklevel=4,
    )
    return SavedFit(model, None)


def _has_saved(model_dir: str, servers: int) -> bool:
    """Say whether a fit can continue from there; that fit warns of incomplete checkpoints."""
    try:
        return _newest_step(model_dir, servers, is_told=True) is not None
    except CheckpointError:  # unreadable now: the fit that continues from there says why
        return True


def _newest_step(model_dir: str, servers: int, *, is_told: bool = False) -> int | None:
    """Return the step that a fit would continue from; None: there is none.

    Raises:
        CheckpointError: the directory cannot be read.
    """
    return latest(Storages()(servers_dir(model_dir, servers)), is_told=is_told)


def write_model(path: str, content: bytes) -> None:
    """Write a model's file; an older one stays until the new one is whole.

    Args:
        path: path or URL of the file.
        content: bytes of a `.keras` file.

    Raises:
        SettingsError: the path is refused.
        OSError: the file system failed.
    """
    place = str(user_location(path, "the model"))
    filesystem_for(place).write(place, content)


def read_model(path: str) -> bytes:
    """Return the bytes of a model's file.

    Args:
        path: path or URL of the file.

    Raises:
        SettingsError: the path is refused, or it is missing or a directory.
        OSError: the file system failed.
    """
    place = user_location(path, "the model")
    try:
        with filesystem_for(str(place)).open(str(place)) as file:
            return bytes(file.read_range(0, file.size_bytes))
    except FileNotFoundError as error:
        raise SettingsError(f"no model is at {path}; save() writes one") from error
    except IsADirectoryError as error:
        raise SettingsError(
            f"{path} is a directory, such as a SavedModel; pass one file. Keras 3's "
            "model.save('name.keras') writes it"
        ) from error


def fit_file(model_dir: str, number: int) -> str:
    """Return the path of the model after a fit.

    Args:
        model_dir: directory of all fits.
        number: number of the fit, from 1.
    """
    return _child(model_dir, f"model-{number:05d}.keras")


def _numbers(model_dir: str, *kinds: re.Pattern[str]) -> list[list[int]]:
    """Return the numbers of each kind of name."""
    place = str(user_location(model_dir, "the model"))
    try:
        names = [each.name for each in filesystem_for(place).entries(place)]
    except FileNotFoundError:
        names = []
    return [[int(found[1]) for name in names if (found := kind.fullmatch(name))] for kind in kinds]


def _record(model_dir: str, number: int) -> str:
    return _child(model_dir, f"model-{number:05d}.json")


def _child(directory: str, name: str) -> str:
    return str(user_location(directory, "the model").child(name))
