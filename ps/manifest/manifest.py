"""Manifest: parameters, groups, the flat layout, and the hyper-parameters of a push.

Covers: the manifest that all sides must agree on, and the cut of its flat buffers into buckets.
Does not: hold values (ps.dense.shard), know a rule's settings (ps.manifest.rule_spec). Pure; no
numba, no threads.

All parameters of a group are in one flat buffer, in order, without padding. Buckets cut that
buffer into pieces of `bucket_bytes`, never across groups; their ids count through all groups.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, NewType, TypeVar

import msgspec
import numpy as np

from ps import codec
from ps.compression.format import Compression
from ps.errors import ManifestMismatch, PSSettingsError
from ps.manifest.limits import MAX_NAME_LENGTH, MAX_SCALAR, DType
from ps.manifest.rule_spec import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Add,
    AMSGrad,
    Average,
    Descent,
    Frozen,
    Ftrl,
    Lion,
    Nadam,
    RMSprop,
    RowWiseAdagrad,
    RuleConfig,
)
from ps.manifest.sharding import BUCKET_BYTES
from ps.manifest.table_spec import LIMITS, MAX_TABLES, TableSpec
from rpc.errors import UNREADABLE
from rpc.field_texts import with_field_texts

__all__ = [  # with the rules, so that a manifest needs one import
    "MAX_BUCKETS",
    "MAX_BUCKET_BYTES",
    "MAX_DIMENSIONS",
    "MAX_GROUP_BYTES",
    "MAX_LAG",
    "MAX_NAME_LENGTH",
    "MAX_PARAMS",
    "MAX_SCALAR",
    "MIN_BUCKET_BYTES",
    "SGD",
    "AMSGrad",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Add",
    "Average",
    "Bucket",
    "DType",
    "Descent",
    "Frozen",
    "Ftrl",
    "GroupLayout",
    "GroupSpec",
    "Hyper",
    "Layout",
    "Lion",
    "Manifest",
    "Nadam",
    "ParamSpec",
    "RMSprop",
    "RowWiseAdagrad",
    "RuleConfig",
    "TableSpec",
    "WorkerRank",
]

WorkerRank = NewType("WorkerRank", int)

Consistency = Literal["async", "sync", "ssp", "hybrid"]

MAX_PARAMS = 100_000
MAX_DIMENSIONS = 32
MAX_GROUP_BYTES = 1 << 44
MIN_BUCKET_BYTES = 64
MAX_BUCKET_BYTES = 1 << 26
MAX_BUCKETS = 1 << 20
MAX_STALENESS_BOUND = 1 << 32
MAX_PERMITS = 1024
"""Most batches of one worker under way in hybrid; each keeps its rows in the worker."""
MAX_LAG = 64
"""Most pushes of one worker under way at a time; each keeps a gradient and a copy of the values."""


@with_field_texts
class ParamSpec(msgspec.Struct, frozen=True):
    """One tensor: its name, unique in its group, and its shape."""

    name: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= MAX_NAME_LENGTH:
            raise PSSettingsError(
                f"a parameter's name has 1..{MAX_NAME_LENGTH} characters, got {len(self.name)}"
            )
        if len(self.shape) > MAX_DIMENSIONS:
            raise PSSettingsError(
                f"{self.name!r} has {len(self.shape)} dimensions, at most {MAX_DIMENSIONS}"
            )
        if min(self.shape, default=0) < 0:
            raise PSSettingsError(f"{self.name!r}: shape {self.shape} has a negative dimension")

    @property
    def num_elements(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)


@with_field_texts
class GroupSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """Parameters of one dtype that follow one rule and share one flat buffer."""

    name: str
    dtype: DType
    rule: RuleConfig
    params: tuple[ParamSpec, ...]
    compression: Compression = "none"
    """How pushed gradients are packed; see ps.compression.format. Values always travel as they
    are."""

    def __post_init__(self) -> None:
        if self.compression != "none" and self.dtype != "float32":
            raise PSSettingsError(
                f"group {self.name!r}: compression={self.compression!r} packs float32, the group "
                f"is {self.dtype}; use compression='none' there, or float32"
            )
        if self.compression != "none" and isinstance(self.rule, Average | Frozen):
            what = (
                "frozen weights have none" if self.is_frozen else "a running average pushes values"
            )
            raise PSSettingsError(
                f"group {self.name!r}: compression={self.compression!r} is for gradients, {what}; "
                "use compression='none' there"
            )
        _check_unique(f"group {self.name!r}", [param.name for param in self.params])
        if self.nbytes > MAX_GROUP_BYTES:
            raise PSSettingsError(
                f"group {self.name!r}: {self.nbytes} bytes are above the limit {MAX_GROUP_BYTES}"
            )
        if isinstance(self.rule, RowWiseAdagrad):
            raise PSSettingsError(
                f"group {self.name!r}: RowWiseAdagrad keeps one number per row, and only tables "
                "have rows; use Adagrad, or a table"
            )

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self.dtype == "float32" else 8

    @property
    def num_elements(self) -> int:
        """Elements of all parameters together."""
        return sum(param.num_elements for param in self.params)

    @property
    def nbytes(self) -> int:
        """Bytes of the group's values, without optimizer slots."""
        return self.num_elements * self.itemsize

    @property
    def is_frozen(self) -> bool:
        """Whether its values never change."""
        return isinstance(self.rule, Frozen)


@with_field_texts
class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What all workers and servers must agree on.

    Equal hashes mean equal manifests, but for frozen groups: pushes and pulls do not touch these,
    and a server that was restored from a checkpoint without them gets them afterwards.
    """

    groups: tuple[GroupSpec, ...]
    tables: tuple[TableSpec, ...] = ()
    """Rows by id beside the groups; see ps.tables.table. Gradients of rows inside a push wait with
    the groups in sync; all others are applied as they arrive."""
    bucket_bytes: int = BUCKET_BYTES
    """Bytes of values in a bucket, the unit of locking, versioning and moving; a multiple of 8.
    Smaller: finer overlap of receiving and applying, more Python per byte. A small model on several
    servers needs smaller ones: ps.manifest.sharding.bucket_bytes_for."""
    consistency: Consistency = "async"
    reduction: Literal["mean", "sum"] = "mean"
    staleness_bound: int = 0
    """ssp: how many pushes the fastest worker may be ahead of the slowest. hybrid: how many batches
    each worker may have under way, from the lookup of their rows until these are updated."""
    staleness_aware: bool = False
    """async, ssp: divide a push's learning rate by 1 + the updates that its worker had not seen."""

    def __post_init__(self) -> None:
        names = [group.name for group in self.groups] + [table.name for table in self.tables]
        _check_unique("manifest", names)
        if len(self.tables) > MAX_TABLES:
            raise PSSettingsError(f"{len(self.tables)} tables are above the limit {MAX_TABLES}")
        num_params = sum(len(group.params) for group in self.groups)
        if num_params > MAX_PARAMS:
            raise PSSettingsError(f"{num_params} parameters are above the limit {MAX_PARAMS}")
        in_range = MIN_BUCKET_BYTES <= self.bucket_bytes <= MAX_BUCKET_BYTES
        if not in_range or self.bucket_bytes % 8:
            raise PSSettingsError(
                f"bucket_bytes must be a multiple of 8 from {MIN_BUCKET_BYTES} to "
                f"{MAX_BUCKET_BYTES}, got {self.bucket_bytes}"
            )
        self._check_mode()
        num_buckets = sum(-(-group.nbytes // self.bucket_bytes) for group in self.groups)
        if num_buckets > MAX_BUCKETS:
            raise PSSettingsError(
                f"{num_buckets} buckets are above the limit {MAX_BUCKETS}; "
                f"raise bucket_bytes ({self.bucket_bytes})"
            )

    def _check_mode(self) -> None:
        """Refuse options that the mode would leave aside in silence."""
        if not 0 <= self.staleness_bound <= MAX_STALENESS_BOUND:
            raise PSSettingsError(
                f"staleness_bound must be in 0..{MAX_STALENESS_BOUND}, got {self.staleness_bound}"
            )
        if self.staleness_bound and self.consistency not in ("ssp", "hybrid"):
            raise PSSettingsError(
                f"staleness_bound={self.staleness_bound} needs consistency='ssp' or 'hybrid', got "
                f"{self.consistency!r}: async has no bound, sync has no staleness"
            )
        if self.consistency == "hybrid":
            self._check_hybrid()
        if self.staleness_aware and self.has_barrier:
            raise PSSettingsError(
                f"staleness_aware=True needs consistency='async' or 'ssp', got "
                f"{self.consistency!r}: at a barrier no gradient is stale"
            )

    def _check_hybrid(self) -> None:
        if not 1 <= self.staleness_bound <= MAX_PERMITS:
            raise PSSettingsError(
                f"consistency='hybrid' needs staleness_bound=1..{MAX_PERMITS}, the batches that "
                f"each worker may have under way, got {self.staleness_bound}"
            )
        if not self.tables:
            raise PSSettingsError(
                "consistency='hybrid' bounds how old rows of tables get, and this manifest has no "
                "tables; use 'sync'"
            )

    @property
    def has_barrier(self) -> bool:
        """Whether the groups' gradients wait for each other: sync and hybrid."""
        return self.consistency in ("sync", "hybrid")

    @property
    def pushed_groups(self) -> tuple[GroupSpec, ...]:
        """The groups that a push changes."""
        return tuple(group for group in self.groups if not group.is_frozen)

    @property
    def frozen_groups(self) -> tuple[GroupSpec, ...]:
        """The groups whose values never change."""
        return tuple(group for group in self.groups if group.is_frozen)

    def without_frozen(self) -> Manifest:
        """Return the manifest of what pushes and pulls move."""
        return msgspec.structs.replace(self, groups=self.pushed_groups)

    def with_seeds_of(self, other: Manifest) -> Manifest:
        """Return the manifest in which tables that name no seed have that of the other's."""
        seeds = {table.name: table.seed for table in other.tables}
        tables = tuple(
            msgspec.structs.replace(table, seed=seeds.get(table.name))
            if table.seed is None
            else table
            for table in self.tables
        )
        return msgspec.structs.replace(self, tables=tables)

    def with_limits_of(self, other: Manifest) -> Manifest:
        """Return the manifest in which tables have the LIMITS of the other's."""
        theirs = {table.name: table for table in other.tables}
        tables = tuple(table.with_limits_of(theirs.get(table.name, table)) for table in self.tables)
        return msgspec.structs.replace(self, tables=tables)

    def encode(self) -> bytes:
        """Return the canonical msgpack encoding."""
        return msgspec.msgpack.encode(self, order="deterministic")

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Manifest:
        """Return the manifest in `data`.

        Raises:
            ManifestMismatch: not a manifest of this version; the message names the field.
        """
        try:
            return codec.msgpack(data, cls)
        except UNREADABLE as error:
            raise ManifestMismatch(f"not a manifest that this version reads: {error}") from error

    def hash(self) -> str:
        """Return the hex digest (32 digits) that both ends compare.

        It leaves out frozen groups, tables' LIMITS, and what ids are made of: a layer may learn
        that later.
        """
        tables = tuple(table.compared for table in self.tables)
        compared = msgspec.structs.replace(self.without_frozen(), tables=tables)
        return hashlib.blake2b(compared.encode(), digest_size=16).hexdigest()

    def limits_hash(self) -> str:
        """Return the hex digest (32 digits) of the tables' LIMITS."""
        limits = [(each.name, *(getattr(each, name) for name in LIMITS)) for each in self.tables]
        return hashlib.blake2b(msgspec.msgpack.encode(limits), digest_size=16).hexdigest()

    def frozen_hash(self) -> str:
        """Return the hex digest (32 digits) of the frozen groups' dtypes and shapes.

        Names may differ: Keras numbers layers from the start in each process.
        """
        groups = self.frozen_groups
        shapes = [(each.name, each.dtype, [p.shape for p in each.params]) for each in groups]
        encoded = msgspec.msgpack.encode(shapes)
        return hashlib.blake2b(encoded, digest_size=16).hexdigest()

    def group(self, name: str) -> GroupSpec:
        """Return the group called `name`."""
        return _named(self.groups, name)


def _check_unique(where: str, names: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise PSSettingsError(f"{where}: the name {name!r} occurs twice")
        seen.add(name)


@with_field_texts
class Hyper(msgspec.Struct, frozen=True):
    """What a push brings besides the gradient."""

    learning_rate: float
    scalars: dict[str, tuple[float, ...]] | None = None
    """The step's scalars by group name, for the group's rule, in the order of
    `ps.optim.rules.rule_of(config).step_scalars` (Adam: alpha; SGD: none), computed by the
    pusher in the group's dtype. The server uses them as they are, which makes one sync worker equal
    to Keras bit for bit; without them it computes them from the learning rate and its steps."""

    def __post_init__(self) -> None:
        if not abs(self.learning_rate) <= MAX_SCALAR:  # also true for NaN
            raise PSSettingsError(
                f"learning_rate must be finite in float32, got {self.learning_rate!r}"
            )
        for group, values in (self.scalars or {}).items():
            if not all(abs(value) <= MAX_SCALAR for value in values):
                raise PSSettingsError(
                    f"scalars of group {group!r} must be finite in float32, got {values!r}"
                )


class Bucket(msgspec.Struct, frozen=True):
    """Elements [start, stop) of one group's flat buffer."""

    id: int
    group: str
    start: int
    stop: int
    nbytes: int

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@with_field_texts
class GroupLayout(msgspec.Struct, frozen=True):
    """Where each parameter of a group starts in its flat buffer."""

    name: str
    dtype: DType
    param_names: tuple[str, ...]
    offsets: tuple[int, ...]
    """First element of each parameter, then the total: one more entry than parameters."""
    first_bucket: int
    num_buckets: int

    @property
    def num_elements(self) -> int:
        """Elements of the whole group."""
        return self.offsets[-1]

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype as numpy's object."""
        return np.dtype(self.dtype)

    def param_at(self, element: int) -> str:
        """Return the name of the parameter that holds this element of the flat buffer."""
        return self.param_names[bisect.bisect_right(self.offsets, element) - 1]


class Layout(msgspec.Struct, frozen=True):
    """The cut of flat buffers into buckets; a pure function of the manifest."""

    groups: tuple[GroupLayout, ...]
    buckets: tuple[Bucket, ...]

    @classmethod
    def of(cls, manifest: Manifest) -> Layout:
        """Lay out what a push and a pull move: all groups but the frozen ones."""
        return cls._of_groups(manifest.pushed_groups, manifest.bucket_bytes, 0)

    @classmethod
    def frozen(cls, manifest: Manifest) -> Layout:
        """Lay out the frozen groups; their buckets' ids come after all others."""
        num_pushed = sum(
            -(-spec.num_elements // (manifest.bucket_bytes // spec.itemsize))
            for spec in manifest.pushed_groups
        )
        return cls._of_groups(manifest.frozen_groups, manifest.bucket_bytes, num_pushed)

    @classmethod
    def whole(cls, manifest: Manifest) -> Layout:
        """Lay out all groups, as checkpoints hold them; a bucket's id is its place in `buckets`."""
        pushed, frozen = cls.of(manifest), cls.frozen(manifest)
        return cls(pushed.groups + frozen.groups, pushed.buckets + frozen.buckets)

    @classmethod
    def _of_groups(cls, specs: Sequence[GroupSpec], bucket_bytes: int, first_bucket: int) -> Layout:
        groups: list[GroupLayout] = []
        buckets: list[Bucket] = []
        for spec in specs:
            sizes = (param.num_elements for param in spec.params)
            offsets = tuple(itertools.accumulate(sizes, initial=0))
            first = first_bucket + len(buckets)
            step = bucket_bytes // spec.itemsize
            for start in range(0, offsets[-1], step):
                stop = min(start + step, offsets[-1])
                size = (stop - start) * spec.itemsize
                number = first_bucket + len(buckets)
                buckets.append(Bucket(number, spec.name, start, stop, size))
            names = tuple(param.name for param in spec.params)
            count = first_bucket + len(buckets) - first
            groups.append(GroupLayout(spec.name, spec.dtype, names, offsets, first, count))
        return cls(tuple(groups), tuple(buckets))

    def group(self, name: str) -> GroupLayout:
        """Return the layout of the group called `name`."""
        return _named(self.groups, name)

    def bucket_bytes(self) -> tuple[int, ...]:
        """Return each bucket's bytes in their order, as `ps.manifest.sharding.deal` takes them."""
        return tuple(bucket.nbytes for bucket in self.buckets)


_Group = TypeVar("_Group", GroupSpec, GroupLayout)


def _named(groups: Sequence[_Group], name: str) -> _Group:
    for group in groups:
        if group.name == name:
            return group
    known = ", ".join(repr(group.name) for group in groups)
    raise ManifestMismatch(f"no parameter group {name!r}; the manifest has {known or 'none'}")
