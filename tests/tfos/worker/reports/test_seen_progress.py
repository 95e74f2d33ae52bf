"""Which report of a worker's progress stands: main_fun's own, or what its data see."""

from __future__ import annotations

from tfos.worker.reports.seen_progress import SeenProgress


def test_what_the_data_see_stands_until_main_fun_reports_and_again_in_the_next_fit():
    told: list[dict[str, float]] = []
    progress = SeenProgress(told.append)
    progress.begin()
    progress.note({"steps": 1.0, "rows": 8.0, "epoch": 1.0})
    progress.report({"steps": 1.0, "rows": 0.0, "loss": 0.5})
    progress.note({"steps": 2.0, "rows": 16.0})
    progress.report({"steps": 2.0, "rows": 0.0, "loss": 0.25})
    progress.report({"steps": 3.0, "rows": 5.0})
    assert progress.so_far == (3.0, 5.0)
    progress.begin()
    progress.note({"steps": 4.0, "rows": 9.0})
    assert progress.so_far == (4.0, 9.0)
    assert told == [
        {"steps": 1.0, "rows": 8.0, "epoch": 1.0},
        {"steps": 1.0, "rows": 8.0, "loss": 0.5},
        {"steps": 2.0, "rows": 16.0, "loss": 0.25},
        {"steps": 3.0, "rows": 5.0},
        {"steps": 4.0, "rows": 9.0},
    ]
