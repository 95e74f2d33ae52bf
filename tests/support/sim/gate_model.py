"""What a server's gate must do, as plainly as it can be said: counts per worker, sets of ranks.

The server adds: each worker's push adds 1 to its own element in every bucket, and its table push
adds 1 to its own row. So "exactly once" is a comparison of counts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

NUM_WORKERS, NUM_BUCKETS, BUCKET_BYTES = 3, 3, 64
SIZE = NUM_BUCKETS * BUCKET_BYTES

Mode = Literal["async", "ssp", "sync", "hybrid"]
Outcome = Literal["ack", "gone", "phase", "lost", "stale", "nan", "settings", "timeout"]
Kind = Literal["full", "null", "nan"]
"""nan: the gradient's middle bucket is not finite."""


class Name(NamedTuple):
    """A push: whose it is, by which attempt, its number."""

    rank: int
    generation: int
    sequence: int


@dataclass
class Model:
    """One server."""

    mode: Mode
    bound: int
    continues: bool
    members: set[int] = field(default_factory=lambda: set(range(NUM_WORKERS)))
    finished: set[int] = field(default_factory=set)
    away: set[int] = field(default_factory=set)
    """Lost, and members again with the first gradient or lookup of a newer attempt."""
    broken: bool = False
    clock: int = 0
    clocks: dict[int, int] = field(default_factory=lambda: dict.fromkeys(range(NUM_WORKERS), 0))
    slowest: int = 0
    waiting: dict[Name, Kind] = field(default_factory=dict)
    done: dict[Name, Outcome] = field(default_factory=dict)
    last: dict[tuple[int, int], int] = field(default_factory=dict)
    """The newest push of each attempt; older ones change nothing any more."""
    excused: set[int] = field(default_factory=set)
    """Whose newer attempt goes on one clock beyond the bound, where the older one had waited."""
    touched: dict[Name, set[int]] = field(default_factory=dict)
    """Buckets that a push has changed on its way in."""
    counts: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Of (bucket, worker)."""
    pushes: Counter[int] = field(default_factory=Counter)
    rows: Counter[int] = field(default_factory=Counter)
    least: list[int] = field(default_factory=lambda: [0] * NUM_WORKERS)
    held: dict[int, set[tuple[int, int]]] = field(
        default_factory=lambda: {rank: set() for rank in range(NUM_WORKERS)}
    )
    """Batches (generation, number) with a permit."""

    @property
    def has_barrier(self) -> bool:
        return self.mode in ("sync", "hybrid")

    def missing(self) -> tuple[int, ...]:
        if self.has_barrier:
            return tuple(sorted(self.members - {name.rank for name in self.waiting}))
        if self.mode == "async" or not self.waiting:
            return ()
        behind = min(self.clocks[name.rank] for name in self.waiting) - self.bound
        return tuple(sorted(rank for rank in self.members if self.clocks[rank] < behind))

    # -- what happens

    def push(self, name: Name, kind: Kind, delivered: int) -> Outcome:
        if not self._is_alive(name.rank, name.generation):
            return "stale"
        is_whole = kind == "null" or delivered >= SIZE
        if name.sequence < self.last.setdefault(name[:2], name.sequence):
            return "ack" if is_whole else "gone"
        self.last[name[:2]] = name.sequence
        if name in self.waiting:
            return "gone"  # with the connection: the push waits on
        if name in self.done:
            outcome = self.done[name]
            return outcome if outcome != "ack" or is_whole else "gone"
        refused = self.refusal(name.rank)
        if refused is not None:
            self.done[name] = refused
            return refused
        if kind != "null":
            arrived, found_nan = self._receive(name, kind, delivered)
            if not arrived:
                return "gone"
            kind = "nan" if found_nan else "full"
        return self._enter(name, kind)

    def refusal(self, rank: int) -> Outcome | None:
        """Why a gradient of this worker is not taken."""
        if rank in self.away:
            self.join(rank)
        if self.has_barrier and self.broken:
            return "lost"
        if rank in self.finished or (self.mode != "async" and rank not in self.members):
            return "phase"
        return None

    def join(self, rank: int) -> Outcome:
        self.away.discard(rank)
        if self.has_barrier and self.broken:
            return "lost"
        if rank in self.finished:
            return "phase"
        self.members.add(rank)
        self.clocks.setdefault(rank, self.slowest)
        return "ack"

    def leave(self, rank: int) -> Outcome:
        self.away.discard(rank)
        self.members.discard(rank)
        self.clocks.pop(rank, None)
        self.held[rank].clear()
        self._go_on()
        return "ack"

    def finish(self, rank: int) -> Outcome:
        self.finished.add(rank)
        return self.leave(rank)

    def lose(self, rank: int, generation: int) -> None:
        if generation < self.least[rank]:
            return
        self.least[rank] = generation + 1
        self.held[rank].clear()
        if self.mode == "ssp":
            self._drop(rank)
            self.leave(rank)
        elif self.has_barrier and not self.broken:
            if self.continues or rank not in self.members:
                self.members.discard(rank)
                self._drop(rank)
                self._go_on()
            else:
                self.broken = True
                self._answer([name for name, kind in self.waiting.items() if kind == "nan"])
                self.waiting.clear()
                for held in self.held.values():
                    held.clear()
        self.away.add(rank)

    def fence(self, rank: int, least: int) -> None:
        if least > self.least[rank]:
            self.least[rank] = least
            if any(name.rank == rank and name.generation < least for name in self.waiting):
                self._drop(rank)
                self._go_on()

    def push_rows(self, rank: int, generation: int, batch: int, *, is_whole: bool) -> Outcome:
        """`batch` 0: of none."""
        if not self._is_alive(rank, generation):
            return "stale"
        refused = self.refusal(rank)
        if refused is not None:
            return refused
        if self.mode == "hybrid" and not batch:
            return "settings"
        if not is_whole:
            return "gone"
        self.rows[rank] += 1
        self.held[rank].discard((generation, batch))
        return "ack"

    def give_up(self, rank: int, generation: int, batch: int) -> Outcome:
        if not self._is_alive(rank, generation):
            return "stale"
        self.held[rank].discard((generation, batch))
        return "ack"

    def look_up(self, rank: int, generation: int, batch: int, known: set[int]) -> Outcome:
        if self.mode != "hybrid":
            return "ack"
        if not self._is_alive(rank, generation):
            return "stale"
        refused = self.refusal(rank)
        if refused is not None:
            return refused
        held = self.held[rank]
        held &= {(generation, number) for number in known}
        if len(held) >= self.bound:
            return "timeout"
        held.add((generation, batch))
        return "ack"

    # -- what follows

    def _is_alive(self, rank: int, generation: int) -> bool:
        if generation < self.least[rank]:
            return False
        self.fence(rank, generation)
        return True

    def _receive(self, name: Name, kind: Kind, delivered: int) -> tuple[bool, bool]:
        """Whether all came, and whether it is refused."""
        touched = self.touched.setdefault(name, set())
        for bucket in range(NUM_BUCKETS):
            if delivered < (bucket + 1) * BUCKET_BYTES:
                return False, False
            if kind == "nan" and bucket == NUM_BUCKETS // 2:
                return delivered >= SIZE, True
            if not self.has_barrier and bucket not in touched:
                touched.add(bucket)
                self.counts[bucket, name.rank] += 1
        return True, False

    def _enter(self, name: Name, kind: Kind) -> Outcome:
        self.waiting[name] = kind
        if not self.has_barrier:
            self.clock += kind == "full"
            self.pushes[name.rank] += kind == "full"
            if name.rank in self.clocks:
                self.clocks[name.rank] += 1
        self._go_on()
        return self.done.get(name, "gone")

    def _go_on(self) -> None:
        """Answer whoever may be answered."""
        if self.has_barrier:
            here = {name.rank for name in self.waiting}
            if here and self.members <= here and not self.broken:
                self.clock += 1
                for name, kind in self.waiting.items():
                    if kind == "full":
                        self.pushes[name.rank] += 1
                        for bucket in range(NUM_BUCKETS):
                            self.counts[bucket, name.rank] += 1
                self._answer(list(self.waiting))
            return
        if self.mode == "ssp":
            self.slowest = min(self.clocks.values(), default=self.slowest)
            limit = self.slowest + self.bound
            free = [name for name in self.waiting if self.clocks.get(name.rank, limit) <= limit]
        else:
            free = list(self.waiting)
        self._answer(free)

    def _answer(self, names: list[Name]) -> None:
        for name in names:
            self.excused.discard(name.rank)
            self.done[name] = "nan" if self.waiting.pop(name) == "nan" else "ack"

    def _drop(self, rank: int) -> None:
        for name in [name for name in self.waiting if name.rank == rank]:
            del self.waiting[name]
            self.excused.add(rank)
