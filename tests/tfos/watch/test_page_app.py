"""The job's page: what its routes answer, and to whom they do not."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from starlette.testclient import TestClient

from tests.support.waiting import wait_until
from tests.support.watched_job import WatchedJob
from tfos.cluster import TFCluster
from tfos.control.coordinator import LAST_LOOK_S
from tfos.errors import SettingsError
from tfos.watch import page_server
from tfos.watch.doors import PageRequest
from tfos.watch.page_access import PageAccess
from tfos.watch.page_app import _PAGE, make_app
from tfos.watch.page_server import MOST_CONNECTIONS, REQUEST_S, JobPage

TOKEN = "right-token"
ACCESS = PageAccess(frozenset(["proxy.example"]), token=TOKEN)
HEADER = {"X-Tfos-Token": TOKEN}
OWN = "http://127.0.0.1:80"


@pytest.fixture
def client(bed: WatchedJob) -> Iterator[TestClient]:
    app = make_app(bed.job, ACCESS, lambda: b"tfos_cluster_running 1\n", lambda: None)
    with contextlib.closing(TestClient(app, base_url=OWN)) as made:
        yield made


def test_the_page_its_state_logs_and_metrics_are_served_to_who_has_the_token(bed, client):
    bed.log("worker:1", "one", "two")
    asked = {"token": TOKEN}
    assert client.get("/", params=asked).text == _PAGE
    state = client.get("/state.json", params=asked).json()
    assert state["name"] == "digits"
    newer = client.get("/state.json", params={**asked, "after": state["curve_at_s"]}).json()
    assert newer["curve"] == []
    log = client.get("/log.json", params={**asked, "node": "worker:1", "after": "x"}).json()
    assert log["lines"] == ["one", "two"]
    assert client.get("/log.json", params={**asked, "node": "worker:7"}).status_code == 404
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    assert client.get("/metrics", headers=bearer).text == "tfos_cluster_running 1\n"


def test_it_stops_and_tells_what_happened(bed, client):
    said = client.post("/stop", headers=HEADER).json()
    assert said["is_done"]
    assert bed.job.snapshot()["stop"]


@pytest.mark.attack("A22")
@pytest.mark.parametrize("path", ["/", "/state.json", "/log.json?node=ps:0", "/metrics", "/none"])
@pytest.mark.parametrize("token", ["", "wrong", TOKEN[:-1], "ü", TOKEN + "x"])
def test_without_the_token_nothing_is_told(client, path, token):
    answer = client.get(path, params={"token": token})
    assert answer.status_code == 401
    assert "digits" not in answer.text


@pytest.mark.attack("A22")
def test_a_query_of_many_fields_has_no_token(client):
    many = "&".join(f"a{n}=1" for n in range(9))
    assert client.get(f"/state.json?{many}").status_code == 401
    assert client.get(f"/state.json?{many}", headers=HEADER).status_code == 200


@pytest.mark.attack("A22")
@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "[", "a@127.0.0.1"])
def test_a_page_that_is_asked_for_by_another_host_name_is_refused(client, host):
    asked = {"token": TOKEN}
    refused = client.get("/state.json", params=asked, headers={"Host": host})
    assert refused.status_code == 403
    assert "cluster.page_url()" in refused.text, "the page may listen on no loopback"
    for known in ("localhost:80", "[::1]:80", "PROXY.example"):
        assert client.get("/state.json", params=asked, headers={"Host": known}).status_code == 200


@pytest.mark.attack("A22")
@pytest.mark.parametrize("action", ["/save", "/stop"])
def test_another_site_can_neither_save_nor_stop(bed, client, action):
    by_url = client.post(action, params={"token": TOKEN})
    by_form = client.post(action, data={"token": TOKEN})
    by_get = client.get(action, params={"token": TOKEN})
    assert (by_url.status_code, by_form.status_code, by_get.status_code) == (401, 401, 405)
    others = (
        "http://evil.example",
        "null",
        "http://[",
        "http://127.0.0.1:9999",
        "http://localhost",
    )
    for origin in others:
        forged = client.post(action, headers={**HEADER, "Origin": origin})
        assert forged.status_code == 403
    assert bed.coordinator.read(lambda state: (state.saves_asked, state.training_stop)) == (0, "")


def test_the_page_itself_may_act_also_through_a_known_proxy(client):
    for origin in ("http://127.0.0.1", "https://proxy.example"):
        said = client.post("/stop", headers={**HEADER, "Host": "127.0.0.1", "Origin": origin})
        assert said.status_code == 200


@pytest.mark.attack("A22")
def test_a_large_request_is_refused_before_it_is_read(client):
    assert client.post("/stop", headers=HEADER, content=b"x" * 5000).status_code == 413


@pytest.mark.attack("A22")
@pytest.mark.parametrize("path", ["/", "/state.json", "/none"])
def test_every_answer_forbids_frames_referrers_and_foreign_scripts(client, path):
    for token in (TOKEN, "wrong"):
        headers = client.get(path, params={"token": token}).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in headers


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href")]
        self.handlers += [name for name, _ in attrs if name.startswith("on") or name == "style"]


@pytest.mark.attack("A22")
@pytest.mark.attack("A24")
def test_texts_of_nodes_never_become_markup_and_nothing_is_loaded_from_elsewhere():
    page = _Links()
    page.feed(_PAGE)
    assert (page.found, page.handlers) == ([], [])
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "//cdn"):
        assert way not in _PAGE
    asked = re.findall(r"(?:ask|fetch|act)\([`\"'](/?[a-z.]*)", _PAGE)
    assert asked
    assert not [path for path in asked if path.startswith("/")]  # relative: proxies add a path


@pytest.fixture
def served(bed: WatchedJob) -> Iterator[JobPage]:
    page = JobPage(bed.job, lambda: b"")
    page.start("127.0.0.1", 0)
    yield page
    page.close()


def _address(page: JobPage) -> tuple[str, int]:
    match = re.match(r"http://([^:/]+):(\d+)/\?token=", page.url)
    assert match
    return match[1], int(match[2])


def _ask(address: tuple[str, int], request: str) -> bytes:
    with socket.create_connection(address, timeout=10.0) as sock:
        sock.sendall(request.encode())
        parts = []
        while part := sock.recv(65536):
            parts.append(part)
        return b"".join(parts)


def _is_closed(sock: socket.socket) -> bool:
    """Wait for the end of a connection, up to its timeout."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


@pytest.mark.socket
def test_a_real_server_answers_one_request_per_connection(served):
    query = served.url.partition("?")[2]
    request = f"GET /state.json?{query} HTTP/1.1\r\nHost: localhost\r\n\r\n"
    answer = _ask(_address(served), request)  # until the server closes
    assert answer.startswith(b"HTTP/1.1 200")
    assert b'"phase":"RUNNING"' in answer


@pytest.mark.socket
@pytest.mark.attack("A13", "A22")
def test_silent_connections_keep_nobody_out(served):
    address, query = _address(served), served.url.partition("?")[2]
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(address, timeout=10.0))
            for _ in range(MOST_CONNECTIONS)
        ]
        try:
            answer = _ask(address, f"GET /state.json?{query} HTTP/1.1\r\nHost: localhost\r\n\r\n")
        except ConnectionResetError:
            answer = b"refused"
        assert answer.startswith(b"HTTP/1.1 200")
        assert _is_closed(silent[0])  # the oldest gave way
        silent[1].sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert silent[1].recv(12) == b"HTTP/1.1 401"


@pytest.mark.socket
@pytest.mark.attack("A13")
def test_a_connection_whose_request_is_answered_never_gives_way(bed, monkeypatch):
    monkeypatch.setattr(page_server, "MOST_CONNECTIONS", 2)
    asked, may_answer = threading.Semaphore(0), threading.Event()

    def slow_metrics() -> bytes:
        asked.release()
        may_answer.wait(10.0)
        return b"tfos_cluster_running 1\n"

    page = JobPage(bed.job, slow_metrics)
    page.start("127.0.0.1", 0)
    try:
        address, query = _address(page), page.url.partition("?")[2]
        with contextlib.ExitStack() as stack:
            busy = [stack.enter_context(socket.create_connection(address, 10.0)) for _ in range(2)]
            for each in busy:
                each.sendall(f"GET /metrics?{query} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            for _ in busy:
                assert asked.acquire(timeout=10.0)
            extra = stack.enter_context(socket.create_connection(address, timeout=REQUEST_S / 2))
            assert _is_closed(extra)
            may_answer.set()
            assert [each.recv(12) for each in busy] == [b"HTTP/1.1 200"] * 2
    finally:
        may_answer.set()
        page.close()


@pytest.mark.socket
@pytest.mark.attack("A22")
def test_connections_without_a_request_are_short(served, monkeypatch):
    monkeypatch.setattr(page_server, "REQUEST_S", 0.2)
    address = _address(served)
    idle = [socket.create_connection(address, timeout=10.0) for _ in range(4)]
    try:
        for sock in idle:
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
    finally:
        for sock in idle:
            sock.close()
    request = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert _ask(address, request).startswith(b"HTTP/1.1 401")


@pytest.mark.socket
@pytest.mark.attack("A22")
def test_an_endless_head_is_refused(served):
    head = "GET / HTTP/1.1\r\nHost: localhost\r\nX: " + "x" * 40_000
    with contextlib.suppress(ConnectionResetError):  # closed with bytes that it has not read
        assert _ask(_address(served), head).startswith(b"HTTP/1.1 400")
    request = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert _ask(_address(served), request).startswith(b"HTTP/1.1 401")  # others are answered


@pytest.mark.socket
@pytest.mark.parametrize("looks_again", [False, True])
def test_the_last_look_of_a_page_is_awaited_from_the_end_of_the_job_on(
    served, monkeypatch: pytest.MonkeyPatch, looks_again: bool
):
    now = [1000.0]
    waited: list[float] = []
    monkeypatch.setattr(page_server, "time", SimpleNamespace(monotonic=lambda: now[0]))
    served._note_look()
    served.note_end()
    now[0] += 2.0  # of a log's last look
    if looks_again:
        served._note_look()
    monkeypatch.setattr(served._looked, "wait", waited.append)
    served.close()
    assert waited == [LAST_LOOK_S - 2.0]
    assert served._looked.is_set() is looks_again


@pytest.mark.socket
def test_a_page_ends_with_its_job(served):
    address = _address(served)
    served.close()
    served.close()
    wait_until(lambda: all(each.name != "tfos-page" for each in threading.enumerate()))
    with pytest.raises(OSError):  # noqa: PT011 - which one is the kernel's
        socket.create_connection(address, timeout=1.0).close()


@pytest.mark.socket
def test_who_looks_sees_how_the_job_ended(served, bed):
    query = served.url.partition("?")[2]
    request = f"GET /state.json?{query} HTTP/1.1\r\nHost: localhost\r\n\r\n"
    address = _address(served)
    assert b'"is_failed":false' in _ask(address, request)
    bed.fail("worker:0", error_type="ValueError", message="broken row")
    end = threading.Thread(target=served.close)
    end.start()
    assert b"broken row" in _ask(address, request)
    end.join()


@pytest.mark.socket
def test_errors_of_the_page_are_logged_and_a_users_own_uvicorn_keeps_its_level(bed, caplog):
    caplog.set_level(logging.INFO, "uvicorn.error")

    def broken() -> bytes:
        raise RuntimeError("no metrics")

    page = JobPage(bed.job, broken)
    page.start("127.0.0.1", 0)
    try:
        address = _address(page)
        host = f"HTTP/1.1\r\nHost: {address[0]}\r\n\r\n"
        assert b" 400 " in _ask(address, "\r\n\x00\r\n\r\n")
        assert b" 500 " in _ask(address, f"GET /metrics?{page.url.partition('?')[2]} {host}")
        wait_until(lambda: "no metrics" in caplog.text)
    finally:
        page.close()
    assert "Invalid HTTP request" not in caplog.text
    assert logging.getLogger("uvicorn.error").level == logging.INFO


@pytest.mark.socket
def test_a_port_in_use_is_a_sentence(bed):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(SettingsError, match=f"page cannot be served: 127.0.0.1:{port} is held"):
            JobPage(bed.job, lambda: b"").start("127.0.0.1", port)


@pytest.mark.socket
def test_an_address_that_is_none_of_this_host_is_named_and_no_port_is_blamed(bed):
    says = r"^page_host='192.0.2.1', page_port=0: .*192.0.2.1:0: .*; name an address of this host"
    with pytest.raises(SettingsError, match=says):
        JobPage(bed.job, lambda: b"").start("192.0.2.1", 0)


@pytest.mark.parametrize("host", [None, 7, b"127.0.0.1"])
def test_a_host_that_is_none_is_refused(host):
    with pytest.raises(SettingsError, match=rf"page_host must be a str .*, got {host!r}"):
        PageRequest(0, host=host).check()


@pytest.mark.parametrize("port", [-1, 65536, "8080", True, 1.5])
def test_a_port_that_is_none_is_refused(port):
    with pytest.raises(SettingsError, match=r"page_port must be in 0..65535"):
        PageRequest(port).check()


def test_host_names_are_a_list():
    with pytest.raises(SettingsError, match="page_hosts must be host names"):
        TFCluster.reserve(None, 3, page_port=0, page_hosts="proxy.example")


def test_a_missing_extra_names_the_command_that_installs_it(monkeypatch):
    monkeypatch.delitem(__import__("sys").modules, "tfos.watch.page_server")
    monkeypatch.delattr("tfos.watch.page_server")
    monkeypatch.setitem(__import__("sys").modules, "uvicorn", None)
    with pytest.raises(SettingsError, match=r"pip install 'tfos\[page\]'"):
        PageRequest(0).check()
