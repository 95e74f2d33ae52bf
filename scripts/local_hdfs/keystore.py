"""A key and a certificate of its own for the HTTPS of a secure DataNode, made by Java's keytool."""

from __future__ import annotations

import secrets
from pathlib import Path

from scripts.local_hdfs.artifacts import java
from scripts.local_hdfs.errors import MissingTool
from scripts.local_hdfs.short_program import run_to_end


def make_keystore(directory: Path) -> tuple[Path, str]:
    """Make a keystore, and return its path and password.

    Args:
        directory: where to write; no other user may read it.

    Raises:
        MissingTool: the Java that is used has no keytool.
    """
    keytool = Path(java()).resolve().with_name("keytool")
    if not keytool.exists():
        raise MissingTool(f"Kerberos needs {keytool}; set JAVA_HOME to a Java that has it")
    path, password = directory / "https.p12", secrets.token_hex(16)
    asked = {
        "-alias": "https",
        "-dname": "CN=localhost",
        "-keyalg": "EC",
        "-validity": "30",
        "-storetype": "PKCS12",
        "-keystore": str(path),
        "-storepass": password,
    }
    options = [word for pair in asked.items() for word in pair]
    command = [str(keytool), "-J-XX:TieredStopAtLevel=1", "-genkeypair", *options]
    run_to_end("keytool", command)
    return path, password
