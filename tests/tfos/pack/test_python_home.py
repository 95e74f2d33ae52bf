"""What cannot be packed is a sentence with both facts and the next step."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import pytest

from tfos.errors import UnsupportedError
from tfos.pack.python_home import PythonHome


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A small whole environment."""
    monkeypatch.setattr("site.ENABLE_USER_SITE", False)
    stdlib, packages = tmp_path / "base/lib", tmp_path / "venv/site-packages"
    for directory in (stdlib, packages):
        directory.mkdir(parents=True)
    (stdlib / "os.py").touch()
    return PythonHome(
        prefix=tmp_path / "venv",
        base=tmp_path / "base",
        executable=tmp_path / "base/bin/python3",
        version="3.11",
        stdlib=stdlib,
        site_name="lib/python3.11/site-packages",
        packages=(packages,),
        own_root=packages,
    )


def refused(home: PythonHome, **changes: Any) -> str:
    with pytest.raises(UnsupportedError) as found:
        dataclasses.replace(home, **changes).check()
    return str(found.value)


def distribution(packages, name, url, **direct):
    info = packages / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {name}\nVersion: 1\n")
    (info / "direct_url.json").write_text(json.dumps({"url": url, "dir_info": direct}))


def test_a_whole_environment_is_taken(home):
    (home.prefix / "pyvenv.cfg").write_text("include-system-site-packages = false\n")
    distribution(home.packages[0], "copied", "file:///src/copied")
    distribution(home.packages[0], "tfos", "file:///src/tfos", editable=True)
    (home.packages[0] / "a.pth").write_text("# why\nimport a\n\nsub\nmissing/../../elsewhere\n")
    (home.packages[0] / "sub").mkdir()
    home.check()


def test_editable_packages_are_refused_by_name(home):
    distribution(home.packages[0], "mine", "file:///src/mine", editable=True)
    distribution(home.packages[0], "yours", "file:///src/yours", editable=True)
    text = refused(home)
    assert "mine is installed from file:///src/mine as editable" in text
    assert "`pip install /src/mine`, without -e" in text
    assert text.endswith("so are yours")


def test_a_path_file_to_elsewhere_is_refused(home, tmp_path):
    (home.packages[0] / "old.pth").write_text(f"{tmp_path}\n")
    assert f"old.pth adds {tmp_path} to the module path" in refused(home)


def test_packages_of_the_base_are_refused(home):
    (home.prefix / "pyvenv.cfg").write_text("home = /usr\nInclude-system-site-packages=x\n")
    home.check()
    (home.prefix / "pyvenv.cfg").write_text("home = /usr\ninclude-system-site-packages = true\n")
    assert "make one without --system-site-packages" in refused(home)


def test_the_users_own_packages_are_refused(home, tmp_path, monkeypatch):
    monkeypatch.setattr("site.ENABLE_USER_SITE", True)
    monkeypatch.setattr("site.getusersitepackages", lambda: str(tmp_path / "own"))
    home.check()
    (tmp_path / "own/a-1.dist-info").mkdir(parents=True)
    assert "PYTHONNOUSERSITE=1" in refused(home)


def test_condas_and_the_systems_pythons_have_their_own_ways(home):
    (home.stdlib / "EXTERNALLY-MANAGED").touch()
    home.check()  # a virtual environment of the system's Python
    assert "-m venv DIRECTORY" in refused(home, prefix=home.base)
    (home.prefix / "conda-meta").mkdir()
    assert "conda-pack packs it whole" in refused(home)


def test_a_python_without_its_standard_library_is_refused(home):
    (home.stdlib / "os.py").unlink()
    assert f"has no standard library at {home.stdlib} (os.py) below {home.base}" in refused(home)


def test_the_running_environment_is_found():
    found = PythonHome.running()
    assert found.executable.is_file()
    assert not found.executable.is_symlink()
    assert found.site_name.startswith(("lib", "local/lib"))
    assert (found.own_root / "tfos").is_dir()
    assert str(found.packages[0]) in map(str, sys.path)
