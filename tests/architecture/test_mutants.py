"""scripts/mutants.toml describes the checkout, and scripts/mutants.py tells ends apart."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest
from hypothesis.errors import Flaky

from scripts import mutants
from scripts.mutant_verdict import is_assertion
from scripts.mutants import Copy, End, Mutant, failing_without, load, run

LEAST = 60
DEFENCE = "def limited(n):\n    if n > 3:\n        raise ValueError(n)\n    return n\n"
TESTS = """
import pytest
from shop import limited

def test_refuses():
    with pytest.raises(ValueError):
        limited(4)

def test_passes():
    assert limited(3) == 3

def test_breaks():
    try:
        limited(4)
    except ValueError:
        return
    raise OSError

@pytest.fixture
def left():
    yield
    try:
        limited(4)
    except ValueError:
        return
    pytest.fail("a fixture has found it")

def test_leaks(left):
    pass

def test_fails_always():
    assert limited(3) == 4
"""


def test_every_defence_of_the_list_is_in_the_code_and_has_its_tests():
    mutants = load()
    assert len(mutants) >= LEAST
    assert [each.name for each in mutants if each.why_stale()] == []
    names = collections.Counter(each.name for each in mutants)
    assert [name for name, count in names.items() if count > 1] == []


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(DEFENCE)
    (tmp_path / "test_shop.py").write_text(TESTS)
    scripts = Path(__file__).parents[2] / "scripts"
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/mutant_verdict.py").write_bytes(
        (scripts / "mutant_verdict.py").read_bytes()
    )
    return tmp_path


def without_limit(*names: str, old: str = "if n > 3:", new: str = "if False:") -> Mutant:
    tests = tuple(f"test_shop.py::test_{name}" for name in names)
    return Mutant("any number is taken", "shop.py", old, new, tests)


@pytest.mark.slow
def test_an_assertion_an_error_and_nothing_are_told_apart(
    shop: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take half of the time
    expected = {
        without_limit("passes", "breaks", "refuses"): End.FOUND,
        without_limit("breaks", "leaks", "passes"): End.ERROR_ONLY,
        without_limit("passes"): End.NOT_FOUND,
        without_limit("refuses", "fails_always"): End.BROKEN,
        without_limit("refuses", old="if n > 4:"): End.STALE,
        without_limit("refuses", new="if False"): End.STALE,  # no Python
        without_limit("of_yesterday"): End.STALE,
    }
    whole = (shop / "shop.py").read_bytes()
    verdicts = run([*expected], shop, ("shop.py", "test_shop.py", "scripts"))
    assert {verdict.mutant: verdict.end for verdict in verdicts} == expected
    assert (shop / "shop.py").read_bytes() == whole


@pytest.mark.slow
def test_all_tests_of_the_list_have_more_time_than_those_of_one_defence(
    shop: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(mutants, "LONGEST_S", 0.0)
    parts = ("shop.py", "test_shop.py", "scripts")
    copy = Copy(shop, tmp_path_factory.mktemp("copy"), parts)
    refuses = without_limit("refuses")
    assert copy.run(refuses.tests, 0.0)["errors"] == ["no end within 0 s"]
    monkeypatch.setattr(mutants, "LONGEST_TEST_S", 60.0)
    assert failing_without(copy, [refuses]) == {refuses.tests[0]: []}


@pytest.mark.slow
def test_a_defence_of_the_list_is_found_by_an_assertion():
    of_the_list = [each for each in load() if each.name == "a frame's MAC is not compared"]
    (verdict,) = run(of_the_list)
    assert verdict.end is End.FOUND, verdict


def test_only_a_tests_own_check_is_an_assertion():
    assert is_assertion(AssertionError())
    assert is_assertion(pytest.fail.Exception("DID NOT RAISE"))
    assert is_assertion(ExceptionGroup("of hypothesis", [Flaky(), AssertionError()]))
    assert not is_assertion(pytest.fail.Exception("Timeout (>240.0s) from pytest-timeout."))
    assert not is_assertion(MemoryError())
