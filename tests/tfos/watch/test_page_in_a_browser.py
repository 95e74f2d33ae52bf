"""The job's page as a person sees and uses it, in headless Chromium, also behind a proxy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from rpc.limits import DEFAULT_LIMITS
from rpc.transport.listen import bound_tcp
from tests.support.browser import Browser
from tests.support.cluster_states import node_id, report_to
from tests.support.watched_job import WatchedJob, server_stats
from tfos.control import messages
from tfos.watch.page_server import JobPage

pytestmark = [pytest.mark.long, pytest.mark.process]

HOSTILE = "<img src=x onerror='document.title=1'><script>document.title=2</script>"
UNDER = "/user/ana/proxy/4041"
LOGIN = "login=ana"


@pytest.fixture
def page(bed: WatchedJob) -> Iterator[JobPage]:
    made = JobPage(bed.job, lambda: b"")
    made.start("127.0.0.1", 0)
    yield made
    made.close()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as made:
        yield made


def trains(bed: WatchedJob) -> None:
    for seq in (1, 2, 3):
        bed.tick(2.0)
        bed.beat("ps:0", seq, stats=server_stats())
        for name in ("worker:0", "worker:1"):
            numbers = {"steps": 10.0 * seq, "rows": 640.0 * seq, "loss": 1.0 / seq}
            bed.beat(name, seq, progress=numbers)


def test_what_happens_is_seen_and_texts_of_nodes_stay_texts(bed, page, browser):
    trains(bed)
    evaluated = messages.Evaluated(1200, {"val_loss": 0.25}, 0.5)
    bed.coordinator.read(lambda state: state.epochs.note(evaluated))
    bed.log("worker:1", "epoch 1", HOSTILE)
    browser.open(page.url)
    rows = browser.wait("document.querySelectorAll('#nodes tr').length", lambda count: count == 4)
    assert rows == 4
    assert browser.value("document.title").startswith("digits")
    assert browser.wait("document.getElementById('loss').getAttribute('d')").startswith("M")
    assert "5 kB" in browser.value("document.getElementById('servers').innerText")
    assert "1,200\t0.25" in browser.value("document.getElementById('evaluations').innerText")
    later = messages.Evaluated(1300, {"val_loss": 0.125}, 0.5)
    bed.coordinator.read(lambda state: state.epochs.note(later))
    shown = browser.wait(
        "document.getElementById('evaluations').innerText", lambda text: "1,300" in text
    )
    assert shown.splitlines()[1:] == ["1,300\t0.125\t500 ms", "1,200\t0.25\t500 ms"]
    browser.click("#nodes tr:nth-child(4) button")
    log = browser.wait("document.getElementById('log').textContent")
    assert log == f"epoch 1\n{HOSTILE}"

    bed.fail("worker:0", error_type="ValueError", message=HOSTILE, traceback="in train: row 7")
    browser.wait("document.getElementById('phase').innerText", lambda text: text == "FAILED")
    told = browser.value("document.getElementById('failures').innerText")
    assert "worker:0 on host-a: ValueError" in told
    assert HOSTILE in told
    assert "in train: row 7" in told
    assert browser.value("document.images.length") == 0
    assert browser.value("document.title").startswith("digits")
    assert browser.complaints == []


def test_save_and_stop_do_what_they_say(bed, page, browser):
    browser.open(page.url)
    browser.wait("!document.getElementById('save').disabled")
    chief = threading.Thread(target=bed.answer_save, kwargs={"path": "/runs/7/step-8"})
    chief.start()
    browser.click("#save")
    said = browser.wait("document.getElementById('said').innerText", lambda text: "…" not in text)
    chief.join()
    assert "/runs/7/step-8" in said
    browser.click("#stop")
    browser.wait(
        "document.getElementById('phase').innerText", lambda text: text == "RUNNING, stops"
    )
    assert browser.dialogs == ["Stop the training at the end of its epoch?"]
    assert bed.coordinator.read(lambda state: state.training_stop)
    assert browser.complaints == []


def test_a_stop_that_the_person_takes_back_is_none(bed, page, tmp_path):
    with Browser(tmp_path / "profile", accept=False) as browser:
        browser.open(page.url)
        browser.wait("!document.getElementById('stop').disabled")
        browser.click("#stop")
        browser.wait("1", lambda _: bool(browser.dialogs))
        assert not bed.coordinator.read(lambda state: state.training_stop)


@pytest.fixture
def methods(request: pytest.FixtureRequest) -> list[str]:
    """What the proxy forwards."""
    found: list[str] = getattr(request, "param", ["GET", "POST"])
    return found


@pytest.fixture
def proxied(page: JobPage, methods: list[str], browser: Browser) -> Iterator[str]:
    """A path on another port, as Jupyter's and YARN's proxies serve a page; yields the URL.

    As Jupyter's does, it knows by a cookie who has logged in, and sends all others to its login.
    """
    root, _, query = page.url.partition("/?")

    async def forward(request: Request) -> Response:
        path = request.url.path.removeprefix(UNDER)
        if path == "/enter":
            cookie = {"set-cookie": f"{LOGIN}; Path=/; HttpOnly; SameSite=Lax"}
            return HTMLResponse("<link rel=icon href=data:,>", headers=cookie)
        if request.headers.get("cookie") != LOGIN:
            return HTMLResponse("<!DOCTYPE html><title>log in</title>")
        keep = {k: v for k, v in request.headers.items() if k not in ("connection", "host")}
        async with httpx2.AsyncClient(trust_env=False) as client:
            url = f"{root}{path}?{request.url.query}"
            answer = await client.request(request.method, url, headers=keep)
        return Response(answer.content, answer.status_code, dict(answer.headers))

    routes = [Route(UNDER + "/{path:path}", forward, methods=methods)]
    listener = bound_tcp("127.0.0.1", 0, DEFAULT_LIMITS)
    config = uvicorn.Config(Starlette(routes=routes), lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    proxy = f"http://127.0.0.1:{listener.getsockname()[1]}{UNDER}"
    browser.open(f"{proxy}/enter")
    yield f"{proxy}/?{query}"
    server.should_exit = True
    thread.join(10.0)


def test_the_page_works_behind_a_proxy_that_adds_a_path(bed, browser, proxied):
    trains(bed)
    report_to(
        bed.coordinator, node_id("worker:0"), messages.TensorBoardUp("http://127.0.0.1:6006/")
    )
    browser.open(proxied)
    browser.wait("document.querySelectorAll('#nodes tr').length", lambda count: count == 4)
    board = browser.wait("document.querySelector('#links a')?.href")
    assert board.endswith(f"{UNDER.rpartition('/')[0]}/6006/")
    browser.click("#nodes tr:nth-child(2) button")
    browser.wait("document.getElementById('log-of').innerText", lambda text: text == "ps:0")
    browser.value("window.isOld = true; location.reload()")
    browser.wait("!window.isOld && document.getElementById('log-of')?.innerText === 'ps:0'")
    browser.wait("!document.getElementById('stop').disabled")
    browser.click("#stop")
    browser.wait(
        "document.getElementById('phase').innerText", lambda text: text == "RUNNING, stops"
    )
    assert browser.complaints == []


def test_a_login_that_the_proxy_asks_for_again_is_told(bed, browser, proxied):
    browser.open(proxied)
    browser.wait("!document.getElementById('stop').disabled")
    browser.forget_cookies()
    browser.click("#save")
    said = browser.wait("document.getElementById('said').innerText", lambda text: "…" not in text)
    assert said == "a proxy before this page answered for it: log in there, and reload this page"


@pytest.mark.parametrize("methods", [["GET"]], indirect=True)
def test_a_proxy_that_forwards_no_action_is_told_with_what_does(bed, browser, proxied):
    browser.open(proxied)
    browser.wait("!document.getElementById('stop').disabled")
    browser.click("#stop")
    said = browser.wait("document.getElementById('said').innerText", lambda text: "…" not in text)
    assert said == "a proxy before this page forwards no action: `tfos stop` on the driver's host"
    assert not bed.job.snapshot()["stop"]
