"""What ends on YARN while a training runs: executors, a NodeManager, the ApplicationMaster, the
client's driver, the application, a container that takes too much memory.

Prints the seconds until the training goes on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.local_hdfs.yarn import LocalYarn
from tests.support.marked_processes import below, kill
from tests.support.on_yarn import (
    TIMEOUT_S,
    Submission,
    applications,
    kill_application,
    logs,
    masters,
    nodes_left,
    told,
)
from tests.support.programs.survives_on_yarn import EPOCHS, NUM_ROWS, TOLD
from tests.support.spark_submit import ROOT
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(TIMEOUT_S + 120, func_only=True)]
PROGRAM = ROOT / "tests" / "support" / "programs" / "survives_on_yarn.py"
Submit = Callable[..., Submission]
START_S = 240.0
"""A driver, its executors and TensorFlow start within it also on a host with ten times the work."""
MANY_EPOCHS = 24
LEASE_S = 40.0
"""A node outlives its driver by 30 s at most."""


class EnforcingYarn(LocalYarn):
    """Ends a container whose processes use more memory than it was given, as YARN does."""

    def _configure(self) -> None:
        super()._configure()
        site = self.conf_dir / "yarn-site.xml"
        node = "yarn.nodemanager"
        # `enforced` leaves it to cgroups, and is so by default also where there are none.
        changed = {
            f"{node}.pmem-check-enabled": "true",
            f"{node}.resource.memory.enforced": "false",
        }
        written = ET.parse(site)
        root = written.getroot()
        for each in root.findall("property"):
            if each.findtext("name") in changed:
                root.remove(each)
        for name, value in changed.items():
            added = ET.SubElement(root, "property")
            ET.SubElement(added, "name").text = name
            ET.SubElement(added, "value").text = value
        written.write(site)


@pytest.fixture
def marks(tmp_path: Path) -> Path:
    """Where the program says how far it is."""
    directory = tmp_path / "marks"
    directory.mkdir()
    return directory


@pytest.fixture
def submit(yarn: LocalYarn, marks: Path) -> Iterator[Submit]:
    """Starts the program, with a directory and further arguments, as of Submission."""
    with contextlib.ExitStack() as runs:

        def start(directory: str, *arguments: str, **options: Any) -> Submission:
            run = Submission(yarn, PROGRAM, directory, str(marks), *arguments, **options)
            return runs.enter_context(run)

        yield start


def wait_for(run: Submission, yarn: LocalYarn, condition: Callable[[], bool], what: str) -> None:
    """Wait for something that happens while a program runs."""
    try:
        wait_until(lambda: condition() or run.has_ended, what, START_S)
    except AssertionError as late:
        raise AssertionError(f"{late}: {run.output()[-4000:]}{logs(yarn)}") from None
    assert not run.has_ended, run.output()[-4000:] + logs(yarn)


def ended_well(run: Submission, yarn: LocalYarn, directory: str) -> dict[str, Any]:
    """Return what the program has told, which has ended as it should and left nothing."""
    status = run.wait()
    print(run.told())  # noqa: T201
    assert status == 0, logs(yarn)
    found: dict[str, Any] = told(f"{directory}/{TOLD}")
    print(found)  # noqa: T201
    assert found["dropped"] == 0
    assert found["fed"] == found["trained"]
    assert not nodes_left(yarn)
    return found


def leaves_nothing(yarn: LocalYarn, since: float) -> None:
    """Wait until no node is left, and tell how long it took."""
    wait_until(lambda: not nodes_left(yarn), "the end of the nodes", LEASE_S)
    print(f"no node is left after {time.monotonic() - since:.1f} s")  # noqa: T201


@pytest.mark.fault("F14")
@pytest.mark.parametrize("victim", ["worker:1", "worker:0", "ps:0"])
def test_a_training_goes_on_when_an_executor_is_killed(
    yarn: LocalYarn, submit: Submit, victim: str
):
    directory = f"{yarn.url}/job"
    run = submit(directory, victim)
    found = ended_well(run, yarn, directory)
    assert found["fed"] == EPOCHS * NUM_ROWS
    (failure,) = found["failures"]
    assert failure.startswith(f"{victim}: executor ")
    others = [each for each in found["workers"] if not each["attempt"]]
    assert [each["epochs"] for each in others] == [list(range(EPOCHS))] * len(others)
    assert len(others) == (2 if victim == "ps:0" else 1)


@pytest.mark.fault("F14")
@pytest.mark.parametrize("yarn", [EnforcingYarn], indirect=True)
def test_a_training_goes_on_when_a_container_takes_too_much_memory(yarn: LocalYarn, submit: Submit):
    directory = f"{yarn.url}/job"
    conf = {"spark.task.maxFailures": "1"}
    run = submit(directory, "memory", conf=conf)
    found = ended_well(run, yarn, directory)
    assert found["fed"] == EPOCHS * NUM_ROWS
    assert any("physical memory" in each for each in found["failures"]), found["failures"]


@pytest.mark.fault("F14")
def test_a_training_goes_on_when_a_node_manager_is_killed(
    yarn: LocalYarn, marks: Path, submit: Submit
):
    directory = f"{yarn.url}/job"
    run = submit(directory)
    wait_for(run, yarn, (marks / "epoch-1-1").exists, "epoch 1")
    (master,) = masters(yarn)
    of_master = _port_of(Path(f"/proc/{master}/environ").read_bytes())
    ports = [each[0] for each in yarn._yarn_ports.node_managers]
    yarn.kill_node_manager(1 - ports.index(of_master))
    found = ended_well(run, yarn, directory)
    assert found["fed"] == EPOCHS * NUM_ROWS


@pytest.mark.fault("F14")
def test_a_program_goes_on_in_its_epoch_when_the_application_master_is_killed(
    yarn: LocalYarn, marks: Path, submit: Submit
):
    directory = f"{yarn.url}/job"
    conf = {"spark.yarn.maxAppAttempts": "2"}
    run = submit(directory, mode="cluster", conf=conf)
    wait_for(run, yarn, (marks / "epoch-1-3").exists, "epoch 3")
    (master,) = masters(yarn)
    killed_s = time.monotonic()
    os.kill(master, signal.SIGKILL)
    wait_for(run, yarn, lambda: len(_attempts(yarn)) > 1, "the next attempt")
    found = ended_well(run, yarn, directory)
    print(f"{time.monotonic() - killed_s:.1f} s to the end")  # noqa: T201
    epochs = found["workers"][0]["epochs"]
    assert epochs == list(range(epochs[0], EPOCHS))
    assert 1 <= epochs[0] <= 3
    assert found["fed"] == len(epochs) * NUM_ROWS


@pytest.mark.fault("F14")
@pytest.mark.parametrize("lost", ["its NodeManager", "its host"])
def test_a_program_goes_on_when_the_application_master_loses(
    yarn: LocalYarn, marks: Path, submit: Submit, lost: str
):
    directory = f"{yarn.url}/job"
    conf = {"spark.yarn.maxAppAttempts": "2"}
    # A lost NodeManager is noticed after 10 s: meanwhile its containers go on.
    run = submit(directory, "", str(MANY_EPOCHS), mode="cluster", conf=conf)
    wait_for(run, yarn, (marks / "epoch-1-3").exists, "epoch 3")
    (master,) = masters(yarn)
    of_master = _port_of(Path(f"/proc/{master}/environ").read_bytes())
    ports = [each[0] for each in yarn._yarn_ports.node_managers]
    killed_s, killed_at = time.monotonic(), time.time()
    yarn.kill_node_manager(ports.index(of_master))
    if lost == "its host":
        kill(_containers_of(yarn, of_master))
    wait_for(run, yarn, lambda: len(_attempts(yarn)) > 1, "the next attempt")
    print(f"{time.monotonic() - killed_s:.1f} s to the next attempt")  # noqa: T201
    found = ended_well(run, yarn, directory)
    epochs = found["workers"][0]["epochs"]
    goes_on = (marks / f"epoch-0-{epochs[0]}").stat().st_mtime - killed_at
    print(f"{goes_on:.1f} s until epoch {epochs[0]} began, again or for the first time")  # noqa: T201
    assert epochs == list(range(epochs[0], MANY_EPOCHS))
    assert 1 <= epochs[0] < MANY_EPOCHS
    assert found["fed"] == len(epochs) * NUM_ROWS


@pytest.mark.fault("F14")
@pytest.mark.parametrize("moment", ["reserving", "epoch-1-1"])
def test_a_killed_application_leaves_nothing(
    yarn: LocalYarn, marks: Path, submit: Submit, moment: str
):
    run = submit(f"{yarn.url}/job")
    wait_for(run, yarn, (marks / moment).exists, moment)
    killed_s = time.monotonic()
    kill_application(yarn)
    status = run.wait(LEASE_S)
    print(f"spark-submit ended with {status} after {time.monotonic() - killed_s:.1f} s")  # noqa: T201
    print(run.told())  # noqa: T201
    assert status != 0
    leaves_nothing(yarn, killed_s)


@pytest.mark.fault("F14")
def test_the_nodes_of_a_killed_client_end(yarn: LocalYarn, marks: Path, submit: Submit):
    run = submit(f"{yarn.url}/job")
    wait_for(run, yarn, (marks / "epoch-1-1").exists, "epoch 1")
    assert nodes_left(yarn)
    killed_s = time.monotonic()
    run.kill()
    leaves_nothing(yarn, killed_s)
    wait_until(
        lambda: applications(yarn)[0]["finalStatus"] != "UNDEFINED", "YARN's notice", START_S
    )


def _port_of(environ: bytes) -> int:
    (port,) = [each[8:] for each in environ.split(b"\0") if each.startswith(b"NM_PORT=")]
    return int(port)


def _containers_of(yarn: LocalYarn, port: int) -> dict[int, str]:
    """Return the processes in the containers of a NodeManager, and what those have started."""
    found = {}
    for pid, line in below(yarn.directory).items():
        with contextlib.suppress(OSError):
            if b"NM_PORT=%d\0" % port in Path(f"/proc/{pid}/environ").read_bytes():
                found[pid] = line
    return found


def _attempts(yarn: LocalYarn) -> list[str]:
    return sorted({path.name.split("_")[3] for path in yarn.directory.glob("node-*/logs/*/cont*")})
