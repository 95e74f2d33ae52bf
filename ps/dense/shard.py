"""One server's part of the dense parameters: values and optimizer slots, bucket by bucket.

Covers: storage, locking and versions of the buckets that this server owns; applying a gradient.
Does not: decide when to apply (ps.consistency.modes), talk to anybody (ps.server.handlers), write
files.
Runs in: PS processes.

Threads: any. Each bucket has one reentrant lock, and all that reads or writes its numbers takes it,
one bucket at a time, so there is no lock order to keep. Compiled loops run without the GIL: threads
that apply different buckets run in parallel.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from ps.dense.ema import MovingAverage
from ps.dense.frozen import FrozenValues
from ps.errors import ManifestMismatch, NonFiniteGradient, NonFiniteUpdate, ShapeError
from ps.manifest.manifest import (
    Bucket,
    GroupLayout,
    GroupSpec,
    Hyper,
    Layout,
    Manifest,
)
from ps.manifest.rule_spec import Average
from ps.manifest.sharding import deal
from ps.optim import kernels
from ps.optim.clipping import clip_of
from ps.optim.rules import rule_of, stands_still, step_scalars

Array = np.ndarray[Any, Any]


class _Group:
    """This server's piece [start, stop) of one group's flat buffer, and how it is updated."""

    def __init__(self, spec: GroupSpec, layout: GroupLayout, buckets: Sequence[Bucket]) -> None:
        self.spec = spec
        self.layout = layout
        self.rule = rule_of(spec.rule)
        self.dtype = layout.numpy_dtype
        self.start = buckets[0].start
        size = buckets[-1].stop - self.start
        self.values: Array = np.zeros(size, self.dtype)
        self.slots = tuple(self._new_slot(size, start) for start in self.rule.kept_starts)
        self.update = kernels.dense_for(spec.rule, spec.dtype)
        self.num_slots = len(self.rule.slots)
        self.average = MovingAverage.if_kept(spec.rule, self.dtype)
        self.is_average = isinstance(spec.rule, Average)
        clip = clip_of(spec.rule)
        self.clip_value = clip[1] if clip is not None and clip[0] == "clipvalue" else None
        self._last: tuple[Hyper, int, Array] | None = None

    def _new_slot(self, size: int, start: float) -> Array:
        if start == 0:
            return np.zeros(size, self.dtype)  # untouched pages cost no memory yet
        return np.full(size, start, self.dtype)

    def scalars(self, hyper: Hyper, step: int) -> Array:
        """Return the step's scalars; computed once for all buckets of a push."""
        last = self._last  # one read: other threads may replace it at any time
        if last is not None and last[0] is hyper and last[1] == step:
            return last[2]
        scalars = step_scalars(self.spec.rule, self.spec.name, hyper, step, self.dtype)
        self._last = (hyper, step, scalars)
        return scalars


@dataclass(slots=True)
class DenseBucket:
    """One bucket: views into its group's arrays, its state, and the one lock of all of it.

    The lock is reentrant: what has to be one step, such as an update and its note in the
    exactly-once record, holds it around calls that take it themselves.
    """

    bucket: Bucket
    group: _Group
    values: Array
    slots: tuple[Array, ...]
    """State that the rule keeps beside the values."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    step: int = 0
    """Updates applied; the t of Adam's formula."""
    version: int = 0
    """Changes of any kind."""


class DenseShard:
    """Values and slots of the buckets that one server owns.

    Creating it loads or compiles the kernels that the manifest needs (seconds with a cold cache).

    Args:
        manifest: what is trained.
        rank: this server's rank.
        num_servers: servers that share the buckets.
        num_workers: divisor of a running average in async mode.
    """

    def __init__(
        self, manifest: Manifest, *, rank: int, num_servers: int, num_workers: int
    ) -> None:
        self.manifest = manifest
        """What is trained, and saved; only `take` changes it."""
        self.frozen = FrozenValues(manifest, rank=rank, num_servers=num_servers)
        self.num_taken = 0
        """Calls of `take`, each a change that a save holds."""
        self.num_servers = num_servers
        self.num_workers = num_workers
        self.layout = Layout.of(manifest)
        self._num_pushers = 1 if manifest.has_barrier else num_workers
        kernels.warm_for(manifest)
        self.rank = rank
        owned = deal(self.layout.bucket_bytes(), num_servers)[rank]
        self.buckets: tuple[Bucket, ...] = self.layout.buckets[owned.start : owned.stop]
        """Owned buckets by ascending id."""
        self._by_id: dict[int, DenseBucket] = {}
        for spec in manifest.pushed_groups:
            mine = [bucket for bucket in self.buckets if bucket.group == spec.name]
            if not mine:
                continue
            group = _Group(spec, self.layout.group(spec.name), mine)
            for bucket in mine:
                piece = slice(bucket.start - group.start, bucket.stop - group.start)
                slots = tuple(slot[piece] for slot in group.slots)
                self._by_id[bucket.id] = DenseBucket(bucket, group, group.values[piece], slots)

        self.owned = tuple(self._by_id[bucket.id] for bucket in self.buckets)
        """What the owned buckets hold, in the order of `buckets`."""
        self.value_nbytes = sum(bucket.nbytes for bucket in self.buckets)
        """Bytes of the owned values: what one whole pull of this server moves."""

    def take(self, manifest: Manifest, frozen: FrozenValues | None) -> None:
        """Take what a seed may change while the shard serves; no snapshot is made meanwhile.

        Args:
            manifest: the seed's, of which the tables' LIMITS count, and with `frozen` the groups.
            frozen: values of its frozen groups; None: those of the shard stay.
        """
        taken = self.manifest.with_limits_of(manifest)
        if frozen is not None:
            self.frozen = frozen  # first: whoever finds the groups finds their values
            taken = msgspec.structs.replace(taken, groups=manifest.groups)
        self.manifest = taken
        self.num_taken += 1

    @property
    def bucket_ids(self) -> tuple[int, ...]:
        """Ids of the owned buckets, ascending."""
        return tuple(bucket.id for bucket in self.buckets)

    @property
    def num_changes(self) -> int:
        """Changes of all buckets together; no lock is taken."""
        return self.num_taken + sum(owned.version for owned in self._by_id.values())

    @property
    def is_trained(self) -> bool:
        """Whether any bucket was updated; no lock is taken."""
        return any(owned.step for owned in self.owned)

    def dtype(self, bucket_id: int) -> np.dtype[Any]:
        """Return the dtype of a bucket."""
        return self._bucket(bucket_id).group.dtype

    def values(self, bucket_id: int) -> Array:
        """Return the live values of a bucket, 1-d, not to be written; no lock is taken."""
        view = self._bucket(bucket_id).values.view()
        view.flags.writeable = False
        return view

    def value_bytes(self, bucket_id: int) -> memoryview:
        """Return the live values of a bucket as read-only bytes; no lock is taken."""
        return self.values(bucket_id).data.cast("B")

    def averages(self, bucket_id: int) -> memoryview:
        """Return the live moving average of a bucket as read-only bytes; no lock is taken.

        Where none is kept, or there was no update yet, its values.
        """
        owned = self._bucket(bucket_id)
        if owned.group.average is None or not owned.step:
            return self.value_bytes(bucket_id)
        return owned.slots[-1].data.toreadonly().cast("B")

    def slots(self, bucket_id: int) -> dict[str, Array]:
        """Return what a bucket keeps beside its values, by name; no lock is taken."""
        owned = self._bucket(bucket_id)
        return dict(zip(owned.group.rule.kept, owned.slots, strict=True))

    def version(self, bucket_id: int) -> int:
        """Return how often the bucket's values have changed."""
        return self._bucket(bucket_id).version

    def step(self, bucket_id: int) -> int:
        """Return how many updates the bucket has seen, which is the t of Adam's formula."""
        return self._bucket(bucket_id).step

    def set_values(self, bucket_id: int, values: Array) -> None:
        """Replace a bucket's values; slots and step stay, as with Keras's set_weights.

        Args:
            bucket_id: number of the bucket.
            values: [num_elements] of the group's dtype.
        """
        owned = self._bucket(bucket_id)
        self._check_like(owned, values, "assigned")
        with owned.lock:
            np.copyto(owned.values, values)
            owned.version += 1

    def load(self, bucket_id: int, values: Array, slots: Sequence[Array], step: int) -> None:
        """Replace a bucket's values, slots (in the rule's order) and step, as from a checkpoint.

        Args:
            bucket_id: number of the bucket.
            values: [num_elements] of the group's dtype.
            slots: [num_elements] each, then the average if there is one.
            step: updates of the bucket so far.
        """
        owned = self._bucket(bucket_id)
        for array in (values, *slots):
            self._check_like(owned, array, "restored")
        with owned.lock:
            np.copyto(owned.values, values)
            for target, source in zip(owned.slots, slots, strict=True):
                np.copyto(target, source)
            owned.step = step
            owned.version += 1

    def dump(self, bucket_id: int, out: Sequence[Array]) -> int:
        """Copy a bucket's values, then its slots, to `out` under its lock; return its step.

        Args:
            bucket_id: number of the bucket.
            out: [num_elements] each: values, slots, then the average if there is one; filled.
        """
        owned = self._bucket(bucket_id)
        with owned.lock:
            for target, source in zip(out, (owned.values, *owned.slots), strict=True):
                np.copyto(target, source)
            return owned.step

    def check_finite(self, bucket_id: int, pushed: Array) -> None:
        """Raise NonFiniteGradient, naming the first parameter, unless all values are finite.

        Args:
            bucket_id: number of the bucket.
            pushed: [num_elements] of the group's dtype.
        """
        count = kernels.count_nonfinite(pushed)
        if count:
            raise _nonfinite(self._bucket(bucket_id), pushed, count)

    def apply(self, bucket_id: int, gradient: Array, hyper: Hyper) -> None:
        """Update one bucket by its rule.

        Args:
            bucket_id: an owned bucket.
            gradient: 1-d, contiguous, of the bucket's dtype and size; not changed. For a group of
                statistics the pushed values.
            hyper: what came with the push; the same object for all buckets of a push, so that the
                step's scalars are computed once.

        Raises:
            NonFiniteUpdate: the elements that would not be finite keep their numbers, the others
                are updated.
            NonFiniteGradient: the bucket is unchanged.
            ShapeError: wrong dtype or size; the bucket is unchanged.
            SettingsError: the push's scalars do not fit the rule; the bucket is unchanged.
        """
        owned = self._bucket(bucket_id)
        self._check_like(owned, gradient, "pushed")
        with owned.lock:
            overflow = self.update(owned, gradient, hyper)
        if overflow is not None:
            raise overflow

    def update(self, owned: DenseBucket, gradient: Array, hyper: Hyper) -> NonFiniteUpdate | None:
        """Like `apply`, under the bucket's lock, with a gradient of its dtype and size.

        Returns a NonFiniteUpdate: the push's other buckets are updated before it is refused.

        Args:
            owned: the bucket, whose lock the caller holds.
            gradient: [num_elements] of the group's dtype.
            hyper: the push's hyper-parameters.
        """
        group, step = owned.group, owned.step + 1
        flags = gradient.flags
        if not flags.aligned or not flags.c_contiguous:
            gradient = np.require(gradient, requirements=("A", "C"))
        count = kernels.count_nonfinite(gradient)
        if count:
            raise _nonfinite(owned, gradient, count)
        if group.is_average:
            left = self._average(owned, gradient)
        elif stands_still(group.spec.rule, hyper.learning_rate, group.dtype):
            left = 0
        else:
            if group.clip_value is not None and self.manifest.has_barrier:
                gradient = _clipped(group, gradient)  # the reduced one
            scalars = group.scalars(hyper, step)
            left = group.update(gradient, owned.values, *owned.slots[: group.num_slots], scalars)
        if group.average is not None:
            group.average.follow(owned.values, owned.slots[-1], step)
        owned.step = step  # after the average: a pull, which takes no lock, reads it from step 1 on
        owned.version += 1
        return _overflowed(owned, left, hyper) if left else None

    def _average(self, owned: DenseBucket, pushed: Array) -> int:
        if self._num_pushers > 1:
            divisor = np.array([self._num_pushers], owned.group.dtype)
            return int(owned.group.update(pushed, owned.values, divisor))
        np.copyto(owned.values, pushed)
        return 0

    def _bucket(self, bucket_id: int) -> DenseBucket:
        try:
            return self._by_id[bucket_id]
        except KeyError:
            ids = self.bucket_ids
            owned = f"{ids[0]}..{ids[-1]}" if ids else "none"
            raise ManifestMismatch(
                f"bucket {bucket_id} is not on this server, which owns {owned} "
                f"of {len(self.layout.buckets)}; do both sides use the same servers?"
            ) from None

    def _check_like(self, owned: DenseBucket, array: Array, verb: str) -> None:
        values = owned.values
        if array.dtype != values.dtype or array.shape != values.shape:
            bucket = owned.bucket
            raise ShapeError(
                f"bucket {bucket.id} of group {bucket.group!r} is {values.dtype}"
                f"[{bucket.num_elements}], {verb} was {array.dtype}{list(array.shape)}"
            )


def _clipped(group: _Group, gradient: Array) -> Array:
    out = np.empty_like(gradient)
    kernels.clip(gradient, out, np.array([group.clip_value], group.dtype))
    return out


def _overflowed(owned: DenseBucket, count: int, hyper: Hyper) -> NonFiniteUpdate:
    bucket, group = owned.bucket, owned.group
    names = dict.fromkeys(group.layout.param_at(at) for at in (bucket.start, bucket.stop - 1))
    return NonFiniteUpdate(
        f"{count} of {bucket.num_elements} values of bucket {bucket.id} of group "
        f"{bucket.group!r} ({' to '.join(map(repr, names))}), or their slots, would become NaN or "
        f"infinite by {group.rule.name} at learning rate {hyper.learning_rate:g}; they keep their "
        "numbers, all others are updated; lower the rate, clip the gradient or raise epsilon",
        {"bucket": str(bucket.id), "group": bucket.group, "count": str(count)},
    )


def _nonfinite(owned: DenseBucket, pushed: Array, count: int) -> NonFiniteGradient:
    bucket = owned.bucket
    first = bucket.start + int(np.argmin(np.isfinite(pushed)))
    name = owned.group.layout.param_at(first)
    return NonFiniteGradient(
        f"{count} of {bucket.num_elements} values pushed to bucket {bucket.id} of group "
        f"{bucket.group!r} are NaN or infinite, the first in {name!r}; the bucket is unchanged",
        {"bucket": str(bucket.id), "group": bucket.group, "param": name, "count": str(count)},
    )
