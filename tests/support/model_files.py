"""Bytes of a `.keras` file as far as a driver without Keras reads them."""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any


def keras_file(compile_config: dict[str, Any] | None) -> bytes:
    """Return a file that names how its model was compiled, and has no model.

    Args:
        compile_config: as Keras writes it; None: it was never compiled.
    """
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("config.json", json.dumps({"compile_config": compile_config}))
    return file.getvalue()
