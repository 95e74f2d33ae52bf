"""RDDs whose rows Spark stores as pickled batches: feed the batches, not the rows.

Covers: which RDDs those are, and how their bytes reach the feed task untouched.
Does not: read the batches (feeding.encode.pickled).
Runs in: the driver; imports pyspark only inside functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

Loads: TypeAlias = Callable[[bytes], Sequence[Any]]


def raw_batches(rdd: Any) -> tuple[Any, Loads | None]:
    """Return an RDD of pickled batches and what unpickles one, or the RDD itself and None.

    Only parallelized and cached RDDs qualify: their bytes are there already. The rows of any other
    RDD are made by its own Python functions, which a second pass over bytes would only slow down.
    """
    from pyspark.core.rdd import RDD
    from pyspark.serializers import (
        BatchedSerializer,
        CloudPickleSerializer,
        CPickleSerializer,
        NoOpSerializer,
    )

    is_pipelinable = getattr(rdd, "_is_pipelinable", None)
    serializer = getattr(rdd, "_jrdd_deserializer", None)
    if is_pipelinable is not None and is_pipelinable():
        return rdd, None
    if not isinstance(serializer, BatchedSerializer):
        return rdd, None
    if type(serializer.serializer) not in (CPickleSerializer, CloudPickleSerializer):
        return rdd, None
    return RDD(rdd._jrdd, rdd.ctx, NoOpSerializer()), serializer.serializer.loads
