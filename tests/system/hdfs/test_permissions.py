"""Permissions of what is written on a real HDFS."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from feeding.filesystem.registry import filesystem_for
from scripts.local_hdfs.cluster import LocalHdfs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("umask", "directory_mode", "file_mode"),
    [("", 0o755, 0o644), ("027", 0o750, 0o640), ("u=rwx,g=,o=", 0o700, 0o600)],
)
def test_files_and_directories_follow_the_umask_of_the_configuration(
    hdfs: LocalHdfs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    umask: str,
    directory_mode: int,
    file_mode: int,
) -> None:
    from hdfs_native import Client

    value = f"<property><name>fs.permissions.umask-mode</name><value>{umask}</value></property>"
    site = f"<configuration>{value if umask else ''}</configuration>"
    (tmp_path / "core-site.xml").write_text(site)
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    name = secrets.token_hex(4)
    fs = filesystem_for(hdfs.url)
    fs.mkdirs(f"{hdfs.url}/{name}")
    fs.write(f"{hdfs.url}/{name}/file", b"x")
    found = Client(hdfs.url)
    modes = [found.get_file_info(path).permission for path in (f"/{name}", f"/{name}/file")]
    assert [oct(mode & 0o777) for mode in modes] == [oct(directory_mode), oct(file_mode)]
