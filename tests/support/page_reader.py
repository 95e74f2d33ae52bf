"""The job's page without a browser: its requests to the last byte, and how many those are."""

from __future__ import annotations

import json
import re
import socket

from tfos.watch.page_app import _PAGE

LOOK_S = float(re.findall(r"LOOK_MS = (\d+)", _PAGE)[0]) / 1000
"""Between two looks of the page."""
BROWSER = (
    "Host: 127.0.0.1:38213",
    "Connection: keep-alive",
    "Pragma: no-cache",
    "Cache-Control: no-cache",
    'sec-ch-ua-platform: "Linux"',
    "User-Agent: Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) "
    "Chrome/142.0.0.0 Safari/537.36",
    'sec-ch-ua: "Chromium";v="142", "Not_A Brand";v="99"',
    "sec-ch-ua-mobile: ?0",
    "Accept: */*",
    "Sec-Fetch-Site: same-origin",
    "Sec-Fetch-Mode: cors",
    "Sec-Fetch-Dest: empty",
    "Accept-Encoding: gzip, deflate, br, zstd",
    "Accept-Language: en-US,en;q=0.9",
)
"""Headers of a fetch by the page, as a usual browser sends them."""


class PageReader:
    """Asks as the page in a browser does, and counts every byte of it.

    Args:
        url: of the page, with its token.
        node: whose log it shows.
    """

    def __init__(self, url: str, node: str) -> None:
        self._port = int(url.split(":")[2].split("/")[0])
        self._token = url.partition("?")[2]
        self._node = node.replace(":", "%3A")
        self._state = self._log = ""
        self.num_bytes = 0

    def look(self) -> int:
        """Read what is new of the job and of the node's log; return the bytes."""
        before = self.num_bytes
        state = self._ask(f"state.json?{self._token}{self._state}")
        asked = {"after": "curve_at_s", **{each: each for each in _counts_the_page_names()}}
        self._state = "".join(f"&{name}={state[field]}" for name, field in asked.items())
        log = self._ask(f"log.json?{self._token}&node={self._node}{self._log}")
        self._log = f"&after={log['last']}"
        return self.num_bytes - before

    def _ask(self, path: str) -> dict[str, float]:
        request = "\r\n".join((f"GET /{path} HTTP/1.1", *BROWSER, "", "")).encode()
        with socket.create_connection(("127.0.0.1", self._port), timeout=10.0) as sock:
            sock.sendall(request)
            answer = b"".join(iter(lambda: sock.recv(1 << 16), b""))
        self.num_bytes += len(request) + len(answer)
        return json.loads(answer.partition(b"\r\n\r\n")[2])


def _counts_the_page_names() -> list[str]:
    """Return what the page says it has, by its own text."""
    return re.findall(r"(num_\w+): last\.\1", _PAGE)
