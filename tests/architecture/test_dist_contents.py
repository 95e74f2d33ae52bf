"""What scripts/build refuses to have inside an sdist or a wheel, and what it asks for."""

from __future__ import annotations

import tomllib

from scripts.dist_contents import (
    DISTRIBUTIONS,
    PACKAGES,
    ROOT,
    faults,
    package_files,
    without_init,
)
from tfos.version import __version__

WANTED = {"ps/__init__.py", "ps/py.typed"}
WHOLE = dict.fromkeys(WANTED, b"")


def test_every_folder_with_modules_is_a_package():
    assert without_init(package_files(ROOT)) == set()


def test_a_folder_without_init_is_named():
    assert without_init({"ps/__init__.py", "ps/wire/frame.py"}) == {"ps/wire"}


def test_every_package_of_the_checkout_is_looked_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {pattern.rstrip("*") for pattern in patterns} == set(PACKAGES)
    typed = {package for package in PACKAGES if (ROOT / package / "py.typed").exists()}
    assert set(project["tool"]["setuptools"]["package-data"]) == typed


def test_a_whole_archive_has_no_faults():
    held = {**WHOLE, "tfos.dist-info/METADATA": b"", "LICENSE": b""}
    assert list(faults(held, WANTED, {"LICENSE", "tfos.dist-info/"})) == []


def test_a_file_that_was_left_out_is_named():
    assert list(faults({"ps/__init__.py": b""}, WANTED, set())) == ["ps/py.typed is missing"]


def test_a_test_inside_is_named():
    (fault,) = faults({**WHOLE, "tests/test_ps.py": b""}, WANTED, {"LICENSE"})
    assert fault == "tests/test_ps.py does not belong in it"


def test_a_path_of_the_machine_that_built_it_is_named():
    held = {**WHOLE, "ps/py.typed": f"{ROOT}/ps".encode()}
    (fault,) = faults(held, WANTED, set())
    assert fault.startswith(f"ps/py.typed names {ROOT}")


def test_the_forwarding_distribution_is_of_this_release():
    (_, forwards) = DISTRIBUTIONS
    project = tomllib.loads((forwards.root / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__
    assert project["dependencies"] == [f"tfos=={__version__}"]
    assert (forwards.root / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert without_init(package_files(forwards.root, forwards.packages)) == set()


def test_programs_of_keras_2_get_what_tensorflow_brought_along():
    """TensorFlow 2.21 installs neither tf-keras nor TensorBoard, whose callback they use."""
    (_, forwards) = DISTRIBUTIONS
    project = tomllib.loads((forwards.root / "pyproject.toml").read_text())["project"]
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    board = [each for each in ours["cpu"] if each.startswith("tensorboard")]
    assert project["optional-dependencies"]["keras2"] == [*board, *ours["native"]]
