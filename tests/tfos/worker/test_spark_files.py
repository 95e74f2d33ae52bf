"""Workers find Spark's files, and import pyspark only if main_fun does."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path

import pytest

from tfos.worker import spark_files


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A stand-in for pyspark that nobody has imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyspark"]:
        monkeypatch.delitem(sys.modules, name)
    package = tmp_path / "pyspark" / "core"
    package.mkdir(parents=True)
    (tmp_path / "pyspark" / "__init__.py").write_text("from pyspark.core.files import SparkFiles\n")
    (package / "__init__.py").touch()
    (package / "files.py").write_text(
        "class SparkFiles:\n    _root_directory = None\n    _is_running_on_worker = False\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield
    for name in ("pyspark", "pyspark.core", "pyspark.core.files"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("fresh")
def test_spark_files_know_their_directory_once_they_are_imported():
    finders = len(sys.meta_path)
    spark_files.announce("/executor/files")
    assert "pyspark" not in sys.modules
    found = importlib.import_module("pyspark").SparkFiles
    assert found._root_directory == "/executor/files"
    assert found._is_running_on_worker
    assert "class SparkFiles" in inspect.getsource(found)
    assert len(sys.meta_path) == finders


@pytest.mark.usefixtures("fresh")
def test_the_last_directory_counts():
    spark_files.announce("/executor/files")
    spark_files.announce("/other/files")
    assert importlib.import_module("pyspark").SparkFiles._root_directory == "/other/files"
    spark_files.announce("/newest/files")
    assert importlib.import_module("pyspark").SparkFiles._root_directory == "/newest/files"


@pytest.mark.usefixtures("fresh")
def test_outside_of_spark_nothing_is_announced():
    spark_files.announce("")
    assert importlib.import_module("pyspark").SparkFiles._root_directory is None


def test_real_spark_has_what_is_set():
    found = importlib.util.find_spec("pyspark")
    assert found is not None
    [package] = found.submodule_search_locations or []
    source = Path(package, "core", "files.py").read_text()
    assert "    _root_directory: ClassVar[Optional[str]] = None\n" in source
    assert "    _is_running_on_worker: ClassVar[bool] = False\n" in source
