"""The package tensorflowonspark over tfos: each module forwards to tfos.tensorflowonspark.

The original distribution has a package of the same name. If both are installed, their files are
in one directory, so the import is refused.
"""

import os
import sys
from importlib import metadata

from tfos.native import legacy_keras
from tfos.version import __version__ as __version__


def _refuse_original() -> None:
    try:
        version = metadata.version("tensorflowonspark")
    except metadata.PackageNotFoundError:
        return
    raise ImportError(
        f"TensorFlowOnSpark {version} is installed beside tfos-tensorflowonspark, and both have "
        "the package tensorflowonspark. Run: pip uninstall -y tensorflowonspark "
        "tfos-tensorflowonspark; then install the wheel of tfos-tensorflowonspark again"
    )


_refuse_original()
legacy_keras.prefer(os.environ, sys.modules)  # importing programs were written for Keras 2
