"""The job's page and TensorBoard through the ResourceManager's proxy, by real requests."""

from __future__ import annotations

import json

import pytest

from scripts.local_hdfs.yarn import LocalYarn
from tests.support.on_yarn import TIMEOUT_S, nodes_left, submitted
from tests.support.programs.behind_yarns_proxy import TOLD
from tests.support.spark_submit import ROOT
from tfos.watch.page_app import SECURITY_HEADERS

pytestmark = [pytest.mark.long, pytest.mark.timeout(TIMEOUT_S + 120, func_only=True)]
PROGRAM = ROOT / "tests" / "support" / "programs" / "behind_yarns_proxy.py"


def test_what_reads_passes_and_what_acts_does_not(yarn: LocalYarn):
    conf = {"spark.ui.enabled": "true", "spark.ui.port": "0"}
    output = submitted(yarn, PROGRAM, executors=2, conf=conf)
    (line,) = [each for each in output.splitlines() if each.startswith(TOLD)]
    found = json.loads(line.removeprefix(TOLD))
    print(found)  # noqa: T201
    page, board = found["page"], found["tensorboard"]
    policy = SECURITY_HEADERS["content-security-policy"]
    assert page["page"] == [200, True, policy]
    assert page["state"] == [200, "RUNNING"]
    assert page["log"] == [200, "worker:0"]
    assert page["without token"] == 401
    assert page["stop"] == 405  # the proxy's own answer: it forwards no POST
    assert board["page"] == [200, True]
    assert board["scripts"] == [200]
    assert (board["read"], board["posted"]) == (200, 405)
    assert found["spark"] == [200, True]
    assert not nodes_left(yarn)
