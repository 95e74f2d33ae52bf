"""The cluster's page for Prometheus: what stands on it, who may read it, when it ends."""

from __future__ import annotations

import re
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ps.stats.server_stats import ServerStats, WorkerStats
from tests.support.cluster_states import node_id
from tests.support.fake_spark import FakeSpark
from tfos import ClusterConfig, InputMode, TFCluster
from tfos.control import messages
from tfos.errors import SettingsError

pytestmark = pytest.mark.socket

DOCUMENT = Path(__file__).parents[3] / "docs" / "guides" / "metrics.md"


def main_fun(args: Any, ctx: Any) -> None:
    """Never called: nodes are played."""


def reserve(spark: FakeSpark, **options: Any) -> TFCluster:
    config = ClusterConfig(verbose=False)
    return TFCluster.reserve(spark, 3, 1, input_mode=InputMode.SPARK, config=config, **options)


def scrape(url: str | None, token: str | None = None) -> dict[tuple[str, ...], float]:
    """Every sample by name and values of its labels."""
    assert url is not None
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=15) as page:
        text = page.read().decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def beat(cluster: TFCluster, name: str, **fields: Any) -> None:
    beat = messages.Heartbeat(node_id(name), 1, "main_fun", **fields)
    cluster._coordinator.on_heartbeat(beat)


def test_one_page_has_all_nodes_and_ends_with_the_cluster(spark):
    stats = ServerStats(
        0, "SERVING", clock=8, uptime_s=1.0, workers=(WorkerStats(1, pushes=8, rows=256),)
    )
    with reserve(spark, metrics_port=0) as cluster:
        assert cluster.metrics_token() is None
        cluster.start(main_fun)
        beat(
            cluster,
            "worker:1",
            rss_bytes=5000,
            progress={"steps": 8.0, "compute_s": 1.5, "lookup_s": 0.25, "push_s": 0.5},
            feeds=(messages.FeedSnapshot("input", fed_rows=300, taken_rows=256),),
        )
        beat(cluster, "ps:0", stats=msgspec.msgpack.encode(stats))
        found = scrape(cluster.metrics_url())
        assert found["tfos_cluster_running", cluster.cluster_id] == 1
        assert found["tfos_node_up", "worker:0"] == 1
        assert found["tfos_node_resident_memory_bytes", "worker:1"] == 5000
        assert found["tfos_worker_steps_total", "worker:1"] == 8
        assert found["tfos_worker_compute_seconds_total", "worker:1"] == 1.5
        assert found["tfos_worker_lookup_seconds_total", "worker:1"] == 0.25
        assert found["tfos_feed_taken_rows_total", "input", "worker:1"] == 256
        assert found["tfos_ps_updates_total", "0"] == 8
        assert found["tfos_ps_worker_rows_total", "0", "1"] == 256
        named = set(re.findall(r"tfos_(?:node|worker|feed|cluster)_\w+", DOCUMENT.read_text()))
        assert named == {name for name, *_ in found if not name.startswith("tfos_ps_")}
        url = cluster.metrics_url()
    with pytest.raises(urllib.error.URLError):
        scrape(url)


@pytest.mark.attack("A17")
def test_a_page_for_other_hosts_needs_the_token_that_only_its_method_tells(spark, capsys, caplog):
    with reserve(spark, metrics_port=0, metrics_host="0.0.0.0") as cluster:
        token, url = cluster.metrics_token(), cluster.metrics_url()
        assert token is not None
        assert url is not None
        port = url.rpartition(":")[2]
        local = f"http://127.0.0.1:{port}"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            scrape(local)
        assert scrape(local, token)["tfos_cluster_running", cluster.cluster_id] == 0
        cluster.start(main_fun)
        shown = capsys.readouterr()
        assert token not in "".join([shown.out, shown.err, caplog.text, repr(cluster)])
        assert token not in str(cluster.status())


@pytest.mark.attack("A17")
def test_a_token_of_a_file_is_the_same_for_each_cluster_and_needed_on_loopback_too(spark, tmp_path):
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text("0123456789abcdef\n")
    for given in (file, str(file)):
        with reserve(spark, metrics_port=0, metrics_token_file=given) as cluster:
            assert cluster.metrics_token() == "0123456789abcdef"
            with pytest.raises(urllib.error.HTTPError, match="401"):
                scrape(cluster.metrics_url())
            found = scrape(cluster.metrics_url(), "0123456789abcdef")
            assert found["tfos_cluster_running", cluster.cluster_id] == 0


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        ("0123456789abcdef", 0o644, "mode 0644: others may read the secret"),
        ("short", 0o600, "has 5 bytes, it needs 16"),
        (None, 0o600, "there is no file .*make one with"),
        ("", 0o700, "metrics_token_file=.*: Is a directory"),
    ],
)
def test_a_file_that_has_no_token_is_refused(spark, tmp_path, text, mode, says):
    file = tmp_path / "token"
    if text:
        file.write_text(text)
        file.chmod(mode)
    elif text is not None:
        file.mkdir(mode)
    with pytest.raises(SettingsError, match=says):
        reserve(spark, metrics_port=0, metrics_token_file=file)


def test_no_page_unless_asked(spark):
    with reserve(spark) as cluster:
        assert (cluster.metrics_url(), cluster.metrics_token()) == (None, None)


@pytest.mark.parametrize(
    ("host", "says"),
    [
        (None, "metrics_host must be a str such as '127.0.0.1', got None"),
        ("192.0.2.1", r"metrics_host='192.0.2.1', .*; name an address of this host"),
    ],
)
def test_a_host_that_is_none_is_refused(spark, host, says):
    with pytest.raises(SettingsError, match=says):
        reserve(spark, metrics_port=0, metrics_host=host)


@pytest.mark.parametrize("port", [-1, 65536, "9100", True, 1.5])
def test_a_port_that_is_none_is_refused(spark, port):
    with pytest.raises(SettingsError, match=r"metrics_port must be in 0..65535"):
        reserve(spark, metrics_port=port)


def test_a_port_that_is_taken_names_its_holder_and_leaves_nothing(spark):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(
            SettingsError, match=f"metrics cannot be served: 127.0.0.1:{port} is held"
        ):
            reserve(spark, metrics_port=port)
    with reserve(spark, metrics_port=port) as cluster:  # the slots were given back too
        assert cluster.metrics_url() == f"http://127.0.0.1:{port}/metrics"
