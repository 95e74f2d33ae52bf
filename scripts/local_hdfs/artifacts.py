"""Hadoop's jars, fetched once by Maven into the user's cache directory.

Covers: finding Java and Maven, one download for all processes of a user, the class path.
Does not: choose where Maven downloads from; that is the user's own Maven settings.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.local_hdfs.errors import MissingTool
from scripts.local_hdfs.short_program import run_to_end

POM = Path(__file__).with_name("pom.xml")
MAVEN_TIMEOUT_S = 600.0
_YARN_ALONE = "bc"  # BouncyCastle's three


def java() -> str:
    """Return the Java to run: that of JAVA_HOME, else the one on the path."""
    home = os.environ.get("JAVA_HOME")
    found = shutil.which(f"{home}/bin/java") if home else None
    found = found or shutil.which("java")
    if found is None:
        raise MissingTool("HDFS needs Java; run: apt-get install openjdk-17-jre-headless")
    return found


def class_path(cache: Path | None = None, *, yarn: bool = False) -> str:
    """Return the class path of Hadoop's daemons, downloading the jars if they are not there yet.

    Args:
        cache: directory for the jars; default: `tfos` below the user's cache directory.
        yarn: add what a ResourceManager needs beside HDFS's jars; each jar costs a web server
            of Hadoop time at its start.
    """
    java()
    cache = cache or _user_cache()
    digest = hashlib.sha256(POM.read_bytes()).hexdigest()[:12]
    home = cache / f"hdfs-{digest}"
    if not home.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with _only_one(cache / "hdfs.lock"):
            if not home.is_dir():
                _install(home)
    jars = sorted((home / "jars").glob("*.jar"))
    if not yarn:
        jars = [jar for jar in jars if not jar.name.startswith(_YARN_ALONE)]
    # Before the jars: else each daemon unpacks its web pages into the temporary directory.
    return ":".join(str(entry) for entry in (home / "web", *jars))


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tfos"


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # held for one download, which has a deadline
        yield


def _install(home: Path) -> None:
    """Download into a directory beside `home`, which then gets its name: it is whole or absent."""
    maven = shutil.which("mvn")
    if maven is None:
        raise MissingTool("HDFS is downloaded by Maven; run: apt-get install maven")
    staging = Path(tempfile.mkdtemp(prefix=".hdfs-", dir=home.parent))
    try:
        shutil.copy(POM, staging / "pom.xml")
        goal = "dependency:copy-dependencies"
        command = [
            maven,
            "-q",
            "-B",
            "--strict-checksums",
            goal,
            f"-DoutputDirectory={staging / 'jars'}",
        ]
        run_to_end(
            "Maven, which downloads HDFS,", command, directory=staging, timeout_s=MAVEN_TIMEOUT_S
        )
        for jar in sorted((staging / "jars").glob("hadoop-*.jar")):
            _store(jar)
        for jar in (staging / "jars").glob("hadoop-client-minicluster-*.jar"):
            with zipfile.ZipFile(jar) as archive:
                pages = [name for name in archive.namelist() if name.startswith("webapps/")]
                archive.extractall(staging / "web", pages)
        staging.rename(home)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _store(jar: Path) -> None:
    """Write a jar again without compression.

    A NameNode's web server reads through all of its jars for annotated classes when it starts; to
    inflate them for that is most of the time that the NameNode takes.
    """
    plain = jar.with_suffix(".tmp")
    with zipfile.ZipFile(jar) as source, zipfile.ZipFile(plain, "w") as target:
        for entry in source.infolist():
            target.writestr(zipfile.ZipInfo(entry.filename, entry.date_time), source.read(entry))
    plain.replace(jar)
