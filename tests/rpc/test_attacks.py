"""Attacks on the data plane: strangers, recordings, forgeries, bombs, and what must not leak."""

from __future__ import annotations

import base64
import hmac
import logging
import socket
import time
from functools import partial
from http import HTTPStatus

import pytest

from rpc.auth.handshake import ClientHandshake, Credentials, ServerHandshake, Session
from rpc.client.connection import Connection, connect
from rpc.endpoint import Endpoint
from rpc.errors import AuthError, IntegrityError, LimitExceeded, ProtocolError
from rpc.http_page import Readers
from rpc.limits import Limits
from rpc.server.listener import Listener
from rpc.transport.stream import SocketStream
from rpc.wire import frame
from rpc.wire.frame import FrameKind, Opener, Sealer
from tests.support.rpc import (
    SERVER,
    WAIT_S,
    WORKER,
    Bed,
    RawClient,
    bed,
    error_of,
    little_memory,
    num_descriptors,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.socket

MiB = 1024 * 1024
NONCE_BYTES = 32


def still_serves(made: Bed) -> bool:
    with made.connect() as connection:
        return bytes(connection.call(b"echo", [b"alive"], timeout_s=WAIT_S).payload) == b"alive"


@pytest.mark.attack("A01")
class TestWithoutToken:
    def test_the_defaults_are_those_promised(self):
        assert Limits().handshake_timeout_s <= 5.0

    @pytest.mark.parametrize("begin", [b"", b"TFRH", b"TFRH\x01\x00\x20\x00half a body"])
    def test_silence_is_closed_at_the_deadline(self, begin, caplog):
        with bed(limits=Limits(handshake_timeout_s=1.5)) as made:
            began = time.monotonic()
            with RawClient(made.address) as stranger:
                stranger.send(begin)
                received = stranger.until_closed()
            assert time.monotonic() - began >= 1.5
            assert len(received) == NONCE_BYTES
            assert still_serves(made)
        assert "no proof within 1.5 s" in caplog.text
        assert "127.0.0.1:" in caplog.text

    def test_a_slow_drip_gets_no_more_time(self):
        with bed(limits=Limits(handshake_timeout_s=0.3)) as made, RawClient(made.address) as drip:
            drip.receive(NONCE_BYTES)
            began = time.monotonic()
            drip.sock.settimeout(0.02)
            message = ClientHandshake(WORKER, made.credentials).feed(bytes(32))
            closed = False
            for at in range(len(message) - 1):  # the last byte would show that the proof is wrong
                drip.send(message[at : at + 1])
                try:
                    closed = drip.sock.recv(1) == b""
                except TimeoutError:
                    continue
                except ConnectionResetError:
                    closed = True
                break
            assert closed
            assert time.monotonic() - began < WAIT_S

    @pytest.mark.parametrize(
        "garbage", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", bytes(1 << 20), b"\xff" * 4096]
    )
    def test_garbage_is_closed_at_once_and_learns_nothing(self, garbage):
        with bed() as made, RawClient(made.address) as stranger:
            stranger.send(garbage)
            assert len(stranger.until_closed()) <= NONCE_BYTES
            assert made.handled == []
            assert still_serves(made)

    def test_two_connections_share_no_greeting(self):
        with bed() as made, RawClient(made.address) as one, RawClient(made.address) as two:
            assert one.receive(NONCE_BYTES) != two.receive(NONCE_BYTES)


@pytest.mark.attack("A02")
@pytest.mark.parametrize("secret", [bytes(32), b"x" * 16, b"y" * 1024])
def test_a_wrong_token_gets_no_answer_and_a_useful_error(secret):
    with bed() as made:
        wrong = Credentials(made.credentials.cluster_id, secret)
        with RawClient(made.address) as raw:
            handshake = ClientHandshake(WORKER, wrong)
            raw.send(handshake.feed(raw.receive(NONCE_BYTES)))
            assert raw.until_closed() == b""
        with pytest.raises(AuthError) as caught:
            connect(made.endpoint, WORKER, wrong)
        assert str(caught.value).endswith(
            f"token does not match cluster {made.credentials.short_id}"
            " (is an old cluster still running on this port?)"
        )
        assert made.handled == []
        assert still_serves(made)


@pytest.mark.attack("A02")
def test_a_token_of_10_mb_is_closed_from_its_head():
    with bed() as made, RawClient(made.address) as raw:
        before = made.listener.stats()
        raw.send(b"TFRH\x01\x00\xff\xff" + bytes(10 * MiB))
        assert len(raw.until_closed()) <= NONCE_BYTES
        wait_until(lambda: made.listener.stats().refused == before.refused + 1)


@pytest.mark.attack("A02")
def test_an_impostor_server_is_refused_by_the_client():
    """A server without the secret must not get a single request."""
    with bed() as impostor:
        ours = Credentials.generate()
        with pytest.raises(AuthError):
            connect(impostor.endpoint, WORKER, ours)
        assert impostor.handled == []


@pytest.mark.attack("A03")
class TestReplay:
    def test_a_recorded_session_opens_nothing(self):
        """What a listener on the wire recorded is refused: the server's nonce is another one."""
        with bed() as made, RawClient(made.address) as honest:
            handshake = ClientHandshake(WORKER, made.credentials)
            proof = handshake.feed(honest.receive(NONCE_BYTES))
            honest.send(proof)
            while handshake.session is None:
                handshake.feed(honest.receive(handshake.wanted))
            request = Sealer(handshake.session.send_key).seal(FrameKind.REQUEST, 1, b"ignore", 0)
            honest.send(request)
            assert len(honest.receive(48)) == 48
            assert made.handled == [b"ignore"]
            with RawClient(made.address) as replay:
                replay.send(proof + request)
                assert len(replay.until_closed()) == NONCE_BYTES
            assert made.handled == [b"ignore"]

    @pytest.mark.parametrize("order", [(0, 0), (1,), (0, 2), (1, 0)])
    def test_a_frame_out_of_its_place_closes(self, order, caplog):
        with bed() as made, RawClient(made.address) as raw:
            raw.authenticate(made.credentials)
            frames = [raw.sealed(b"ignore", request_id=index) for index in range(3)]
            raw.send(b"".join(frames[index] for index in order))
            raw.until_closed()
            wait_until(lambda: made.listener.stats().errors == 1)
            assert len(made.handled) == (1 if order[0] == 0 else 0)
            assert still_serves(made)
        assert "IntegrityError" in caplog.text

    def test_frames_of_another_connection_close(self):
        with bed() as made, RawClient(made.address) as one, RawClient(made.address) as two:
            one.authenticate(made.credentials)
            two.authenticate(made.credentials)
            two.send(one.sealed(b"ignore"))
            assert two.until_closed() == b""
            assert made.handled == []


@pytest.mark.attack("A04")
def test_each_changed_byte_of_a_header_or_meta_closes():
    with bed() as made:
        for at in range(48 + len(b"ignore")):
            with RawClient(made.address) as raw:
                frame = bytearray(raw.authenticate(made.credentials).sealed(b"ignore"))
                frame[at] ^= 0x10
                raw.send(bytes(frame))
                # A longer meta is waited for; what it waits for comes, and is wrong.
                raw.send(bytes(65536))
                assert raw.until_closed() == b""
        assert made.handled == []
        assert still_serves(made)


@pytest.mark.attack("A08")
class TestLengthBombs:
    @pytest.mark.parametrize("payload_bytes", [2**31, 2**32, 2**63, 2**64 - 1])
    def test_of_an_authenticated_client(self, payload_bytes):
        limits = Limits(max_payload_bytes=2**30)
        with bed(limits=limits) as made:
            for _ in range(3):
                still_serves(made)
            with little_memory():
                for _ in range(20):
                    with RawClient(made.address) as raw:
                        raw.send(raw.authenticate(made.credentials).sealed(b"echo", payload_bytes))
                        assert raw.until_closed() == b""
            assert made.handled == [b"echo"] * 3
            assert still_serves(made)

    @pytest.mark.parametrize("meta_len", [65537, 2**31, 2**32 - 1])
    def test_of_a_meta(self, meta_len):
        with bed() as made:
            still_serves(made)
            with little_memory():
                for _ in range(20):
                    with RawClient(made.address) as raw:
                        frame = bytearray(raw.authenticate(made.credentials).sealed(b"echo"))
                        frame[16:20] = meta_len.to_bytes(4, "little")
                        raw.send(bytes(frame))
                        assert raw.until_closed() == b""

    def test_a_legal_huge_announcement_takes_no_memory(self):
        """Payload is read into the handler's buffers only; a handler that drops it needs none."""
        with bed() as made:
            still_serves(made)
            with little_memory(), RawClient(made.address) as raw:
                raw.send(raw.authenticate(made.credentials).sealed(b"ignore", 2**33))
                assert len(raw.receive(48)) == 48

    @pytest.mark.fault("F51")
    def test_of_an_authenticated_server(self):
        """The reply's length is believed only up to `max_reply_bytes` or the caller's buffers."""
        for payload_bytes in (2**21, 2**31, 2**63, 2**64 - 1):
            for into in (None, [memoryview(bytearray(10))]):
                left, right = socket.socketpair()
                session = Session(SERVER, bytes(32), bytes(32))
                connection = Connection(SocketStream(left, "server"), session)
                with little_memory():
                    pending = connection.start(b"pull", into=into, timeout_s=WAIT_S)
                    right.sendall(Sealer(bytes(32)).seal(FrameKind.REPLY, 1, b"", payload_bytes))
                    error = error_of(partial(pending.result, WAIT_S))
                assert isinstance(error, ProtocolError if into else LimitExceeded)
                assert connection.closed
                right.close()

    def test_many_small_parts_do_not_add_up(self):
        left, right = socket.socketpair()
        connection = Connection(
            SocketStream(left, "server"),
            Session(SERVER, bytes(32), bytes(32)),
            Limits(max_reply_bytes=1000),
        )
        pending = connection.start(b"pull", timeout_s=WAIT_S)
        sealer = Sealer(bytes(32))
        for left_over in range(10, -1, -1):
            head = sealer.seal(FrameKind.REPLY, 1, b"", 100, more=left_over > 0)
            right.sendall(head + bytes(100))
        with pytest.raises(LimitExceeded, match="max_reply_bytes=1000"):
            pending.result(WAIT_S)
        right.close()


@pytest.mark.attack("A14")
@pytest.mark.parametrize("order", [b"stop", b"shutdown", b"save", b"restore", b"ignore"])
def test_orders_without_a_proof_reach_no_handler(order):
    """Neither before a handshake, nor behind a wrong proof, nor behind half of one."""
    with bed() as made:
        strange = Credentials(made.credentials.cluster_id, b"s" * 32)
        frame = Sealer(bytes(32)).seal(FrameKind.REQUEST, 1, order, 0)
        for begin in ("nothing", "proof", "half"):
            with RawClient(made.address) as raw:
                proof = ClientHandshake(WORKER, strange).feed(raw.receive(NONCE_BYTES))
                raw.send({"nothing": b"", "proof": proof, "half": proof[:40]}[begin] + frame)
                if begin != "half":
                    assert raw.until_closed() == b""
        assert made.handled == []
        assert still_serves(made)


@pytest.mark.attack("A17")
def test_the_secret_is_in_no_log_error_or_repr(caplog):
    caplog.set_level(logging.DEBUG)
    shown: list[str] = []
    with bed() as made:
        secret = made.credentials.secret
        wrong = Credentials(made.credentials.cluster_id, b"wrong-wrong-wrong-wrong-wrong-32")
        shown.append(str(error_of(lambda: connect(made.endpoint, WORKER, wrong))))
        with made.connect() as connection, RawClient(made.address) as raw:
            for meta in (b"raise", b"fail", b"fail_midway"):
                error = error_of(partial(connection.call, meta, [b"x"], timeout_s=WAIT_S))
                shown.append(repr(error) + str(error))
            raw.authenticate(made.credentials)
            raw.send(bytes(100))
            raw.until_closed()
            objects = (made.credentials, connection, raw.session, made.listener)
            shown += [repr(one) for one in objects]
            shown += [repr(vars(one)) for one in (connection, made.listener)]
            session_keys = [raw.session.send_key, raw.session.receive_key] if raw.session else []
    text = "".join(shown) + caplog.text
    assert "IntegrityError" in text
    for key in (secret, b"wrong-wrong-wrong-wrong-wrong-32", *session_keys):
        for form in (repr(key)[2:-1], key.hex(), base64.b64encode(key).decode()):
            assert form not in text


@pytest.mark.attack("A27")
def test_nodes_of_an_old_cluster_are_refused_on_a_reused_port():
    old = Credentials.generate()
    with Listener(lambda call: call.reply(b"old"), old, SERVER) as first:
        first.bind_tcp("127.0.0.1")
        first.start()
        endpoint = first.endpoint
        with connect(endpoint, WORKER, old) as connection:
            assert connection.call(b"", timeout_s=WAIT_S).meta == b"old"
    new = Credentials.generate()
    called: list[bytes] = []
    with Listener(lambda call: called.append(call.meta), new, SERVER) as second:
        second.bind_tcp(endpoint.host, endpoint.port)
        second.start()
        with pytest.raises(AuthError, match=rf"cluster {old.short_id} \(is an old cluster"):
            connect(Endpoint(endpoint.host, endpoint.port), WORKER, old)
        same_secret = Credentials(old.cluster_id, new.secret)
        with pytest.raises(AuthError):
            connect(Endpoint(endpoint.host, endpoint.port), WORKER, same_secret)
        assert called == []
        assert second.stats().open_connections == 0


@pytest.mark.attack("A32")
def test_every_refusal_looks_the_same_to_the_client():
    texts = set()
    with bed() as made:
        name, secret = made.credentials.cluster_id, made.credentials.secret
        flipped = bytes([secret[0] ^ 1]) + secret[1:]
        for wrong in (bytes(32), flipped, secret[:-1] + b"?", secret + b"?"):
            stranger = Credentials(name, wrong)
            texts.add(str(error_of(partial(connect, made.endpoint, WORKER, stranger))))
    assert len(texts) == 1


@pytest.mark.attack("A32")
@pytest.mark.parametrize("same", [True, False])
def test_every_proof_is_judged_by_a_comparison_in_constant_time_and_by_nothing_else(
    monkeypatch: pytest.MonkeyPatch, same: bool
):
    """Whatever the comparison says is believed: a wrong proof passes, or a right one does not."""
    seen: list[tuple[bytes, bytes]] = []

    def judged(one: bytes, other: bytes) -> bool:
        seen.append((one, other))
        return same

    monkeypatch.setattr(hmac, "compare_digest", judged)
    monkeypatch.setattr(frame, "compare_digest", judged)
    key, token = bytes(32), b"b" * 20
    secret = b"s" * 31
    given = Credentials("cluster", secret + (b"?" if same else b"s"))
    known = Credentials("cluster", secret + b"s")
    page = b"GET /metrics HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer "
    client, server = ClientHandshake(WORKER, given), ServerHandshake(SERVER, known)
    message, head_bytes = client.feed(server.greeting), server.wanted
    server.feed(message[:head_bytes])
    header = Sealer(b"k" * 32 if same else key).seal(FrameKind.REQUEST, 1, b"", 0)
    accepted = []
    for attempt in (
        lambda: server.feed(message[head_bytes:]),
        lambda: Opener(key, Limits()).open(header, b""),
    ):
        try:
            attempt()
        except (AuthError, IntegrityError):
            accepted.append(False)
        else:
            accepted.append(True)
    status, _ = Readers(token).answer(page + (b"a" * 20 if same else token))
    accepted.append(status == HTTPStatus.OK)
    assert accepted == [same] * 3
    assert len(seen) == 3
    assert all((one == other) is not same for one, other in seen)


def test_attacks_leave_nothing_behind():
    with bed() as made:
        still_serves(made)
        wait_until(lambda: made.listener.stats().open_connections == 0)
        before = num_descriptors()
        for _ in range(30):
            with RawClient(made.address) as raw:
                raw.send(b"x" * 100)
                raw.until_closed()
            with RawClient(made.address) as raw:
                raw.authenticate(made.credentials)
                raw.send(b"x" * 100)
                raw.until_closed()
        wait_until(lambda: made.listener.stats().open_connections == 0)
        wait_until(lambda: num_descriptors() <= before, "descriptors as before")
