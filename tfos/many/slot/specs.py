"""What a slot's processes receive at start: the documents of the slot and its trainer.

Covers: the settings of a run that every slot gets, the bodies of the bootstrap documents.
Does not: start anything. Imports nothing heavy.
Runs in: the driver and the slot's task make them; they never go into argv or environment.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from rpc.auth.certificates import TlsCredentials
from tfos.node.spec import Executor

_HAND_OVER_BYTES = 256 << 20
"""Bytes of values that the loss of an executor may cost a slot; a new trainer costs seconds."""
_VALUE_BYTES = 1700 << 20
"""Largest value: PySpark sends rows in batches of less than 2 GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Settings that are the same for every slot of one `map_train`."""

    run_id: str
    driver_address: str
    timeout_s: float | None
    results_dir: str
    """Complete path or URL; empty: values are Spark's results."""
    max_result_bytes: int
    """spark.driver.maxResultSize, which limits the result of a slot's job; 0: no limit."""
    driver_heap_bytes: int
    """Largest heap of the driver's JVM, which holds a job's result up to four times."""
    is_grouped: bool
    """Whether items are pickles of (key, Arrow stream)."""
    shares_gpus: bool
    """Whether a slot has a part of a GPU."""
    loopback: bool
    """Whether everything runs on the driver's host."""

    @property
    def hand_over_bytes(self) -> int:
        """Bytes of values at which a slot ends, so that its job returns them and it restarts."""
        most = min(_HAND_OVER_BYTES, self.driver_heap_bytes // 16)
        return min(most, self.max_result_bytes // 4 or most)

    @property
    def max_value_bytes(self) -> int:
        """Largest value; a larger one may end Spark's thread that reads results, so no job ends."""
        most = min(_VALUE_BYTES, self.driver_heap_bytes // 6)
        return min(most, self.max_result_bytes * 7 // 10 or most)

    @property
    def max_job_bytes(self) -> int:
        """Largest total with a value that was drawn ahead; else a full slot gives its item back."""
        return min(self.hand_over_bytes + self.max_value_bytes, self.driver_heap_bytes // 5)


class SlotSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a slot's process needs."""

    slot: int
    attempt: int
    settings: RunSettings
    keys: TlsCredentials
    """Keys of all slots of the run."""
    names: dict[int, str]
    """Names of the items that this slot may train."""
    places: dict[int, tuple[int, int]]
    """Offset and length of each item in the file of items."""
    digests: dict[int, str]
    """Digest of each item; empty texts if no results are kept."""
    function: bytes
    """The pickled function; only the trainer loads it."""
    executor: Executor
    sys_path: tuple[str, ...]
    items_fd: int
    spool_fd: int
    """File for values if there is no `results_dir`: (item, length) as two 8-byte integers,
    value."""
    task_fd: int
    """Socket to the slot's task; its end shows the end of the task."""


class TrainerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a trainer needs."""

    function: bytes
    is_grouped: bool
    items_fd: int
    link_fd: int
    spark_files: str
    title: str
