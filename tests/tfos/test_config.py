"""The configuration travels to every node as it is: whatever was accepted arrives equal."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tfos
from rpc.auth.certificates import TlsCredentials
from tests.support.nodes import node_settings
from tfos.cluster import TFCluster
from tfos.config import Checkpoints, ClusterConfig, Restarts, TensorBoardConfig
from tfos.control.authority import ClusterAuthority
from tfos.driver.node_jobs import NodeKeys
from tfos.errors import SettingsError
from tfos.files.inputs import InputFiles
from tfos.node.spec import NO_KEYS, NodeBundle
from tfos.topology import PlannedNode, plan

SECONDS = st.one_of(st.floats(0.5, 1e6), st.integers(1, 10**6), st.floats(0.5, 1e6).map(np.float64))
COUNTS = st.integers(1, 1 << 40)
OF_TYPE: dict[str, Any] = {
    "float": SECONDS,
    "int": COUNTS,
    "bool": st.booleans(),
    "str": st.just("hdfs:///runs/7"),
    "str | None": st.sampled_from([None, "/shared/saves", Path("/shared/saves")]),
    "Restarts": st.builds(Restarts, workers=st.integers(0, 9), ps=st.integers(0, 9)),
    "Integrity": st.sampled_from(["auto", "header"]),  # not "payload", which TLS excludes
    "Literal['auto', 'min', 'max']": st.sampled_from(["auto", "min", "max"]),
    "tuple[InputFiles, ...]": st.sampled_from(
        [(), (InputFiles(name="a", path="/a", mode="download"),)]
    ),
    "Literal['error', 'warn']": st.sampled_from(["error", "warn"]),
    "Literal['hmac', 'tls']": st.sampled_from(["hmac", "tls"]),
}


def _of_type(annotation: str) -> Any:
    return OF_TYPE[annotation.replace('"', "'")]


def _values(record: type, **special: Any) -> st.SearchStrategy[Any]:
    """Every field of the record by its type, so that a new one is covered unasked."""
    fields = {
        each.name: special[each.name] if each.name in special else _of_type(str(each.type))
        for each in dataclasses.fields(record)
    }
    return st.builds(record, **fields)


CONFIGS = _values(
    ClusterConfig,
    heartbeat_s=st.just(0.1),
    gpu_resource=st.sampled_from([None, "gpu"]),
    checkpoints=st.one_of(
        st.none(), _values(Checkpoints, keep_best=st.sampled_from([None, "val_loss"]))
    ),
)


@given(CONFIGS)
def test_a_node_reads_the_configuration_that_the_driver_accepted(config):
    bundle = NodeBundle(
        node=PlannedNode("worker", 1, 1),
        settings=dataclasses.replace(node_settings(), config=config),
        control_keys=TlsCredentials(b"CERT", b"KEY", b"CA"),
        rpc_secret=b"S" * 32,
    )
    sent = msgspec.msgpack.encode(bundle)
    assert msgspec.msgpack.decode(sent, type=NodeBundle) == bundle


def test_a_bundle_holds_the_keys_of_one_node_alone_and_shows_none():
    authority = ClusterAuthority("c")
    keys = NodeKeys(authority, b"S" * 32)
    settings = node_settings(security="tls")
    bundles = [keys.bundle(node, settings, b"F") for node in plan(3, 1).nodes]
    private = [bundle.control_keys.key_pem for bundle in bundles]
    private += [bundle.data_tls.key_pem for bundle in bundles if bundle.data_tls is not None]
    assert len(set(private)) == 6
    for bundle in bundles:
        sent = msgspec.msgpack.encode(bundle)
        own = {bundle.control_keys.key_pem, bundle.data_tls and bundle.data_tls.key_pem}
        assert {key for key in private if key in sent} == own
        assert not [secret for secret in (*private, b"S" * 32) if str(secret)[2:40] in repr(bundle)]
        child = msgspec.msgpack.encode(dataclasses.replace(bundle, control_keys=NO_KEYS))
        assert bundle.control_keys.key_pem not in child


@pytest.mark.parametrize("place", ["/shared/7", Path("/shared/7")])
def test_a_directory_may_be_a_path_wherever_one_is_named(place: Any):
    config = ClusterConfig(
        checkpoints=Checkpoints(directory=place), output=place, save_on_interrupt=place
    )
    assert config.checkpoints is not None
    found = (config.checkpoints.directory, config.output, config.save_on_interrupt)
    assert (*found, TensorBoardConfig(log_dir=place).log_dir) == ("/shared/7",) * 4


@pytest.mark.parametrize(
    "make",
    [
        lambda place: TensorBoardConfig(log_dir=place),
        lambda place: Checkpoints(directory=place),
        lambda place: ClusterConfig(output=place),
    ],
)
def test_a_url_as_a_path_object_is_refused_with_what_to_pass(make: Any):
    with pytest.raises(SettingsError, match=r"='hdfs:/nn/runs': .*pass a str, such as 'hdfs://…'"):
        make(Path("hdfs://nn/runs"))


def test_a_log_dir_that_is_no_path_is_refused_by_name():
    with pytest.raises(SettingsError, match="log_dir must be a directory or a URL, got 7"):
        TFCluster.reserve(None, 3, log_dir=7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"config": {"verbose": False}},
            r"config must be a tfos.ClusterConfig or None, got \{'verb",
        ),
        ({"config": {}}, r"config must be a tfos.ClusterConfig or None, got \{\}"),
        ({"tensorboard_host": 5}, "tensorboard_host must be a str such as '', got 5"),
    ],
)
def test_arguments_of_another_type_are_refused_by_name(given: dict[str, Any], text: str):
    with pytest.raises(SettingsError, match=text):
        TFCluster.reserve(None, 3, **given)


@pytest.mark.parametrize("given", [{"verbose": False}, {}])
def test_a_run_refuses_a_config_of_another_type_by_name(given: Any):
    with pytest.raises(SettingsError, match=r"config must be a tfos.ClusterConfig or None, got"):
        tfos.run(print, num_proc=1, sc=object(), config=given)
