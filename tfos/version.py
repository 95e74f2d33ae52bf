"""The release's number: one place, which every process of a cluster must agree on."""

from __future__ import annotations

__version__ = "0.1.0"
