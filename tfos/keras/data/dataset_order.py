"""Order of a tf.data.Dataset's rows: whether every process that reads it has the same one.

Covers: options and calls with deterministic=False, also in the functions of a dataset; Python
generators, whose order cannot be checked.
Does not: shuffles without a seed (tfos.runner.mirrored_rank and tfos.estimators.program give all
processes one).
Threads: none of its own.

The functions of `flat_map`, `interleave` and similar calls make datasets that are not inputs of any
dataset. TensorFlow's graph of the whole contains them.
"""

from __future__ import annotations

import logging
from typing import Any

from tfos.errors import SettingsError

logger = logging.getLogger(__name__)


def check_order(dataset: Any) -> None:
    """Refuse a dataset whose rows come in the order in which they are ready.

    Args:
        dataset: dataset that all processes read, each for its part of it.

    Raises:
        SettingsError: their parts would not fit: some rows would count twice, others never.
    """
    waiting, seen, makes_datasets = [dataset], set(), False
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if each.options().deterministic is False or vars(each).get("_deterministic") == "false":
            raise _refused(type(each).__name__.strip("_"))
        makes_datasets = makes_datasets or _has_datasets_in_functions(each)
        waiting += each._inputs()
    if makes_datasets:
        _check_graph(dataset)


def _refused(name: str) -> SettingsError:
    return SettingsError(
        f"a tf.data.Dataset with deterministic=False ({name}) has another order in each process. "
        "Each process takes its part of it, so some rows would be trained twice and others never. "
        "Set it to True or leave it out in the dataset's options, and in calls such as map() and "
        "interleave(), also within the dataset's functions"
    )


def _has_datasets_in_functions(dataset: Any) -> bool:
    """Return whether one of the dataset's own functions makes or reads another (a variant)."""
    import tensorflow as tf

    operations = (
        operation
        for function in dataset._functions()
        for operation in function.function.graph.get_operations()
    )
    return any(each.dtype == tf.variant for operation in operations for each in operation.outputs)


def _check_graph(dataset: Any) -> None:
    """Refuse what the graph of the dataset shows, as `check_order`; warn of what it does not."""
    import tensorflow as tf

    policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    try:
        written = dataset._as_serialized_graph(external_state_policy=policy).numpy()
    except tf.errors.OpError as error:
        logger.debug("a dataset cannot be written: %s", error)
        written = b""
    if not written:  # also if it has more than 2 GiB
        logger.warning(
            "TensorFlow cannot write this tf.data.Dataset (it may have more than 2 GiB in "
            "memory), so the functions of its flat_map, interleave and similar calls are not "
            "checked. With deterministic=False in them, some rows are trained twice and others "
            "never; leave it out there"
        )
        return
    graph = tf.compat.v1.GraphDef.FromString(written)
    nodes = (*graph.node, *(n for each in graph.library.function for n in each.node_def))
    for node in nodes:
        if node.attr["deterministic"].s == b"false" or _is_option(node):
            raise _refused(node.op)
    if any(node.op == "GeneratorDataset" for node in nodes):
        logger.warning(
            "this tf.data.Dataset reads a Python generator, and tfos cannot check its order. Every "
            "worker must get the rows in the same order; otherwise some rows are trained twice and "
            "others never. np.random and random are seeded alike; seed other generators "
            "(default_rng(seed)) and sort unordered input such as os.listdir()"
        )


def _is_option(node: Any) -> bool:
    """Return whether the node is the options of a dataset with deterministic=False."""
    from tensorflow.core.framework import dataset_options_pb2

    told = dataset_options_pb2.Options.FromString(node.attr["serialized_options"].s)
    return told.WhichOneof("optional_deterministic") is not None and not told.deterministic
