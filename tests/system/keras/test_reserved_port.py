"""TensorFlow's own server on the port that TF_CONFIG names."""

from __future__ import annotations

import socket

import pytest

from tfos.native.reserved_port import ReservedPort

tf = pytest.importorskip("tensorflow")

pytestmark = [pytest.mark.tf, pytest.mark.timeout(110)]


def serve(port: int) -> object:
    cluster = tf.train.ClusterSpec({"worker": [f"127.0.0.1:{port}"]})
    return tf.distribute.Server(cluster, job_name="worker", task_index=0)


def test_tensorflows_server_binds_the_port_that_is_held_for_it(monkeypatch):
    held = ReservedPort()
    monkeypatch.setenv("TF_GRPC_REUSE_PORT", "false")
    with pytest.raises(tf.errors.UnknownError, match="Could not start gRPC server"):
        serve(held.port)
    monkeypatch.setenv("TF_GRPC_REUSE_PORT", "true")
    server = serve(held.port)
    socket.create_connection(("127.0.0.1", held.port), timeout=5).close()
    held.release()
    del server
