"""The Spark task of one slot: starts the slot's process, waits for it, returns its values.

Covers: which items the slot has, the files that its process and its trainers share.
Does not: unpickle items, functions or values.
Runs in: a PySpark worker.
"""

from __future__ import annotations

import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

import msgspec

from tfos.errors import NodeStartError
from tfos.many.slot.process import SPOOL_HEAD
from tfos.many.slot.specs import RunSettings, SlotSpec
from tfos.node import bootstrap, versions
from tfos.node.task import find_executor, gpus_of, refuse_skew, task_context
from tfos.spark.task_secrets import taken_keys


@dataclass(frozen=True, slots=True)
class SlotTask:
    """Runs the slot of its partition's number.

    Args:
        settings: settings of the run.
        function: Spark's broadcast of the pickled function.
        names: Spark's broadcast of the items' names.
        items: Spark's broadcast of the pickled items; None: the partition's rows are
            (name, pickled item, digest of the group's rows).
        first_attempt: added to Spark's attempt number: a later job may run a slot of an earlier
            one again.
        versions: versions of the driver's packages.
    """

    settings: RunSettings
    function: Any
    names: Any
    items: Any
    first_attempt: int
    versions: Mapping[str, str]

    def __call__(self, slot: int, rows: Iterable[Any]) -> Iterator[tuple[int, bytes]]:
        """Yield (item, pickled value) of each trained item; none if files have them.

        Raises:
            NodeStartError: its process did not start, or vanished.
            SettingsError: its job does not have the run's keys.
        """
        refuse_skew(versions.compare(self.versions, versions.installed()))
        context = task_context()
        executor = find_executor(
            loopback=self.settings.loopback,
            cores=context.cpus() if context else 1,
            gpus=gpus_of(context, "gpu"),
        )
        attempt = self.first_attempt + (context.attemptNumber() if context else 0)
        scratch = executor.scratch_dir
        with (
            tempfile.TemporaryFile(dir=scratch) as items,
            tempfile.TemporaryFile(dir=scratch) as spool,
        ):
            places, digests = _store(self._own(rows), items)
            self._forget_items()
            ours, theirs = socket.socketpair()
            spec = SlotSpec(
                slot=slot,
                attempt=attempt,
                settings=self.settings,
                keys=taken_keys(self.settings.run_id),
                names={item: self.names.value[item] for item in places},
                places=places,
                digests=digests,
                function=self.function.value,
                executor=executor,
                sys_path=bootstrap.without_spark_jar(sys.path),
                items_fd=items.fileno(),
                spool_fd=spool.fileno(),
                task_fd=theirs.fileno(),
            )
            with ours:
                with theirs:
                    _launch(spec)
                if ours.recv(16) != b"ended":
                    raise NodeStartError(f"the process of slot {slot} vanished; see its log")
            yield from _values(spool)

    def _forget_items(self) -> None:
        """Free the memory of the broadcast, which PySpark keeps as long as its worker lives.

        A later access reads Spark's file again; if that is encrypted, there is none.
        """
        if getattr(self.items, "_path", None):
            vars(self.items).pop("_value", None)

    def _own(self, rows: Iterable[Any]) -> Iterator[tuple[int, bytes, str]]:
        if self.items is not None:
            list(rows)  # to its end, or PySpark does not reuse this process
            return ((number, *item) for number, item in enumerate(self.items.value))
        numbers = {name: number for number, name in enumerate(self.names.value)}
        return ((numbers[row[0]], bytes(row[1]), row[2]) for row in rows if row[0] in numbers)


def _store(
    items: Iterable[tuple[int, bytes, str]], file: IO[bytes]
) -> tuple[dict[int, tuple[int, int]], dict[int, str]]:
    """Write items one after the other; return the place of each, and their digests."""
    places: dict[int, tuple[int, int]] = {}
    digests: dict[int, str] = {}
    offset = 0
    for item, data, digest in items:
        file.write(data)
        places[item] = (offset, len(data))
        digests[item] = digest
        offset += len(data)
    file.flush()
    return places, digests


def _launch(spec: SlotSpec) -> None:
    document = bootstrap.document_fd(
        "tfos.many.slot.process", msgspec.msgpack.encode(spec), sys_path=spec.sys_path, detach=True
    )
    bootstrap.start_detached(
        document,
        f"tfos slot {spec.slot} of {spec.settings.run_id}",
        inherited=[spec.items_fd, spec.spool_fd, spec.task_fd],
        cwd=spec.executor.cwd,
    )


def _values(spool: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    spool.seek(0)
    while head := spool.read(SPOOL_HEAD.size):
        item, length = SPOOL_HEAD.unpack(head)
        yield item, spool.read(length)
