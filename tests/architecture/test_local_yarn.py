"""The settings of the local YARN, and the file that says which processes it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.local_hdfs import cluster
from scripts.local_hdfs.cluster import LocalHdfs, State
from scripts.local_hdfs.daemon import Daemon
from scripts.local_hdfs.errors import LocalHdfsError, MissingTool
from scripts.local_hdfs.kdc import Kdc
from scripts.local_hdfs.sites import Ports
from scripts.local_hdfs.yarn import LocalYarn
from scripts.local_hdfs.yarn_sites import YarnPorts, node_manager_options, yarn_site

HDFS_PORTS = Ports.of([1, 2, 3, 4, 5])
YARN_PORTS = YarnPorts.of(list(range(10, 23)))


def test_ports_are_dealt_out_once_each():
    assert YARN_PORTS.resource_manager == (10, 11, 12, 13, 14)
    assert YARN_PORTS.node_managers == ((15, 16, 17, 18), (19, 20, 21, 22))
    assert YARN_PORTS.web == "http://127.0.0.1:14"


def test_ports_that_make_no_whole_node_are_refused():
    with pytest.raises(ValueError, match="shorter"):
        YarnPorts.of(list(range(10, 22)))


@pytest.mark.parametrize("yarn", [None, YARN_PORTS])
def test_state_file_is_read_as_it_was_written(yarn: YarnPorts | None):
    state = State(HDFS_PORTS, (Daemon("namenode", 7, 8),), yarn)
    assert State.from_json(state.to_json()) == state


def test_hdfs_alone_is_refused_as_a_yarn(tmp_path: Path):
    (tmp_path / "state.json").write_text(State(HDFS_PORTS, ()).to_json())
    with pytest.raises(LocalHdfsError, match="holds an HDFS without YARN"):
        LocalYarn.found(tmp_path)


@pytest.fixture
def jars(monkeypatch: pytest.MonkeyPatch):
    """Hadoop, which is not needed where no process starts."""
    monkeypatch.setattr(cluster, "class_path", lambda: "")


@pytest.mark.usefixtures("jars")
def test_a_directory_with_files_is_refused_because_its_end_removes_them(tmp_path: Path):
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    with pytest.raises(LocalHdfsError, match=r"is not empty.* another --directory"):
        LocalHdfs.started(tmp_path)
    assert list(tmp_path.iterdir()) == [notes]


@pytest.mark.usefixtures("jars")
def test_a_start_without_kerberos_tools_leaves_no_directory(tmp_path: Path, monkeypatch):
    """What stayed would be in the way of the next start, and `down` would not find it."""

    def create(*_: object) -> None:
        raise MissingTool("Kerberos needs krb5kdc")

    monkeypatch.setattr(Kdc, "create", create)
    with pytest.raises(MissingTool):
        LocalHdfs.started(tmp_path / "run", kerberos=True)
    assert not list(tmp_path.iterdir())


def test_all_listen_on_loopback_and_node_managers_share_nothing():
    options = [set(node_manager_options(YARN_PORTS, Path("/d"), index)) for index in range(2)]
    assert not options[0] & options[1]
    addresses = [text for option in options for text in option if ".address=" in text]
    assert len(addresses) == 8
    assert all("=127.0.0.1:" in address for address in addresses)
    site = yarn_site(YARN_PORTS, 4096)
    assert all(site[key].startswith("127.0.0.1:") for key in site if key.endswith(".address"))
    assert site["yarn.nodemanager.resource.memory-mb"] == "4096"


def test_an_application_master_has_hadoops_own_time_to_unpack_an_environment():
    site = yarn_site(YARN_PORTS, 4096)
    assert site["yarn.am.liveness-monitor.expiry-interval-ms"] == "600000"


def test_a_disk_that_is_nearly_full_takes_containers():
    """Hadoop's default takes none above 90 %, however many GB that leaves."""
    site = yarn_site(YARN_PORTS, 4096)
    checker = "yarn.nodemanager.disk-health-checker"
    assert site[f"{checker}.enable"] == "false"
    assert site[f"{checker}.max-disk-utilization-per-disk-percentage"] == "100.0"
