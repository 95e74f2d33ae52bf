"""A YARN on whose nodes there is Java, a libc and a shell: no Python, no HOME, and not root.

Covers: NodeManagers in a mount namespace of their own, where this host's Pythons, the checkout and
libraries that Python needs are hidden; what else a user called nobody needs to run them.
Does not: hide anything from HDFS or the ResourceManager. Needs root.
"""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from scripts.local_hdfs.artifacts import class_path
from scripts.local_hdfs.yarn import LocalYarn
from tests.support.spark_submit import ROOT

NOBODY = 65534
HIDDEN_LIBRARIES = ("libbz2", "libffi", "libgomp", "liblzma", "libreadline", "libsqlite3", "libssl")
"""Nothing that a shell or Java uses."""
PYTHONS = (
    "/usr/lib/python3*",
    "/usr/local/lib/python3*",
    "/usr/bin/python3*",
    "/usr/local/bin/python3*",
)


class BareYarn(LocalYarn):
    """`with BareYarn.started(directory) as yarn: …`, where `directory` is open to every user."""

    def _before(self, name: str) -> list[str]:
        if not name.startswith("nodemanager"):
            return super()._before(name)
        node = self.directory / f"node-{name.rpartition('-')[2]}"
        for directory in (node, node / "local", node / "logs"):
            directory.mkdir(exist_ok=True)
            os.chown(directory, NOBODY, NOBODY)
        script = " && ".join([*map(_hide, sorted(_hidden())), 'exec "$@"'])
        user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        without_parent = ["--pdeathsig", "KILL"]  # a change of the user forgets an earlier one
        return ["unshare", "--mount", "sh", "-c", script, "sh", *user, *without_parent]

    def _configure(self) -> None:
        super()._configure()
        self.directory.chmod(0o1777)
        (self.directory / "logs").chmod(0o1777)

    def _class_path(self) -> str:
        """Return copies: the user's cache directory is nobody else's."""
        copies = self.directory / "hadoop"
        if not copies.exists():
            copies.mkdir()
            for place in map(Path, class_path(yarn=True).split(":")):
                copy = shutil.copytree if place.is_dir() else shutil.copy
                copy(place, copies / place.name)
        return f"{copies}/web:{copies}/*"

    def _environ(self) -> dict[str, str]:
        kept = {
            name: os.environ[name]
            for name in ("JAVA_HOME", "LANG", "TFOS_TEST_MARK")
            if name in os.environ
        }
        conf = super()._environ()["HADOOP_CONF_DIR"]
        return {
            **kept,
            "PATH": "/usr/bin:/bin",
            "HADOOP_CONF_DIR": conf,
            "SPARK_LOCAL_IP": "127.0.0.1",
        }


def can_be_bare() -> bool:
    """Whether this user can make a mount namespace and change its user."""
    done = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    return os.geteuid() == 0 and done.returncode == 0


def _hidden() -> Iterable[Path]:
    directories = {Path(each).resolve() for each in (sys.prefix, sys.base_prefix, ROOT)}
    yield from (each for each in directories if each != Path("/usr"))
    for pattern in PYTHONS:
        yield from (Path(each) for each in glob.glob(pattern) if not os.path.islink(each))
    for name in HIDDEN_LIBRARIES:
        yield from (Path(each).resolve() for each in glob.glob(f"/usr/lib/*/{name}.so.*"))


def _hide(path: Path) -> str:
    if path.is_dir():
        # an outer one may be hidden already
        return f"{{ [ ! -d {path} ] || mount -t tmpfs none {path}; }}"
    return f"{{ [ ! -e {path} ] || mount --bind /dev/null {path}; }}"
