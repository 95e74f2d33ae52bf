"""Log mirror: sends TensorBoard's local files to a log directory that is a URL.

TensorFlow writes event files to this host only, and TensorBoard reads them here; the log directory
holds copies. Each file is sent whole and replaced atomically, so readers find no partial one.
Files grow and are sent repeatedly: a pause of `REST` times d follows a round of d seconds.

Covers: which files to send when, the last round, one warning per failure; on TensorBoard's host
also when to fetch (tfos.files.log_fetch).
Does not: fail a training, follow links, remove copies of files that no longer exist here.
Runs in: workers' processes.      Threads: `tfos-log-mirror`; the public calls from the main one.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from feeding.errors import PathError, StorageUnavailable
from feeding.filesystem.location import parse
from feeding.filesystem.registry import filesystem_for
from tfos.files.log_fetch import LogFetch
from tfos.files.transfer import file_pieces

_logger = logging.getLogger(__name__)

PERIOD_S = 5.0
REST = 20
"""Pause after a round, in multiples of its duration: sending takes at most 1/REST of the time."""


class LogMirror:
    """Keeps a copy of a directory's files elsewhere until it is closed.

    Args:
        source: directory on this host; it need not exist yet.
        target: a path or URL.
        period_s: least seconds between two rounds.
        fetches: whether to fetch the other hosts' event files.

    Raises:
        PathError, MissingPackage: the target is not writable; see filesystem_for.
    """

    def __init__(
        self,
        source: str,
        target: str,
        *,
        period_s: float = PERIOD_S,
        fetches: bool = False,
    ) -> None:
        self._source = Path(source)
        self._target = parse(target)
        self._fs = filesystem_for(target)
        self._period_s = period_s
        self._sent: dict[str, tuple[int, int]] = {}
        """Size and modification time of the files that were sent, by name."""
        self._refused: set[str] = set()
        self._fetch = LogFetch(self._fs, target, self._source) if fetches else None
        self._is_failing = self._is_fetch_failing = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tfos-log-mirror", daemon=True)

    def start(self) -> None:
        """Begin with the first round."""
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Send changed files once more and end, within `timeout_s` seconds. Idempotent."""
        self._ended.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _logger.warning(
                "the last log files were not sent to %s within %.1f s", self._target, timeout_s
            )

    def _run(self) -> None:
        pause_s = self._period_s
        while not self._ended.wait(pause_s):
            begun_s = time.monotonic()
            self._round()
            pause_s = max(self._period_s, REST * (time.monotonic() - begun_s))
        self._round()

    def _round(self) -> None:
        self._send_changed()
        if self._fetch is not None:
            self._fetch_new(self._fetch)

    def _fetch_new(self, fetch: LogFetch) -> None:
        failure: Exception | None = None
        try:
            fetch.round()
        except Exception as error:  # noqa: BLE001 - some packages raise their own kinds
            failure = error
        if failure is None and self._is_fetch_failing:
            _logger.warning("event files are fetched from %s again", self._target)
        elif failure is not None and not self._is_fetch_failing:
            _logger.warning(
                "event files cannot be fetched from %s: %s; TensorBoard shows only those of this "
                "host; training goes on",
                self._target,
                failure,
            )
        self._is_fetch_failing = failure is not None

    def _send_changed(self) -> None:
        failure: Exception | None = None
        for name, path, state in self._changed():
            try:
                self._fs.write(str(self._target.child(name)), partial(file_pieces, path, state[0]))
                self._sent[name] = state
            except Exception as error:  # noqa: BLE001 - some packages raise their own kinds
                failure = failure or error
                if isinstance(error, StorageUnavailable):
                    break  # the others would wait as long
        if failure is None and self._is_failing:
            _logger.warning("log files are sent to %s again", self._target)
        elif failure is not None and not self._is_failing:
            _logger.warning(
                "log files cannot be sent to %s: %s; sending is retried, training goes on",
                self._target,
                failure,
            )
        self._is_failing = failure is not None

    def _changed(self) -> Iterator[tuple[str, Path, tuple[int, int]]]:
        """Yield regular files that were never sent, or that have changed since."""
        for directory, _, names in os.walk(self._source):
            for each in sorted(names):
                path = Path(directory, each)
                name = path.relative_to(self._source).as_posix()
                if name in self._refused or (self._fetch and name in self._fetch.names):
                    continue
                try:
                    found = path.lstat()
                except OSError:  # removed since it was listed, or not readable now
                    continue
                if not stat.S_ISREG(found.st_mode):
                    continue
                state = (found.st_size, found.st_mtime_ns)
                if self._sent.get(name) != state and self._may_be_sent(name):
                    yield name, path, state

    def _may_be_sent(self, name: str) -> bool:
        try:
            self._target.child(name)
        except PathError as error:
            self._refused.add(name)
            _logger.warning("a log file is not sent: %s", error)
            return False
        return True
