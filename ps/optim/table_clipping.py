"""Clipping of what one push brings to a table, by the worker.

Covers: `clipvalue` and `clipnorm` of a table's rule, on gradients with equal ids summed.
Does not: know other tables or dense groups (for which see ps.optim.clipping), import numba.
Threads: none; every function stands alone.

A push to a table is applied when it arrives, in every mode, so there is no mean of several workers
to clip. The norm is that of the dense gradient: ids that the push does not bring add nothing to it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ps.manifest.rule_spec import RuleConfig
from ps.optim.norms import clip_of, scale_to_norm

Array = np.ndarray[Any, Any]

_CHUNK = 1 << 12


def clipped(rule: RuleConfig, gradients: Array) -> Array:
    """Return the gradients of one push as its table's rule clips them.

    Args:
        rule: of the table.
        gradients: [distinct ids, dim]; not changed. With NaN or infinity among them they are not
            clipped by norm, so that the server names the id.

    Returns:
        The same array where nothing is to be clipped.
    """
    clip = clip_of(rule)
    if clip is None:
        return gradients
    kind, limit = clip
    if kind == "clipvalue":
        return np.clip(gradients, -limit, limit)
    squares = _squares(gradients)
    if not np.isfinite(squares) and not np.isfinite(gradients).all():
        return gradients
    out = np.empty_like(gradients)
    scale_to_norm(gradients, out, squares, limit)
    return out


def _squares(gradients: Array) -> float:
    """Sum the squares in double precision; the bits do not depend on the order of the rows."""
    rows = np.empty(len(gradients))
    for start in range(0, len(gradients), _CHUNK):
        chunk = gradients[start : start + _CHUNK].astype(np.float64)
        np.einsum("ij,ij->i", chunk, chunk, out=rows[start : start + _CHUNK])
    return float(np.sort(rows).sum())
