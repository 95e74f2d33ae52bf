"""The next step where Python does not find a module: one text for every process.

Covers: which extra of tfos brings a package, how the user's own modules travel.
Does not: import anything.      Pure.
"""

from __future__ import annotations

import re

_EXTRAS = {
    "keras": "cpu",
    "pandas": "spark",
    "pyspark": "spark",
    "tensorboard": "cpu",
    "tensorflow": "cpu",
    "tf_keras": "native",
}
"""Extra by module."""
_OTHER_BACKENDS = ("jax", "openvino", "torch")
"""What Keras imports if KERAS_BACKEND or its own file of settings says so."""
_MISSING = re.compile(r"ModuleNotFoundError: No module named '([^']+)'$")
"""Only at the end: what `tfos.keras` raises has the step already."""


def extra_advice(error: str) -> str:
    """Return which extra has the package that is missing; "": another error, or another package.

    Args:
        error: type and text of an exception, or its traceback.
    """
    found = _MISSING.search(_last_line(error))
    extra = _EXTRAS.get(found[1]) if found else None  # keras.x is missing: a keras is there
    if extra is None:
        return ""
    or_gpu = " (or 'tfos[gpu]')" if extra == "cpu" else ""
    return (
        f". The extra [{extra}] has it: pip install 'tfos[{extra}]'{or_gpu} for that Python, or "
        "ship an environment by --archives (tfos pack)"
    )


def advice(error: str) -> str:
    """Return the next step if the executors' Python lacks a module; "": it is another error.

    Args:
        error: type and text of an exception, or its traceback.
    """
    found = _MISSING.search(_last_line(error))
    if found is None:
        return ""
    backend = (
        ". If Keras imports it, set KERAS_BACKEND=tensorflow for driver and executors: tfos trains "
        "on no other backend"
    )
    return extra_advice(error) or (
        (backend if found[1] in _OTHER_BACKENDS else "")
        + ". The executors' Python does not find it: ship your own module by sc.addPyFile or "
        "--py-files, packages by --archives"
    )


def _last_line(error: str) -> str:
    return error.rstrip().rpartition("\n")[2]
