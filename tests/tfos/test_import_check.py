"""`import tfos` beside packages of other people that are called ps, rpc or feeding, too."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tfos.import_check import PACKAGES

ROOT = Path(__file__).parents[2]
FILES = [f"{name}/__init__.py" for name in ("tfos", *PACKAGES)] + [
    "tfos/import_check.py",
    "tfos/version.py",
    "rpc/lazy.py",
]


@pytest.fixture
def root(tmp_path):
    """What `import tfos` loads, as an installation that tests may damage."""
    root = tmp_path / "installed"
    for file in FILES:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, root / file)
    return root


def imported(*path, code="import tfos"):
    """Run code with these directories alone, in this order, beside the standard library.

    Returns its output, or the last line of its traceback.
    """
    run = subprocess.run(
        [sys.executable, "-S", "-P", "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return run.stdout if run.returncode == 0 else run.stderr.splitlines()[-1]


def install(site, name, distribution):
    """A foreign distribution, as pip leaves it."""
    (site / name).mkdir(parents=True, exist_ok=True)
    (site / name / "__init__.py").write_text("raise SystemExit('foreign code ran')\n")
    about = site / f"{distribution.replace('-', '_')}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (about / "top_level.txt").write_text(f"{name}\n")


def test_a_whole_installation_is_imported_and_nothing_is_looked_up(root):
    code = (
        "import sys, tfos; print(tfos.__version__, {'importlib.metadata', 'ps'} & set(sys.modules))"
    )
    assert imported(root, code=code).split() == ["0.1.0", "set()"]


def test_an_archive_on_the_path_is_an_installation(root, tmp_path):
    archive = tmp_path / "tfos.zip"
    with zipfile.ZipFile(archive, "w") as out:
        for file in FILES:
            out.write(root / file, file)
    assert imported(archive, code="import tfos; print(tfos.__file__)").startswith(str(archive))
    assert "needs its own package 'ps'" in imported(foreign_file(tmp_path), archive)


def foreign_file(tmp_path):
    directory = tmp_path / "program"
    directory.mkdir()
    (directory / "ps.py").write_text("")
    return directory


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_of_another_distribution_is_named_with_both_paths(root, tmp_path, name):
    site = tmp_path / "site"
    install(site, name, "their-tools")
    text = imported(site, root)
    assert text.startswith(f"ImportError: tfos needs its own package {name!r}")
    assert str(root / name / "__init__.py") in text
    assert str(site / name / "__init__.py") in text
    assert "pip uninstall their-tools" in text
    assert f"put {root} before it" in text


def test_a_file_of_the_user_is_to_be_renamed(root, tmp_path):
    directory = foreign_file(tmp_path)
    text = imported(directory, root)
    assert str(directory / "ps.py") in text
    assert "No installed distribution has it: rename it" in text


def test_a_distribution_elsewhere_is_not_blamed_for_a_file_of_the_user(root, tmp_path):
    site = tmp_path / "site"
    install(site, "ps", "their-tools")
    assert "rename it" in imported(foreign_file(tmp_path), site, root)


def test_behind_tfos_on_the_path_others_are_in_nobodys_way(root, tmp_path):
    site = tmp_path / "site"
    install(site, "ps", "their-tools")
    assert imported(root, site) == ""


def test_a_package_that_was_installed_over_ours_is_found_by_its_contents(root):
    install(root, "ps", "their-tools")
    text = imported(root)
    assert "was installed over it. Run `pip uninstall their-tools`" in text
    assert "pip install --force-reinstall --no-deps` with its wheel" in text


def test_what_the_removal_of_such_a_distribution_leaves_is_incomplete(root):
    (root / "ps" / "__init__.py").unlink()
    text = imported(root)
    assert "nothing is there" in text
    assert "pip install --force-reinstall --no-deps` with its wheel" in text


def test_a_module_that_a_program_made_is_told_as_such(root):
    code = "import sys, types; sys.modules['rpc'] = types.ModuleType('rpc'); import tfos"
    assert "a module that a program made and named rpc" in imported(root, code=code)


def test_an_installation_by_a_link_is_itself(root, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(root)
    code = f"import ps, sys; sys.path[:0] = [{str(root)!r}]; import tfos; print(tfos.__file__)"
    assert imported(link, code=code).startswith(f"{root}/")


def test_files_without_sources_are_believed(root, tmp_path):
    import compileall

    compileall.compile_dir(root, legacy=True, quiet=1)
    for source in root.rglob("*.py"):
        source.unlink()
    assert imported(root) == ""
    assert "rename it" in imported(foreign_file(tmp_path), root)
