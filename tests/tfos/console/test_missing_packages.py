"""A package that is missing is told with the extra that has it, wherever it was imported."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from tfos.console.missing_packages import advice, extra_advice
from tfos.predict import column, loading
from tfos.predict.signature import ModelSource

NO_KERAS = """
import sys
import tfos.keras

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "keras":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
tfos.keras.Embedding
"""


@pytest.mark.parametrize(
    ("module", "step"),
    [
        ("tensorflow", r"pip install 'tfos[cpu]' (or 'tfos[gpu]') for"),
        ("keras", r"pip install 'tfos[cpu]' (or"),
        ("tf_keras", r"pip install 'tfos[native]' for"),
        ("pandas", r"pip install 'tfos[spark]' for"),
        ("keras.misspelt", "ship your own module by sc.addPyFile"),
        ("mylib", "ship your own module by sc.addPyFile"),
        ("jax", "set KERAS_BACKEND=tensorflow"),
        ("torch", "ship your own module by sc.addPyFile"),
    ],
)
def test_the_last_line_of_a_traceback_says_what_is_missing(module, step):
    raised = f"ModuleNotFoundError: No module named {module!r}"
    assert step in advice(f"Traceback …:\n  line\n{raised}\n")
    assert bool(extra_advice(raised)) is ("tfos[" in step)
    assert advice(f"{raised}\nRuntimeError: no model") == ""
    assert advice(f"{raised}{advice(raised)}") == ""


def test_the_public_names_of_the_keras_binding_say_what_they_need():
    line = [sys.executable, "-c", NO_KERAS]
    run = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert "No module named 'keras'. The extra [cpu] has it: pip install" in run.stderr


def test_a_model_that_executors_cannot_read_for_want_of_a_package_says_which_extra(monkeypatch):
    def no_tensorflow(source: object) -> None:
        raise ModuleNotFoundError("No module named 'tensorflow'")

    monkeypatch.setattr(loading, "read_signature", no_tensorflow)
    told = msgspec.msgpack.decode(column._read(ModelSource(path="m.keras")), type=str)
    assert told.startswith("No module named 'tensorflow'. The extra [cpu] has it")
