"""Progress in a notebook: one output that is updated; anything else is lines, as in a log."""

from __future__ import annotations

import subprocess
import sys
import types
from typing import Any

import pytest

from tfos.console.console import Console
from tfos.console.progress_lines import ProgressLines


class Front:
    """A notebook's front end: the outputs of its cell."""

    def __init__(self) -> None:
        self.outputs: list[dict[str, str]] = []
        self.num_updates = 0
        self.is_broken = False

    def display(self, bundle: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert raw
        assert display_id
        if self.is_broken:
            raise RuntimeError("the kernel's sockets are closed")
        self.outputs.append(bundle)
        return types.SimpleNamespace(update=lambda new, raw: self._update(len(self.outputs), new))

    def _update(self, number: int, bundle: dict[str, str]) -> None:
        if self.is_broken:
            raise RuntimeError("the kernel's sockets are closed")
        self.num_updates += 1
        self.outputs[number - 1] = bundle

    @property
    def texts(self) -> list[str]:
        return [each["text/plain"] for each in self.outputs]


@pytest.fixture
def front(monkeypatch) -> Front:
    front = Front()
    shell = types.SimpleNamespace(kernel=object())
    ipython = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(
        sys.modules, "IPython.display", types.SimpleNamespace(display=front.display)
    )
    return front


def test_progress_is_one_output_that_keeps_ended_epochs(front, capsys):
    console = Console()
    assert console.is_live
    console.progress("epoch 1/2  10 rows")
    console.progress("epoch 1/2  20 rows")
    console.node_lines("worker:0@h", ("hello",), 0)
    console.progress("epoch 1 of 2: done", final=True)
    console.progress("epoch 2/2  10 rows")
    assert front.texts == ["epoch 1 of 2: done\nepoch 2/2  10 rows"]
    console.end_progress()
    assert front.texts == ["epoch 1 of 2: done"]
    console.progress("another call")
    assert front.texts == ["epoch 1 of 2: done", "another call"]
    assert console.flush(10.0)
    assert capsys.readouterr().err == "worker:0@h | hello\n"


def test_only_the_last_lines_stay_and_the_others_are_counted(front):
    console = Console()
    for number in range(100):
        console.progress(f"epoch {number + 1}", final=True)
    (text,) = front.texts
    assert text.splitlines()[0] == "(80 lines before)"
    assert text.splitlines()[-1] == "epoch 100"
    assert len(text.splitlines()) == 21


def test_the_same_text_is_sent_once(front):
    console = Console()
    for _ in range(5):
        console.progress("workers are starting")
    assert front.num_updates == 0


@pytest.mark.attack("A24")
def test_the_last_line_stays_and_comes_once(front, capsys):
    lines = ProgressLines(Console())
    lines.show("3 of 3 done")
    lines.end("3 of 3 done")
    assert front.texts == ["3 of 3 done"]
    assert capsys.readouterr().err == ""


def test_html_of_progress_is_escaped(front):
    console = Console()
    console.progress("<b>bold</b>\x1b[2J\nforged", final=True)
    html = front.outputs[0]["text/html"]
    assert "&lt;b&gt;bold&lt;/b&gt;\\x1b[2J\\nforged" in html
    assert "<b>" not in html


@pytest.mark.parametrize("breaks_at_once", [True, False])
def test_a_front_end_that_fails_costs_the_display_and_not_the_training(
    front, capsys, breaks_at_once
):
    console = Console()
    if not breaks_at_once:
        console.progress("10 rows")
    front.is_broken = True
    console.progress("20 rows")
    console.progress("done", final=True)
    console.end_progress()
    assert capsys.readouterr().err.splitlines() == ["tfos | 20 rows", "tfos | done"]
    assert not console.is_live


def test_ipython_in_a_terminal_is_no_notebook(front, monkeypatch, capsys):
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: types.SimpleNamespace())
    console = Console()
    assert not console.is_live
    console.progress("10 rows")
    assert capsys.readouterr().err == "tfos | 10 rows\n"
    assert front.outputs == []


@pytest.mark.slow
def test_nothing_imports_ipython():
    look = "import sys, tfos, tfos.console.console; print([n for n in sys.modules if 'IPy' in n])"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
