"""Version of this release, on which all processes of a cluster must agree."""

from __future__ import annotations

__version__ = "0.1.0"
