"""`scripts/hdfs|yarn up|down|status`: a real HDFS, or a YARN with its HDFS, on this host.

up starts one (or says that one runs) and prints what to export, and with --kerberos how to get a
ticket; down ends it and forgets its files.
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
from scripts.local_hdfs.kerberos_sites import USERS
from scripts.local_hdfs.yarn import LocalYarn


def main() -> int:
    kind = sys.argv[1]  # scripts/hdfs and scripts/yarn say which they are
    parser = argparse.ArgumentParser(
        prog=f"scripts/{kind}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("order", choices=["up", "down", "status"])
    parser.add_argument("--datanodes", type=int, default=2, metavar="N", help="default: 2")
    parser.add_argument("--kerberos", action="store_true", help="with a realm of its own")
    parser.add_argument(
        "--directory",
        type=Path,
        default=_default_directory(kind),
        help="new or empty; removed at its end (default: %(default)s)",
    )
    args = parser.parse_args(sys.argv[2:])
    try:
        with _only_one(args.directory):
            directory = args.directory.absolute()
            return _ORDERS[args.order](_KINDS[kind], directory, args)
    except (LocalHdfsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _default_directory(kind: str) -> Path:
    return Path(tempfile.gettempdir()) / f"tfos-{kind}-{os.getuid()}"


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


def _up(kind: type[LocalHdfs], directory: Path, args: argparse.Namespace) -> int:
    num_datanodes = args.datanodes
    running = kind.found(directory)
    if running is not None and not any(daemon.is_alive() for daemon in running.daemons):
        running.stop()
        running = None
    if running is None:
        running = kind.started(directory, num_datanodes=num_datanodes, kerberos=args.kerberos)
    elif running.num_datanodes != num_datanodes:
        raise LocalHdfsError(
            f"an HDFS with {running.num_datanodes} DataNodes runs in {directory}, not"
            f" {num_datanodes}; end it first, with down"
        )
    elif args.kerberos != (running.kdc is not None):
        has = "with" if running.kdc else "without"
        raise LocalHdfsError(f"an HDFS {has} Kerberos runs in {directory}; end it first, with down")
    print(running.url)
    if isinstance(running, LocalYarn):
        print(running.page)
    print(f"export HADOOP_CONF_DIR={running.conf_dir}")
    if running.kdc is not None:
        print(f"export KRB5_CONFIG={running.kdc.krb5_conf}")
        print(f"kinit -kt {running.kdc.keytab(USERS[0])} {USERS[0]}")
    return 0


def _down(kind: type[LocalHdfs], directory: Path, _: argparse.Namespace) -> int:
    running = kind.found(directory)
    if running is None:
        print(f"nothing to end in {directory}")
        return 0
    running.stop()
    print(f"ended {', '.join(daemon.name for daemon in running.daemons)}")
    return 0


def _status(kind: type[LocalHdfs], directory: Path, _: argparse.Namespace) -> int:
    running = kind.found(directory)
    if running is None:
        print(f"nothing runs in {directory}")
        return 3
    for daemon in running.daemons:
        print(f"{daemon.name}: {'runs' if daemon.is_alive() else 'ended'}, process {daemon.pid}")
    answers = [_state_of(running.url, running.num_live_datanodes(), "DataNodes live")]
    if isinstance(running, LocalYarn):
        answers.append(_state_of(running.page, running.num_active_nodes(), "NodeManagers active"))
    return 0 if all(answers) else 3


def _state_of(url: str, count: int, what: str) -> bool:
    """Print how many of a service's processes it counts; -1 is a service that is silent."""
    print(f"{url}: {count} {what}" if count >= 0 else f"{url} does not answer")
    return count >= 0


_ORDERS = {"up": _up, "down": _down, "status": _status}
_KINDS: dict[str, type[LocalHdfs]] = {"hdfs": LocalHdfs, "yarn": LocalYarn}

if __name__ == "__main__":
    raise SystemExit(main())
