"""`scripts/hdfs up|down|status`: a real HDFS on this host to try things on.

up starts one (or says that one runs) and prints what to export; down ends it and forgets its files.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.local_hdfs.cluster import LocalHdfs
from scripts.local_hdfs.errors import LocalHdfsError


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/hdfs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("order", choices=["up", "down", "status"])
    parser.add_argument("--datanodes", type=int, default=2, metavar="N", help="default: 2")
    parser.add_argument("--directory", type=Path, default=_default_directory())
    args = parser.parse_args()
    try:
        with _only_one(args.directory):
            return _ORDERS[args.order](args.directory.absolute(), args.datanodes)
    except (LocalHdfsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _default_directory() -> Path:
    return Path(tempfile.gettempdir()) / f"tfos-hdfs-{os.getuid()}"


@contextmanager
def _only_one(directory: Path) -> Iterator[None]:
    """Let one command at a time work on a directory that is nobody else's."""
    path = directory.with_name(directory.name + ".lock")
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "r+") as file:
        _refuse_foreign(os.fstat(file.fileno()), path)
        if directory.exists():
            _refuse_foreign(directory.lstat(), directory)
        fcntl.flock(file, fcntl.LOCK_EX)  # held for one command, which has deadlines
        yield


def _refuse_foreign(status: os.stat_result, path: Path) -> None:
    if status.st_uid != os.getuid() or stat.S_ISLNK(status.st_mode):
        raise LocalHdfsError(f"{path} belongs to somebody else; choose another --directory")


def _up(directory: Path, num_datanodes: int) -> int:
    hdfs = LocalHdfs.found(directory)
    if hdfs is not None and not any(daemon.is_alive() for daemon in hdfs.daemons):
        hdfs.stop()
        hdfs = None
    if hdfs is None:
        hdfs = LocalHdfs.started(directory, num_datanodes=num_datanodes)
    elif hdfs.num_datanodes != num_datanodes:
        raise LocalHdfsError(
            f"an HDFS with {hdfs.num_datanodes} DataNodes runs in {directory}, not {num_datanodes};"
            " run scripts/hdfs down first"
        )
    print(f"{hdfs.url}\nexport HADOOP_CONF_DIR={hdfs.conf_dir}")
    return 0


def _down(directory: Path, _: int) -> int:
    hdfs = LocalHdfs.found(directory)
    if hdfs is None:
        print(f"no HDFS in {directory}")
        return 0
    hdfs.stop()
    print(f"ended {', '.join(daemon.name for daemon in hdfs.daemons)}")
    return 0


def _status(directory: Path, _: int) -> int:
    hdfs = LocalHdfs.found(directory)
    if hdfs is None:
        print(f"no HDFS in {directory}")
        return 3
    for daemon in hdfs.daemons:
        print(f"{daemon.name}: {'runs' if daemon.is_alive() else 'ended'}, process {daemon.pid}")
    live = hdfs.num_live_datanodes()
    print(f"{hdfs.url}: {live} DataNodes live" if live >= 0 else f"{hdfs.url} does not answer")
    return 0 if live >= 0 else 3


_ORDERS = {"up": _up, "down": _down, "status": _status}

if __name__ == "__main__":
    raise SystemExit(main())
