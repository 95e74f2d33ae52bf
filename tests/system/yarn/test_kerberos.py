"""A training on a YARN and an HDFS that ask for Kerberos, in both modes: tokens, or a keytab."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hdfs_native import Client

from ps.checkpoint.choice import steps_on_disk
from scripts.local_hdfs.kdc import REALM, Kdc
from scripts.local_hdfs.yarn import LocalYarn
from tests.support.on_yarn import local_yarn, logs, nodes_left, submitted, told
from tests.support.programs.trains_on_yarn import EPOCHS, NUM_ROWS, TOLD
from tests.support.spark_submit import ROOT
from tfos.files.checkpoint_storage import Storages

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
PROGRAM = ROOT / "tests" / "support" / "programs" / "trains_on_yarn.py"


@pytest.fixture(scope="module")
def yarn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalYarn]:
    """One for all tests."""
    directory = tmp_path_factory.mktemp("secure-yarn") / "run"
    with local_yarn(directory, LocalYarn, kerberos=True) as running:
        yield running


@pytest.fixture
def as_alice(yarn: LocalYarn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kdc:
    """The realm in which this process has alice's ticket."""
    assert yarn.kdc is not None
    yarn.kdc.kinit("alice", tmp_path / "ticket")
    monkeypatch.setenv("KRB5_CONFIG", str(yarn.kdc.krb5_conf))
    monkeypatch.setenv("KRB5CCNAME", str(tmp_path / "ticket"))
    monkeypatch.setenv("HADOOP_CONF_DIR", str(yarn.conf_dir))
    return yarn.kdc


@pytest.mark.parametrize("mode", ["client", "cluster"])
@pytest.mark.parametrize("has_keytab", [False, True], ids=["ticket", "keytab"])
def test_a_training_reaches_hdfs_from_its_containers(
    yarn: LocalYarn, as_alice: Kdc, mode: str, has_keytab: bool
):
    directory = f"{yarn.url}/{mode}-{has_keytab}"
    conf = of_keytab(as_alice) if has_keytab else {}
    submitted(yarn, PROGRAM, directory, mode=mode, executors=2, conf=conf)
    trained_and_saved(yarn, directory, by="alice")


def test_a_keytab_in_containers_goes_before_their_tokens(
    yarn: LocalYarn, as_alice: Kdc, tmp_path: Path
):
    """Tokens are of alice, who submits; the keytab is bob's: owners of files tell what was used."""
    directory, hdfs = f"{yarn.url}/bobs", Client(yarn.url)
    hdfs.mkdirs("/bobs/saves", 0o755, create_parent=True)
    hdfs.set_owner("/bobs/saves", "bob")
    keytab = shutil.copy(as_alice.keytab("bob"), tmp_path / "nodes.keytab")
    conf = {
        **of_keytab(as_alice),
        "spark.files": str(keytab),
        "spark.executorEnv.KRB5_CLIENT_KTNAME": "nodes.keytab",
        "spark.executorEnv.KRB5_CONFIG": str(as_alice.krb5_conf),
    }
    submitted(yarn, PROGRAM, directory, mode="cluster", executors=2, conf=conf)
    trained_and_saved(yarn, directory, by="bob")


def of_keytab(kdc: Kdc) -> dict[str, str]:
    """Return what submits as alice by her keytab."""
    keytab = str(kdc.keytab("alice"))
    return {"spark.kerberos.principal": f"alice@{REALM}", "spark.kerberos.keytab": keytab}


def trained_and_saved(yarn: LocalYarn, directory: str, *, by: str) -> None:
    """Assert that all rows were trained, and that nodes' files are of that user."""
    found = told(f"{directory}/{TOLD}")
    assert (found["fed"], found["trained"], found["dropped"]) == (EPOCHS * NUM_ROWS,) * 2 + (0,)
    saves = f"{directory}/saves"
    assert steps_on_disk(Storages()(saves))
    entries = Client(yarn.url).list_status(saves.removeprefix(yarn.url), recursive=True)
    assert {each.owner for each in entries} == {by}
    assert not nodes_left(yarn)
    assert "NotAuthenticated" not in logs(yarn)
