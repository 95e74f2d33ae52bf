"""Code generation of kernels: the loops around a rule's formula, for buckets and for table rows.

Covers: the source of both, as named functions: numba's cache finds those again, but never a closure
over the formula. Does not: compile (ps.optim.kernels).
Pure; no numba.

Both loops call the formula of ps.optim.formulas, with decay before it for rules with weight
decay. LLVM inlines the calls and vectorizes the inner loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ps.optim.rules import Rule

_BUCKET = """\
def {name}(g, {values}, s):
    {scalars}
    none = nonfinite(v.dtype.type(0))
    left = none
    mode = flush_denormals()
    for i in range(v.size):
        {new} = formula(g[i], {value}, {operands})
        bad = {any_nonfinite}
        left = counted(left, bad)
        {kept}
    restore(mode)
    return np.int64(left)
"""

_ROWS = """\
def {name}(slab, rows, grads, s):
    for k in range(rows.size):
        if rows[k] < 0 or rows[k] >= slab.shape[0]:
            return -1 - k
    {scalars}
    none = nonfinite(slab.dtype.type(0))
    left = none
    dim = grads.shape[1]
    c = np.empty({num_computed}, slab.dtype)
    flat = slab.reshape(slab.size)
    width = slab.shape[1]
    mode = flush_denormals()
    for k in range(rows.size):
        if k + {ahead} < rows.size:
            at = rows[k + {ahead}] * width
            for line in range(at, at + width, {line} // slab.itemsize):
                prefetch(flat, line)
        row = slab[rows[k]]
        g = grads[k]
        {views}
        {once}
        bad_row = {row_nonfinite}
        for i in range(dim):
            {new} = formula(g[i], {value}, {operands})
            bad = {any_nonfinite}
            left = counted(left, bad)
            {kept}
        if bad_row == none:
            {keep_own}
    restore(mode)
    return np.int64(left)
"""

INTRINSICS = (
    "counted",
    "flush_denormals",
    "nonfinite",
    "or_nonfinite",
    "prefetch",
    "restore",
    "unless",
)
"""Names from ps.jit.intrinsics, as the loops use them."""

_AHEAD = 12
"""Distance of the prefetch of rows, in rows: a cache miss lasts about as long."""
_LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class Loop:
    """One of the loops around a rule's formula.

    Over buckets it is `name(g, v, *slots, s)`. g, v and the slots are [num_elements] of one dtype
    and do not overlap; v and the slots change. s is [num_scalars] of the same dtype,
    `ps.optim.rules.scalars`.

    Over rows it is `name(slab, rows, grads, s)`. slab is [capacity, width]: each row its values,
    then each slot, then the per-row numbers. rows is [n] int64, distinct row numbers; grads is [n,
    dim].

    Both return how many elements keep their value and slots, because one of these would become NaN
    or infinite; a row whose own numbers would keeps all of them. Over rows, -1 - k means that row
    number k is not in the slab: then nothing has changed.
    """

    rule: Rule
    decays: bool
    over_rows: bool

    @property
    def name(self) -> str:
        """The function's name; rules that differ in constants only share it."""
        return "rows_" * self.over_rows + self.rule.name + "_decay" * self.decays

    @property
    def num_slots(self) -> int:
        """Slots of the rule."""
        return len(self.rule.slots)

    def source(self) -> str:
        """Return the function's text; it needs its formulas, np and `INTRINSICS`."""
        values = ["v", *(f"slot_{k}" for k in range(self.num_slots))]
        names = list(self.rule.scalar_names)
        operands = [f"{slot}[i]" for slot in values[1:]] + list(self.rule.element_scalars)
        value = "v[i]"
        if self.decays:
            names += ["weight_decay", "decay_rate"]
            value = "decay(v[i], weight_decay, decay_rate)"
        views = [f"{array} = row[{k} * dim : {k + 1} * dim]" for k, array in enumerate(values)]
        once, own = self._once(len(values))
        return (_ROWS if self.over_rows else _BUCKET).format(
            name=self.name,
            ahead=_AHEAD,
            line=_LINE_BYTES,
            values=", ".join(values),
            views="; ".join(views),
            once=once or "pass",
            num_computed=len(own) + (len(self.rule.row.computed) if self.rule.row else 0),
            row_nonfinite=_any_nonfinite("none", [f"c[{k}]" for k in range(len(own))]),
            keep_own="; ".join(f"{number} = c[{k}]" for k, number in enumerate(own)) or "pass",
            scalars="; ".join(f"{name} = s[{k}]" for k, name in enumerate(names)) or "pass",
            new=", ".join(f"new_{array}" for array in values),
            any_nonfinite=_any_nonfinite(
                "bad_row" if self.over_rows else "none", [f"new_{array}" for array in values]
            ),
            kept="; ".join(f"{a}[i] = unless(bad, new_{a}, {a}[i])" for a in values),
            value=value,
            operands=", ".join(operands),
        )

    def _once(self, num_arrays: int) -> tuple[str, list[str]]:
        """Return the source of the per-row part, and the row's numbers.

        Their new values come first in `c`, then the computed scalars: an array, for its dtype.
        """
        row = self.rule.row
        if row is None:
            return "", []
        own = [f"row[{num_arrays} * dim + {k}]" for k in range(len(row.slots))]
        results = [f"c[{k}]" for k in range(len(own) + len(row.computed))]
        operands = ["g"] * row.takes_gradient + own + list(row.scalar_names)
        call = f"{', '.join(results)} = row_formula({', '.join(operands)})"
        named = zip(row.computed, results[len(own) :], strict=True)
        return "; ".join([call, *map(" = ".join, named)]), own


def _any_nonfinite(start: str, names: Sequence[str]) -> str:
    """Return the source of a mask; see ps.jit.intrinsics on why it is no test of floats."""
    for name in names:
        start = f"or_nonfinite({start}, {name})"
    return start
