"""A module is changed once, when something imports it, and no other module is."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import zipfile

import pytest

from tfos.native.at_import import at_import


def test_a_module_that_is_there_already_is_changed_at_once_and_others_wait(monkeypatch):
    changed: list[object] = []
    at_import("json", changed.append)
    assert changed == [sys.modules["json"]]
    before = len(sys.meta_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    for _ in range(2):
        at_import("tfos_no_such_module", changed.append)
    assert len(sys.meta_path) == before + 1
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("tfos_no_such_module")
    assert len(changed) == 1


@pytest.fixture
def zipped(monkeypatch, tmp_path):
    """Two modules in a zip file, whose loader they share."""
    with zipfile.ZipFile(tmp_path / "both.zip", "w") as archive:
        archive.writestr("tfos_zipped/__init__.py", "")
        archive.writestr("tfos_zipped/first.py", "NUMBER = 1\n")
        archive.writestr("tfos_zipped/second.py", "NUMBER = 2\n")
    monkeypatch.syspath_prepend(tmp_path / "both.zip")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    yield
    for name in [name for name in sys.modules if name.startswith("tfos_zipped")]:
        del sys.modules[name]


@pytest.mark.usefixtures("zipped")
def test_other_modules_of_its_zip_file_are_not_changed():
    changed: list[object] = []
    at_import("tfos_zipped.first", changed.append)
    first = importlib.import_module("tfos_zipped.first")
    second = importlib.import_module("tfos_zipped.second")
    assert (first.NUMBER, second.NUMBER) == (1, 2)
    assert changed == [first]
    assert inspect.getsource(first) == "NUMBER = 1\n"


def test_a_module_that_was_looked_for_is_changed_when_it_is_imported(monkeypatch, tmp_path):
    (tmp_path / "tfos_looked_for.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    changed: list[object] = []
    before = len(sys.meta_path)
    at_import("tfos_looked_for", changed.append)
    assert importlib.util.find_spec("tfos_looked_for") is not None
    assert changed == []
    found = importlib.import_module("tfos_looked_for")
    monkeypatch.delitem(sys.modules, "tfos_looked_for")
    assert changed == [found]
    assert len(sys.meta_path) == before
