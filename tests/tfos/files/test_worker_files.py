"""A worker's share of a job's inputs, as paths and as copies; its output at the end."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feeding.errors import PathError
from feeding.filesystem.registry import filesystem_for
from feeding.filesystem.walking import walk
from feeding.reading.splits import SourceFile
from tfos.errors import SettingsError
from tfos.files import transfer
from tfos.files.inputs import InputFiles
from tfos.files.worker_files import WorkerInputs, WorkerOutput, local_names


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Five files in two directories, and what Spark leaves beside data."""
    root = tmp_path / "data"
    for name in ("a.csv", "b.csv", "day=1/a.csv", "day=1/c.csv", "day=2/d.csv", "_SUCCESS", ".crc"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return root


def of(tmp_path: Path, *inputs: InputFiles, rank: int = 0, num_workers: int = 2) -> WorkerInputs:
    return WorkerInputs(inputs, rank, num_workers, tmp_path / f"copies-{rank}", str)


@given(st.integers(0, 40), st.integers(1, 9))
def test_each_file_is_one_workers_and_shares_are_even(num_files, num_workers):
    given_ = InputFiles(name="x", path="/x")
    parts = [given_.share_of(range(num_files), rank, num_workers) for rank in range(num_workers)]
    assert sorted(each for part in parts for each in part) == list(range(num_files))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_list_is_this_workers_paths_in_order(tmp_path, data):
    parts = [of(tmp_path, InputFiles(name="train", path=str(data)), rank=rank) for rank in (0, 1)]
    names = ["a.csv", "day=1/a.csv", "day=2/d.csv"], ["b.csv", "day=1/c.csv"]
    assert [list(part["train"]) for part in parts] == [
        [str(data / each) for each in part] for part in names
    ]
    assert list(parts[0]) == ["train"]
    assert len(parts[0]) == 1
    assert not (tmp_path / "copies-0").exists()


def test_copies_keep_their_names_below_the_input(tmp_path, data):
    inputs = of(tmp_path, InputFiles(name="train", path=str(data), mode="download"), rank=1)
    found = inputs["train"]
    below = tmp_path / "copies-1" / "train"
    assert found == (str(below / "b.csv"), str(below / "day=1" / "c.csv"))
    assert [Path(each).read_text() for each in found] == ["b.csv", "day=1/c.csv"]
    (data / "b.csv").write_text("changed")
    assert inputs["train"] is found


def test_all_files_are_every_workers_if_that_is_wanted(tmp_path, data):
    everything = InputFiles(name="all", path=f"{data}/*.csv", mode="download", share="all")
    found = [of(tmp_path, everything, rank=rank)["all"] for rank in (0, 1)]
    assert [[Path(each).name for each in part] for part in found] == [["a.csv", "b.csv"]] * 2


def test_a_single_file_is_copied_under_its_name(tmp_path, data):
    inputs = of(tmp_path, InputFiles(name="words", path=str(data / "a.csv"), mode="download"))
    assert inputs["words"] == (str(tmp_path / "copies-0" / "words" / "a.csv"),)


def test_a_worker_without_a_file_is_told_and_no_other(tmp_path, data, caplog):
    one = InputFiles(name="x", path=str(data / "a.csv"))
    with caplog.at_level(logging.WARNING):
        assert of(tmp_path, one, rank=0)["x"] == (str(data / "a.csv"),)
        assert not caplog.records
        assert of(tmp_path, one, rank=1)["x"] == ()
    assert "input 'x' has 1 files for 2 workers: none is this one's" in caplog.text


def test_an_input_that_is_unknown_or_empty_is_an_error_with_the_next_step(tmp_path, data):
    inputs = of(tmp_path, InputFiles(name="train", path=str(data / "none")))
    with pytest.raises(
        SettingsError, match=r"the job's inputs are 'train'\. Name it in \[inputs\]"
    ):
        inputs["test"]
    with pytest.raises(FileNotFoundError):
        inputs["train"]
    assert "test" not in inputs
    assert "train" in inputs


def test_copies_of_which_one_breaks_off_can_be_tried_again(tmp_path, data, monkeypatch):
    everything = InputFiles(name="x", path=f"{data}/*.csv", mode="download", share="all")
    inputs, download = of(tmp_path, everything), transfer.download

    def breaks_off(source, target):
        if target.name == "a.csv":
            return download(source, target)
        target.write_text("half")
        raise OSError("away")

    for _ in range(2):
        with monkeypatch.context() as broken:
            broken.setattr(transfer, "download", breaks_off)
            with pytest.raises(OSError, match="away"):
                inputs["x"]
    assert [Path(each).read_text() for each in inputs["x"]] == ["a.csv", "b.csv"]


def source(path: str, base: str) -> SourceFile:
    return SourceFile(path, 1, base=base)


def test_equal_names_of_a_pattern_get_a_number(tmp_path):
    files = [source(f"hdfs://nn/d{n}/part", "hdfs://nn/d0/part") for n in range(1)]
    assert local_names(files) == {"hdfs://nn/d0/part": "part"}
    twins = [source("hdfs://nn/a/x", "hdfs://nn/a"), source("hdfs://nn/b/x", "hdfs://nn/b")]
    assert set(local_names(twins).values()) == {"00000/x", "00001/x"}


@pytest.mark.attack("A18")
def test_a_listed_name_that_leads_out_of_the_copies_is_refused():
    with pytest.raises(PathError):
        local_names([source("hdfs://nn/a/..\\b", "hdfs://nn/a")])


# ---- output ----


def test_an_output_replaces_what_was_there_as_a_whole(tmp_path):
    target = tmp_path / "out"
    for text in ("first", "second"):
        output = WorkerOutput(str(target), "worker-1", tmp_path / text)
        Path(output.directory, text).mkdir()
        Path(output.directory, text, "file").write_text(text)
        assert output.send() == str(target / "worker-1")
    assert [str(p.relative_to(target)) for p in sorted(target.rglob("*"))] == [
        "worker-1",
        "worker-1/second",
        "worker-1/second/file",
    ]


def test_an_output_that_breaks_off_leaves_what_was_there(tmp_path, monkeypatch):
    target = tmp_path / "out"
    output = WorkerOutput(str(target), "worker-1", tmp_path / "files")
    Path(output.directory, "a").write_text("whole")
    output.send()
    Path(output.directory, "b").write_text("new")
    reads = transfer.file_pieces

    def breaks_off(path: Path, limit_bytes: int | None = None):
        if path.name == "b":
            raise OSError("disk is gone")
        return reads(path, limit_bytes)

    monkeypatch.setattr(transfer, "file_pieces", breaks_off)
    with pytest.raises(OSError, match="disk is gone"):
        output.send()
    assert os.listdir(target) == ["worker-1"]
    assert os.listdir(target / "worker-1") == ["a"]


def test_links_of_an_output_arrive_as_what_they_lead_to(tmp_path, caplog):
    """The output may be removed with the node; a link there leads to nothing on another host."""
    target, beside = tmp_path / "out", tmp_path / "beside"
    (beside / "deep").mkdir(parents=True)
    (beside / "deep" / "rows").write_text("rows")
    output = WorkerOutput(str(target), "worker-1", tmp_path / "files")
    own = Path(output.directory)
    (own / "step-9").write_text("nine")
    (own / "newest").symlink_to("step-9")
    (own / "results").symlink_to(beside)
    (beside / "deep" / "back").symlink_to(own)
    (own / "gone").symlink_to("nowhere")
    os.mkfifo(own / "pipe")
    output.send()
    sent = {
        path.relative_to(target).as_posix(): path.read_text()
        for path in target.rglob("*")
        if not path.is_dir()
    }
    assert sent == {
        "worker-1/step-9": "nine",
        "worker-1/newest": "nine",
        "worker-1/results/deep/rows": "rows",
    }
    assert not any(path.is_symlink() for path in target.rglob("*"))
    assert sorted(record.args for record in caplog.records if record.levelname == "WARNING") == [
        (own / "gone",),
        (own / "pipe",),
        (own / "results" / "deep" / "back",),
    ]


def test_a_link_of_an_output_may_lead_to_where_it_is_sent(tmp_path):
    """Nothing that arrives meanwhile is sent again."""
    target = tmp_path / "out"
    target.mkdir()
    (target / "earlier").write_text("earlier")
    output = WorkerOutput(str(target), "worker-1", tmp_path / "files")
    own = Path(output.directory)
    (own / "a").write_text("a")
    (own / "all").symlink_to(target)
    with contextlib.suppress(OSError):
        output.send()
    sent = [path for path in (target / "worker-1").rglob("*") if path.is_file()]
    assert sorted(each.name for each in sent) == ["a", "earlier"]


def test_an_output_in_a_store_has_names_that_look_like_patterns(tmp_path):
    target = f"memory://{secrets.token_hex(4)}/lr=[0.1]"
    place = f"{target}/worker-1"
    for text in ("first", "second"):
        output = WorkerOutput(target, "worker-1", tmp_path / text)
        for name in ("img[0].png", f"fold[{text}]/rows?"):
            path = Path(output.directory, name)
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert output.send() == place
    files = filesystem_for(target)
    found = [each.path.removeprefix(f"{place}/") for each in walk(files, target, lambda _: False)]
    assert found == ["fold[second]/rows?", "img[0].png"]
    with files.open(f"{place}/img[0].png") as file:
        assert file.read_range(0, 9) == b"second"


def test_nothing_is_sent_of_an_output_that_main_fun_did_not_use(tmp_path):
    output = WorkerOutput(str(tmp_path / "out"), "worker-1", tmp_path / "files")
    assert output.send() == ""
    assert output.directory
    assert output.send() == ""
    assert not (tmp_path / "out").exists()


def test_a_job_without_output_has_no_directory(tmp_path):
    output = WorkerOutput("", "worker-1", tmp_path / "files")
    with pytest.raises(SettingsError, match=r"the job has no output\. Name a directory or URL"):
        output.directory  # noqa: B018 - that is the test
    assert output.send() == ""
