"""A page in headless Chromium, driven by the DevTools protocol over a pipe.

A test that uses it is skipped, with the reason, where no Chromium is installed.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

ANSWER_S = 30.0
NAMES = ("chromium", "chromium-browser", "google-chrome")
_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--remote-debugging-pipe"),
)


class Browser:
    """One tab. What its console, its policies and its scripts complain about is kept.

    Args:
        profile: an empty directory of its own.
        accept: the answer to each dialog of the page.
    """

    def __init__(self, profile: Path, *, accept: bool = True) -> None:
        program = next(filter(None, map(shutil.which, NAMES)), None)
        if program is None:
            pytest.skip(f"none of {', '.join(NAMES)} is installed: no page is looked at")
        self._accept = accept
        self._number = 0
        self._rest = b""
        self._session = ""
        self.complaints: list[str] = []
        self.dialogs: list[str] = []
        self._to, self._from, their_ends = _pipes()
        command = [program, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        try:
            self._process = subprocess.Popen(
                ["bash", "-c", 'exec "${@:3}" 3<&"$1" 4>&"$2"', "bash", *their_ends, *command],
                pass_fds=[int(end) for end in their_ends],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        finally:
            for end in their_ends:
                os.close(int(end))

    def __enter__(self) -> Self:
        tabs = self._ask("Target.getTargets")["targetInfos"]
        tab = next(each["targetId"] for each in tabs if each["type"] == "page")
        attached = self._ask("Target.attachToTarget", targetId=tab, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._ask(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._ask("Browser.close")
            self._process.wait(ANSWER_S)
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            os.close(self._to)
            os.close(self._from)

    def open(self, url: str) -> None:
        """Go to a page, and wait until its scripts have run."""
        self._ask("Page.navigate", url=url)
        self.wait("location.href + document.readyState", lambda at: at == f"{url}complete")

    def value(self, expression: str) -> Any:
        """Return what JavaScript in the page says, as JSON."""
        found = self._ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression: str, holds: Callable[[Any], bool] = bool) -> Any:
        """Wait until an expression's value holds; returns it."""
        deadline_s = time.monotonic() + ANSWER_S
        while True:
            value = self.value(expression)
            if holds(value):
                return value
            assert time.monotonic() < deadline_s, (expression, value, self.complaints)

    def click(self, selector: str) -> None:
        """Press and release the mouse's button on an element, as a person does."""
        box = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{box}.scrollIntoView({{block: 'center'}})")
        at = self.value(
            f"(r => [r.x + r.width / 2, r.y + r.height / 2])({box}.getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._ask(
                "Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], button="left", clickCount=1
            )

    def forget_cookies(self) -> None:
        """Be nobody to every site from here on."""
        self._ask("Network.clearBrowserCookies")

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        number = self._send(method, params)
        deadline_s = time.monotonic() + ANSWER_S
        while True:
            message = self._next(deadline_s)
            if message.get("id") == number:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self._note(message)

    def _send(self, method: str, params: dict[str, Any]) -> int:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        return self._number

    def _next(self, deadline_s: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            with selectors.DefaultSelector() as selector:
                selector.register(self._from, selectors.EVENT_READ)
                assert selector.select(deadline_s - time.monotonic()), "the browser does not answer"
            part = os.read(self._from, 1 << 20)
            assert part, f"the browser ended with {self._process.wait()}"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Page.javascriptDialogOpening":
                self.dialogs.append(params["message"])
                self._send("Page.handleJavaScriptDialog", {"accept": self._accept})
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(params["entry"]["text"])
            case "Runtime.exceptionThrown":
                self.complaints.append(str(params["exceptionDetails"]))


def _pipes() -> tuple[int, int, list[str]]:
    """Return our end to write, ours to read, and its ends as texts."""
    their_in, to = os.pipe()
    back, their_out = os.pipe()
    return to, back, [str(their_in), str(their_out)]
