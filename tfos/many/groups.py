"""Groups of a DataFrame as items: each group's rows as one Arrow stream, persisted by Spark.

Covers: `df.groupBy(...)` to pickled items, in one partition per slot.
Does not: bring rows to the driver, only names.
Runs in: the driver; `_packed` in Spark's tasks.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tfos.errors import SettingsError
from tfos.many.items import check_names, digest_of, shown_name
from tfos.many.row_digest import rows_digest

_OTHER_KEYS = (
    "their keys have one text (a null and the text 'None', or parts that have ', ' in them): group "
    "by keys whose texts differ, such as coalesce(key, 'unknown')"
)
_PACKED = "item string, data binary, rows_digest string"
_LARGE_TYPES = "spark.sql.execution.arrow.useLargeVarTypes"


@dataclass(frozen=True, slots=True)
class GroupedItems:
    """The groups of a DataFrame."""

    names: tuple[str, ...]
    homes: tuple[int, ...]
    """Partition of each group."""
    frame: Any
    """Persisted frame with rows of (name, pickled item, digest of the group's rows)."""
    digest: str
    """Digest of the keys."""
    row_digests: tuple[str, ...]
    """Digest of each group's rows; empty texts if they are not needed."""

    def release(self) -> None:
        """Unpersist the groups."""
        self.frame.unpersist()


def is_grouped(given: Any) -> bool:
    """Whether this is a grouped DataFrame."""
    kind = type(given)
    return kind.__module__.startswith("pyspark.sql") and kind.__name__ == "GroupedData"


def session_of(given: Any) -> Any:
    """Return the session of a grouped DataFrame, classic or of Spark Connect."""
    return given._df.sparkSession


def group(given: Any, num_slots: int, *, with_digests: bool) -> GroupedItems:
    """Group the rows, in one Spark job.

    Args:
        given: the result of `df.groupBy(...)`.
        num_slots: number of partitions.
        with_digests: whether to compute a digest of each group's rows.

    Raises:
        SettingsError: Spark cannot group rows with these columns' names.
        pyspark.errors.AnalysisException: it cannot for another reason.
    """
    from pyspark import StorageLevel
    from pyspark.errors import AnalysisException
    from pyspark.sql import functions

    is_large = given.session.conf.get(_LARGE_TYPES, "false").lower() == "true"

    def pack(key: Any, table: Any) -> Any:  # Spark takes no partial: it reads hints
        return _packed(key, table, rows_digest(table) if with_digests else "", is_large)

    # By name: a recomputation after a loss yields the same partitions. A plain repartition deals
    # rows by their bytes, which depend on the order of a group's rows.
    try:
        applied = given.applyInArrow(pack, _PACKED)
    except AnalysisException as error:
        raise _refusal(error, given._df.columns) from error
    packed = applied.repartitionByRange(num_slots, "item")
    packed = packed.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        rows = packed.select("item", functions.spark_partition_id(), "rows_digest").collect()
        found = sorted((row[0], row[1], row[2]) for row in rows)
        names = tuple(name for name, _, _ in found)
        check_names(names, _OTHER_KEYS)
    except BaseException:
        packed.unpersist()
        raise
    return GroupedItems(
        names=names,
        homes=tuple(home for _, home, _ in found),
        frame=packed,
        digest=digest_of((name, "") for name in names),
        row_digests=tuple(digest for _, _, digest in found),
    )


def _refusal(error: Exception, columns: Sequence[str]) -> Exception:
    """Return Spark's error, or a clear one: it reads a name with a dot as that of a field."""
    odd = [name for name in columns if "." in name or "`" in name]
    if not odd:
        return error
    return SettingsError(
        f"map_train(df.groupBy(...)): Spark cannot pass columns with dots or backticks in their "
        f"names to a function of groups, and the DataFrame has {odd}; rename them before groupBy: "
        "df.withColumnRenamed(old, new)"
    )


def _packed(key: Any, table: Any, digest: str, is_large: bool) -> Any:
    import cloudpickle
    import pyarrow

    values = tuple(part.as_py() for part in key)
    stream = io.BytesIO()
    with pyarrow.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    item = (values[0] if len(values) == 1 else values, stream.getvalue())
    data = {
        "item": [shown_name(values)],
        "data": [cloudpickle.dumps(item)],
        "rows_digest": [digest],
    }
    prefix = "large_" if is_large else ""
    types = [("item", "string"), ("data", "binary"), ("rows_digest", "string")]
    return pyarrow.table(data, pyarrow.schema([(name, prefix + kind) for name, kind in types]))
