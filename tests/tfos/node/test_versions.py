"""What the executors have in other versions than the driver: refused, warned about, or nothing."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest

import tfos
from tfos.errors import VersionSkew
from tfos.node import versions
from tfos.node.task import NodeTask
from tfos.spark.jobs import failed_task_of, reason_of

DRIVER = {
    "tfos": "1.2.0",
    versions.SOURCE: "b2",
    "python": "3.11.7",
    "numpy": "2.4.6",
    "keras": "3.15.1",
}


def test_this_environment_is_equal_to_itself():
    here = versions.installed()
    assert {"tfos", versions.SOURCE, "python", "numpy"} <= set(here)
    assert versions.compare(here, here) == []


@pytest.mark.parametrize(
    ("changed", "is_fatal"),
    [
        ({"tfos": "1.2.1"}, True),
        ({versions.SOURCE: "a1"}, True),
        ({"python": "3.12.7"}, True),
        ({"python": "3.11.9"}, False),
        ({"numpy": "2.3.0"}, False),
        ({"keras": "3.16.0"}, False),
    ],
)
def test_only_what_nodes_cannot_work_with_is_fatal(changed, is_fatal):
    (difference,) = versions.compare(DRIVER, {**DRIVER, **changed})
    assert difference.is_fatal is is_fatal


def test_what_only_one_side_has_is_no_difference():
    thin = {name: DRIVER[name] for name in ("tfos", "python")}
    assert versions.compare(thin, DRIVER) == versions.compare(DRIVER, thin) == []


@pytest.mark.fault("F55")
def test_a_task_refuses_before_it_reads_its_bundle():
    driver = {**versions.installed(), "tfos": "9.9", "python": "3.99.1"}
    task = NodeTask(hold_slot=True, versions=driver)
    bundles = iter([None])
    with pytest.raises(VersionSkew) as refused:
        list(task(0, bundles))  # type: ignore[arg-type]  # it is not read
    assert list(bundles) == [None]
    lines = str(refused.value).splitlines()
    assert lines[0].startswith("executor driver on ")
    assert [line.split() for line in lines[1:4]] == [
        ["driver", "executor"],
        ["tfos", "9.9", versions.installed()["tfos"]],
        ["python", "3.99.1", versions.installed()["python"]],
    ]
    assert lines[4].startswith("Let both run one environment: set PYSPARK_PYTHON")


@pytest.mark.fault("F55")
def test_another_commit_of_one_version_is_refused_before_its_bundle_is_read(tmp_path):
    """Its messages may have other fields, and no number tells."""
    for room in ("tfos", "ps"):
        (tmp_path / room / "protocol").mkdir(parents=True)
        (tmp_path / room / "protocol" / "messages.py").write_text("step: int\n")
    one = versions.source_digest.__wrapped__(tmp_path)
    assert one == versions.source_digest.__wrapped__(tmp_path) != ""
    (tmp_path / "ps" / "protocol" / "messages.py").write_text("step: int\nrows: int\n")
    other = versions.source_digest.__wrapped__(tmp_path)
    assert other != one
    here = versions.installed()
    task = NodeTask(hold_slot=True, versions={**here, versions.SOURCE: other})
    with pytest.raises(VersionSkew) as refused:
        list(task(0, iter([])))
    lines = str(refused.value).splitlines()
    assert lines[2].split() == ["source", "of", "tfos", other, here[versions.SOURCE]]
    assert "two commits of tfos " + here["tfos"] in lines[3]
    assert "restart the driver (in a notebook: its kernel). Let both" in lines[3]


def test_two_commits_are_told_with_the_directories_that_they_are_imported_from():
    """As where the driver runs an installed tfos, and its working directory is a checkout."""
    here = versions.installed()
    driver = {**here, versions.DIRECTORY: "/home/me/checkout/tfos"}
    assert versions.compare(driver, here) == []
    with pytest.raises(VersionSkew) as refused:
        list(NodeTask(hold_slot=True, versions={**driver, versions.SOURCE: "a1"})(0, iter([])))
    lines = str(refused.value).splitlines()
    assert lines[3].split()[3:] == ["/home/me/checkout/tfos", str(Path(tfos.__file__).parent)]
    assert "import that of their working directory, if any. Let both" in lines[4]


def test_source_that_is_in_no_files_is_not_compared(tmp_path):
    assert versions.source_digest(tmp_path / "tfos.zip") == ""


def test_the_reason_of_a_failed_job_is_the_whole_message_of_the_last_exception():
    text = (
        "Job aborted: Lost task 0.3: org.apache.spark.api.python.PythonException: Traceback:\n"
        '  File "worker.py", line 1\nKeyError: 1\n\nDuring handling of the above:\n\n'
        "Traceback (most recent call last):\ntfos.node.errors.VersionSkew: executor 3 differs:\n"
        "      driver  executor\n  tfos  1       2\nGet one.\n\n\tat org.apache.spark.Task\n"
    )
    assert reason_of(RuntimeError(text)) == (
        "tfos.node.errors.VersionSkew: executor 3 differs:\n"
        "      driver  executor\n  tfos  1       2\nGet one."
    )
    for small in ("struct.error: 'i' format requires -2147483648 <= number", "zlib.error: -3"):
        text = (
            f"Job aborted: Traceback (most recent call last):\n  File x\n{small}\n\tat org.apache"
        )
        assert reason_of(RuntimeError(text)) == small
    assert reason_of(RuntimeError("ValueError: bad row\n\tat org.apache")) == "ValueError: bad row"


@pytest.mark.parametrize("end", ["\n SQLSTATE: 38000", "\n\n\tat org.apache.spark.Task\n", ""])
@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (
            '  File "worker.py", line 9, in process\n    out = func(rows)\n'
            '  File "/a b/rows.py", line 5, in <lambda>\n    assert x < 50\n           ^^^^^^\n'
            "AssertionError",
            "AssertionError in <lambda> (/a b/rows.py, line 5)",
        ),
        (
            '  File "rows.py", line 5, in row\nKeyError: 1\n\nDuring handling of the above:\n\n'
            '  File "rows.py", line 7, in row\nmine.Unknown',
            "mine.Unknown in row (rows.py, line 7)",
        ),
        (
            'mine.Remote: it said\n  File "there.py", line 5, in there\n    assert x\n'
            "AssertionError",
            'mine.Remote: it said\n  File "there.py", line 5, in there\n    assert x\n'
            "AssertionError",
        ),
    ],
)
def test_an_error_without_a_message_is_the_reason_with_its_place(lines, reason, end):
    text = f"Job aborted: Lost task 0.3: PythonException: Traceback (most recent):\n{lines}{end}"
    assert reason_of(RuntimeError(text)) == reason


def test_the_class_of_sparks_own_error_is_no_part_of_the_reason():
    """Spark 4.2 and later, in a program that has no SparkSession."""
    text = (
        "[PYTHON_EXCEPTION] An exception was thrown from the Python worker: Traceback (most recent "
        'call last):\n  File "rows.py", line 5\nValueError: bad value\nof row 7\n SQLSTATE: 38000'
    )
    assert reason_of(RuntimeError(text)) == "ValueError: bad value\nof row 7"


def test_a_package_of_which_pip_left_an_empty_directory_is_not_there(tmp_path, monkeypatch):
    (tmp_path / "keras-0.dist-info").mkdir()
    (tmp_path / "numpy-0.dist-info").mkdir()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert set(versions.installed()) == {"tfos", versions.SOURCE, versions.DIRECTORY, "python"}


def test_more_packages_are_looked_up_when_asked_for():
    more = versions.installed({"rows": ("pyarrow",), "nothing": ("no-such-distribution",)})
    assert set(more) - set(versions.installed()) == {"rows"}


def test_the_task_that_a_job_failed_with_is_read_from_sparks_text():
    text = (
        "Job aborted due to stage failure: Task 3 in stage 0.0 failed 4 times, most recent "
        "failure: Lost task 3.3 in stage 0.0 (TID 7) (host-b executor 5): VersionSkew: no"
    )
    assert failed_task_of(RuntimeError(text)) == 3
    assert failed_task_of(RuntimeError("Job 1 cancelled")) is None


def test_a_node_task_tells_its_number_where_spark_does_not():
    """From 4.2 on, Spark's text is the Python traceback alone."""
    with pytest.raises(VersionSkew) as caught:
        list(NodeTask(hold_slot=True, versions={"python": "2.7"})(3, iter([])))
    text = "".join(traceback.format_exception(caught.value))
    error = RuntimeError(f"An exception was thrown from the Python worker:\n{text}")
    assert failed_task_of(error) == 3
    assert reason_of(error).endswith(str(caught.value).splitlines()[-1])
