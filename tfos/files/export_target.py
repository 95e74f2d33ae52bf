"""What an exported model may replace: nothing, a file, or an earlier one.

Covers: the refusal of directories with other content, which the transfer would remove.
Does not: transfer (tfos.files.transfer).
Threads: any.
"""

from __future__ import annotations

from feeding.errors import PathError
from feeding.filesystem.location import Location
from feeding.filesystem.registry import filesystem_for
from tfos.errors import SettingsError

SAVED_MODEL = "saved_model.pb"
"""Without this file nobody takes a directory for a SavedModel."""
_OWN = {
    *(SAVED_MODEL, "variables", "assets", "assets.extra", "fingerprint.pb"),
    *("keras_metadata.pb", "debug"),
}
"""What TensorFlow and Keras write into a SavedModel's directory."""


def refuse_other_content(target: Location) -> None:
    """Refuse a directory with more than a SavedModel in it: to replace it would remove all of it.

    What an export left in a store without renames that was cut there is no obstacle.

    Args:
        target: an export's target, a directory or a `.keras` file.

    Raises:
        SettingsError: names the place and something in it.
    """
    try:
        fs = filesystem_for(str(target))
        found = fs.entries(str(target))
    except (FileNotFoundError, NotADirectoryError):
        return
    except PathError as error:
        raise SettingsError(f"cannot export to {target}: {error}") from error
    names = {each.name for each in found}
    is_model = SAVED_MODEL in names or not fs.renames_whole
    other = sorted(names - _OWN if is_model and not target.name.endswith(".keras") else names)
    if other:
        raise SettingsError(
            f"{target} is a directory with {other[0]!a} in it, which is not part of an exported "
            "model, and an export would replace all its content; name a path below it"
        )
