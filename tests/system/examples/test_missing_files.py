"""The examples that read files say so if there are none where their flags point to."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SHARED = Path(__file__).parents[3] / "examples" / "tensorflowonspark" / "shared.py"


@pytest.mark.process
def test_a_pattern_without_files_is_named_with_the_program_that_writes_them(tmp_path):
    read_lines = runpy.run_path(str(SHARED))["read_lines"]
    with pytest.raises(FileNotFoundError, match=r"nowhere/part-\*: mnist_data_setup.py writes"):
        read_lines(f"{tmp_path}/nowhere/part-*")
