"""Tables of `tfos status` and `tfos history` at narrow and wide terminals, and without one."""

from __future__ import annotations

from typing import Any

import pytest

from tfos.cli import columns, jobs
from tfos.watch.run_history import RunRecord

DOMAIN = "eu-central-1.compute.internal"


def node(number: int) -> dict[str, Any]:
    return {
        "name": f"worker:{number}",
        "status": "running",
        "phase": "RUNNING",
        "host": f"ip-10-23-{number}-117.{DOMAIN}",
        "pid": 7,
        "silent_s": 0.4,
        "rss_mib": 1234,
        "steps_per_s": 12.3456,
        "rows_per_s": 12345.67,
        "loss": 0.123456,
    }


def told(monkeypatch: pytest.MonkeyPatch, width: int | None) -> list[str]:
    written: list[str] = []
    monkeypatch.setattr(columns, "width_of_output", lambda: width)
    monkeypatch.setattr(jobs, "_write", written.append)
    return written


@pytest.mark.parametrize("num_nodes", [3, 40])
@pytest.mark.parametrize("width", [80, 100, 200, None])
def test_a_node_has_one_line_that_fits_and_no_broken_number(
    monkeypatch: pytest.MonkeyPatch, width: int | None, num_nodes: int
):
    told(monkeypatch, width)
    lines = jobs._node_lines([node(number) for number in range(num_nodes)])
    assert len(lines) == 1 + num_nodes
    if width is not None:
        assert max(map(len, lines)) <= width
    for number, line in enumerate(lines[1:]):
        cells = line.split()
        assert cells[:3] == [f"worker:{number}", "running", "RUNNING"]
        assert cells[-4:] == ["1234", "12.35", "12,346", "0.1235"]
        host = f"ip-10-23-{number}-117"
        assert cells[3] == (host if width in (80, 100) else f"{host}.{DOMAIN}")


def test_a_long_host_loses_its_middle_and_an_address_nothing():
    assert columns.without_domain(["a.b.c", "d.b.c"]) == ["a", "d"]
    assert columns.without_domain(["a.b.c", "a.x.c"]) == ["a.b.c", "a.x.c"]
    assert columns.without_domain(["10.0.0.1", "10.0.0.2"]) == ["10.0.0.1", "10.0.0.2"]
    assert columns.without_domain(["-", "a.b.c"]) == ["-", "a"]
    assert columns.shortened("gpu-node-in-the-cellar-17", 12) == "gpu-no…ar-17"
    head, row = columns.lines(
        ("host", "loss"),
        [("gpu-node-in-the-cellar-17", "0.5")],
        width=17,
        numbers=("loss",),
        shrinks="host",
    )
    assert (head, row) == ("host         loss", "gpu-no…ar-17  0.5")


RUN = RunRecord(
    cluster_id="c0ffee",
    name="daily",
    application_id="app-7",
    started_at=1e9,
    ended_at=1e9 + 61,
    state="FAILED",
    epochs=3,
    steps=100.0,
    loss=0.1234,
    metrics={"accuracy": 0.97, "val_loss": 0.3},
    failure="worker:2: ValueError: " + "the shape of the input is another one; " * 4,
)


@pytest.mark.parametrize("width", [80, 100, 200])
def test_a_run_has_one_line_and_below_it_what_it_measured_and_why_it_failed(
    monkeypatch: pytest.MonkeyPatch, width: int
):
    written = told(monkeypatch, width)
    jobs._show_history([RUN])
    lines = [line for text in written for line in text.splitlines()]
    assert max(map(len, lines)) <= width
    assert lines[1].split()[2:] == ["0:01:01", "FAILED", "3", "c0ffee", "daily"]
    assert lines[2] == "    loss 0.1234, accuracy 0.97, val_loss 0.3"
    assert lines[3].startswith("    worker:2: ValueError: the shape")
    assert " ".join(line.strip() for line in lines[3:]) == RUN.failure.strip()


def test_without_a_terminal_a_run_is_one_line(monkeypatch: pytest.MonkeyPatch):
    written = told(monkeypatch, None)
    jobs._show_history([RUN, RUN])
    assert len(written) == 3
    assert RUN.failure.strip() in written[1]
    assert "accuracy 0.97" in written[1]
