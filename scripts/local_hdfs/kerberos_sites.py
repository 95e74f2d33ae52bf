"""The settings that make a local HDFS and YARN ask for Kerberos, over those of their own sites.

Pure: directories in, settings out. DataNodes listen on ports that any user may take, so they prove
themselves by SASL and serve their own web pages by HTTPS alone; Hadoop refuses anything less.
"""

from __future__ import annotations

from pathlib import Path

from scripts.local_hdfs.kdc import REALM, Kdc
from scripts.local_hdfs.sites import HOST

SERVICES = ("nn/localhost", "dn/localhost", "HTTP/localhost", "rm/localhost", "nm/localhost")
USERS = ("alice", "bob")
"""alice may do everything in HDFS, bob what anybody may."""


def secure_core_site() -> dict[str, str]:
    """Return what every client and daemon reads."""
    return {
        "hadoop.security.authentication": "kerberos",
        "hadoop.security.authorization": "true",
        "hadoop.rpc.protection": "privacy",
        "hadoop.user.group.static.mapping.overrides": "alice=supergroup;bob=bob;nn=supergroup",
    }


def secure_hdfs_site(kdc: Kdc) -> dict[str, str]:
    """Return the daemons' principals, and encryption on the way to DataNodes."""
    nn, dn, http, *_ = SERVICES
    values = {
        "dfs.block.access.token.enable": "true",
        "dfs.data.transfer.protection": "privacy",
        "dfs.encrypt.data.transfer.cipher.suites": "AES/CTR/NoPadding",  # the default is slow
        "dfs.web.authentication.kerberos.principal": f"{http}@{REALM}",
        "dfs.web.authentication.kerberos.keytab": str(kdc.keytab(http)),
    }
    for daemon, principal in (("namenode", nn), ("datanode", dn)):
        values[f"dfs.{daemon}.kerberos.principal"] = f"{principal}@{REALM}"
        values[f"dfs.{daemon}.keytab.file"] = str(kdc.keytab(principal))
    return values


def secure_yarn_site(kdc: Kdc) -> dict[str, str]:
    """Return the daemons' principals; containers go on as the NodeManagers' own user."""
    *_, rm, nm = SERVICES
    values = {}
    for daemon, principal in (("resourcemanager", rm), ("nodemanager", nm)):
        values[f"yarn.{daemon}.principal"] = f"{principal}@{REALM}"
        values[f"yarn.{daemon}.keytab"] = str(kdc.keytab(principal))
    return values


def secure_datanode_options(web_port: int) -> list[str]:
    """Return what a DataNode's program needs beside its own ports."""
    return ["-Ddfs.http.policy=HTTPS_ONLY", f"-Ddfs.datanode.https.address={HOST}:{web_port}"]


def ssl_server(keystore: Path, password: str) -> dict[str, str]:
    """Return the settings of DataNodes' HTTPS."""
    return {
        "ssl.server.keystore.location": str(keystore),
        "ssl.server.keystore.type": "pkcs12",
        "ssl.server.keystore.password": password,
        "ssl.server.keystore.keypassword": password,
    }
