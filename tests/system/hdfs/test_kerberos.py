"""A real HDFS that asks for Kerberos: tickets, keytabs and tokens, valid ones and others."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from feeding.errors import NotAuthenticated, StorageUnavailable
from feeding.filesystem.config import FileSystemConfig
from feeding.filesystem.interface import FileSystem
from feeding.filesystem.registry import filesystem_for
from ps.checkpoint.choice import latest, read_manifest
from ps.checkpoint.restore import verify
from ps.manifest.manifest import Hyper
from scripts.local_hdfs.cluster import LocalHdfs
from tests.support.ps_cluster import ADD, cluster, filled, make_manifest
from tests.support.secure_hdfs import cancel_token, fetch_token
from tests.support.spark_submit import EXAMPLES, separate, submit
from tests.support.waiting import wait_until
from tfos.config import Checkpoints
from tfos.files.checkpoint_storage import Storages
from tfos.worker.saver import ChiefSaver

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

DATA = secrets.token_bytes(1 << 20) * 20
"""Two blocks."""
SECONDS = 10.0
"""Until a sentence; a request that is repeated takes 150."""
HURRIED = FileSystemConfig(call_timeout_s=5, patience_s=5)


class User:
    """Whose ticket and token are in a directory, and which of both the process shows."""

    def __init__(self, hdfs: LocalHdfs, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert hdfs.kdc is not None
        self.hdfs = hdfs
        self.kdc = hdfs.kdc
        self.token = directory / "token"
        self.ticket = directory / "ticket"
        self._patch = monkeypatch
        self.fs: FileSystem = filesystem_for(hdfs.url)
        for name in ("HADOOP_TOKEN_FILE_LOCATION", "KRB5_CLIENT_KTNAME", "HADOOP_USER_NAME"):
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        monkeypatch.setenv("KRB5_CONFIG", str(self.kdc.krb5_conf))
        monkeypatch.setenv("HADOOP_CONF_DIR", str(hdfs.conf_dir))
        monkeypatch.setenv("KRB5CCNAME", str(directory / "none"))
        self.fs = filesystem_for(hdfs.url)

    def shows(self, variable: str, path: Path) -> None:
        self._patch.setenv(variable, str(path))

    def gets_ticket(self, name: str = "alice", *, life_s: int = 36_000) -> None:
        cache = self.ticket.with_name(f"{name}-{life_s}")
        self.kdc.kinit(name, cache, life_s=life_s)
        self.shows("KRB5CCNAME", cache)

    def gets_token(self) -> None:
        self.kdc.kinit("alice", self.ticket)
        fetch_token(self.hdfs, self.ticket, self.token)
        self.shows("HADOOP_TOKEN_FILE_LOCATION", self.token)

    def loses_token(self) -> None:
        """End it on the NameNode, and with a restart all connections that it has opened."""
        cancel_token(self.hdfs, self.ticket, self.token)
        self.restarts_namenode()

    def restarts_namenode(self, **settings: str) -> None:
        self.hdfs.kill_namenode()
        self.hdfs.start_namenode(settings=settings)

    def refused(self, url: str = "") -> str:
        """Return the sentence for who lists the root directory, which comes within seconds."""
        url = url or self.hdfs.url
        began_s = time.monotonic()
        with pytest.raises(NotAuthenticated) as refused:
            filesystem_for(url).entries(f"{url}/")
        assert time.monotonic() - began_s < SECONDS
        return str(refused.value)


@pytest.fixture
def user(secure_hdfs: LocalHdfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> User:
    return User(secure_hdfs, tmp_path, monkeypatch)


@pytest.fixture
def directory(secure_hdfs: LocalHdfs) -> str:
    return f"{secure_hdfs.url}/{secrets.token_hex(4)}"


def used(fs: FileSystem, directory: str) -> None:
    """Write, list, read, rename and delete."""
    fs.write(f"{directory}/file", DATA)
    assert [entry.name for entry in fs.entries(directory)] == ["file"]
    with fs.open(f"{directory}/file") as file:
        assert file.read_range(0, len(DATA)) == DATA
    fs.rename(f"{directory}/file", f"{directory}/moved")
    assert fs.delete(f"{directory}/moved")


def by_ticket(user: User) -> None:
    user.gets_ticket()


def by_keytab(user: User) -> None:
    user.shows("KRB5CCNAME", user.ticket)
    user.shows("KRB5_CLIENT_KTNAME", user.kdc.keytab("alice"))


def by_token(user: User) -> None:
    user.gets_token()


@pytest.mark.parametrize("proves", [by_ticket, by_keytab, by_token])
def test_hdfs_is_used_by_who_proves_to_be_its_user(user, directory, proves: Callable):
    proves(user)
    used(user.fs, directory)


@pytest.mark.fault("F62")
def test_another_ticket_is_another_user_at_once(user, directory):
    user.gets_ticket("alice")
    user.fs.write(f"{directory}/file", b"x")
    user.gets_ticket("bob")
    with pytest.raises(PermissionError, match="user=bob, access=WRITE"):
        user.fs.write(f"{directory}/file", b"y")
    user.gets_ticket("alice")
    user.fs.write(f"{directory}/file", b"z")


@pytest.mark.fault("F62")
def test_no_ticket_an_old_one_and_no_configuration_are_sentences(user, monkeypatch):
    assert re.search(r"cannot list hdfs://.*No Kerberos cred.*kinit", user.refused())
    user.gets_ticket(life_s=1)
    passes(1.5)
    said = user.refused()
    assert re.search(r"cannot list hdfs://.*: (Ticket expired|The referenced context has ex)", said)
    assert re.search(r"; the ticket of alice@TFOS.TEST in \S+ ended at 20.*kinit", said)
    monkeypatch.delenv("HADOOP_CONF_DIR")
    assert "asks for Kerberos, and HADOOP_CONF_DIR is not set" in user.refused()


def passes(seconds: float) -> None:
    """Wait until what lives for less has ended."""
    end_s = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() > end_s, "its end", seconds + 1)


@pytest.mark.fault("F62")
def test_a_kdc_that_is_away_is_awaited(user):
    user.gets_ticket()
    user.hdfs.kill_kdc()
    try:
        with pytest.raises(StorageUnavailable, match="Cannot contact any KDC"):
            filesystem_for(user.hdfs.url, HURRIED).entries(f"{user.hdfs.url}/")
    finally:
        user.hdfs.start_kdc()
    assert user.fs.exists(f"{user.hdfs.url}/")


@pytest.mark.fault("F62")
def test_a_token_of_an_address_serves_a_path_with_the_name(user, directory):
    user.gets_token()
    assert b"127.0.0.1:" in user.token.read_bytes()
    by_name = directory.replace("127.0.0.1", "localhost")
    used(filesystem_for(by_name), by_name)


@pytest.mark.fault("F62")
def test_a_cancelled_token_is_a_sentence_and_a_new_one_is_taken(user, directory):
    user.gets_token()
    user.fs.write(f"{directory}/file", b"x")
    user.loses_token()
    said = user.refused()
    assert f"the token of alice@TFOS.TEST in {user.token} was not renewed in time or" in said
    assert "hdfs fetchdt" in said
    user.gets_token()
    assert user.fs.exists(f"{directory}/file")


@pytest.mark.fault("F62")
def test_a_keytab_serves_where_a_token_has_ended(user, directory):
    user.gets_token()
    user.loses_token()
    by_keytab(user)
    used(user.fs, directory)


@pytest.mark.fault("F62")
def test_a_token_that_nobody_renewed_and_one_at_its_end_are_sentences(user):
    life = "dfs.namenode.delegation.token"
    try:
        user.restarts_namenode(**{f"{life}.renew-interval": "1000"})
        user.gets_token()
        passes(1.0)
        assert re.search("Token +has expired.* was not renewed in time", user.refused())
        user.restarts_namenode(**{f"{life}.max-lifetime": "30000"})
        user.gets_token()
        assert re.search(
            rf"the token of alice@TFOS.TEST in {user.token} ends at 20", user.refused()
        )
    finally:
        user.restarts_namenode()


@pytest.mark.fault("F62")
def test_saves_without_a_valid_token_are_warnings_and_go_on_with_a_new_one(user, directory, caplog):
    user.gets_token()
    manifest = make_manifest(20_000, rule=ADD)
    ones = filled(manifest, 1.0)
    plan = Checkpoints(directory=directory, every_s=0.2, keep=2)
    storages = Storages(config=FileSystemConfig(call_timeout_s=5, patience_s=30))
    with cluster(num_servers=2, open_storage=storages) as bed:
        saver = ChiefSaver(plan, bed.client, storages)
        saver.start()
        client = bed.client()
        client.seed(manifest, filled(manifest))
        client.attach()
        storage = storages(directory)

        def saved_after(step: int) -> bool:
            client.push(ones, hyper=Hyper(1.0), rows=1)
            return (latest(storage) or 0) > step

        try:
            wait_until(lambda: saved_after(0), "the first save", 60.0)
            user.loses_token()
            wait_until(lambda: _pushed(client, ones) and "not saved: " in caplog.text, "a warning")
            user.gets_token()
            seen = latest(storage)
            assert seen is not None
            wait_until(lambda: saved_after(seen), "a save with the new token", 60.0)
        finally:
            saver.close()
        verify(storage, read_manifest(storage))
    (first, *_) = [line for line in caplog.messages if "not saved: " in line]
    assert "was not renewed in time or was cancelled" in first


def _pushed(client, ones) -> bool:
    client.push(ones, hyper=Hyper(1.0), rows=1)
    return True


@pytest.mark.spark
def test_a_training_reads_saves_and_exports_with_a_token_alone(
    user, directory, tmp_path, monkeypatch
):
    user.gets_token()
    java = (
        f"{os.environ.get('JAVA_TOOL_OPTIONS', '')} -Djava.security.krb5.conf={user.kdc.krb5_conf}"
    )
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", java)
    model = f"{directory}/model"
    flags = ["--model_dir", model, "--export_dir", f"{directory}/export", "--cluster_size", "3"]
    program = EXAMPLES / "mnist_tf_ds.py"
    work = tmp_path / "work"
    work.mkdir()
    output = submit(program, *flags, master=separate(3), cwd=work, timeout_s=380)
    accuracy = re.search(r"test accuracy: (\d\.\d+)", output)
    assert accuracy, output[-8000:]
    assert float(accuracy[1]) > 0.8
    storage = Storages()(f"{model}/checkpoints")
    verify(storage, read_manifest(storage))
    names = [entry.name for entry in user.fs.entries(f"{directory}/export")]
    assert names == ["model.keras"]
    assert user.fs.glob(f"{model}/logs/**/*tfevents*")
    assert list(work.iterdir()) == []
