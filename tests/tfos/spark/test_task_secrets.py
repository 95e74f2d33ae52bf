"""No closure holds a secret: tasks take them from the local properties of their job."""

from __future__ import annotations

import base64
import dataclasses
import threading
from typing import Any, get_type_hints

import cloudpickle
import pytest

from feeding.sender.arrow_inference import ArrowInferenceTask
from feeding.sender.task import FeedTask, InferenceTask
from rpc.auth.certificates import TlsCredentials
from rpc.auth.handshake import Credentials
from tests.support.fake_spark import FakeSpark
from tfos.errors import SettingsError
from tfos.many.slot.task import SlotTask
from tfos.runner.local_process import LocalRank
from tfos.serving.table_tasks import TaskServers
from tfos.spark import task_secrets
from tfos.spark.task_secrets import TaskCredentials, give_credentials, redaction_note, withdraw

PLAIN = Credentials("one", b"the secret of it", "payload")
TLS = Credentials("one", b"the secret of it", tls=TlsCredentials(b"cert", b"key", b"ca"))


class TaskOf:
    """Stands for pyspark's TaskContext in a task of this thread's job."""

    def __init__(self, spark: FakeSpark) -> None:
        self._spark = spark

    def get(self) -> TaskOf:
        return self

    def getLocalProperty(self, key: str) -> str | None:
        return self._spark.properties.get(key)


@pytest.fixture
def spark(monkeypatch):
    made = FakeSpark()
    monkeypatch.setattr("pyspark.TaskContext", TaskOf(made))
    return made


@pytest.mark.parametrize("credentials", [PLAIN, TLS])
def test_a_task_takes_what_its_job_was_given(spark, credentials):
    give_credentials(spark, credentials)
    task = TaskCredentials(credentials.cluster_id)
    assert task() == credentials
    secret = credentials.secret
    for form in (secret, secret.hex().encode(), base64.b64encode(secret)):
        assert form not in cloudpickle.dumps(task)


@pytest.mark.attack("A17")
@pytest.mark.parametrize(
    "holder",
    [
        task_secrets._Document(b"the secret of it", "auto", (b"cert", b"key", b"ca")),
        LocalRank(0, "run", b"the secret of it", "/tmp", b""),
    ],
    ids=["task", "local rank"],
)
def test_what_carries_a_secret_does_not_show_it(holder):
    assert "secret" not in repr(holder)
    assert "key" not in repr(holder)


def test_a_job_of_another_thread_or_after_the_end_has_none(spark):
    give_credentials(spark, PLAIN)
    errors: list[BaseException] = []

    def take() -> None:
        try:
            TaskCredentials(PLAIN.cluster_id)()
        except SettingsError as error:
            errors.append(error)

    other = threading.Thread(target=take)
    other.start()
    other.join()
    withdraw(spark, PLAIN.cluster_id)
    take()
    assert len(errors) == 2
    for text in map(str, errors):
        assert "another thread submitted it than the one that called reserve()" in text
        assert "no credentials of one: the cluster is shut down, or" in text
        assert "run it before shutdown()" in text


@pytest.mark.parametrize(
    "task", [FeedTask, InferenceTask, ArrowInferenceTask, TaskServers, SlotTask]
)
def test_nothing_that_spark_pickles_has_a_field_for_a_secret(task):
    seen: set[Any] = set()

    def look(kind: Any) -> None:
        for hint in get_type_hints(kind).values():
            assert hint not in (Credentials, TlsCredentials)
            if dataclasses.is_dataclass(hint) and hint not in seen:
                seen.add(hint)
                look(hint)

    look(task)


def test_an_event_log_that_would_show_secrets_is_warned_of():
    logs = {"spark.eventLog.enabled": "true"}
    assert redaction_note({}) == redaction_note(logs) == ""
    for regex in ("(?i)password", "(?unknown"):
        note = redaction_note({**logs, "spark.redaction.regex": regex})
        assert repr(regex) in note
        assert "add |secret" in note


def test_sparks_configuration_gets_the_key_and_not_the_secret(spark, monkeypatch):
    told: dict[str, str] = {}

    class Configuration:
        def contains(self, key: str) -> bool:
            return key in told

        def set(self, key: str, value: str) -> None:
            told[key] = value

    monkeypatch.setattr(type(spark._jsc), "conf", lambda _: Configuration())
    give_credentials(spark, PLAIN)
    give_credentials(spark, PLAIN)
    assert told == {f"{task_secrets.PREFIX}one": "in local properties"}
