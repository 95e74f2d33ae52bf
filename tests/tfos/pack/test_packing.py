"""A small environment is packed; its Python runs elsewhere, from an empty environment."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tfos.errors import UnsupportedError
from tfos.pack.libraries import is_of_host
from tfos.pack.packing import Choices, PackProgress, check_places, pack_home
from tfos.pack.python_home import PythonHome
from tfos.pack.warming import NODE_MODULES, Warmed

PROGRAM = """
import bz2, ctypes, json, lzma, pathlib, sqlite3, ssl, sys
import hello
libraries = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
found = {"prefix": sys.prefix, "hello": hello.WORD, "cached": hello.__cached__,
         "libraries": sorted(libraries), "json": json.__cached__}
print(json.dumps(found))
"""


@pytest.fixture
def small(tmp_path):
    """The running interpreter with one package, and what a node of it would load."""
    packages = tmp_path / "packages"
    (packages / "hello/tests").mkdir(parents=True)
    (packages / "hello/__init__.py").write_text("WORD = 'hello'\n")
    (packages / "hello/tests/__init__.py").touch()
    kernel = tmp_path / "a.nbi"
    kernel.write_text("compiled")
    home = dataclasses.replace(PythonHome.running(), packages=(packages,), own_root=packages)
    modules = (Path(json.__file__).resolve(), packages / "hello/__init__.py")
    return home, Warmed(modules, kernels=(("hello/__pycache__/kernels-1/a.nbi", kernel),))


@pytest.mark.slow  # copies the standard library
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="packs on Linux only")
def test_its_python_runs_from_another_place_and_loads_nothing_of_the_host(small, tmp_path):
    home, warmed = small
    written: list[int] = []
    target, again = tmp_path / "env.tar", tmp_path / "again.tar"
    packed = pack_home(home, warmed, target, Choices(), PackProgress(on_bytes=written.append))
    pack_home(home, warmed, again, Choices(), PackProgress())
    assert target.read_bytes() == again.read_bytes()
    assert sum(written) == packed.files_bytes < packed.before_bytes
    assert (packed.num_modules, packed.num_kernels) == (2, 1)
    env = tmp_path / "elsewhere" / "env"
    with tarfile.open(target) as tar:
        tar.extractall(env, filter="tar")
    site = env / home.site_name
    assert (site / "hello/__pycache__/kernels-1/a.nbi").read_text() == "compiled"
    assert not (site / "hello/tests").exists()
    found = run(env)
    assert (found["prefix"], found["hello"]) == (str(env), "hello")
    for cached in (found["cached"], found["json"]):
        assert Path(cached).is_relative_to(env)
        assert Path(cached).read_bytes()[4:8] == b"\x01\0\0\0"  # by hash, never checked
    outside = [Path(each) for each in found["libraries"] if not each.startswith(str(env))]
    assert [each.name for each in outside if not is_of_host(each.name)] == []


@pytest.mark.slow  # copies the standard library
def test_what_nodes_import_of_left_out_packages_is_told(small, tmp_path):
    home, warmed = small
    target = tmp_path / "env.tar"
    packed = pack_home(home, warmed, target, Choices(left_out=("hel*", "six")), PackProgress())
    assert packed.given_up == ("hello",)
    assert packed.unmatched == ("six",)
    with tarfile.open(target) as tar:
        assert [name for name in tar.getnames() if name.endswith("hello/__init__.py")] == []


def test_modules_from_places_that_are_not_packed_are_refused(small, tmp_path):
    """As from PYTHONPATH; Spark brings its own."""
    home, warmed = small
    target = tmp_path / "env.tar"
    spark = tmp_path / "spark/python/lib/pyspark.zip/pyspark/conf.py"
    other = tmp_path / "elsewhere/mine/__init__.py"
    strange = dataclasses.replace(
        warmed, modules=(*warmed.modules, spark, other), of_spark=frozenset({spark})
    )
    with pytest.raises(UnsupportedError) as refused:
        pack_home(home, strange, target, Choices(), PackProgress())
    assert str(refused.value).startswith(f"{other} is imported by what a node runs")
    assert "PYTHONPATH" in str(refused.value)
    assert not target.exists()
    check_places(home, dataclasses.replace(strange, modules=(*warmed.modules, spark)))


@pytest.mark.parametrize("name", NODE_MODULES)
def test_what_a_node_imports_is_still_called_so(name):
    assert importlib.util.find_spec(name)


def run(env: Path) -> Any:
    done = subprocess.run(
        [env / "bin/python", "-c", PROGRAM],
        env={},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
