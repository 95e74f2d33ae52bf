"""Threads that run one at a time under a seeded scheduler and a virtual clock.

Real blocking code runs here unchanged: `World.patch` puts this world's clock, sleeps and conditions
in the place of the `time` and `threading` that a module imported. A thread gives up its turn where
it waits, and, by the seed's choice, where it takes a condition's lock. So the same seed gives the
same run, a second of waiting costs nothing, and a wait that nothing can end is found at once.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace, TracebackType
from typing import Any

import pytest

TURN_TIMEOUT_S = 60.0


class Killed(BaseException):
    """Ends a task where it stands, as SIGKILL ends a process."""


class Stuck(AssertionError):
    """Nobody can go on: a wait without an end."""


class _Turn:
    """A bare lock, held until somebody gives the turn: a third of a semaphore's time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def give(self) -> None:
        self._lock.release()

    def take(self, timeout_s: float = -1.0) -> bool:
        return self._lock.acquire(timeout=timeout_s)


class _Runner:
    """A thread of the pool; starting one for each of a million tasks would cost the most."""

    def __init__(self) -> None:
        self.turn = _Turn()
        self.task: Task | None = None
        self.thread = threading.Thread(target=self._run, name="simulated", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while True:
            self.turn.take()
            task = self.task
            if task is None:
                return
            task.run()
            self.task = None
            _idle.append(self)
            task.world.leave(task)


_idle: list[_Runner] = []


def end_runners() -> None:
    """End the pool's threads; all of them are idle once their worlds have ended."""
    while _idle:
        runner = _idle.pop()
        runner.turn.give()
        runner.thread.join(TURN_TIMEOUT_S)


class Task:
    """Something that runs in this world: a worker, a handler, the driver."""

    def __init__(self, world: World, name: str, work: Callable[[], Any]) -> None:
        self.world = world
        self.name = name
        self.work = work
        self.condition: Callable[[], bool] | None = None
        self.deadline_s: float | None = None
        self.killed = False
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.runner: _Runner | None = None
        self.turn = _Turn()

    def run(self) -> None:
        try:
            if not self.killed:
                self.result = self.work()
        except BaseException as error:  # noqa: BLE001 - whoever looks at the task decides
            self.error = error
        self.done = True

    def is_ready(self, now_s: float) -> bool:
        if self.killed or self.condition is None or self.condition():
            return True
        return self.deadline_s is not None and now_s >= self.deadline_s

    def wake(self) -> None:
        if self.runner is None:
            self.turn.give()
        else:
            self.runner.turn.give()

    def sleep(self) -> None:
        turn = self.turn if self.runner is None else self.runner.turn
        assert turn.take(TURN_TIMEOUT_S), f"{self.name} never got its turn again"


class World:
    """One run: its tasks, its clock, its dice."""

    def __init__(self, seed: int, *, switch_rate: float = 0.2) -> None:
        self.random = random.Random(seed)
        self.now_s = 1000.0
        self.switch_rate = switch_rate
        self.turns = 0
        self._main = Task(self, "main", lambda: None)
        self._tasks = [self._main]
        self._current = self._main
        self._stuck: list[str] = []
        self._timers: list[tuple[float, Callable[[], None]]] = []

    @property
    def current(self) -> Task:
        return self._current

    def spawn(self, name: str, work: Callable[[], Any]) -> Task:
        """Add a task; it runs when it is chosen."""
        task = Task(self, name, work)
        task.runner = _idle.pop() if _idle else _Runner()
        task.runner.task = task
        self._tasks.append(task)
        return task

    def block(self, condition: Callable[[], bool] | None, timeout_s: float | None = None) -> None:
        """Give up the turn until the condition holds or the (virtual) time is over."""
        task = self._current
        task.condition = condition
        task.deadline_s = None if timeout_s is None else self.now_s + timeout_s
        self._switch(task)
        if task.killed:
            raise Killed(task.name)

    def sleep(self, seconds: float) -> None:
        self.block(_never, max(0.0, seconds))

    def at(self, seconds: float, act: Callable[[], None]) -> None:
        """Do something after a while; it must not wait."""
        self._timers.append((self.now_s + seconds, act))

    def maybe_switch(self) -> None:
        """Let others go first, if the dice say so."""
        if self.random.random() < self.switch_rate:
            self.block(None)

    def kill(self, task: Task) -> None:
        """End the task at its next turn."""
        task.killed = True

    def join(self, *tasks: Task) -> None:
        """Run until these have ended; then end whatever else is left.

        Raises:
            Stuck: they never will.
        """
        self.block(lambda: bool(self._stuck) or all(task.done for task in tasks))
        stuck = self._stuck
        while left := [task for task in self._tasks if task is not self._main]:
            for task in left:
                self.kill(task)
            self.block(None)
        if stuck:
            raise Stuck("nobody can go on: " + ", ".join(stuck))

    def leave(self, task: Task) -> None:
        """The current task has ended: pass the turn on."""
        self._tasks.remove(task)
        self._choose().wake()

    def _switch(self, task: Task) -> None:
        chosen = self._choose()
        if chosen is task:
            return
        chosen.wake()
        task.sleep()

    def _choose(self) -> Task:
        self.turns += 1
        while True:
            self._fire()
            now_s = self.now_s
            ready = [task for task in self._tasks if task.is_ready(now_s)]
            if ready:
                self._current = self.random.choice(ready)
                return self._current
            ends = [task.deadline_s for task in self._tasks if task.deadline_s is not None]
            ends += [at_s for at_s, _ in self._timers]
            if not ends:
                self._stuck = [task.name for task in self._tasks if task is not self._main]
                continue  # main is ready now
            self.now_s = min(ends)

    def _fire(self) -> None:
        due = [timer for timer in self._timers if timer[0] <= self.now_s]
        if due:
            self._timers = [timer for timer in self._timers if timer[0] > self.now_s]
            for _, act in due:
                act()

    @contextmanager
    def patch(self, *modules: ModuleType) -> Iterator[pytest.MonkeyPatch]:
        """Give these modules this world's time and conditions."""
        time = SimpleNamespace(
            monotonic=lambda: self.now_s,
            perf_counter=lambda: self.now_s,
            time=lambda: self.now_s,
            sleep=self.sleep,
        )
        threads = SimpleNamespace(
            Condition=lambda lock=None: Condition(self, lock),
            Event=threading.Event,
            Lock=threading.Lock,
            RLock=ReentrantLock,
        )
        with pytest.MonkeyPatch.context() as patched:
            for module in modules:
                for name, stand_in in (("time", time), ("threading", threads)):
                    if hasattr(module, name):
                        patched.setattr(module, name, stand_in)
            yield patched


class ReentrantLock:
    """The lock of one condition, or of several; without any, a real one."""

    def __init__(self) -> None:
        self.owner: Task | None = None
        self.depth = 0
        self._real = threading.RLock()

    def __enter__(self) -> bool:
        return self._real.__enter__()

    def __exit__(self, *failure: Any) -> None:
        self._real.__exit__(*failure)


class Condition:
    """A condition with its reentrant lock, for tasks of one world."""

    def __init__(self, world: World, lock: ReentrantLock | None = None) -> None:
        self._world = world
        self._lock = lock or ReentrantLock()
        self._notified = 0

    def __enter__(self) -> Condition:
        world, lock = self._world, self._lock
        if lock.owner is not world.current:
            world.maybe_switch()
            if lock.owner is not None:
                world.block(lambda: lock.owner is None)
            lock.owner = world.current
        lock.depth += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.depth -= 1
        if not self._lock.depth:
            self._lock.owner = None

    def wait(self, timeout: float | None = None) -> None:
        lock, depth, before = self._lock, self._lock.depth, self._notified
        lock.depth, lock.owner = 0, None
        try:
            self._world.block(lambda: self._notified != before, timeout)
            self._world.block(lambda: lock.owner is None)
        finally:
            lock.depth, lock.owner = depth, self._world.current

    def notify_all(self) -> None:
        self._notified += 1


def _never() -> bool:
    return False
