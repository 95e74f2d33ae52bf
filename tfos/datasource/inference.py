"""Schema inference of TFRecord files, from a sample of several of them.

Runs in: a Python process on the driver's host.
"""

from __future__ import annotations

import itertools

from pyspark.sql.types import (
    DateType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from feeding.errors import DataError
from feeding.formats.tfrecord.infer import FeatureSurvey, survey
from feeding.formats.tfrecord.source import sample_of
from tfos.datasource.columns import RECORD_SCHEMA, spark_schema
from tfos.datasource.listing import Listing
from tfos.datasource.options import TFRecordOptions

_TYPES = {"int": IntegerType(), "bigint": LongType(), "date": DateType(), "string": StringType()}
"""Types of partition columns."""


def infer_schema(listing: Listing, options: TFRecordOptions) -> StructType:
    """Return the columns of a sample of the records, then those of the directories.

    Columns are in the order of their names. All may be null: records outside the sample may lack a
    feature.

    Args:
        listing: the files of the read.
        options: size of the sample, binary features, handling of damaged records.

    Raises:
        DataError: a feature's type differs between files, or there is no feature.
    """
    if options.record_type == "ByteArray":
        columns = RECORD_SCHEMA
    else:
        columns = spark_schema(_surveyed(listing, options), options.binary_features)
    fields = [field for field in columns.fields if field.name not in listing.kinds]
    for name, kind in listing.kinds.items():
        fields.append(StructField(name, _TYPES[kind]))
    return StructType(fields)


def _surveyed(listing: Listing, options: TFRecordOptions) -> dict[str, FeatureSurvey]:
    found: dict[str, FeatureSurvey] = {}
    seen_in: dict[str, str] = {}
    sampled = listing.sample(options.sample_files)
    others = (file for file in listing.files if file.size_bytes and file not in sampled)
    for number, file in enumerate(itertools.chain(sampled, others)):
        if found and number >= len(sampled):
            break  # others count only if the sample has no records
        records = sample_of(file, options.bad_data(), num_records=options.sample_records)
        try:
            surveyed = survey(records)
        except DataError as error:
            raise DataError(f"{file.path}: {error}; give a schema") from None
        for name, seen in surveyed.items():
            before = found.get(name, seen)
            if before.kind != seen.kind:
                raise DataError(
                    f"feature {name!r} is a {before.kind} list in {seen_in[name]} and a "
                    f"{seen.kind} list in {file.path}; give a schema without it, or read the "
                    "files separately"
                )
            found[name] = before.merged(seen)
            seen_in.setdefault(name, file.path)
    if not found:
        raise DataError(
            f"no schema can be inferred: {len(listing.files)} files"
            f"{f', the first is {listing.files[0].path},' if listing.files else ''} hold no "
            "tf.Example with a feature; give a schema"
        )
    return dict(sorted(found.items()))
