"""The command `tfos pack`: refusals before any work, progress, and what it says of an archive."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tfos.cli import main
from tfos.cli.packing import summary
from tfos.pack import packing
from tfos.pack.libraries import HostLibraries
from tfos.pack.packing import Packed

MIB = 1 << 20
PACKED = Packed(
    num_files=16_526,
    before_bytes=2842 * MIB,
    files_bytes=1879 * MIB,
    archive_bytes=527 * MIB,
    num_modules=4217,
    num_kernels=222,
    given_up=("pandas", "six"),
    unmatched=("sicpy*",),
    libraries=HostLibraries(
        {"libffi.so.8": Path("/lib/libffi.so.8")}, (), ("libtbb.so.12",), (2, 36)
    ),
)


def called(*arguments: str):
    return CliRunner().invoke(main.app, ["pack", *arguments])


def test_what_nobody_unpacks_is_refused_before_any_work(tmp_path):
    result = called("-o", str(tmp_path / "env.zip"))
    assert result.exit_code == 2
    assert result.stderr.startswith("tfos: env.zip does not end in .tar.gz, .tgz, .tar")


def test_a_missing_extra_is_named_with_the_command(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tfos.pack.packing", None)
    result = called("-o", str(tmp_path / "env.tar.gz"))
    assert result.exit_code == 2
    assert "pip install 'tfos[pack]'" in result.stderr


def test_it_shows_the_steps_and_says_sizes_and_where_the_archive_runs(monkeypatch, tmp_path):
    def pack(target, choices, progress):
        progress.on_step("writing the archive")
        progress.on_size(2)
        progress.on_bytes(1)
        assert choices == packing.Choices(kept=("pyspark/jars",), left_out=("scipy*",), level=1)
        return PACKED

    monkeypatch.setattr(packing, "pack", pack)
    options = ("--keep", "pyspark/jars", "--leave-out", "scipy*", "--level", "1")
    result = called("-o", str(tmp_path / "env.tar.gz"), *options)
    assert result.exit_code == 0, result.output
    assert "tfos | writing the archive" in result.stderr
    assert "527 MiB; 16526 files of 1879 MiB of the environment's 2842 MiB" in result.stdout


@pytest.mark.parametrize(
    "line",
    [
        "glibc 2.36 or newer",
        "from this host: libffi.so.8",
        "compiled: 4217 modules; 222 kernels, for processors like this one",
        "not on this host either: libtbb.so.12",
        "left out, though a node imports it here: pandas, six",
        "spark-submit --archives 'my env.tar.gz#env' --conf spark.pyspark.python=./env/bin/python",
    ],
)
def test_the_summary_has(line):
    assert line in summary(Path("my env.tar.gz"), PACKED, 89.2)
