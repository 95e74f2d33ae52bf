"""Settings of a sparse table: rows, rule, initial values, limits. Pure; no numba.

Covers: the settings that all sides must agree on, as part of the manifest.
Does not: hold rows (ps.tables.table), compute (ps.tables.initializers, ps.optim.rules).
Threads: none.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from ps.errors import PSSettingsError
from ps.manifest.field_types import check_types
from ps.manifest.initializer_spec import Initializer, RandomUniform
from ps.manifest.limits import MAX_NAME_LENGTH, MAX_SCALAR, DType
from ps.manifest.rule_spec import Adam, Adamax, Average, Descent, Frozen, RuleConfig
from rpc.field_texts import with_field_texts

MAX_TABLES = 1024
MAX_DIM = 65_536
MAX_SEGMENTS = 256
MOST_CHOSEN_SEGMENTS = 16
"""The most segments that a server chooses on its own, a power of 2."""
LIMITS = ("max_rows", "max_bytes", "when_full", "ttl_s")
"""Settings that say which rows a table keeps, not what is in them: a run that resumes may have
others, and the chief's count. Manifests that differ in them alone have equal hashes."""
MAX_INT64 = 2**63 - 1
MAX_UINT64 = 2**64 - 1


def largest_id(id_kind: Literal["int64", "uint64"], max_id: int | None) -> int:
    """Return the largest id that a table accepts.

    Args:
        id_kind: kind of ids of the table.
        max_id: largest id of the table; None: the largest of `id_kind`.
    """
    if max_id is not None:
        return max_id
    return MAX_INT64 if id_kind == "int64" else MAX_UINT64


@with_field_texts
class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """Which unknown ids of a push get a row."""

    min_count: int = 1
    """The min_count-th push of an id creates its row. A sketch counts: ids that share counters may
    be admitted earlier, below 2 % at their first push. The counts are halved whenever about half as
    many new ids came as a row of the sketch has counters, so an id that is rarer is admitted later,
    or not at all; see ps.tables.admission."""
    probability: float = 1.0
    """Each push creates the row with this probability, once min_count is reached."""
    unknown: Literal["initial", "zeros"] = "zeros"
    """Result of a lookup for an id without a row, if admission is selective: zeros, or the row's
    initial values."""

    @property
    def is_selective(self) -> bool:
        """Whether some pushed ids get no row."""
        return self.min_count > 1 or self.probability < 1.0

    def __post_init__(self) -> None:
        check_types(self, "Admission")
        if not 1 <= self.min_count <= MAX_COUNT:
            raise PSSettingsError(
                f"Admission: min_count must be in 1..{MAX_COUNT}, got {self.min_count}"
            )
        if not 0.0 < self.probability <= 1.0:
            raise PSSettingsError(
                f"Admission: probability must be in (0, 1], got {self.probability!r}"
            )


MAX_COUNT = 65_535


@with_field_texts
class TableSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One table of rows by id; the ids are spread over all servers by their hash."""

    name: str
    dim: int
    """Numbers in a row."""
    rule: RuleConfig
    """Update rule of pushed rows; weight decay acts on pushed rows only."""
    learning_rate_multiplier: float = 1.0
    """The table's rate is the rate of the push times this, also in the alpha that a push may bring
    for Adam (Hyper.scalars)."""
    row_steps: bool = False
    """Adam, AdamW, AMSGrad, Adamax: t counts the pushes that contained this row, not those to the
    table; one more number per row. See ps.optim.row_rules.counting."""
    dtype: DType = "float32"
    initializer: Initializer = RandomUniform()
    """A row's first values; they depend on `row_seed` and the id alone."""
    unseen: tuple[float, ...] = ()
    """What a lookup with training=False reads for an id without a row, [dim]; empty: zeros."""
    seed: int | None = None
    """Seed of the rows' first values. None: made of the table's name, or the restored checkpoint's.
    Tables with one seed begin with the same values for the same ids."""
    id_kind: Literal["int64", "uint64"] = "int64"
    """int64: ids 0..2^63-1. uint64: also larger ones, for hashes of 64 bits."""
    id_source: Literal["any", "integers", "strings"] = "any"
    """What ids are made of. integers: a string, whose hash no row has, is refused. strings: hashes,
    also if given as integers. any: unknown. Manifests that differ in it alone have equal hashes."""
    max_id: int | None = None
    """The largest id; None: the largest of `id_kind`."""
    max_rows: int | None = None
    """Rows of the whole table; each server holds its share. None: no limit."""
    max_bytes: int | None = None
    """The same limit in bytes, with everything that a row needs."""
    when_full: Literal["refuse", "lru"] = "refuse"
    """refuse: TableFull for the push that needs more rows. lru: evict the least recently pushed."""
    ttl_s: float | None = None
    """Time to live in seconds: rows that no push contained for this long are dropped. None:
    unlimited."""
    admission: Admission = Admission()
    segments: int | None = None
    """Parts of a server's share, each with its own lock. More: more threads work on one table, and
    shorter pauses; fewer: less overhead for small requests. None: each server chooses a power of 2
    by its cores, up to 16."""

    @property
    def num_parts(self) -> int:
        """Parts of a server's share by which clients arrange ids: each segment has some whole."""
        return MOST_CHOSEN_SEGMENTS if self.segments is None else self.segments

    def __post_init__(self) -> None:
        check_types(self, f"table {self.name!r}")
        if not 0 < len(self.name) <= MAX_NAME_LENGTH:
            raise PSSettingsError(
                f"a table's name has 1..{MAX_NAME_LENGTH} characters, got {len(self.name)}"
            )
        self._check_int("dim", self.dim, 1, MAX_DIM)
        for field, least, most in (
            ("seed", 0, MAX_INT64),
            ("segments", 1, MAX_SEGMENTS),
            ("max_id", 0, largest_id(self.id_kind, None)),
            ("max_rows", 1, MAX_INT64),
            ("max_bytes", 1, MAX_INT64),
        ):
            value = getattr(self, field)
            if value is not None:
                self._check_int(field, value, least, most)
        if self.ttl_s is not None and not 0 < self.ttl_s <= MAX_SCALAR:
            raise PSSettingsError(f"table {self.name!r}: ttl_s must be above 0, got {self.ttl_s!r}")
        if self.when_full == "lru" and self.max_rows is None and self.max_bytes is None:
            raise PSSettingsError(
                f"table {self.name!r}: when_full='lru' needs a limit; set max_rows or max_bytes"
            )
        self._check_rule()
        self._check_numbers()

    @property
    def compared(self) -> TableSpec:
        """The settings that count in a manifest's hash; LIMITS and id_source have defaults."""
        return msgspec.structs.replace(
            self, id_source="any", max_rows=None, max_bytes=None, when_full="refuse", ttl_s=None
        )

    def with_limits_of(self, other: TableSpec) -> TableSpec:
        """Return this table with another one's LIMITS."""
        return msgspec.structs.replace(self, **{name: getattr(other, name) for name in LIMITS})

    @property
    def row_seed(self) -> int:
        """The number that stands for `seed`, 0..2^63-1."""
        if self.seed is not None:
            return self.seed
        digest = hashlib.blake2b(self.name.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") & MAX_INT64

    @property
    def largest_id(self) -> int:
        """The largest id that the table accepts."""
        return largest_id(self.id_kind, self.max_id)

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return 4 if self.dtype == "float32" else 8

    @property
    def value_nbytes(self) -> int:
        """Bytes of one row's values, without optimizer slots."""
        return self.dim * self.itemsize

    def _check_int(self, field: str, value: int, low: int, high: int) -> None:
        if not low <= value <= high:
            raise PSSettingsError(
                f"table {self.name!r}: {field} must be in {low}..{high}, got {value}"
            )

    def _check_numbers(self) -> None:
        rate = self.learning_rate_multiplier
        if not 0 <= rate <= MAX_SCALAR:  # also true for NaN
            raise PSSettingsError(
                f"table {self.name!r}: learning_rate_multiplier must be in 0..{MAX_SCALAR:g}, got "
                f"{rate!r}; 1.0 uses the rate of the push as it is"
            )
        if len(self.unseen) not in (0, self.dim):
            raise PSSettingsError(
                f"table {self.name!r}: unseen has {len(self.unseen)} numbers, a row has "
                f"{self.dim}; give one vector of that size, or () for zeros"
            )
        for value in self.unseen:
            if not abs(value) <= MAX_SCALAR:
                raise PSSettingsError(
                    f"table {self.name!r}: unseen must be finite in float32, got {value!r}"
                )

    def _check_rule(self) -> None:
        rule = self.rule
        name = type(rule).__name__
        if isinstance(rule, Average):
            raise PSSettingsError(f"table {self.name!r}: {name} is for statistics, not for rows")
        if isinstance(rule, Frozen):
            raise PSSettingsError(
                f"table {self.name!r}: {name} is for groups; do not push its rows"
            )
        if isinstance(rule, Descent) and rule.ema_momentum is not None:
            raise PSSettingsError(
                f"table {self.name!r}: {name}(ema_momentum={rule.ema_momentum}) is not offered for "
                "tables: the averages of rows outside a push would also move; set "
                "ema_momentum=None"
            )
        if isinstance(rule, Descent) and rule.global_clipnorm:
            raise PSSettingsError(
                f"table {self.name!r}: {name}(global_clipnorm={rule.global_clipnorm}) is not "
                "offered for tables: a push to tables does not include the gradients of the dense "
                "groups; set clipnorm, which is the norm of this table's gradient, or clip before "
                "the push"
            )
        if self.row_steps and not isinstance(rule, Adam | Adamax):
            raise PSSettingsError(
                f"table {self.name!r}: row_steps=True is for Adam, AdamW, AMSGrad and Adamax, "
                f"whose powers follow from a row's number of updates alone; got {name}"
            )
