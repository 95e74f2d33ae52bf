"""TensorFlow's own strategies by spark-submit, as users run them, on separate executors."""

from __future__ import annotations

import ast
import re

import pytest

from tests.support.spark_submit import ROOT, separate, submit

PROGRAMS = ROOT / "examples" / "native"

pytestmark = [
    pytest.mark.long,
    pytest.mark.process,
    pytest.mark.spark,
    pytest.mark.timeout(600),
]


@pytest.mark.parametrize(
    ("program", "flags", "executors", "chiefs"),
    [
        ("parameter_server.py", (), 4, 1),
        ("parameter_server.py", ("--fed",), 4, 1),
        ("multi_worker.py", (), 2, 2),
    ],
    ids=["own-data", "fed", "mirrored"],
)
def test_the_weights_are_those_of_the_data(program, flags, executors, chiefs, tmp_path):
    output = submit(PROGRAMS / program, *flags, master=separate(executors), cwd=tmp_path)
    found = re.findall(r"^weights.*?: (\[.*?\]), true: (\[.*?\])$", output, re.M)
    assert len(found) == chiefs, output[-4000:]
    for learned, true in found:
        assert ast.literal_eval(learned) == pytest.approx(ast.literal_eval(true), abs=2e-2)
