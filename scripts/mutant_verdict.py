"""pytest plugin of scripts.mutants: notes whether a test failed by an assertion or otherwise.

Covers: the kinds of failures, ending at the first assertion, that the copy was what was tested.
Does not: change a defence (scripts.mutants).

An assertion is one that a test makes: `assert`, `pytest.raises` that got nothing or another text,
`pytest.fail`. Not: another exception, a timeout, and what a fixture finds before or after it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

RESULT = "verdict.json"
_ROOMS = ("rpc", "ps", "feeding", "tfos")
_ended: dict[str, list[str]] = {"passed": [], "assertions": [], "errors": []}


def is_assertion(error: BaseException) -> bool:
    """Whether a test's own check failed, or one of several that hypothesis found."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(is_assertion, error.exceptions))
    if isinstance(error, pytest.fail.Exception):
        return not str(error).startswith("Timeout ")  # of pytest-timeout
    return isinstance(error, AssertionError)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mutant-run-all", action="store_true", help="do not end at an assertion")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> object:  # a generator, as pytest wants it
    report = yield
    if call.excinfo is None:
        if call.when == "call":
            _ended["passed"].append(item.nodeid)
    elif not isinstance(call.excinfo.value, pytest.skip.Exception):
        error = call.excinfo.value
        if call.when == "call" and is_assertion(error):
            _ended["assertions"].append(item.nodeid)
            if not item.config.getoption("--mutant-run-all"):
                item.session.shouldstop = "an assertion has found it"
        else:
            _ended["errors"].append(f"{item.nodeid}: in {call.when}: {error!r:.200}")
    return report


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _ended["errors"].append(f"{report.nodeid}: cannot be collected: {report.longrepr!s:.200}")


def pytest_sessionfinish() -> None:
    for room in _ROOMS:
        origin = getattr(sys.modules.get(room), "__file__", None)
        if origin and not Path(origin).is_relative_to(Path.cwd()):
            _ended["errors"].append(f"{room} was imported from {origin}, outside of the copy")
    Path(RESULT).write_text(json.dumps(_ended))
