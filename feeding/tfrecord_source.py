"""TFRecord files of tf.Example as a source of columns.

Covers: TFRecordSource; features inferred from the first records.
Does not: batch or shuffle (direct), frame or decode (tfrecord, example).
Threads: one reader.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from feeding import frame_kernels
from feeding.bad_data import BadData
from feeding.column_cuts import Columns
from feeding.config import MIB
from feeding.data_files import data_files
from feeding.errors import DataError, FileChanged
from feeding.example import ExampleDecoder, Feature
from feeding.example_writer import infer_features
from feeding.filesystem.choose import DEFAULTS, filesystem_for
from feeding.filesystem.interface import FileStatus, Path
from feeding.filesystem.readahead import ReadAhead
from feeding.schema import ColumnSpec, Group, Schema
from feeding.splits import SourceFile, Split
from feeding.tfrecord import RecordLimits, RecordReader, is_gzip

_SAMPLE_RECORDS = 256
_SAMPLE_BYTES = 16 * MIB
_GZIP_NAMES = (".gz", ".gzip")


class TFRecordSource:
    """See direct.Source.

    Args:
        paths: files, directories or patterns.
        features: the columns by name; None: all that the first 256 records (or 16 MiB) of the first
            file that has any hold, float32 and int64 (see infer_features).
        bad: what becomes of damaged records.
        limits: what a file may ask for.

    Raises:
        FileNotFoundError: a path has no file.
        DataError: features are to be inferred, and there are none.
    """

    def __init__(
        self,
        paths: Path | Iterable[Path],
        features: Mapping[str, Feature] | None = None,
        *,
        bad: BadData | None = None,
        limits: RecordLimits | None = None,
    ) -> None:
        self._bad = bad or BadData()
        self._limits = limits
        self._files = data_files(paths, can_be_cut=_is_plain)
        self._sizes = {file.path: file.size_bytes for file in self._files}
        self._decoder = ExampleDecoder(self._inferred() if features is None else features)

    @property
    def schema(self) -> Schema:
        """See direct.Source."""
        features = self._decoder.features
        columns = tuple(_spec(name, feature) for name, feature in features.items())
        return Schema(columns, Group("dict", tuple(features), (None,) * len(features)))

    @property
    def num_skipped(self) -> int:
        """Damaged records so far that were left out."""
        return self._bad.num_skipped

    def files(self) -> Sequence[SourceFile]:
        """See direct.Source."""
        return self._files

    def read(self, split: Split) -> Iterator[Columns]:
        """See direct.Source."""
        with contextlib.closing(filesystem_for(split.path).open(split.path)) as file:
            if file.size_bytes != self._sizes[split.path]:
                raise FileChanged(
                    f"{split.path} had {self._sizes[split.path]} bytes when it was listed, now "
                    f"{file.size_bytes}; train on files that are not written to any more"
                )
            if split.start and is_gzip(file.read_range(0, frame_kernels.FRAME_HEAD)):
                return  # whoever reads its beginning reads all of it
            reader = RecordReader(
                ReadAhead(file, DEFAULTS, begin=split.start),
                split.path,
                span=(split.start, split.stop),
                limits=self._limits,
                bad=self._bad,
            )
            for block in reader.blocks():
                yield tuple(self._decoder.decode(block, split.path, self._bad).values())

    def _inferred(self) -> dict[str, Feature]:
        for file in self._files:
            with contextlib.closing(filesystem_for(file.path).open(file.path)) as opened:
                stream = ReadAhead(opened, DEFAULTS)
                bad = BadData(self._bad.action, self._bad.max_skipped)
                reader = RecordReader(stream, file.path, limits=self._limits, bad=bad)
                sample = list(_sample(reader))
            try:
                found = infer_features(sample)
            except DataError as error:
                raise DataError(
                    f"{file.path}: {error}; name the features that you expect"
                ) from None
            if found:
                return found
        raise DataError(
            f"{self._files[0].path} and {len(self._files) - 1} other files hold no tf.Example with "
            "a feature; name the features that you expect"
        )


def _sample(reader: RecordReader) -> Iterator[bytes]:
    """Yield the first records, the fewer the larger they are."""
    left = _SAMPLE_BYTES
    records = (record for block in reader.blocks() for record in block.records())
    for record in itertools.islice(records, _SAMPLE_RECORDS):
        yield record
        left -= len(record)
        if left <= 0:
            return


def _is_plain(status: FileStatus) -> bool:
    """Shares are even only if compressed files are known by name; each is read once in any case."""
    return not status.path.endswith(_GZIP_NAMES)


def _spec(name: str, feature: Feature) -> ColumnSpec:
    if feature.dtype == "bytes":
        return ColumnSpec(name, "bytes", "bytes")
    if feature.shape is None:
        return ColumnSpec(name, "ragged", "numpy", feature.dtype)
    if not feature.shape:
        return ColumnSpec(name, "tensor", "scalar", feature.dtype)
    return ColumnSpec(name, "tensor", "numpy", feature.dtype, feature.shape)
