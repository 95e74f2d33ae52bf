"""An RDD with one partition per node, on the executors and with the profile that were chosen.

Covers: node_rdd.      Does not: choose (tfos.slots.placing, tfos.slots.profiles) or run it.
Runs in: the driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def node_rdd(sc: Any, items: Sequence[object], executors: Sequence[str]) -> Any:
    """Return an RDD with each item in a partition of its own.

    Args:
        sc: the SparkContext.
        items: one per node; they pickle.
        executors: where Spark should run each item's task, as `task_location` returns it; empty
            strings: anywhere. Spark waits for it `spark.locality.wait`, then takes another one.
    """
    if not any(executors):
        return sc.parallelize(items, len(items))
    from pyspark.core.rdd import RDD
    from pyspark.serializers import CPickleSerializer

    pickler, jvm = CPickleSerializer(), sc._jvm
    to_seq = jvm.org.apache.spark.api.python.PythonUtils.toSeq
    with_places = [
        jvm.scala.Tuple2(pickler.dumps(item), to_seq([place] if place else []))
        for item, place in zip(items, executors, strict=True)
    ]
    tag = jvm.scala.reflect.ClassTag.apply(jvm.java.lang.Class.forName("[B"))
    made = sc._jsc.sc().makeRDD(to_seq(with_places), tag)
    return RDD(made.toJavaRDD(), sc, pickler)


def task_location(host: str, executor_id: str) -> str:
    """Return an executor as Spark's scheduler names it in the preferences of a task.

    Args:
        host: host name that the scheduler knows.
        executor_id: Spark's.
    """
    return f"executor_{host}_{executor_id}"
