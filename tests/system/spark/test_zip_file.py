"""tfos as a zip file of --py-files, as TensorFlowOnSpark was shipped, on real executors."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest

from tests.support.marked_processes import below
from tests.support.spark_submit import ROOT, separate, submit

TIMEOUT_S = 240
pytestmark = [pytest.mark.long, pytest.mark.timeout(TIMEOUT_S + 30, func_only=True)]
PROGRAM = ROOT / "tests" / "support" / "programs" / "trains_from_a_zip.py"


def test_a_model_is_trained(tmp_path: Path):
    archive = tmp_path / "tfos.zip"
    with zipfile.ZipFile(archive, "w") as out:
        for room in ("tfos", "ps", "rpc", "feeding"):
            for path in (ROOT / room).rglob("*"):
                if path.suffix in (".py", ".html"):
                    out.write(path, path.relative_to(ROOT))
    output = submit(PROGRAM, str(archive), master=separate(2), cwd=tmp_path, timeout_s=TIMEOUT_S)
    told = re.search(r"trained: \('(.*)', ([\d.]+)\)", output)
    assert told, output[-4000:]
    assert told[1].endswith("tfos.zip/tfos/__init__.py")
    assert float(told[2]) < 10
    assert below(tmp_path) == {}
