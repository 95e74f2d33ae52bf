"""Markers inside a queue of rows."""

from __future__ import annotations


class Marker:
    """Something in a queue that is no row."""


class EndPartition(Marker):
    """The rows of a partition end here."""
