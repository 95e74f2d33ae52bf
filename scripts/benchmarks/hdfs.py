"""How fast is a file of HDFS read through our reader, against hdfs-native's own read_range?

Figure: P12.
Method: one file of 256 MiB of random bytes on a NameNode and two DataNodes of this host, all of it
    in the page cache. Ours: `ReadAhead`, a block of 1 MiB at a time as record readers take it. The
    reference calls `read_range` in a loop, with the one of four sizes that is best here. In turns.
Caveats: client and DataNodes share the cores and there is no network; what reading ahead hides of a
    network's latency is not seen. `--url` takes an HDFS that runs already.
Bar: at least 0.85 of the reference.
Last result: docs/guides/performance.md.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from feeding.config import MIB
from feeding.filesystem.config import FileSystemConfig
from feeding.filesystem.readahead import ReadAhead
from feeding.filesystem.registry import filesystem_for
from scripts.benchmarks.harness import Figure, interleave, parse_arguments, report
from scripts.local_hdfs.cluster import LocalHdfs

SIZES_MIB = (1, 4, 16, 64)
BLOCK_BYTES = MIB


@contextmanager
def some_hdfs(url: str | None) -> Iterator[str]:
    """Yield the URL of the HDFS that was given, or of one that ends with the block."""
    if url is not None:
        yield url
        return
    with (
        tempfile.TemporaryDirectory(prefix="tfos-bench-") as directory,
        LocalHdfs.started(Path(directory) / "hdfs") as hdfs,
    ):
        yield hdfs.url


def read_native(url: str, path: str, size_bytes: int, at_once: int) -> float:
    """Return MB/s of hdfs-native alone."""
    from hdfs_native import Client

    reader = Client(url).read(path)
    begun = time.perf_counter()
    for offset in range(0, size_bytes, at_once):
        reader.read_range(offset, min(at_once, size_bytes - offset))
    return size_bytes / (time.perf_counter() - begun) / 1e6


def read_ours(path: str, size_bytes: int, config: FileSystemConfig) -> float:
    """Return MB/s of our reader."""
    block = memoryview(bytearray(BLOCK_BYTES))
    with ReadAhead(filesystem_for(path, config).open(path), config) as file:
        begun = time.perf_counter()
        total = 0
        while count := file.readinto(block):
            total += count
        seconds = time.perf_counter() - begun
    if total != size_bytes:
        raise SystemExit(f"{total} of {size_bytes} bytes were read")
    return size_bytes / seconds / 1e6


def main() -> None:
    args = parse_arguments(__doc__, 9, {"--url": {"help": "of an HDFS that is there"}})
    size_bytes = (8 if args.toy else 256) * MIB
    config = FileSystemConfig()
    with some_hdfs(args.url) as url:
        path = f"{url}/tfos-bench-{os.getpid()}"
        fs = filesystem_for(path)
        fs.write(path, os.urandom(MIB) * (size_bytes // MIB))
        try:
            inner = path.removeprefix(url)
            sizes = [size * MIB for size in SIZES_MIB]
            tries = interleave(
                1 if args.toy else 3,
                *(lambda n=size: read_native(url, inner, size_bytes, n) for size in sizes),
            )
            best = max(zip(sizes, tries, strict=True), key=lambda pair: statistics.median(pair[1]))
            ours, reference = interleave(
                args.repeats,
                lambda: read_ours(path, size_bytes, config),
                lambda: read_native(url, inner, size_bytes, best[0]),
            )
        finally:
            fs.delete(path)
    figure = Figure("P12", f"read of {size_bytes // MIB} MiB from HDFS", "MB/s", "higher")
    name = f"hdfs-native read_range, {best[0] // MIB} MiB at a time"
    report(figure, ours, reference, name)


if __name__ == "__main__":
    main()
