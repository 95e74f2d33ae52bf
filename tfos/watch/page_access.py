"""Access to the job's page: who may read it, who may act by it. Pure.

Covers: the token, the Host header (DNS rebinding), the Origin header and the token's place
(forged requests of other sites), the size of a request.
Does not: serve (tfos.watch.page_server), limit connections (there too).

A request that reads has the token in its URL or in a header, as a proxy may drop unknown headers.
One that acts has it in the header `X-Tfos-Token`, which no site can make a browser send here.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import parse_qs

from rpc.endpoint import is_loopback
from rpc.http_page import bearer_token, host_name

TOKEN_HEADER = "x-tfos-token"
MOST_BODY_BYTES = 1024
_TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class PageAccess:
    """Decides about each request."""

    hosts: frozenset[str] = frozenset()
    """Names besides loopback's by which the page is reached: its own, those of proxies."""
    token: str = field(default_factory=lambda: secrets.token_urlsafe(_TOKEN_BYTES), repr=False)

    def refusal(
        self, method: str, query: str, headers: Mapping[str, str]
    ) -> tuple[HTTPStatus, str] | None:
        """Return status and reason of a refusal; None: the request may be served.

        Args:
            method: HTTP method.
            query: the URL's part after the question mark.
            headers: header values, by name in lower case.
        """
        host = headers.get("host", "")
        if not self._is_known(host_name(host)):
            return HTTPStatus.FORBIDDEN, (
                "this page does not know the requested host name; use the one in "
                "cluster.page_url() or `tfos page`, or name this one in page_hosts of reserve()"
            )
        acts = method not in ("GET", "HEAD")
        if not self._knows_token(query, headers, in_header=acts):
            where = f"the header {TOKEN_HEADER}" if acts else "the URL"
            return HTTPStatus.UNAUTHORIZED, f"the page needs its token in {where}"
        if acts and not self._is_own_origin(headers.get("origin", ""), host):
            return HTTPStatus.FORBIDDEN, "another site may not act here"
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > MOST_BODY_BYTES:
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the request is too long"
        return None

    def _is_known(self, host: str) -> bool:
        return is_loopback(host) or host.lower() in self.hosts

    def _knows_token(self, query: str, headers: Mapping[str, str], *, in_header: bool) -> bool:
        given = [headers.get(TOKEN_HEADER, "")]
        if not in_header:
            given += [bearer_token(headers.get("authorization", "")), *_tokens_in(query)]
        own = self.token.encode()
        return any(hmac.compare_digest(each.encode(), own) for each in given if each)

    def _is_own_origin(self, origin: str, host: str) -> bool:
        """Whether the page itself asks, perhaps through a known proxy; programs send no Origin."""
        if not origin:
            return True
        named = origin.partition("://")[2]
        return named == host or host_name(named).lower() in self.hosts


def _tokens_in(query: str) -> list[str]:
    """Return a query's tokens; none if it has more fields than any link of the page."""
    try:
        return parse_qs(query, max_num_fields=8).get("token", [])
    except ValueError:
        return []
