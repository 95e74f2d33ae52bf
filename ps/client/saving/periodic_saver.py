"""Periodic saves beside the training, by time and by the servers' clocks.

A clock says only when to look: whether there is anything to save is the servers' to say.

Covers: when to save, saves on request, moments in which none may begin, trying again
after a save that failed, a last save at the end.
Does not: save (ps.client.saving.saver), choose the servers (ps.cli.self_saving, tfos.worker.saver).
Runs in: the chief's process, or that of the first hand-started server.
Threads: `tfos-saver` saves by time, `save_now` in the thread that calls it; `_lock` is held while a
save runs. The public calls come from any other thread.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ps.checkpoint.format import step_of
from ps.checkpoint.score import Score
from ps.client.saving.saver import DEFAULT_OPTIONS, DEFAULT_SAVE_TIMEOUT_S, IS_FINAL, SaveOptions
from ps.errors import ManifestMismatch, PSError, PSSettingsError, ServerUnavailable
from ps.protocol.permissions import ServerPhase
from rpc.errors import RpcError

if TYPE_CHECKING:
    from ps.client.client import PSClient

_logger = logging.getLogger(__name__)

_EXPECTED = (PSError, RpcError, OSError)
"""Any other failure, as in a process without threads or memory, is tried again too, and logged with
its traceback: the end of this thread would be the end of all saves."""
_RETRY_S = 1.0
"""Pause after the first failed save; doubled with each further one, up to the plan's period."""
_MAX_DOUBLINGS = 16
ASKED_TRIES = 4
"""Of a save that somebody waits for: 1, 2 and 4 s apart, enough for a server that is restarted."""
_LOOK_S = 0.5
"""How often the servers' clocks are read when saves come by steps, and the end is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """Where and when to save."""

    directory: str
    every_s: float
    """Seconds between saves."""
    every_steps: int = 0
    """Save also after this many updates of the dense parameters; 0: by time alone."""
    options: SaveOptions = DEFAULT_OPTIONS
    timeout_s: float = DEFAULT_SAVE_TIMEOUT_S
    """Timeout of one save."""


class PeriodicSaver:
    """Saves until it is closed.

    Args:
        period: where and when.
        client: gives a connection that nobody else uses; asked before every save.
    """

    def __init__(self, period: Period, client: Callable[[], PSClient]) -> None:
        self._period = period
        self._client = client
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._holders: set[Hashable] = set()
        self._saves_last, self._last_tries = True, 1
        self._attached: PSClient | None = None
        self._saved_step = -1
        self._saved_clock = 0
        self._last_error = ""
        self._is_final = False
        """Whether no further try of the last failed save can succeed."""
        self.num_begun = 0
        """Saves that have begun so far, failed ones too."""
        self.on_saved: Callable[[int, int], object] | None = None
        """Called behind each save, before the next may begin: its number among those that have
        begun, and its step."""
        self.on_unsaved: Callable[[str], object] = lambda _: None
        """Called with the reason once periodic saves fail again and again, or none is possible."""
        self._num_failed = 0
        """Saves, since the last that succeeded."""
        self._is_told = False
        """`on_unsaved` was called since then."""
        self._due_s = 0.0
        """When to save next, as monotonic time."""
        self._thread = threading.Thread(target=self._run, name="tfos-saver", daemon=True)

    def start(self, *, saved_step: int = -1) -> None:
        """Save once the servers hold parameters, then periodically.

        Args:
            saved_step: the last save, for the warning if none succeeds; -1: there is none.
        """
        self._saved_step = saved_step
        self._thread.start()

    def hold(self, holder: Hashable) -> None:
        """Let no save begin until this holder's `release`, unless it is asked for.

        Waits for a save that runs.
        """
        with self._lock:
            self._holders.add(holder)

    def release(self, holder: Hashable) -> None:
        """Save by time and steps again, once no other holder is left. Idempotent."""
        with self._lock:
            self._holders.discard(holder)

    def save_now(
        self,
        score: Score | None = None,
        *,
        tries: int = ASKED_TRIES,
        generations: tuple[int, ...] | None = None,
    ) -> str:
        """Save what has changed since the last save, also while saves are held.

        Args:
            score: of the parameters; with it also what has not changed is saved once more.
            tries: how often to try; none begins after the time of one save.
            generations: see SaveOptions.

        Returns:
            Why it failed, several times; empty once it is saved.
        """
        return self._save_with(tries, self._ended.wait, score, generations)

    def save_between(self) -> str:
        """Save what has changed, unless saves are held: then say so instead of waiting.

        Returns:
            Why nothing was saved; empty once it is.
        """
        with self._lock:
            if self._holders:
                return "a micro-batch is in progress; it is saved whole after it is trained"
            error = self._save()
        if not error and self._saved_step < 0:
            return "the servers hold no parameters yet; try again after the first step"
        return error

    @property
    def saved_step(self) -> int:
        """Step of the last save; -1: there was none."""
        return self._saved_step

    def close(self, *, last: bool = True, tries: int = 1) -> str:
        """End, after a `last` save of what was trained since the one before. Idempotent.

        Args:
            last: whether to save.
            tries: how often to try; none begins after the time of one save.

        Returns:
            Why that save failed, or was never possible; empty if it did not, or there was nothing
            to save.
        """
        self._saves_last, self._last_tries = last, tries
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        return self._last_error

    def _run(self) -> None:
        if not self._wait_seeded():
            return
        if not self._ended.is_set():
            # At once: a server that dies before the first period has something to go on from.
            self._save_due(is_due=True)
        while not self._ended.wait(_LOOK_S):
            self._save_due(is_due=time.monotonic() >= self._due_s)
        if self._saves_last:
            self._last_error = self._save_with(self._last_tries, time.sleep)

    def _save_due(self, *, is_due: bool) -> None:
        with self._lock:
            if self._holders or not (is_due or self._has_grown()):
                return
            error = self._save()
            # A server that is started again fails the first few.
            if error and self._num_failed >= ASKED_TRIES and not self._is_told:
                self._is_told = True
                self.on_unsaved(error)

    def _wait_seeded(self) -> bool:
        """Wait until there is something to save; looked for once more at the end."""
        reported: str | None = None
        while not self._ended.is_set():
            try:
                with self._lock:
                    self._attach(self._client(), timeout_s=_LOOK_S)
            except (ManifestMismatch, PSSettingsError) as error:
                self._last_error = _text(error)
                _logger.warning("nothing is saved: %s", error)
                self.on_unsaved(self._last_error)
                return False
            except Exception as error:
                # A disk that is away, a server that stops and is replaced.
                if not isinstance(error, ServerUnavailable) and str(error) != reported:
                    reported = str(error)
                    _logger.warning(
                        "nothing is saved yet: %s", error, exc_info=not isinstance(error, _EXPECTED)
                    )
                self._ended.wait(_LOOK_S)
                continue
            return True
        return self._saves_last and self._is_seeded_at_last()

    def _is_seeded_at_last(self) -> bool:
        """Whether there is something to save at the end; logs why, if that cannot be known."""
        try:
            with self._lock:
                client = self._client()
                if all(server.phase == ServerPhase.EMPTY for server in client.describe()):
                    return False
                self._attach(client)
        except Exception as error:
            self._last_error = _text(error)
            _logger.warning(
                "the parameters were not saved, not even at the end: %s; %s. Look at the servers' "
                "logs",
                error,
                self._newest,
                exc_info=not isinstance(error, _EXPECTED),
            )
            return False
        return True

    def _attach(self, client: PSClient, *, timeout_s: float | None = None) -> None:
        if client is not self._attached:
            client.attach(timeout_s=timeout_s)
            self._attached = client

    def _clock(self) -> int:
        return max(server.clock for server in self._client().describe())

    def _has_grown(self) -> bool:
        """Whether the plan's number of updates was made since the last save."""
        if not self._period.every_steps or self._num_failed:
            return False
        try:
            return self._clock() - self._saved_clock >= self._period.every_steps
        except Exception:  # noqa: BLE001 - see _EXPECTED
            return False  # the next save will tell

    def _save_with(
        self,
        tries: int,
        pause: Callable[[float], object],
        score: Score | None = None,
        generations: tuple[int, ...] | None = None,
    ) -> str:
        """Save with several tries, until a pause returns True; return why the last one failed."""
        until_s = time.monotonic() + self._period.timeout_s
        error = ""
        for attempt in range(tries):
            with self._lock:
                error = self._save(score, generations)
                is_final = self._is_final
            is_over = attempt == tries - 1 or time.monotonic() >= until_s or is_final
            if not error or is_over or pause(_RETRY_S * 2**attempt):
                break
        return error

    def _save(self, score: Score | None = None, generations: tuple[int, ...] | None = None) -> str:
        """Save if anything has changed, rows and metadata too; what failed is soon tried again.

        A server that is dead fails all saves until it is back, and what it holds is not safe then.

        Returns:
            Why it failed; empty if it did not.
        """
        failed = ""
        period = self._period
        clock: int | None = None
        self.num_begun += 1
        try:
            clock = self._clock()
            client = self._client()
            self._attach(client)
            options = dataclasses.replace(period.options, score=score, generations=generations)
            path = client.save(period.directory, None, timeout_s=period.timeout_s, options=options)
            step = step_of(path.rpartition("/")[2])
            self._saved_step = -1 if step is None else step
            self._saved_clock = clock
            if self.on_saved is not None:
                self.on_saved(self.num_begun, self._saved_step)
            self._num_failed, self._is_told = 0, False
            wait_s = period.every_s
        except Exception as error:  # noqa: BLE001 - see _EXPECTED
            failed = _text(error)
            self._is_final = isinstance(error, PSError) and IS_FINAL in error.details
            self._tell(clock, error)
            wait_s = min(period.every_s, _RETRY_S * 2 ** min(self._num_failed, _MAX_DOUBLINGS))
            self._num_failed += 1
        self._due_s = time.monotonic() + wait_s
        return failed

    def _tell(self, clock: int | None, error: Exception) -> None:
        moment = "" if clock is None else f" at clock {clock}"
        _logger.warning(
            "the parameters%s were not saved: %s; training goes on, %s",
            moment,
            error,
            self._newest,
            exc_info=not isinstance(error, _EXPECTED),
        )

    @property
    def _newest(self) -> str:
        return f"the last save is step {self._saved_step}" if self._saved_step >= 0 else "no save"


def _text(error: Exception) -> str:
    return f"{type(error).__qualname__}: {error}"
