"""A module is changed once, when something imports it, and no other module is."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import zipfile
from importlib.abc import MetaPathFinder

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
    assert first.__spec__ is not None
    assert {type(first.__loader__), type(first.__spec__.loader)} == {type(second.__loader__)}


@pytest.mark.usefixtures("zipped")
def test_each_module_that_is_waited_for_has_its_own_change():
    changed: dict[str, list[object]] = {"first": [], "second": []}
    for name, of_name in changed.items():
        at_import(f"tfos_zipped.{name}", of_name.append)
    for name, of_name in changed.items():
        assert of_name == []
        module = importlib.import_module(f"tfos_zipped.{name}")
        assert of_name == [module]


@pytest.fixture
def found_by_path(monkeypatch, tmp_path):
    """A module that nobody has imported."""
    path = tmp_path / "tfos_on_path.py"
    path.touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    yield path
    sys.modules.pop("tfos_on_path", None)


def test_a_module_that_was_looked_for_is_changed_when_it_is_imported(found_by_path):
    changed: list[object] = []
    before = len(sys.meta_path)
    at_import("tfos_on_path", changed.append)
    spec = importlib.util.find_spec("tfos_on_path")
    assert spec is not None
    assert spec.loader is not None
    assert spec.loader.get_filename() == str(found_by_path)  # type: ignore[attr-defined]
    assert changed == []
    found = importlib.import_module("tfos_on_path")
    assert changed == [found]
    assert len(sys.meta_path) == before


def test_a_module_whose_import_failed_is_changed_once_it_succeeds(found_by_path):
    changed: list[object] = []
    at_import("tfos_on_path", changed.append)
    found_by_path.write_text("raise RuntimeError\n")
    with pytest.raises(RuntimeError):
        importlib.import_module("tfos_on_path")
    assert changed == []
    found_by_path.write_text("NUMBER = 1\n")
    found = importlib.import_module("tfos_on_path")
    assert changed == [found]
    importlib.reload(found)
    assert changed == [found]


class AsksAll(MetaPathFinder):
    """Asks all finders again, as wrapt's does."""

    def __init__(self):
        self.is_asking = False

    def find_spec(self, fullname, path, target=None):
        if self.is_asking:
            return None
        self.is_asking = True
        try:
            return importlib.util.find_spec(fullname)
        finally:
            self.is_asking = False


@pytest.mark.usefixtures("found_by_path")
@pytest.mark.parametrize("place", [0, 1])
def test_a_finder_that_asks_all_others_has_a_module_changed_once(place: int):
    changed: list[object] = []
    at_import("tfos_on_path", changed.append)
    sys.meta_path.insert(place, AsksAll())
    found = importlib.import_module("tfos_on_path")
    assert changed == [found]


@pytest.mark.usefixtures("found_by_path")
def test_a_finder_that_cannot_find_is_passed_over_as_python_does():
    changed: list[object] = []
    at_import("tfos_on_path", changed.append)
    sys.meta_path.insert(1, object())  # type: ignore[arg-type]  # on purpose
    found = importlib.import_module("tfos_on_path")
    assert changed == [found]


@pytest.mark.usefixtures("found_by_path")
def test_of_two_changes_that_wait_the_last_is_made():
    changed: list[str] = []
    at_import("tfos_on_path", lambda module: changed.append("first"))
    at_import("tfos_on_path", lambda module: changed.append("last"))
    importlib.import_module("tfos_on_path")
    assert changed == ["last"]
