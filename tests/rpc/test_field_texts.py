"""The texts of a record's fields, in its help."""

from __future__ import annotations

import pydoc
from dataclasses import dataclass

import pytest

from rpc.field_texts import field_texts, with_field_texts


@with_field_texts
@dataclass(frozen=True, slots=True)
class Limits:
    """Two limits."""

    most_rows: int = 3
    """Rows at once. Larger:
    more memory."""
    name: str = ""
    wait_s: float = 1.0
    """Seconds."""

    def text(self) -> str:
        """Return them as text."""
        return f"{self.most_rows} {self.name}"


class Stricter(Limits):
    """Other limits."""


def test_help_shows_each_fields_text_below_the_records_own():
    shown = pydoc.plain(pydoc.render_doc(Limits))
    assert "Two limits." in shown
    assert "most_rows: Rows at once. Larger: more memory." in shown
    assert "wait_s: Seconds." in shown
    assert Limits(name="x").text() == "3 x"
    assert "Seconds." not in (Stricter.__doc__ or "")


def test_a_record_without_source_keeps_its_docstring(monkeypatch: pytest.MonkeyPatch):
    def no_source(kind: type) -> str:
        raise OSError("could not get source code")

    monkeypatch.setattr("inspect.getsource", no_source)
    assert field_texts(Limits) == {}
    assert Limits.__doc__ == "Two limits."
