"""Order of a tf.data.Dataset's rows: whether every process that reads it has the same one.

Covers: options and calls with deterministic=False, also in the functions of a dataset; Python
generators, whose order nobody can check.
Does not: shuffles without a seed (tfos.runner.mirrored_rank and tfos.estimators.program give all
processes one).
Threads: none of its own.

The functions of `flat_map`, `interleave` and the like make datasets, which no dataset has among its
inputs. The graph that TensorFlow writes of the whole has them.
"""

from __future__ import annotations

import logging
from typing import Any

from tfos.errors import SettingsError

logger = logging.getLogger(__name__)


def check_order(dataset: Any) -> None:
    """Refuse a dataset whose rows come in the order in which they are ready.

    Args:
        dataset: that all processes read, each for its part of it.

    Raises:
        SettingsError: they would part other batches: some rows would count twice, others never.
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
        f"a tf.data.Dataset with deterministic=False ({name}) has another order in each process, "
        "and each takes its part of it: rows would be trained twice or never. In its options, and "
        "in calls such as map() and interleave(), also within functions of the dataset, set it to "
        "True or leave it out"
    )


def _has_datasets_in_functions(dataset: Any) -> bool:
    """Say whether one of the dataset's own functions makes or reads another; it is a variant."""
    import tensorflow as tf

    operations = (
        operation
        for function in dataset._functions()
        for operation in function.function.graph.get_operations()
    )
    return any(each.dtype == tf.variant for operation in operations for each in operation.outputs)


def _check_graph(dataset: Any) -> None:
    """Refuse as `check_order` what the graph of the dataset tells; warn of what it does not."""
    import tensorflow as tf

    policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    try:
        written = dataset._as_serialized_graph(external_state_policy=policy).numpy()
    except tf.errors.OpError as error:
        logger.debug("a dataset is not written: %s", error)
        written = b""
    if not written:  # of more than 2 GiB, too
        logger.warning(
            "TensorFlow cannot write this tf.data.Dataset, as of one with more than 2 GiB in "
            "memory, so the functions of its flat_map, interleave and the like are not checked. "
            "If they have deterministic=False, rows are trained twice or never, as each process "
            "takes its part of them: leave it out there"
        )
        return
    graph = tf.compat.v1.GraphDef.FromString(written)
    nodes = (*graph.node, *(n for each in graph.library.function for n in each.node_def))
    for node in nodes:
        if node.attr["deterministic"].s == b"false" or _is_option(node):
            raise _refused(node.op)
    if any(node.op == "GeneratorDataset" for node in nodes):
        logger.warning(
            "this tf.data.Dataset reads a Python generator, whose order nobody can check. Each "
            "process takes its part of it, so rows are trained twice or never unless it yields the "
            "same order in all of them. What it draws of np.random and random is the same in all; "
            "give others a seed, as default_rng(seed), and sort what has no order, as os.listdir()"
        )


def _is_option(node: Any) -> bool:
    """Say whether the node is the options of a dataset, with deterministic=False."""
    from tensorflow.core.framework import dataset_options_pb2

    told = dataset_options_pb2.Options.FromString(node.attr["serialized_options"].s)
    return told.WhichOneof("optional_deterministic") is not None and not told.deterministic
