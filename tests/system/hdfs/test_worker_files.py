"""A job's inputs and output on a real HDFS."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from feeding.filesystem.registry import filesystem_for
from scripts.local_hdfs.cluster import LocalHdfs
from tfos.files.inputs import InputFiles
from tfos.files.worker_files import WorkerInputs, WorkerOutput

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def test_copies_come_from_hdfs_and_an_output_goes_there_as_a_whole(
    hdfs: LocalHdfs, tmp_path: Path
) -> None:
    root = f"{hdfs.url}/{secrets.token_hex(4)}"
    fs = filesystem_for(root)
    for name in ("a", "day=1/a", "day=1/b", "_SUCCESS"):
        fs.write(f"{root}/data/{name}", name.encode() * 1000)
    given = InputFiles(name="train", path=f"{root}/data", mode="download")
    shares = [WorkerInputs([given], rank, 2, tmp_path / str(rank), str)["train"] for rank in (0, 1)]
    found = {Path(each).read_bytes()[:7] for share in shares for each in share}
    assert [len(share) for share in shares] == [2, 1]
    assert found == {b"aaaaaaa", b"day=1/a", b"day=1/b"}
    for text in (b"first", b"second"):
        output = WorkerOutput(f"{root}/out", "worker-0", tmp_path / text.decode())
        Path(output.directory, text.decode()).write_bytes(text)
        assert output.send() == f"{root}/out/worker-0"
    assert [each.name for each in fs.entries(f"{root}/out")] == ["worker-0"]
    assert [each.name for each in fs.entries(f"{root}/out/worker-0")] == ["second"]
