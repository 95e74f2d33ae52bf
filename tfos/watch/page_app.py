"""The job's page as a web application: its routes, and what guards all of them.

Covers: the static page, the snapshot, a node's log, save, stop, the metrics; security headers.
Does not: decide who may (tfos.watch.page_access), listen (tfos.watch.page_server).
Threads: routes run on threads of Starlette's pool; a Job may be asked from any.

    GET  /            the page                     GET  /metrics    for Prometheus
    GET  /state.json  ?after=curve_at_s&...        POST /save       {"is_done", "text"}
    GET  /log.json    ?node=worker:1&after=last    POST /stop       {"is_done", "text"}

A reader that sends to /state.json what it has, by the numbers of its last answer (`after` for
`curve_at_s`, num_epochs, num_evaluations, num_failures), is sent what is newer.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from http import HTTPStatus
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ps.stats.prometheus import CONTENT_TYPE
from tfos.watch.job import Job, whole
from tfos.watch.page_access import PageAccess
from tfos.watch.snapshot import Seen

_PAGE = resources.files("tfos.watch").joinpath("page.html").read_text(encoding="utf-8")


def _sources(tag: str) -> str:
    """Return the hashes of the page's own inline texts: the browser runs and applies no other."""
    texts = re.findall(f"<{tag}>(.*?)</{tag}>", _PAGE, re.DOTALL)
    hashes = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{each}'" for each in hashes)


SECURITY_HEADERS = {
    "content-security-policy": (
        f"default-src 'none'; script-src {_sources('script')}; style-src {_sources('style')}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
    "connection": "close",
}
"""Headers of every answer. One request per connection: a waiting connection has no client."""


class _Guard:
    """Refuses requests before any route sees them, and adds the headers to every answer."""

    def __init__(self, app: ASGIApp, access: PageAccess) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(SECURITY_HEADERS)
            await send(message)

        if scope["type"] != "http":
            return
        query = scope["query_string"].decode("latin-1")
        headers = {key.lower(): value for key, value in Headers(scope=scope).items()}
        refused = self._access.refusal(scope["method"], query, headers)
        if refused is not None:
            status, reason = refused
            await PlainTextResponse(f"{reason}\n", status)(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)


def make_app(
    job: Job,
    access: PageAccess,
    metrics: Callable[[], bytes],
    on_look: Callable[[], object],
) -> ASGIApp:
    """Return the application.

    Args:
        job: what it shows, and acts on.
        access: decides who may.
        metrics: returns Prometheus' text.
        on_look: called once a snapshot is made for the page.
    """

    def page(request: Request) -> Response:  # noqa: ARG001 - Starlette's signature
        return HTMLResponse(_PAGE)

    def state(request: Request) -> Response:
        found = job.snapshot(_seen(request.query_params))
        on_look()
        return _answer(found)

    def log(request: Request) -> Response:
        after = whole(_number(request.query_params.get("after", ""), 0.0))
        answer = job.log(request.query_params.get("node", "")[:100], after)
        return _answer(answer, HTTPStatus.NOT_FOUND if "error" in answer else HTTPStatus.OK)

    def save(request: Request) -> Response:  # noqa: ARG001
        return _answer(job.save().as_json())

    def stop(request: Request) -> Response:  # noqa: ARG001
        return _answer(job.stop().as_json())

    def scrape(request: Request) -> Response:  # noqa: ARG001
        return Response(metrics(), media_type=CONTENT_TYPE)

    routes = [
        Route("/", page),
        Route("/state.json", state),
        Route("/log.json", log),
        Route("/save", save, methods=["POST"]),
        Route("/stop", stop, methods=["POST"]),
        Route("/metrics", scrape),
    ]
    return _Guard(Starlette(routes=routes), access)


def _answer(values: dict[str, Any], status: HTTPStatus = HTTPStatus.OK) -> Response:
    body = json.dumps(values, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return Response(body, status, media_type="application/json")


def _seen(asked: Mapping[str, str]) -> Seen:
    def count(name: str) -> int:
        return whole(_number(asked.get(name, ""), 0.0))

    return Seen(
        curve_at_s=_number(asked.get("after", ""), -math.inf),
        num_epochs=count("num_epochs"),
        num_evaluations=count("num_evaluations"),
        num_failures=count("num_failures"),
    )


def _number(text: str, default: float) -> float:
    try:
        return float(text)
    except ValueError:
        return default
