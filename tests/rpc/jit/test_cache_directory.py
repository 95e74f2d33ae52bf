"""The directory of compiled kernels: who may own and write it, and where it is instead."""

from __future__ import annotations

import atexit
import os
import stat
import tempfile
from pathlib import Path

import pytest

from rpc.jit.cache_directory import (
    CACHE_VARIABLE,
    CacheDirectory,
    made_private,
    make,
    real_path,
    why_unsafe,
)


@pytest.fixture
def room(tmp_path: Path) -> Path:
    """An installed package beside which nothing can be kept."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__pycache__").touch()
    return package


def test_the_configured_place_is_made_private_and_named_by_the_sources(
    room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "deep" / "cache"))
    before = os.umask(0o002)  # as where every user has a group
    try:
        used = CacheDirectory(room, "digest").path()
    finally:
        os.umask(before)
    assert used == tmp_path / "deep" / "cache" / "kernels-digest"
    assert stat.S_IMODE(used.stat().st_mode) == 0o700
    assert why_unsafe(used) == ""


@pytest.mark.parametrize(("mask", "mode"), [(0o000, 0o755), (0o002, 0o755), (0o077, 0o700)])
def test_what_is_made_above_a_private_directory_is_no_reason_to_refuse_it(
    tmp_path: Path, mask: int, mode: int
):
    before = os.umask(mask)
    try:
        made = tmp_path / "home" / "state" / "runs"
        make(made)
    finally:
        os.umask(before)
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    for parent in (made.parent, made.parent.parent):
        assert stat.S_IMODE(parent.stat().st_mode) == mode
    assert made_private(made) == made


@pytest.mark.attack("A16")
@pytest.mark.parametrize(
    ("place", "mode", "is_used"),
    [
        ("kernels-digest", 0o777, False),
        ("kernels-digest", 0o770, False),
        ("kernels-digest", 0o755, True),
        (".", 0o777, False),
        (".", 0o775, False),
        ("..", 0o777, False),
        ("..", 0o1777, True),  # like /tmp
    ],
)
def test_a_place_that_others_can_write_is_not_used(
    room: Path, tmp_path: Path, place: str, mode: int, is_used: bool, monkeypatch
):
    root = tmp_path / "above" / "root"
    planted = root / "kernels-digest"
    planted.mkdir(parents=True, mode=0o700)
    (root / place).resolve().chmod(mode)
    monkeypatch.setenv(CACHE_VARIABLE, str(root))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    used = CacheDirectory(room, "digest").path()
    assert used == (planted if is_used else tmp_path / "home" / "tfos" / "kernels-digest")


@pytest.mark.attack("A16")
@pytest.mark.parametrize("place", ["kernels-digest", ".", ".."])
def test_a_place_of_or_below_another_users_directory_is_not_used(
    room: Path, tmp_path: Path, place: str, monkeypatch
):
    root = tmp_path / "above" / "root"
    planted = root / "kernels-digest"
    planted.mkdir(parents=True, mode=0o700)
    theirs, real = (root / place).resolve(), Path.stat

    def stat_of(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        found = real(path, follow_symlinks=follow_symlinks)
        return os.stat_result((*found[:4], 4711, *found[5:])) if path == theirs else found

    monkeypatch.setenv(CACHE_VARIABLE, str(root))
    monkeypatch.setattr(Path, "stat", stat_of)
    assert CacheDirectory(room, "digest").path() != planted
    own = f"it is no directory of user {os.geteuid()}"
    expected = own if theirs == planted else f"{theirs} belongs to user 4711"
    assert expected in why_unsafe(planted)


def test_a_link_is_not_followed(room: Path, tmp_path: Path, monkeypatch):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "root").mkdir()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "root"))
    (tmp_path / "root" / "kernels-digest").symlink_to(tmp_path / "elsewhere")
    assert CacheDirectory(room, "digest").path().parent != tmp_path / "root"


@pytest.mark.attack("A16")
def test_a_link_above_the_place_leads_nowhere_else_later(room: Path, tmp_path: Path, monkeypatch):
    """Whoever may change the link's directory turns it between a check and the next load."""
    mine, theirs, shared = tmp_path / "mine", tmp_path / "theirs", tmp_path / "shared"
    for place, mode in ((mine, 0o700), (theirs, 0o700), (shared, 0o777)):
        place.mkdir()
        place.chmod(mode)
    link = shared / "cache"
    link.symlink_to(mine)
    monkeypatch.setenv(CACHE_VARIABLE, str(link))
    directory = CacheDirectory(room, "digest")
    assert directory.path() == mine / "kernels-digest"
    link.unlink()
    link.symlink_to(theirs)
    assert directory.path() == mine / "kernels-digest"
    assert directory.is_safe()


@pytest.mark.attack("A16")
def test_a_path_through_a_link_is_not_safe_whatever_it_leads_to_now(tmp_path: Path):
    (tmp_path / "mine" / "cache").mkdir(parents=True, mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    through = tmp_path / "link" / "cache"
    assert "is a symbolic link" in why_unsafe(through)
    assert real_path(through) == tmp_path / "mine" / "cache"
    assert why_unsafe(real_path(through)) == ""


def test_beside_the_package_its_own_parents_are_trusted(tmp_path: Path, monkeypatch):
    """Who can write the package runs code here anyway; below it the cache stays private."""
    room = tmp_path / "shared" / "package"
    room.mkdir(parents=True)
    room.parent.chmod(0o775)
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    directory = CacheDirectory(room, "digest")
    assert directory.path() == room / "__pycache__" / "kernels-digest"
    assert directory.is_safe()
    (room / "__pycache__").chmod(0o777)
    assert not directory.is_safe()


def test_without_any_writable_place_a_private_one_is_made_and_filled_from_the_packed_one(
    room: Path, tmp_path: Path, monkeypatch
):
    packed = tmp_path / "packed" / "kernels-digest"
    packed.mkdir(parents=True, mode=0o700)
    (packed / "kernels.sgd-1.py311.nbi").write_bytes(b"index")
    monkeypatch.setenv(CACHE_VARIABLE, str(packed.parent))
    monkeypatch.setattr(CacheDirectory, "_is_usable", lambda *_: False)  # as on a read-only disk
    used = CacheDirectory(room, "digest").path()
    assert used.parent == Path(tempfile.gettempdir())
    assert stat.S_IMODE(used.stat().st_mode) == 0o700
    assert (used / "kernels.sgd-1.py311.nbi").read_bytes() == b"index"
    assert why_unsafe(used) == ""


def test_a_forked_child_that_ends_leaves_the_private_place_to_its_parent(
    room: Path, tmp_path: Path, monkeypatch
):
    made = []
    monkeypatch.setattr(CacheDirectory, "_is_usable", lambda *_: False)
    monkeypatch.setattr(atexit, "register", lambda act, *given, **named: made.append((act, given)))
    used = CacheDirectory(room, "digest").path()
    ((remove, given),) = made
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        remove(*given)
    assert used.is_dir()
    remove(*given)
    assert not used.exists()


def test_where_everybody_may_write_the_packed_one_is_used_itself(
    room: Path, tmp_path: Path, monkeypatch
):
    """As in a pod: a tree that cannot be written, and a volume of mode 0777 as /tmp."""
    packed = tmp_path / "packed" / "kernels-digest"
    packed.mkdir(parents=True, mode=0o700)
    (packed / "kernels.sgd-1.py311.nbi").write_bytes(b"index")
    volume = tmp_path / "volume"
    volume.mkdir()
    volume.chmod(0o777)
    monkeypatch.setenv(CACHE_VARIABLE, str(packed.parent))
    monkeypatch.setattr(CacheDirectory, "_is_usable", lambda *_: False)
    monkeypatch.setattr(tempfile, "tempdir", str(volume))
    directory = CacheDirectory(room, "digest")
    assert directory.path() == packed
    assert directory.is_safe()
