"""What proves a user to a NameNode: token files, and the sentences where nothing valid is there."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from feeding.errors import NotAuthenticated
from feeding.filesystem.config import FileSystemConfig
from feeding.filesystem.hdfs.client import _key
from feeding.filesystem.hdfs.credentials import (
    asks_for_kerberos,
    connect_url,
    keytab_login,
    next_step,
    unconfigured,
)
from feeding.filesystem.hdfs.hadoop_conf import NameNode
from feeding.filesystem.hdfs.ticket_cache import KerberosTicket, newest_ticket_of
from feeding.filesystem.hdfs.token_file import DelegationToken, hdfs_tokens, hdfs_tokens_of
from feeding.filesystem.registry import filesystem_for

IDENTIFIER = bytes.fromhex(
    "000f616c6963654054464f532e5445535405616c696365008a01a21237bb488a01a236443f480102"
)
PASSWORD = bytes(20)
WRITTEN = b"".join(
    (
        b"HDTS\x00\x01\x0f127.0.0.1:13101",
        b"\x28" + IDENTIFIER + b"\x14" + PASSWORD,
        b"\x15HDFS_DELEGATION_TOKEN\x0f127.0.0.1:13101\x00",
    )
)
"""As Hadoop 3.5's DelegationTokenFetcher has written it, but for the password."""
MAX_DATE_MS = 1796206772040
ENTRY = bytes.fromhex("0001000954464f532e544553540005616c69636500000001") + bytes(43)
"""alice@TFOS.TEST, as kadmin.local has written it, but for the key."""
REMOVED = bytes.fromhex("fffffffc") + bytes(4)
KEYTAB = b"\x05\x02" + REMOVED + len(ENTRY).to_bytes(4, "big") + ENTRY
ALICE = bytes.fromhex("00000001000000010000000954464f532e5445535400000005616c696365")
GRANTING = bytes.fromhex(
    "00000002000000020000000954464f532e54455354000000066b72627467740000000954464f532e54455354"
)
NOTE = bytes.fromhex(
    "00000000000000030000000c582d4341434845434f4e463a000000156b7262355f6363616368655f636f6e665f6461"
    "74610000000a666173745f617661696c0000001a6b72627467742f54464f532e544553544054464f532e54455354"
)
SERVICE = ALICE[:8] + ALICE[8:].replace(b"alice", b"nn/nn")
END_S = 1795612598
NAMENODE = NameNode("hdfs://127.0.0.1:13101", "from the path", is_kerberos=True)
KERBEROS = b'"!\n\x08KERBEROS\x12\x06GSSAPI\x1a\x02nn"\tlocalhost'
SIMPLE = b"\n\n\x06SIMPLE\x12\x00"


def message(content: bytes) -> bytes:
    """Return it behind its length, as protobuf has it."""
    return bytes([0x80 | len(content) & 127, len(content) >> 7]) + content


def field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + message(content)


def protobuf(service: bytes) -> bytes:
    """Return the token in the format of `hdfs dtutil`."""
    token = field(1, IDENTIFIER) + field(2, PASSWORD)
    token += field(3, b"HDFS_DELEGATION_TOKEN") + field(4, service)
    return b"HDTS\x01" + message(field(1, field(1, b"alias") + field(2, token)))


def file_with(directory: Path, content: bytes) -> dict[str, str]:
    path = directory / "tokens"
    path.write_bytes(content)
    return {"HADOOP_TOKEN_FILE_LOCATION": str(path)}


def until(max_date_ms: float) -> bytes:
    """Return the file with a token that ends at another time."""
    at = WRITTEN.index(MAX_DATE_MS.to_bytes(6, "big"))
    return WRITTEN[:at] + int(max_date_ms).to_bytes(6, "big") + WRITTEN[at + 6 :]


def ticket(server: bytes, end_s: int, key_type: bytes = b"\0\x12") -> bytes:
    """Return an entry of a ticket cache as kinit has written it, but for key and ticket."""
    key = key_type + (32).to_bytes(4, "big") + bytes(32)
    times = END_S.to_bytes(4, "big") * 2 + end_s.to_bytes(4, "big") + bytes(4)
    address = bytes.fromhex("00000001 0002 00000004 7f000001")
    tickets = b"\0\0\0\x03abc\0\0\0\x02de"
    return ALICE + server + key + times + bytes(5) + address + bytes(4) + tickets


CACHE_HEAD = bytes.fromhex("0504000c00010008") + bytes(8) + ALICE


@pytest.mark.parametrize("content", [WRITTEN, protobuf(b"127.0.0.1:13101")], ids=["own", "proto"])
def test_a_token_file_says_for_whom_and_until_when(tmp_path, content):
    (tmp_path / "tokens").write_bytes(content)
    token = DelegationToken("127.0.0.1:13101", "alice@TFOS.TEST", MAX_DATE_MS)
    assert hdfs_tokens(tmp_path / "tokens") == [token]


def test_tokens_of_long_names_are_read():
    service = b"ha-hdfs:" + b"n" * 300
    (token,) = hdfs_tokens_of(protobuf(service))
    assert token.service == service.decode()


def test_other_secrets_in_a_token_file_are_left_out():
    other = WRITTEN[6:-1].replace(b"\x15HDFS_DELEGATION_TOKEN", b"\x15HIVE_DELEGATION_TOKEN")
    both = b"HDTS\x00\x02" + other + WRITTEN[6:-1] + b"\x00"
    assert hdfs_tokens_of(both) == hdfs_tokens_of(WRITTEN)
    secret = field(2, field(1, b"alias") + field(3, b"secret"))
    token = protobuf(b"127.0.0.1:13101")[7:]
    assert hdfs_tokens_of(b"HDTS\x01" + message(secret + token)) == hdfs_tokens_of(WRITTEN)


def test_no_cut_of_a_token_file_is_taken_for_one():
    for content in (WRITTEN, protobuf(b"127.0.0.1:13101")):
        for length in range(len(content) - 1):
            with pytest.raises(ValueError, match=r"cut short|HDTS"):
                hdfs_tokens_of(content[:length])


def test_a_name_in_the_path_becomes_the_address_that_the_token_has(tmp_path):
    environ = file_with(tmp_path, WRITTEN)
    by_name = NameNode("hdfs://nn.example:13101", "from the path", is_kerberos=True)
    assert connect_url(by_name, ["::1", "127.0.0.1"], environ) == "hdfs://127.0.0.1:13101"
    assert connect_url(by_name, ["10.0.0.1"], environ) == by_name.url
    assert connect_url(by_name, ["127.0.0.1"], {}) == by_name.url
    own = file_with(tmp_path, protobuf(b"nn.example:13101"))  # where use_ip is false
    assert connect_url(by_name, ["127.0.0.1"], own) == by_name.url
    (tmp_path / "tokens").unlink()
    assert connect_url(by_name, ["127.0.0.1"], own) == by_name.url


def test_another_ticket_or_token_file_is_another_users_connection(monkeypatch):
    keys = {_key(NAMENODE)}
    for name in ("HADOOP_TOKEN_FILE_LOCATION", "KRB5CCNAME", "KRB5_CLIENT_KTNAME"):
        monkeypatch.setenv(name, "/x")
        keys.add(_key(NAMENODE))
    assert len(keys) == 4


@pytest.mark.fault("F62")
def test_the_next_step_says_what_is_wrong_with_the_token_file(tmp_path):
    path = tmp_path / "tokens"
    environ = {"HADOOP_TOKEN_FILE_LOCATION": str(path)}
    assert f"the token file {path} cannot be read (No such file" in next_step(NAMENODE, environ)
    file_with(tmp_path, b"PK")
    assert f"{path} is no token file (it does not begin with HDTS)" in next_step(NAMENODE, environ)
    file_with(tmp_path, protobuf(b"10.0.0.1:8020"))
    assert "has tokens for 10.0.0.1:8020 alone" in next_step(NAMENODE, environ)
    file_with(tmp_path, until(0xFFFF_FFFF_FFFF))
    said = next_step(NAMENODE, environ)
    assert f"of alice@TFOS.TEST in {path} was not renewed in time or was cancelled" in said
    assert "hdfs fetchdt" in said
    file_with(tmp_path, until(time.time() * 1000 - 5000))
    assert f"in {path} ended at 20" in next_step(NAMENODE, environ)
    file_with(tmp_path, until(time.time() * 1000 + 30_000))
    assert f"in {path} ends at 20" in next_step(NAMENODE, environ)
    ended = until(time.time() * 1000 - 5000)[6:-1]
    for tokens in (ended + WRITTEN[6:-1], WRITTEN[6:-1] + ended):
        file_with(tmp_path, b"HDTS\x00\x02" + tokens + b"\x00")
        assert "was not renewed in time or was cancelled" in next_step(NAMENODE, environ)


def test_the_token_of_a_name_service_is_found(tmp_path):
    service = NameNode("hdfs://ns1", "from the path", is_kerberos=True)
    environ = file_with(tmp_path, protobuf(b"ha-hdfs:ns1"))
    assert "alice@TFOS.TEST" in next_step(service, environ)


@pytest.mark.fault("F62")
def test_the_next_step_without_a_token_file_is_a_ticket():
    said = next_step(NAMENODE, {})
    assert all(word in said for word in ("kinit", "KRB5_CLIENT_KTNAME", "HADOOP_TOKEN_FILE"))


def test_a_ticket_cache_says_whose_ticket_is_in_it_and_until_when():
    granting, service = ticket(GRANTING, END_S), ticket(SERVICE, END_S + 9)
    note = ticket(NOTE, END_S + 99)
    expected = KerberosTicket("alice@TFOS.TEST", END_S)
    assert newest_ticket_of(CACHE_HEAD + note + granting + service + note) == expected
    assert newest_ticket_of(CACHE_HEAD + service).end_s == END_S + 9
    assert newest_ticket_of(CACHE_HEAD + ticket(GRANTING, END_S - 9) + granting) == expected
    older = ticket(GRANTING, END_S, b"\0\x12\0\x12")
    assert newest_ticket_of(b"\x05\x03" + ALICE + older) == expected
    for content, words in ((CACHE_HEAD + note, "it has no ticket"), (b"HDTS", "neither 0503 nor")):
        with pytest.raises(ValueError, match=words):
            newest_ticket_of(content)


def test_no_cut_of_a_ticket_cache_is_taken_for_one():
    whole = CACHE_HEAD + ticket(GRANTING, END_S)
    for length in range(len(whole)):
        with pytest.raises(ValueError, match=r"cut short|neither|no ticket"):
            newest_ticket_of(whole[:length])


@pytest.mark.fault("F62")
def test_the_next_step_says_what_is_wrong_with_the_ticket(tmp_path):
    path = tmp_path / "ticket"
    environ = {"KRB5CCNAME": f"FILE:{path}"}
    said = next_step(NAMENODE, environ)
    assert said.startswith(f"the ticket cache {path} cannot be read (No such file")
    assert "kinit" in said
    path.write_bytes(b"PK")
    assert next_step(NAMENODE, environ).startswith(f"{path} is no ticket cache (it begins")
    now_s = int(time.time())
    path.write_bytes(CACHE_HEAD + ticket(GRANTING, now_s - 1))
    for named in (f"FILE:{path}", str(path)):
        said = next_step(NAMENODE, {"KRB5CCNAME": named})
        assert said.startswith(f"the ticket of alice@TFOS.TEST in {path} ended at 20")
    path.write_bytes(CACHE_HEAD + ticket(GRANTING, now_s + 3600))
    assert ", did not prove it; get a ticket" in next_step(NAMENODE, environ)
    assert next_step(NAMENODE, {"KRB5CCNAME": "KCM:0"}).startswith("get a ticket")


def test_a_keytab_goes_before_tokens_that_end(tmp_path):
    path = tmp_path / "alice.keytab"
    path.write_bytes(KEYTAB)
    expected = ("alice@TFOS.TEST", str(path))
    tokens = file_with(tmp_path, WRITTEN)
    assert keytab_login({"KRB5_CLIENT_KTNAME": f"FILE:{path}"} | tokens) == expected
    assert keytab_login(tokens) is None


@pytest.mark.fault("F62")
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read (No such file or directory)"),
        (b"", "is no keytab (it does not begin with 0502)"),
        (KEYTAB[:10], "is no keytab (it is cut short or empty"),
        (KEYTAB[:40], "is no keytab (it has 40 bytes, its first entry ends at"),
        (KEYTAB, "of alice@TFOS.TEST did not prove it; try kinit -kt"),
    ],
)
def test_the_next_step_says_what_is_wrong_with_the_keytab(tmp_path, content, words):
    path = tmp_path / "alice.keytab"
    if content is not None:
        path.write_bytes(content)
    environ = {"KRB5_CLIENT_KTNAME": str(path)}
    assert (keytab_login(environ) is None) == (content != KEYTAB)
    said = next_step(NAMENODE, environ)
    assert words in said
    assert f"{path}" in said


def test_a_configuration_without_kerberos_is_named():
    assert "HADOOP_CONF_DIR is not set" in unconfigured(NAMENODE, {})
    assert "/etc/hadoop does not set it" in unconfigured(
        NAMENODE, {"HADOOP_CONF_DIR": "/etc/hadoop"}
    )


@contextmanager
def namenode(answer: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """Serve one connection with an answer; yield the port, and what was heard."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)

        def serve() -> None:
            stream, _ = server.accept()
            with stream:
                heard.append(stream.recv(100))
                stream.sendall(len(answer).to_bytes(4, "big") + answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1], heard
        thread.join(10)


@pytest.mark.socket
@pytest.mark.parametrize(
    ("answer", "asks"),
    [(KERBEROS, True), (KERBEROS + SIMPLE, False), (SIMPLE, False), (b"", False)],
)
def test_a_namenode_is_asked_how_users_prove_themselves(answer, asks):
    with namenode(answer) as (port, heard):
        assert asks_for_kerberos("127.0.0.1", port) is asks
    assert heard[0].startswith(b"hrpc\x09\x00\xdf")


@pytest.mark.socket
@pytest.mark.fault("F62")
def test_a_namenode_that_asks_for_what_is_not_configured_is_an_error_at_once(monkeypatch):
    monkeypatch.delenv("HADOOP_CONF_DIR", raising=False)
    monkeypatch.delenv("HADOOP_HOME", raising=False)
    with namenode(KERBEROS) as (port, _):
        url = f"hdfs://127.0.0.1:{port}"
        with pytest.raises(NotAuthenticated, match="asks for Kerberos, and HADOOP_CONF_DIR is not"):
            filesystem_for(url, FileSystemConfig(patience_s=1)).status(f"{url}/x")


@pytest.mark.socket
def test_a_namenode_that_is_away_asks_for_nothing():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert not asks_for_kerberos("127.0.0.1", port)
