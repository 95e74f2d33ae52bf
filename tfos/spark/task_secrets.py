"""Secrets of Spark tasks: local properties of their jobs carry them, and no closure does.

Covers: giving a secret to the jobs of this thread, taking it in a task; a cluster's credentials.
Does not: encrypt what Spark's RPC carries (spark.network.crypto.enabled does).
Runs in: the driver (`give`, `withdraw`); Spark's tasks (`taken`, calls of TaskCredentials).
Threads: a local property belongs to the thread that sets it and to those that start from it.

Spark stores closures: each is part of a stage's broadcast, which may be spilled, and PySpark writes
those above 1 MiB to files. A job's local properties come with each task's description, by RPC
alone. An event log has them too. There Spark redacts a key that its own configuration contains and
`spark.redaction.regex` matches, so the configuration gets each key, without the value.
"""

from __future__ import annotations

import base64
import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from rpc.auth.certificates import TlsCredentials
from rpc.auth.handshake import Credentials
from tfos.errors import SettingsError
from tfos.spark.facts import is_true

PREFIX = "tfos.secret."
_REDACTION = "(?i)secret|password|token|access[.]?key"
"""Spark's default for spark.redaction.regex."""


_Pem = tuple[bytes, bytes, bytes]


class _Document(msgspec.Struct):
    """Credentials as JSON; bytes are base64 there."""

    secret: bytes
    integrity: str
    tls: _Pem | None

    def __repr__(self) -> str:
        return "_Document()"


@dataclass(frozen=True)
class TaskCredentials:
    """Credentials that a task takes from its job; pickled, it holds no secret.

    Args:
        cluster_id: the cluster's id.
    """

    cluster_id: str

    def __call__(self) -> Credentials:
        """Return the credentials; call it in a Spark task.

        Raises:
            SettingsError: the job was submitted by a thread that does not have them.
        """
        document = msgspec.json.decode(taken(self.cluster_id), type=_Document)
        tls = None if document.tls is None else TlsCredentials(*document.tls)
        return Credentials(self.cluster_id, document.secret, document.integrity, tls)  # type: ignore[arg-type]  # Credentials checks it


def give_credentials(sc: Any, credentials: Credentials) -> None:
    """Let the tasks of this thread's jobs take a cluster's credentials.

    Args:
        sc: the SparkContext.
        credentials: credentials of feed tasks.
    """
    keys = None if credentials.tls is None else _pem(credentials.tls)
    document = _Document(credentials.secret, credentials.integrity, keys)
    give(sc, credentials.cluster_id, msgspec.json.encode(document))


def give_keys(sc: Any, name: str, keys: TlsCredentials) -> None:
    """Let the tasks of this thread's jobs take a certificate and its key.

    Args:
        sc: the SparkContext.
        name: name for `taken_keys`, unique in the application.
        keys: what it returns.
    """
    give(sc, name, msgspec.json.encode(_pem(keys)))


def taken_keys(name: str) -> TlsCredentials:
    """Return what `give_keys` has given to this task's job.

    Raises:
        SettingsError: see `taken`.
    """
    return TlsCredentials(*msgspec.json.decode(taken(name), type=_Pem))


def _pem(keys: TlsCredentials) -> _Pem:
    return keys.cert_pem, keys.key_pem, keys.ca_pem


def give(sc: Any, name: str, secret: bytes) -> None:
    """Let the tasks of the jobs that this thread submits from now on take a secret.

    Args:
        sc: the SparkContext.
        name: the secret's name, unique in the application.
        secret: what `taken` returns.
    """
    key = PREFIX + name
    configuration = sc._jsc.sc().conf()  # the one that event logs look at
    if not configuration.contains(key):
        configuration.set(key, "in local properties")
    sc.setLocalProperty(key, base64.b64encode(secret).decode())


def withdraw(sc: Any, name: str) -> None:
    """Stop giving this thread's later jobs the secret; without effect on a stopped context."""
    if sc._jsc is not None:
        sc.setLocalProperty(PREFIX + name, None)


def taken(name: str) -> bytes:
    """Return a secret that was given to this task's job.

    Raises:
        SettingsError: the thread that submitted the job does not have it, or no more.
    """
    from pyspark import TaskContext

    context = TaskContext.get()
    value = None if context is None else context.getLocalProperty(PREFIX + name)
    if value is None:
        raise SettingsError(
            f"the job of this task has no credentials of {name}: the cluster is shut down, or "
            "another thread submitted it than the one that called reserve(), inference() or "
            "rows(). Results are computed by the action: run it before shutdown(), in that thread, "
            "or make the call in the thread that runs the action"
        )
    return base64.b64decode(value)


def redaction_note(conf: Mapping[str, str]) -> str:
    """Return a warning if event logs would show secrets; else an empty string.

    Args:
        conf: Spark's settings.
    """
    if not is_true(conf, "spark.eventLog.enabled"):
        return ""
    regex = conf.get("spark.redaction.regex", _REDACTION)
    with contextlib.suppress(re.error):  # Java knows more expressions
        if re.search(regex, PREFIX):
            return ""
    return (
        f"spark.redaction.regex={regex!r} does not match {PREFIX!r}, so Spark's event log shows "
        "this cluster's secret to anyone who may read it: add |secret to the expression"
    )
