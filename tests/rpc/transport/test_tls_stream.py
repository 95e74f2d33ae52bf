"""security="tls": who is let in, what is refused and why, what a changed byte becomes."""

from __future__ import annotations

import dataclasses
import re
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator

import pytest

from rpc.auth.certificates import TlsCredentials, data_name
from rpc.auth.handshake import Credentials, Role
from rpc.client.connection import Connection, connect
from rpc.errors import AuthError, DeadlineExceeded, TransportError
from rpc.limits import Limits
from rpc.server.listener import Listener
from rpc.transport import tls_stream
from rpc.transport.tls_stream import MAX_HANDSHAKE_BYTES
from tests.support.rpc import SERVER, WAIT_S, WORKER, RawClient, bed, little_memory
from tests.support.tls import CLUSTER, Keys, first_word, raw_context
from tests.support.waiting import wait_until

pytestmark = pytest.mark.socket

KEYS = Keys()
SECRET = b"s" * 32
NONCE_BYTES = 32
OPENSSL = shutil.which("openssl") or ""


@pytest.fixture
def served() -> Iterator[Listener]:
    with listening(KEYS.good) as listener:
        yield listener


def listening(keys: TlsCredentials | None, *, unix: bool = False) -> Listener:
    credentials = Credentials(CLUSTER, SECRET, tls=keys)
    listener = Listener(
        lambda call: call.reply(b"done"),
        credentials,
        SERVER,
        limits=Limits(handshake_timeout_s=WAIT_S),
    )
    if unix:
        listener.bind_unix()
    else:
        listener.bind_tcp("127.0.0.1")
    listener.start()
    return listener


def come(listener: Listener, keys: TlsCredentials | None, timeout_s: float = WAIT_S) -> Connection:
    credentials = Credentials(CLUSTER, SECRET, tls=keys)
    return connect(listener.endpoint, WORKER, credentials, expect=Role.SERVER, timeout_s=timeout_s)


def address(listener: Listener) -> tuple[str, int]:
    return listener.endpoint.host, listener.endpoint.port


def test_both_sides_show_a_certificate_and_speak_tls_1_3(served, tmp_path, caplog):
    caplog.set_level("INFO", "rpc.client.connect")
    with come(served, KEYS.authority.data_client("worker")) as connection:
        assert connection.transport == "tcp+tls"
        assert connection.call(b"x", timeout_s=WAIT_S).meta == b"done"
    assert "is reached by TLS: it has no Unix socket" in caplog.text
    context = raw_context(KEYS.good, KEYS.good.ca_pem, tmp_path, ssl.TLSVersion.TLSv1_3)
    nonce = first_word(address(served), context)
    assert isinstance(nonce, bytes)
    assert len(nonce) == NONCE_BYTES


def test_neither_key_nor_secret_is_shown():
    shown = repr(Credentials(CLUSTER, SECRET, tls=KEYS.good))
    assert "PRIVATE" not in shown
    assert "ssss" not in shown


class TestWhoIsRefused:
    """By the server: the client is told TLS's reason, the log has ours."""

    @pytest.mark.attack("A29")
    @pytest.mark.parametrize(
        ("how", "logged"),
        [
            ("expired", "certificate has expired"),
            ("not yet valid", "certificate is not yet valid"),
            ("other authority", "certificate signature failure|unable to get local issuer"),
        ],
    )
    def test_a_client_with_a_wrong_certificate(self, served, caplog, how, logged):
        with pytest.raises(AuthError, match=r"the peer refuses this side's TLS: .*alert"):
            come(served, KEYS.wrong(how))
        wait_until(lambda: served.stats().refused == 1)
        assert_logged(caplog, f"the peer's certificate is refused: ({logged})")
        assert served.stats().open_connections == 0

    @pytest.mark.attack("A27")
    @pytest.mark.attack("A29")
    @pytest.mark.parametrize(
        ("how", "name"),
        [("other cluster", "cluster-b.data"), ("control plane", f"{CLUSTER}")],
    )
    def test_a_client_of_another_cluster_or_plane(self, served, caplog, tmp_path, how, name):
        """Signed by the same authority, so TLS itself has nothing against it."""
        keys = KEYS.wrong(how)
        context = raw_context(keys, keys.ca_pem, tmp_path, ssl.TLSVersion.TLSv1_3)
        assert first_word(address(served), context) == b""  # the end, no nonce
        wait_until(lambda: served.stats().refused == 1)
        assert_logged(caplog, f"is for {name}.tfos.invalid, not for {CLUSTER}.data.tfos.invalid")

    @pytest.mark.attack("A29")
    @pytest.mark.parametrize(
        ("with_certificate", "version", "logged"),
        [
            (False, ssl.TLSVersion.TLSv1_3, "the peer shows no certificate"),
            (True, ssl.TLSVersion.TLSv1_2, "the peer speaks no TLS 1.3"),
            (True, ssl.TLSVersion.TLSv1_1, "the peer speaks no TLS 1.3"),
        ],
    )
    def test_a_client_without_one_or_of_an_old_version(
        self, served, caplog, tmp_path, with_certificate, version, logged
    ):
        keys = KEYS.good if with_certificate else None
        answer = first_word(address(served), raw_context(keys, KEYS.good.ca_pem, tmp_path, version))
        assert isinstance(answer, ssl.SSLError)
        assert "ALERT" in (answer.reason or "")
        wait_until(lambda: served.stats().refused == 1)
        assert_logged(caplog, logged)

    @pytest.mark.slow
    @pytest.mark.attack("A29")
    @pytest.mark.skipif(not OPENSSL, reason="no openssl program")
    @pytest.mark.parametrize(
        ("how", "flags", "expected"),
        [
            ("good", [], "Verify return code: 0"),
            ("good", ["-tls1_2"], "alert protocol version"),
            ("no certificate", [], "alert certificate required"),
            ("expired", [], "alert certificate expired"),
        ],
    )
    def test_by_the_openssl_program(self, served, tmp_path, how, flags, expected):
        keys = KEYS.wrong(how) if how == "expired" else KEYS.good
        cert, key, ca = KEYS.write(keys, tmp_path)
        shown = [] if how == "no certificate" else ["-cert", str(cert), "-key", str(key)]
        host, port = address(served)
        found = subprocess.run(
            [
                OPENSSL,
                "s_client",
                "-ign_eof",
                "-connect",
                f"{host}:{port}",
                "-CAfile",
                str(ca),
                *shown,
                *flags,
            ],
            input=b"x" * 8,  # no proof: the server ends the connection
            capture_output=True,
            timeout=WAIT_S,
            check=False,
        )
        assert expected.encode() in found.stdout + found.stderr
        assert served.stats().open_connections == 0


class TestWhatAClientRefuses:
    @pytest.mark.attack("A29")
    @pytest.mark.parametrize(
        ("how", "reason"),
        [
            ("expired", "certificate has expired"),
            ("not yet valid", "certificate is not yet valid"),
            ("other authority", "certificate signature failure|unable to get local issuer"),
            ("other cluster", f"Hostname mismatch.*{CLUSTER}.data.tfos.invalid"),
            ("control plane", "unsuitable certificate purpose"),
            ("client only", "unsuitable certificate purpose"),
        ],
    )
    def test_a_server_with_a_wrong_certificate(self, caplog, how, reason):
        """It learns nothing: the proof of the secret comes after TLS."""
        with listening(KEYS.wrong(how)) as listener:
            with pytest.raises(
                AuthError, match=rf"127.0.0.1:\d+: the peer's certificate is refused: .*({reason})"
            ):
                come(listener, KEYS.good)
            wait_until(lambda: listener.stats().refused == 1)
            assert_logged(caplog, "the peer refuses this side's TLS: .*alert")

    @pytest.mark.attack("A29")
    @pytest.mark.parametrize(
        "keys",
        [
            dataclasses.replace(KEYS.good, key_pem=KEYS.wrong("expired").key_pem),
            dataclasses.replace(KEYS.good, cert_pem=b"no certificate"),
            dataclasses.replace(KEYS.good, ca_pem=b"no authority"),
            dataclasses.replace(KEYS.good, ca_pem=b"\xff"),
        ],
        ids=["another key", "no certificate", "no authority", "no text"],
    )
    def test_files_that_do_not_fit_are_refused_before_anybody_connects(self, keys):
        with pytest.raises(AuthError, match="TLS files cannot be used"):
            listening(keys)


class TestDowngrade:
    @pytest.mark.attack("A06")
    def test_a_client_without_tls_is_told_what_the_silence_means(self, served):
        with pytest.raises(DeadlineExceeded, match=r"waits for TLS \(security='tls'\)"):
            come(served, None, timeout_s=0.3)
        wait_until(lambda: served.stats().refused == 1)

    @pytest.mark.attack("A06")
    def test_a_client_with_tls_refuses_a_server_without(self):
        with listening(None) as listener:
            with pytest.raises(AuthError, match="does not speak TLS; give all processes"):
                come(listener, KEYS.good)
            wait_until(lambda: listener.stats().refused == 1)

    @pytest.mark.attack("A06")
    @pytest.mark.parametrize(("at_client", "at_server"), [(True, False), (False, True)])
    def test_on_one_host_both_must_want_the_same_too(self, at_client, at_server):
        """There TLS is not spoken; but a cluster has one setting."""
        with (
            listening(KEYS.good if at_server else None, unix=True) as listener,
            pytest.raises(AuthError, match=r"security='.*security='.*give all processes"),
        ):
            come(listener, KEYS.good if at_client else None)

    def test_one_host_needs_no_tls(self):
        with listening(KEYS.good, unix=True) as listener, come(listener, KEYS.good) as connection:
            assert connection.transport in ("shm", "unix")

    @pytest.mark.parametrize(
        ("cluster_id", "integrity", "text"),
        [
            (CLUSTER, "payload", "authenticate every byte twice"),
            ("a b", "header", "letters, digits"),
            ("x" * 64, "header", "letters, digits"),
            ("-x", "header", "letters, digits"),
        ],
    )
    def test_settings_without_sense_are_refused(self, cluster_id, integrity, text):
        with pytest.raises(ValueError, match=text):
            Credentials(cluster_id, SECRET, integrity, KEYS.good)


class TestStrangers:
    @pytest.mark.slow
    @pytest.mark.attack("A13")
    @pytest.mark.parametrize("hello", [b"", b"\x16\x03\x01\x02\x00\x01"])
    def test_unfinished_handshakes_cost_no_threads(self, hello):
        limits = Limits(max_handshakes=16, handshake_timeout_s=WAIT_S)
        with bed("tcp+tls", limits) as made:
            with made.connect(timeout_s=WAIT_S) as connection:
                connection.call(b"echo", timeout_s=WAIT_S)
                before = threading.active_count()
                strangers = [RawClient(made.address) for _ in range(60)]
                for stranger in strangers:
                    stranger.send(hello)
                wait_until(lambda: made.listener.stats().refused >= 44)
                assert made.listener.stats().open_handshakes <= 16
                assert threading.active_count() == before
                assert connection.call(b"echo", timeout_s=WAIT_S).meta == b"done"
            for stranger in strangers:
                stranger.sock.close()

    @pytest.mark.attack("A13")
    @pytest.mark.parametrize("hello", [b"", b"\x16\x03\x01\x02\x00\x01"])
    def test_unfinished_handshakes_end_in_time(self, hello):
        with bed("tcp+tls", Limits(handshake_timeout_s=0.1)) as made:
            with RawClient(made.address) as stranger:
                stranger.send(hello)
                assert stranger.until_closed() == b""
            wait_until(lambda: made.listener.stats().refused == 1)

    @pytest.mark.attack("A13")
    def test_one_that_ends_tls_holds_up_nobody(self, served, tmp_path):
        """As `openssl s_client` at its end: TLS's own goodbye, before any proof of the secret."""
        context = raw_context(KEYS.good, KEYS.good.ca_pem, tmp_path, ssl.TLSVersion.TLSv1_3)
        with (
            socket.create_connection(address(served), timeout=WAIT_S) as plain,
            context.wrap_socket(plain, server_hostname=data_name(CLUSTER)) as tls,
        ):
            assert len(tls.recv(64)) == NONCE_BYTES
            with pytest.raises(ssl.SSLEOFError):  # the listener ends TCP alone
                tls.unwrap()
            wait_until(lambda: served.stats().refused == 1)
        with come(served, KEYS.good) as connection:
            assert connection.call(b"x", timeout_s=WAIT_S).meta == b"done"

    @pytest.mark.attack("A08")
    def test_an_endless_handshake_is_refused_before_it_takes_memory(self, served, caplog):
        """A ClientHello that says it has 60 kB, in records as large as TLS allows."""
        hello = b"\x01" + (60_000).to_bytes(3, "big") + bytes(60_000)
        records = b"".join(
            b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part
            for part in (hello[at : at + 16384] for at in range(0, len(hello), 16384))
        )
        assert len(records) > MAX_HANDSHAKE_BYTES
        with little_memory(), RawClient(address(served)) as raw:
            raw.send(records)
            wait_until(lambda: served.stats().refused == 1)
        assert_logged(caplog, f"more than {MAX_HANDSHAKE_BYTES} bytes")


def test_a_connection_ends_before_its_keys_are_used_up(monkeypatch):
    monkeypatch.setattr(tls_stream, "MAX_RECORDS", 8)
    with bed("tcp+tls") as made, made.connect() as connection:
        connection.call(b"echo", [bytes(16384)], timeout_s=WAIT_S)
        with pytest.raises(TransportError, match="as many as its keys are good for"):
            connection.call(b"echo", [bytes(8 * 16384)], timeout_s=WAIT_S)
        with made.connect() as another:
            assert another.call(b"echo", [bytes(99)], timeout_s=WAIT_S).meta == b"done"


def assert_logged(caplog: pytest.LogCaptureFixture, pattern: str) -> None:
    wait_until(lambda: re.search(pattern, caplog.text) is not None, f"log has no {pattern!r}")
