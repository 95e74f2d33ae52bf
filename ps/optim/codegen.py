"""Code generation of kernels: the loops around a rule's formula, for buckets and for table rows.

Covers: the source of both, as named functions: numba's cache finds those again, but never a closure
over the formula. Does not: compile (ps.optim.kernels).
Pure; no numba.

Both loops call the formula of ps.optim.formulas, with decay before it for rules with weight
decay. LLVM inlines the calls and vectorizes the inner loop.
"""

from __future__ import annotations

from dataclasses import dataclass

from ps.optim.rules import Rule

_BUCKET = """\
def {name}(g, {values}, s):
    {scalars}
    mode = flush_denormals()
    for i in range(v.size):
        {updated} = formula(g[i], {value}, {operands})
    restore(mode)
"""

_ROWS = """\
def {name}(slab, rows, grads, s):
    for k in range(rows.size):
        if rows[k] < 0 or rows[k] >= slab.shape[0]:
            return k
    {scalars}
    dim = grads.shape[1]
    c = np.empty({num_computed}, slab.dtype)
    mode = flush_denormals()
    for k in range(rows.size):
        row = slab[rows[k]]
        g = grads[k]
        {views}
        {once}
        for i in range(dim):
            {updated} = formula(g[i], {value}, {operands})
    restore(mode)
    return -1
"""


@dataclass(frozen=True, slots=True)
class Loop:
    """One of the loops around a rule's formula.

    Over buckets it is `name(g, v, *slots, s)`. g, v and the slots are [num_elements] of one dtype
    and do not overlap; v and the slots change. s is [num_scalars] of the same dtype,
    `ps.optim.rules.scalars`.

    Over rows it is `name(slab, rows, grads, s)`. slab is [capacity, width]: each row its values,
    then each slot, then the per-row numbers. rows is [n] int64, distinct row numbers; grads is [n,
    dim]. It returns -1, or the position of the first row number that is not in the slab: then
    nothing has changed.
    """

    rule: Rule
    decays: bool
    over_rows: bool

    @property
    def name(self) -> str:
        """The function's name; rules that differ in constants only share it."""
        return "rows_" * self.over_rows + self.rule.name + "_decay" * self.decays

    @property
    def num_row_slots(self) -> int:
        """Numbers that a row has once."""
        return len(self.rule.row_slots)

    @property
    def num_slots(self) -> int:
        """Slots of the rule."""
        return len(self.rule.slots)

    def source(self) -> str:
        """Return the function's text; it needs its formulas, np, flush_denormals and restore."""
        values = ["v", *(f"slot_{k}" for k in range(self.num_slots))]
        names = list(self.rule.scalar_names)
        operands = [f"{slot}[i]" for slot in values[1:]] + list(self.rule.element_scalars)
        value = "v[i]"
        if self.decays:
            names += ["weight_decay", "decay_rate"]
            value = "decay(v[i], weight_decay, decay_rate)"
        views = [f"{array} = row[{k} * dim : {k + 1} * dim]" for k, array in enumerate(values)]
        return (_ROWS if self.over_rows else _BUCKET).format(
            name=self.name,
            values=", ".join(values),
            views="; ".join(views),
            once=self._once(len(values)) or "pass",
            num_computed=len(self.rule.row.computed) if self.rule.row is not None else 0,
            scalars="; ".join(f"{name} = s[{k}]" for k, name in enumerate(names)) or "pass",
            updated=", ".join(f"{array}[i]" for array in values),
            value=value,
            operands=", ".join(operands),
        )

    def _once(self, num_arrays: int) -> str:
        """Return the source of the per-row part: per-row numbers and scalars."""
        row = self.rule.row
        if row is None:
            return ""
        own = [f"row[{num_arrays} * dim + {k}]" for k in range(len(row.slots))]
        computed = [f"c[{k}]" for k in range(len(row.computed))]  # an array, for its dtype
        operands = ["g"] * row.takes_gradient + own + list(row.scalar_names)
        call = f"{', '.join(own + computed)} = row_formula({', '.join(operands)})"
        return "; ".join([call, *map(" = ".join, zip(row.computed, computed, strict=True))])
