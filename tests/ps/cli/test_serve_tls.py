"""Parameter servers over TLS, as a user without Spark sets them up."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ps.cli import serve
from ps.cli.main import main as ps_main
from ps.client.client import PSClient
from ps.errors import RequestTimeout
from ps.manifest.manifest import Hyper
from rpc.auth.certificates import TlsCredentials
from rpc.auth.handshake import Credentials, Identity, Role
from rpc.transport import tls_stream
from tests.support.ps_cluster import ADD, cluster, filled, make_manifest
from tests.support.ps_processes import CLUSTER_ID, CREDENTIALS, SECRET, server_processes

pytestmark = pytest.mark.socket

HYPER = Hyper(1.0)
SECURITY = Path(__file__).parents[3] / "SECURITY.md"
FILES = ("cert.pem", "key.pem", "ca.pem")


def arguments(directory: Path) -> tuple[str, ...]:
    flags = ("--tls-cert", "--tls-key", "--tls-ca")
    files = [str(directory / name) for name in FILES]
    return tuple(part for pair in zip(flags, files, strict=True) for part in pair)


@pytest.mark.process
@pytest.mark.attack("A06")
@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl program")
def test_the_documented_commands_make_what_servers_and_clients_need(tmp_path: Path, capsys):
    (recipe,) = re.findall(r"```\n(id=.*?)```", SECURITY.read_text(), re.DOTALL)
    recipe = recipe.replace("id=my-cluster", f"id={CLUSTER_ID}")
    subprocess.run(["sh", "-ec", recipe], cwd=tmp_path, check=True, capture_output=True, timeout=60)
    manifest = make_manifest(1000, rule=ADD)
    tls = TlsCredentials.from_files(*(tmp_path / name for name in FILES))
    identity = Identity(Role.WORKER, 0)
    with server_processes(tmp_path, 1, num_workers=1, arguments=arguments(tmp_path)) as (server,):
        credentials = Credentials(CLUSTER_ID, SECRET, tls=tls)
        with PSClient([server.endpoint], credentials, identity, num_workers=1) as client:
            client.seed(manifest, filled(manifest))
            into = filled(manifest)
            client.push_pull(filled(manifest, 1.0), into, hyper=HYPER, rows=1)
            assert np.all(into["trainable"] == 1.0)
            assert client.link_stats()[0].path == "tls"
        asked = ["--secret-file", str(tmp_path / "secret"), "--cluster-id", CLUSTER_ID]
        address = f"{server.endpoint.host}:{server.endpoint.port}"
        assert ps_main(["stats", address, *asked, *arguments(tmp_path)]) == 0
        assert "ps:0 SERVING: clock 1" in capsys.readouterr().out
        with (
            PSClient(
                [server.endpoint], CREDENTIALS, identity, num_workers=1, timeout_s=1.0
            ) as plain,
            pytest.raises(RequestTimeout, match=r"ps:0 at .*waits for TLS \(security='tls'\)"),
        ):
            plain.describe()


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--tls-cert", "cert.pem"], "all three of --tls-cert, --tls-key and --tls-ca"),
        (["--tls-key", "key.pem", "--tls-ca", "ca.pem"], "all three"),
        (["--integrity", "payload", "all"], "authenticate every byte twice"),
        (["--cluster-id", "a b", "all"], "letters, digits"),
        (["all"], "others may read the key; chmod 0600"),
        (["all"], "TLS files cannot be used"),
    ],
)
def test_flags_and_files_without_sense_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, flags, text
):
    monkeypatch.setattr(serve, "_signals_caught", lambda: contextlib.nullcontext([]))
    for name in ("secret", *FILES):
        (tmp_path / name).touch(mode=0o644 if "chmod" in text and name == "key.pem" else 0o600)
        (tmp_path / name).write_bytes(SECRET)
    if flags[-1] == "all":
        flags = [*flags[:-1], *arguments(tmp_path)]
    secret = ["--secret-file", str(tmp_path / "secret")]
    assert serve.main(["--num-workers", "1", "--cluster-id", "c", *secret, *flags]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.fault("F28")
def test_pushes_count_exactly_while_connections_use_up_their_keys(monkeypatch: pytest.MonkeyPatch):
    manifest = make_manifest(1000, rule=ADD)
    with cluster("tls") as bed:
        monkeypatch.setattr(tls_stream, "MAX_RECORDS", 16)
        (client,) = bed.workers(manifest, filled(manifest))
        for _ in range(20):
            client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        assert client.link_stats()[0].reconnects >= 2
        assert set(bed.pulled(client)["trainable"]) == {20.0}
