"""Limits of names and numbers, for groups and tables alike. Pure.

Covers: the limits of both.      Does not: know groups (ps.manifest.manifest) or tables
(ps.manifest.table_spec).
"""

from __future__ import annotations

from typing import Literal

import numpy as np

DType = Literal["float32", "float64"]

MAX_NAME_LENGTH = 512
MAX_SCALAR = float(np.finfo(np.float32).max)
"""Above it a scalar is infinite in float32, and so is every value that it touches."""
