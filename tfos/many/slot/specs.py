"""What a slot's processes receive at their start: the slot's and its trainer's documents.

Covers: the settings of a run that every slot gets, the bodies of the bootstrap documents.
Does not: start anything. Imports nothing heavy.
Runs in: made in the driver and the slot's task; never argv, environment.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from rpc.auth.certificates import TlsCredentials
from tfos.node.spec import Executor


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What is the same for every slot of one `map_train`."""

    run_id: str
    driver_address: str
    timeout_s: float | None
    results_dir: str
    """Complete path or URL; empty: values are Spark's results."""
    is_grouped: bool
    """Items are pickles of (key, Arrow stream)."""
    loopback: bool
    """Everything runs on the driver's host."""


class SlotSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a slot's process needs to know."""

    slot: int
    attempt: int
    settings: RunSettings
    keys: TlsCredentials
    """Of all slots of the run."""
    names: dict[int, str]
    """Of the items that this slot may train."""
    places: dict[int, tuple[int, int]]
    """Offset and length of each of them in the file of items."""
    digests: dict[int, str]
    """Of each of them; empty texts where no results are kept."""
    function: bytes
    """Pickled; only the trainer loads it."""
    executor: Executor
    sys_path: tuple[str, ...]
    items_fd: int
    spool_fd: int
    """Takes values if there is no `results_dir`: (item, length) as two 8-byte integers, value."""
    task_fd: int
    """Socket to the slot's task: its end shows the end of the task."""


class TrainerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a trainer needs to know."""

    function: bytes
    is_grouped: bool
    items_fd: int
    link_fd: int
    spark_files: str
    title: str
