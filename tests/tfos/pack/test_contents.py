"""Which files are packed: the rules, links, and what a node imports."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfos.errors import UnsupportedError
from tfos.pack.contents import OF_PACKAGES, OF_STDLIB, Rules, files_below, unmatched


def made(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return root


def packed(root: Path, rules: Rules) -> list[str]:
    return [each.name.removeprefix("at/") for each in files_below(root, "at", rules)]


def test_packages_come_without_tests_headers_jars_and_caches(tmp_path):
    kept = ["a/__init__.py", "a/data/latest.txt", "a/test/__init__.py", "pyspark/conf.py"]
    left = ["a/tests/test_a.py", "a/include/a.h", "a/lib.a", "a/__pycache__/a.pyc", "pip/x.py"]
    left += ["pyspark/jars/spark-core.jar", "pip-1.dist-info/METADATA", "tests/test_x.py"]
    left += [
        "__editable__.tfos-1.pth",
        "__editable___tfos_finder.py",
        "b.dist-info/direct_url.json",
    ]
    root = made(tmp_path, *kept, *left)
    assert packed(root, Rules(OF_PACKAGES)) == sorted(kept)


def test_the_standard_library_comes_without_its_tests_windows_and_packages(tmp_path):
    kept = ["json/__init__.py", "lib-dynload/_ssl.cpython-311.so", "os.py", "unittest/case.py"]
    left = ["test/test_os.py", "site-packages/x.py", "tkinter/__init__.py", "config-3.11/Makefile"]
    left += ["lib-dynload/_tkinter.cpython-311.so", "lib-dynload/_testcapi.so", "os/__pycache__/x"]
    root = made(tmp_path, *kept, *left)
    assert packed(root, Rules(OF_STDLIB)) == sorted(kept)


def test_a_directory_that_a_node_imports_from_is_never_left_out(tmp_path):
    root = made(tmp_path, "a/tests/__init__.py", "a/tests/data.py", "b/tests/__init__.py")
    rules = Rules(OF_PACKAGES, needed=frozenset({"a/tests/data.py"}))
    assert packed(root, rules) == ["a/tests/__init__.py", "a/tests/data.py"]


def test_a_user_keeps_and_leaves_out(tmp_path):
    root = made(tmp_path, "pyspark/jars/a.jar", "scipy/a.py", "scipy-1.dist-info/METADATA")
    rules = Rules((*OF_PACKAGES, "scipy", "scipy-*"), ("pyspark/jars",))
    assert packed(root, rules) == ["pyspark/jars/a.jar"]


def test_a_pattern_that_matches_nothing_is_told(tmp_path):
    root = made(tmp_path, "scipy/a.py", "pyspark/jars/a.jar")
    patterns = ("scipy", "sicpy*", "*/a.jar", "pyspark/jars", "jars")
    assert unmatched(patterns, [tmp_path / "none", root]) == ["sicpy*", "jars"]


def test_what_a_user_leaves_out_goes_whole_though_nodes_import_it(tmp_path):
    names = ["pandas/__init__.py", "pandas/_libs/a.so", "pandas/_libs/__init__.py"]
    root = made(tmp_path, *names, "pandas-2.dist-info/METADATA", "six.py")
    needed = frozenset({"pandas/__init__.py", "pandas/_libs/__init__.py", "six.py"})
    rules = Rules(unwanted=("pandas*",), needed=needed)
    assert packed(root, rules) == ["six.py"]
    assert rules.given_up() == ["pandas"]
    kept = Rules(kept=("pandas*",), unwanted=("pandas*",), needed=needed)
    assert sorted(packed(root, kept)) == sorted(["pandas-2.dist-info/METADATA", *names, "six.py"])
    assert kept.given_up() == []


def test_bytecode_is_packed_by_no_wish(tmp_path):
    root = made(tmp_path, "a/__pycache__/a.pyc")
    assert packed(root, Rules(kept=("a/__pycache__",), needed=frozenset({"a/__pycache__"}))) == []


def test_links_inside_stay_links_and_files_from_outside_are_copied(tmp_path):
    root = made(tmp_path / "root", "a/lib.so.1")
    outside = made(tmp_path, "outside.txt") / "outside.txt"
    (root / "a/lib.so").symlink_to("lib.so.1")
    (root / "b").symlink_to(root / "a")
    (root / "c.txt").symlink_to(outside)
    (root / "gone").symlink_to("nowhere")
    found = {each.name: (each.link, each.source) for each in files_below(root, "at", Rules())}
    assert found == {
        "at/a/lib.so": ("lib.so.1", None),
        "at/a/lib.so.1": ("", root / "a/lib.so.1"),
        "at/b": ("a", None),
        "at/c.txt": ("", root / "c.txt"),
    }


def test_a_link_to_a_directory_elsewhere_is_refused_with_both_paths(tmp_path):
    root = made(tmp_path / "root", "a.py")
    (root / "data").symlink_to(tmp_path)
    with pytest.raises(UnsupportedError, match="outside of") as refused:
        packed(root, Rules())
    assert f"{root / 'data'} is a link to the directory {tmp_path}" in str(refused.value)
