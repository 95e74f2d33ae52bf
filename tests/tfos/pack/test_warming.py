"""What a warm process tells of the modules that it has loaded."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from tfos.pack import warming


def load(monkeypatch: pytest.MonkeyPatch, name: str, path: str) -> None:
    module = types.ModuleType(name)
    module.__file__ = path
    monkeypatch.setitem(sys.modules, name, module)


def test_sparks_modules_are_told_apart_and_generated_ones_left_out(monkeypatch):
    load(monkeypatch, "py4j.fake", "/spark/py4j-src.zip/py4j/fake.py")
    load(monkeypatch, "fake", "/opt/pyspark/fake.py")  # not Spark's, whatever its directory is
    load(monkeypatch, "fake_compiled", "/opt/fake_compiled.so")
    load(monkeypatch, "__autograph_generated_fileab", "/tmp/__autograph_generated_fileab.py")
    found = warming._loaded()
    assert {"/spark/py4j-src.zip/py4j/fake.py", "/opt/pyspark/fake.py"} <= set(found["modules"])
    assert "/spark/py4j-src.zip/py4j/fake.py" in found["of_spark"]
    assert "/opt/pyspark/fake.py" not in found["of_spark"]
    left_out = {"/opt/fake_compiled.so", "/tmp/__autograph_generated_fileab.py"}
    assert not left_out & set(found["modules"])


def test_a_module_is_where_it_was_found_though_its_file_is_a_link(tmp_path: Path):
    """As those of installers that link into a cache."""
    packages, cache = tmp_path / "packages", tmp_path / "cache"
    for directory in (packages, cache):
        directory.mkdir()
    (cache / "a.py").touch()
    (packages / "a.py").symlink_to(cache / "a.py")
    (tmp_path / "lib64").symlink_to(packages)
    assert warming._place(str(tmp_path / "lib64/a.py")) == packages.resolve() / "a.py"
