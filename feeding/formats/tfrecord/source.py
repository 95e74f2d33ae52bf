"""TFRecord source: TFRecord files of tf.Example as columns.

Covers: TFRecordSource; features inferred from the first records.
Does not: batch or shuffle (reading.reader), frame or decode (framing, example).
Threads: one reader.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from feeding.columnar.ops import Columns
from feeding.columnar.schema import ColumnSpec, Schema
from feeding.config import MIB
from feeding.errors import DataError, FeedSettingsError
from feeding.filesystem.interface import Path
from feeding.formats.tfrecord.example import ExampleDecoder, Feature
from feeding.formats.tfrecord.framing import RecordBlock, RecordLimits, RecordReader
from feeding.formats.tfrecord.infer import infer_features
from feeding.formats.tfrecord.records import opened_records
from feeding.reading.bad_records import BadData
from feeding.reading.discover import data_files, is_plain
from feeding.reading.partitions import PartitionColumn, partition_columns, refuse_both
from feeding.reading.row_counts import PieceRows
from feeding.reading.splits import SourceFile, Split

_SAMPLE_BYTES = 16 * MIB


class TFRecordSource:
    """See reading.runs.Source.

    Args:
        paths: files, directories or patterns.
        features: the columns by name; None: all features of the first 256 records (or 16 MiB) of
            the first file that has any, as float32 and int64 (see infer_features).
        bad: policy for damaged records.
        limits: bound records and compression.
        partitions: whether `directories` has columns: all keys of directories, or those in
            `features`.

    Raises:
        FileNotFoundError: a path has no file.
        DataError: `features` is None, and no file has any; or a directory's value does not fit.
    """

    def __init__(
        self,
        paths: Path | Iterable[Path],
        features: Mapping[str, Feature] | None = None,
        *,
        bad: BadData | None = None,
        limits: RecordLimits | None = None,
        partitions: bool = False,
    ) -> None:
        self._bad = bad or BadData()
        self._limits = limits
        self._files = data_files(paths, is_splittable=is_plain)
        self._by_path = {file.path: file for file in self._files}
        self.directories = partition_columns(self._files) if partitions else {}
        """Columns of directories, which `read` leaves out, by name."""
        if features is None:
            features = self._inferred()
        else:
            named = {name: features[name] for name in self.directories if name in features}
            self.directories = {
                name: _from_directories(self.directories[name], feature)
                for name, feature in named.items()
            }
            features = {name: spec for name, spec in features.items() if name not in named}
        self._decoder = ExampleDecoder(features)

    @property
    def schema(self) -> Schema:
        """See reading.runs.Source."""
        features = self._decoder.features
        return Schema.of_dict(_spec(name, feature) for name, feature in features.items())

    @property
    def num_skipped(self) -> int:
        """Damaged records that were skipped so far."""
        return self._bad.num_skipped

    def files(self) -> Sequence[SourceFile]:
        """See reading.runs.Source."""
        return self._files

    def read(self, split: Split) -> Iterator[Columns]:
        """See reading.runs.Source."""
        with self._opened(split) as reader:
            # map holds no block while its columns are used, as a loop's variable would.
            yield from map(functools.partial(self._columns, path=split.path), reader.blocks())

    def count(self, piece: Split) -> int:
        """See reading.row_counts.Countable; counts all records, damaged ones included."""
        with self._opened(piece) as reader:
            return reader.count()

    def read_rows(self, wanted: PieceRows) -> Iterator[Columns]:
        """See reading.row_counts.Countable; decodes only the wanted records."""
        with self._opened(wanted.piece) as reader:
            for block in reader.blocks():
                if part := wanted.within(block.first_record, len(block)):
                    yield self._columns(block.part(*part), wanted.piece.path)
                if wanted.is_read(block.first_record + len(block)):
                    return
            wanted.check(reader.num_records)

    def _opened(self, piece: Split) -> AbstractContextManager[RecordReader]:
        return opened_records(piece, self._by_path[piece.path], self._bad, self._limits)

    def _columns(self, block: RecordBlock, path: str) -> Columns:
        return tuple(self._decoder.decode(block, path, self._bad).values())

    def _inferred(self) -> dict[str, Feature]:
        for file in self._files:
            bad = BadData(self._bad.action, self._bad.max_skipped)
            sample = sample_of(file, bad, self._limits)
            try:
                found = infer_features(sample)
            except DataError as error:
                raise DataError(
                    f"{file.path}: {error}; name the features that you expect"
                ) from None
            for name in self.directories:
                if name in found:
                    raise refuse_both(name, file.path)
            if found:
                return found
        raise DataError(
            f"{self._files[0].path} and {len(self._files) - 1} other files hold no tf.Example with "
            "a feature; name the features that you expect"
        )


def _from_directories(column: PartitionColumn, feature: Feature) -> PartitionColumn:
    if feature.shape != ():
        raise FeedSettingsError(
            f"{column.name!r} is a key of directories, which has one value per row, not shape "
            f"{feature.shape}; pass shape=(), or partitions=False to read it from the records"
        )
    return column.of(feature.dtype)


def sample_of(
    file: SourceFile, bad: BadData, limits: RecordLimits | None = None, num_records: int = 256
) -> list[bytes]:
    """Return a file's first records, up to 16 MiB.

    Args:
        file: to read.
        bad: policy for damaged records.
        limits: bound records and compression.
        num_records: most records.
    """
    whole = Split(file.path, 0, file.size_bytes)
    sample: list[bytes] = []
    left = _SAMPLE_BYTES
    with opened_records(whole, file, bad, limits, ahead_until=0) as reader:
        for block in reader.blocks():
            for record in itertools.islice(block.records(), num_records - len(sample)):
                sample.append(record)
                left -= len(record)
                if left <= 0:
                    return sample
            if len(sample) == num_records:
                break
    return sample


def _spec(name: str, feature: Feature) -> ColumnSpec:
    if feature.dtype == "bytes" and feature.shape is None:
        return ColumnSpec(name, "bytes", "texts")
    if feature.dtype == "bytes":
        return ColumnSpec(name, "bytes", "bytes", shape=feature.shape or ())
    if feature.shape is None:
        return ColumnSpec(name, "ragged", "numpy", feature.dtype)
    if not feature.shape:
        return ColumnSpec(name, "tensor", "scalar", feature.dtype)
    return ColumnSpec(name, "tensor", "numpy", feature.dtype, feature.shape)
