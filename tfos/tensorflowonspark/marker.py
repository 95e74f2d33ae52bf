"""Markers inside a queue of rows."""

from __future__ import annotations


class Marker:
    """A queue entry that is not a row."""


class EndPartition(Marker):
    """The rows of a partition end here."""
