"""Checks around every test: the environment stays as it was, and no thread or child is left.

A test belongs to exactly one group of scripts/test; `--shuffle SEED` runs files, and the tests in
each file, in a random order. Hypothesis' examples are always the same, but with it and in the long
group.

A test that leaves something behind fails by name, instead of disturbing a later one. What a
library keeps for the life of the process (py4j's connections, Spark's JVM) is named here, with
the reason.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

from scripts.local_hdfs.cluster import LocalHdfs
from scripts.local_hdfs.errors import MissingTool
from scripts.test_groups import LONG, names_for
from tests.support.spark_submit import QUICK_JVM

LIBRARY_THREADS = (
    "Thread-serve_forever",  # py4j's callback server and pyspark's accumulator server
    "asyncio_",  # executors of event loops, joined at interpreter exit
    "grpc",
    "ThreadPoolExecutor",  # keras and gRPC keep their pools
    "pymp-",
    "file-call",  # given up with its server; ends when that answers
)
GROWING_POOLS = ("tfos-control-",)  # of a cluster that several tests share: busy, it starts more
LIBRARY_COMMANDS = (
    *("java", "pyspark.daemon"),  # end with the SparkContext, which outlives a test
    "krb5kdc",  # ends with its HDFS, as the Java of that does
    "multiprocessing.resource_tracker",  # one per process that spawns, and ends with it
)
ROOT = Path(__file__).parent.parent
ZYGOTE = (
    "tests.support.programs.server_zygote"  # ends with pytest; the servers it forks are checked
)
CURRENT_TEST = "PYTEST_CURRENT_TEST"
TENSORFLOW = "tensorflow.python"  # the real one; a test's own package of that name has no such
SETTLE_S = 20.0
EXECUTORS = "local-cluster[3,1,1024]"  # half of what runs on the fixture `spark`

# How long an example takes, or its data to make, is the machine's affair.
settings.register_profile(
    "random", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("tfos", settings.get_profile("random"), derandomize=True)
settings.load_profile("tfos")


def pytest_configure(config: pytest.Config) -> None:
    """Keep tickets and records of the tests' clusters out of the user's own directories."""
    if config.getoption("shuffle") or config.getoption("markexpr") == LONG.marks:
        settings.load_profile("random")
    own = tempfile.mkdtemp(prefix="tfos-tests-")
    config.add_cleanup(lambda: shutil.rmtree(own, ignore_errors=True))
    os.environ["XDG_RUNTIME_DIR"] = os.environ["XDG_STATE_HOME"] = own


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", metavar="SEED", help="run in the random order of this seed")
    parser.addoption("--storm-s", type=float, default=600.0, help="seconds of all long storms")
    parser.addoption("--storm-seed", type=int, default=0, help="what happens in the storms")


def pytest_report_header(config: pytest.Config) -> list[str]:
    seed = config.getoption("shuffle")
    return [f"random order: --shuffle {seed}"] if seed else []


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave what is imported and collected to the collector's permanent generation.

    It stays as long as pytest: looking through its million objects again and again is in vain. What
    tests make is looked through less often than Python does by itself, which took a tenth of all
    processor time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before -m selects, and before pytest sorts by session fixtures
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "hdfs" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.hdfs)
        callspec = getattr(item, "callspec", None)
        if callspec is not None and callspec.params.get("spark") == EXECUTORS:
            item.add_marker(pytest.mark.executors)
        path = item.path.relative_to(ROOT).as_posix()
        groups = names_for(path, {mark.name for mark in item.iter_markers()})
        if len(groups) != 1:
            raise pytest.UsageError(
                f"{item.nodeid} is in the groups {groups} of scripts/test_groups.py instead of "
                f"one; change its marks or its folder"
            )
    if config.getoption("shuffle"):
        _shuffle(items, config.getoption("shuffle"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test outside tests/system that loads TensorFlow: its group waits 4 s for it."""
    was_loaded = TENSORFLOW in sys.modules
    result = yield
    if (
        TENSORFLOW in sys.modules
        and not was_loaded
        and ROOT / "tests/system" not in item.path.parents
    ):
        pytest.fail("loaded TensorFlow; such a test belongs in tests/system/keras")
    return result


def _shuffle(items: list[pytest.Item], seed: str) -> None:
    """Order files, then the tests in each, at random: a module's fixtures are made once."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    order = random.Random(seed)
    paths = sorted(files)
    order.shuffle(paths)
    for path in paths:
        order.shuffle(files[path])
    items[:] = [item for path in paths for item in files[path]]


def _threads() -> set[threading.Thread]:
    return {
        thread
        for thread in threading.enumerate()
        if thread.is_alive()
        and not thread.name.startswith(LIBRARY_THREADS)
        and not _is_py4js(thread)
    }


def _is_py4js(thread: threading.Thread) -> bool:
    """Whether it serves calls back from Spark's JVM; py4j keeps it as long as the JVM."""
    owner = getattr(getattr(thread, "_target", None), "__self__", thread)
    return type(owner).__module__.startswith("py4j")


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _children(parent: int = os.getpid()) -> set[psutil.Process]:
    """Direct children that are alive: a descendant further down has a live child above it."""
    alive: set[psutil.Process] = set()
    if parent == os.getpid() and not _has_children():
        return alive  # as around most tests
    for listing in Path(f"/proc/{parent}/task").glob("*/children"):
        try:
            pids = listing.read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # a thread that ended between the listing and the reading
        for pid in pids:
            try:
                child = psutil.Process(int(pid))
                command = _command(child)
                if parent == os.getpid() and ZYGOTE in command:
                    alive |= _children(child.pid)
                elif child.status() != psutil.STATUS_ZOMBIE and not any(
                    word in command for word in LIBRARY_COMMANDS
                ):
                    alive.add(child)
            except psutil.NoSuchProcess:
                continue
    return alive


def _named(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return str(process.pid)


@pytest.fixture(scope="session", autouse=True)
def writable_spark_home(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Keep the work directories of local-cluster executors out of the installed pyspark."""
    starts_spark = any(item.get_closest_marker("spark") for item in request.session.items)
    if not starts_spark or "SPARK_HOME" in os.environ:
        return
    base = tmp_path_factory.mktemp("spark")
    script = '. scripts/env.sh && . scripts/java.sh && PY=$1 && tfos_spark "$2"'
    subprocess.run(
        ["bash", "-c", script, "bash", sys.executable, str(base)],
        check=True,
        cwd=ROOT,
        timeout=60,
    )
    os.environ["SPARK_HOME"] = str(base / "spark")


@pytest.fixture(scope="session", autouse=True)
def quick_jvms(request: pytest.FixtureRequest, writable_spark_home: None) -> None:
    """Start Spark's many short-lived JVMs with a third of the CPU time: they never need C2."""
    if not any(item.get_closest_marker("spark") for item in request.session.items):
        return
    options = [QUICK_JVM, os.environ.get("JAVA_TOOL_OPTIONS", "")]
    archive = Path(os.environ["SPARK_HOME"]) / "classes.jsa"  # see scripts/java.sh
    if archive.exists():
        options.append(f"-XX:SharedArchiveFile={archive} -Xlog:disable -Xlog:all=error:stderr")
    os.environ["JAVA_TOOL_OPTIONS"] = " ".join(filter(None, options))


@pytest.fixture(scope="session")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalHdfs]:
    """A real HDFS with two DataNodes, one for all tests; who breaks it mends it."""
    directory = tmp_path_factory.mktemp("hdfs") / "run"
    try:
        running = LocalHdfs.started(directory, with_parent=True)
    except MissingTool as missing:
        pytest.skip(str(missing))
    with running:
        yield running


@pytest.fixture(autouse=True)
def clean_environ() -> Iterator[None]:
    """Give os.environ and the working directory back as they were."""
    environ, cwd = dict(os.environ), os.getcwd()
    yield
    environ[CURRENT_TEST] = os.environ.get(CURRENT_TEST, "")  # pytest's own: new in each phase
    if dict(os.environ) != environ:
        os.environ.clear()
        os.environ.update(environ)
    if os.getcwd() != cwd:
        os.chdir(cwd)


@pytest.fixture(autouse=True)
def same_signals() -> Iterator[None]:
    """Fail a test that leaves signals blocked or handled, and restore them for the next one."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    left = signal.pthread_sigmask(signal.SIG_SETMASK, blocked) - blocked
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
            left.add(number)
    if left:
        pytest.fail(f"left blocked or handled: {sorted(left)}; such a program needs a process")


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves threads or child processes behind."""
    threads, children = _threads(), _children()
    pools = {thread.name for thread in threads if thread.name.startswith(GROWING_POOLS)}
    yield
    if request.node.get_closest_marker("tf"):
        threads |= {thread for thread in _threads() if thread.daemon}  # TensorFlow's own pools
    deadline = time.monotonic() + SETTLE_S

    def left() -> tuple[set[threading.Thread], set[psutil.Process]]:
        mine = {thread for thread in _threads() - threads if thread.name not in pools}
        return mine, _children() - children

    left_threads, left_children = left()
    while (left_threads or left_children) and time.monotonic() < deadline:
        for thread in left_threads:
            thread.join(0.05)
        if left_children:
            psutil.wait_procs(list(left_children), timeout=0.05)
        left_threads, left_children = left()
    if left_threads or left_children:
        pytest.fail(
            f"left behind after {SETTLE_S:.0f} s: threads {sorted(t.name for t in left_threads)}, "
            f"processes {sorted(map(_named, left_children))}; close what the test started"
        )
