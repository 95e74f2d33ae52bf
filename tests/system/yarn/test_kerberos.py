"""A training on a YARN and an HDFS that ask for Kerberos, in both modes: containers have tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ps.checkpoint.reader import steps_on_disk
from scripts.local_hdfs.errors import MissingTool
from scripts.local_hdfs.kdc import REALM
from scripts.local_hdfs.yarn import LocalYarn
from tests.support.on_yarn import logs, nodes_left, submitted, told
from tests.support.programs.trains_on_yarn import EPOCHS, NUM_ROWS, TOLD
from tests.support.spark_submit import ROOT
from tfos.files.checkpoint_storage import Storages

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
PROGRAM = ROOT / "tests" / "support" / "programs" / "trains_on_yarn.py"


@pytest.fixture(scope="module")
def yarn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalYarn]:
    directory = tmp_path_factory.mktemp("secure-yarn") / "run"
    try:
        running = LocalYarn.started(directory, num_datanodes=1, with_parent=True, kerberos=True)
    except MissingTool as missing:
        pytest.skip(str(missing))
    with running:
        yield running


@pytest.mark.parametrize("mode", ["client", "cluster"])
@pytest.mark.parametrize("has_keytab", [False, True], ids=["ticket", "keytab"])
def test_a_training_reaches_hdfs_from_its_containers(
    yarn: LocalYarn, tmp_path: Path, monkeypatch, mode: str, has_keytab: bool
):
    assert yarn.kdc is not None
    yarn.kdc.kinit("alice", tmp_path / "ticket")
    monkeypatch.setenv("KRB5_CONFIG", str(yarn.kdc.krb5_conf))
    monkeypatch.setenv("KRB5CCNAME", str(tmp_path / "ticket"))
    monkeypatch.setenv("HADOOP_CONF_DIR", str(yarn.conf_dir))
    conf = {}
    if has_keytab:
        keytab = str(yarn.kdc.keytab("alice"))
        conf = {"spark.kerberos.principal": f"alice@{REALM}", "spark.kerberos.keytab": keytab}
    directory = f"{yarn.url}/{mode}-{has_keytab}"
    submitted(yarn, PROGRAM, directory, mode=mode, executors=2, conf=conf)
    found = told(f"{directory}/{TOLD}")
    assert (found["fed"], found["trained"], found["dropped"]) == (EPOCHS * NUM_ROWS,) * 2 + (0,)
    assert steps_on_disk(Storages()(f"{directory}/saves"))
    assert not nodes_left(yarn)
    assert "NotAuthenticated" not in logs(yarn)
