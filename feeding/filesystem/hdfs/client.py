"""HDFS client: requests to a NameNode or DataNode, with deadlines, retries and typed errors.

Covers: one hdfs-native client per process, NameNode and user (and what proves the user); deadlines;
retries on a new client while a server is unavailable.
Does not: know the requests' meaning.
Threads: any.

hdfs-native's clients own threads, which a fork does not copy: only the process that made a client
uses it.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from feeding.errors import FeedError, MissingPackage, NotAuthenticated, StorageUnavailable
from feeding.filesystem.bounded_calls import BoundedCall, BoundedCalls, CallTimeout
from feeding.filesystem.config import FileSystemConfig
from feeding.filesystem.hdfs.credentials import (
    asks_for_kerberos,
    connect_url,
    credential_names,
    keytab_login,
    next_step,
    unconfigured,
)
from feeding.filesystem.hdfs.errors import ErrorKind, kind_of, sentence, translate, user_in
from feeding.filesystem.hdfs.hadoop_conf import NameNode, user_name

if TYPE_CHECKING:
    from hdfs_native import Client

T = TypeVar("T")
Key = tuple[str, str, str, str]

_logger = logging.getLogger(__name__)
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
_OF_CONNECTIONS = (ErrorKind.AWAY, ErrorKind.UNPROVED)


class Clients:
    """The clients of this process, made on first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: dict[Key, Client] = {}
        self._parents: list[dict[Key, Client]] = []

    def forget(self) -> None:
        """Drop the parent's clients in a forked child; freeing one waits for threads it lacks."""
        self._parents.append(self._clients)
        self._lock = threading.Lock()
        self._clients = {}

    def get(self, namenode: NameNode, timeout_s: float) -> Client:
        """Return the client for a NameNode and the user and configuration of the environment.

        Args:
            namenode: to connect to.
            timeout_s: for the connection's set-up.

        Raises:
            MissingPackage: hdfs-native is not installed.
            NotAuthenticated: the NameNode asks for Kerberos, the configuration does not.
            OSError: the host name has no address.
            CallTimeout: the name was not resolved in time.
        """
        key = _key(namenode)
        with self._lock:
            client = self._clients.get(key)
        if client is None:
            client = _CALLS.run(partial(_new_client, namenode), timeout_s)
            with self._lock:
                client = self._clients.setdefault(key, client)
        return client

    def discard(self, namenode: NameNode, client: Client) -> None:
        """Drop a client that may be broken; the next request makes another one.

        Args:
            namenode: where the client connects to.
            client: the one that failed; nothing happens if another one has replaced it.
        """
        key = _key(namenode)
        with self._lock:
            if self._clients.get(key) is client:
                del self._clients[key]


def _key(namenode: NameNode) -> Key:
    environ = os.environ
    configuration = environ.get("HADOOP_CONF_DIR") or environ.get("HADOOP_HOME") or ""
    user, proof = user_name(environ), credential_names(environ)
    return (namenode.url, configuration, user, proof)


def _new_client(namenode: NameNode) -> Client:
    try:
        from hdfs_native import Client
    except ImportError as error:
        raise MissingPackage(
            f"{namenode.url} needs hdfs-native ({error}); run: pip install hdfs-native"
        ) from error
    url, host = namenode.url, urllib.parse.urlsplit(namenode.url)
    if host.hostname is not None and host.port is not None:  # else it is a name service
        # hdfs-native would retry for ever to resolve a name that does not exist.
        found = socket.getaddrinfo(host.hostname, host.port)
        if not namenode.is_kerberos and asks_for_kerberos(host.hostname, host.port):
            raise NotAuthenticated(unconfigured(namenode, os.environ))
        url = connect_url(namenode, [str(entry[4][0]) for entry in found], os.environ)
    if os.environ.get("SPARK_USER"):  # hdfs-native asks as whom this variable names, and no other
        os.environ.setdefault("HADOOP_USER_NAME", user_name(os.environ))
    login = keytab_login(os.environ) if namenode.is_kerberos else None
    if login is None:
        return Client(url)
    return Client(url, kerberos_principal=login[0], kerberos_keytab=login[1])


@dataclass(frozen=True, slots=True)
class HdfsRequest:
    """A request, as its error messages name it."""

    action: str
    """A verb: "read"."""
    path: str
    """Path with scheme and authority."""


class Requests:
    """Sends requests to one NameNode, and to the DataNodes that it names.

    Args:
        namenode: where requests go, and as which user.
        config: timeouts and the seconds for which a request is retried.
    """

    def __init__(self, namenode: NameNode, config: FileSystemConfig) -> None:
        self.namenode = namenode
        self.config = config

    def ask(self, request: HdfsRequest, work: Callable[[Client], T], *, once: bool = False) -> T:
        """Run `work` with a client, and retry it while servers are unavailable.

        Args:
            request: for messages.
            work: one or a few calls of hdfs-native; may run more than once, and may still run after
                `ask` has returned or raised.
            once: do not retry.

        Returns:
            The result of `work`.

        Raises:
            OSError, PathError: the NameNode's refusal, typed, with user and path.
            StorageUnavailable: the servers were unavailable for longer than `patience_s`.
        """
        waiting = RequestBudget(self, request)
        while True:
            client = None
            try:
                client = self.client()
                return _CALLS.run(partial(work, client), self.config.call_timeout_s)
            except FeedError:
                raise
            except Exception as error:  # noqa: BLE001 - hdfs-native raises RuntimeError and OSError
                self.failed(client, error)
                waiting.after(error, give_up=once)

    def start(self, work: Callable[[], T]) -> BoundedCall[T]:
        """Start a call without retries; the caller waits for it.

        Raises:
            CallTimeout: no thread was free.
        """
        return _CALLS.start(work, self.config.call_timeout_s)

    def client(self) -> Client:
        """Return this process's client."""
        return _CLIENTS.get(self.namenode, self.config.call_timeout_s)

    def failed(self, client: Client | None, error: Exception) -> None:
        """Drop the client if the error says that its connection may be broken or was refused.

        Args:
            client: the client that was used; None: none could be made.
            error: what it raised.
        """
        if client is not None and (
            isinstance(error, CallTimeout) or kind_of(error) in _OF_CONNECTIONS
        ):
            _CLIENTS.discard(self.namenode, client)


class RequestBudget:
    """The time left for one request, over all of its attempts, with exponential backoff.

    Args:
        requests: has the settings, and drops broken clients.
        request: what is asked of which path, for messages.
    """

    def __init__(self, requests: Requests, request: HdfsRequest) -> None:
        self._requests = requests
        self._request = request
        self._patience_s = requests.config.patience_s
        self._deadline_s = time.monotonic() + self._patience_s
        self._pause_s = _FIRST_PAUSE_S
        self._is_logged = False

    def after(self, error: Exception, *, give_up: bool = False) -> None:
        """Pause before another attempt, or raise the caller's error.

        Args:
            error: what the attempt has raised.
            give_up: raise instead of pausing.

        Raises:
            OSError, PathError: a retry cannot help.
            StorageUnavailable: there is no time left for another attempt.
        """
        if isinstance(error, FeedError):
            raise error
        kind = ErrorKind.AWAY if isinstance(error, CallTimeout) else kind_of(error)
        _logger.debug("%s %s: %s", self._request.action, self._request.path, error)
        if kind is ErrorKind.UNKNOWN_HOST or (kind is ErrorKind.AWAY and give_up):
            raise self._unavailable(error, 0.0) from None
        if kind is not ErrorKind.AWAY:
            request, namenode = self._request, self._requests.namenode
            step = next_step(namenode, os.environ) if kind is ErrorKind.UNPROVED else ""
            raise translate(
                error,
                action=request.action,
                path=request.path,
                who=self._who(user_in(error)),
                next_step=step,
            ) from None
        left_s = self._deadline_s - time.monotonic()
        if left_s <= self._pause_s:
            raise self._unavailable(error, self._patience_s) from None
        if not self._is_logged:
            self._is_logged = True
            _logger.warning(
                "cannot %s %s yet: %s; trying for %.0f s more",
                self._request.action,
                self._request.path,
                sentence(error),
                left_s,
            )
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _who(self, user: str = "") -> str:
        namenode = self._requests.namenode
        place = f"NameNode {namenode.url} {namenode.origin}"
        if not user and namenode.is_kerberos:  # ticket or token say who it is
            return place
        return f"user {user or user_name(os.environ)!r}, {place}"

    def _unavailable(self, error: Exception, tried_s: float) -> StorageUnavailable:
        tried = f"; tried for {tried_s:g} s" if tried_s else ""
        return StorageUnavailable(
            f"cannot {self._request.action} {self._request.path}: {sentence(error)}"
            f"{tried} ({self._who()})"
        )


_CLIENTS = Clients()
_CALLS = BoundedCalls()
"""The clients and calls of this process; a forked child makes its own."""
os.register_at_fork(after_in_child=_CLIENTS.forget)
os.register_at_fork(after_in_child=_CALLS.forget)
