"""TFNode: paths, feeds and the port of a node, for programs that do not call `ctx` itself.

Covers: hdfs_path, DataFeed, release_port, the functions of the first release (next_batch,
batch_results, terminate), refusal of TensorFlow 1's server and export.
Does not: do any of it; `ctx` and its `mgr` do.
Runs in: the worker's process.      Threads: one reader per feed.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from tfos.files import paths

_feeds: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
"""Feeds that next_batch has opened, by manager and name: one may hold rows of a chunk."""


def hdfs_path(ctx: Any, path: str) -> str:
    """Return `path` with scheme and directory; see NodeContext.absolute_path.

    Args:
        ctx: any object with `defaultFS` and `working_dir`.
        path: complete, absolute or relative.
    """
    return paths.absolute_path(path, default_fs=ctx.defaultFS, working_dir=ctx.working_dir)


def DataFeed(
    mgr: Any,
    train_mode: bool = True,
    qname_in: str = "input",
    qname_out: str = "output",
    input_mapping: Mapping[str, str] | None = None,
) -> Any:
    """Return the feed of a manager; for `ctx.mgr` it is `ctx.get_data_feed(...)`.

    Args:
        mgr: `ctx.mgr`, or what TFManager.start returns.
        train_mode: False: a batch ends with its partition, for inference.
        qname_in: name of the feed.
        qname_out: name of the queue of results; no effect for `ctx.mgr`.
        input_mapping: column name to tensor name; batches are then dicts of lists.
    """
    return mgr.data_feed(train_mode, qname_in, qname_out, input_mapping)


def start_cluster_server(ctx: Any, num_gpus: int = 1, rdma: bool = False) -> None:
    """Refuse TensorFlow 1's server.

    Args:
        ctx: the context of main_fun.
        num_gpus: GPUs of the server.
        rdma: whether the server uses RDMA.

    Raises:
        UnsupportedError: always; names what to write.
    """
    ctx.start_cluster_server(num_gpus, rdma)


def export_saved_model(sess: Any, export_dir: str, tag_set: Any, signatures: Any) -> None:
    """Refuse the export of TensorFlow 1's session.

    Args:
        sess: TensorFlow 1's session.
        export_dir: directory of the SavedModel.
        tag_set: its tags.
        signatures: its signatures.

    Raises:
        UnsupportedError: always; names what to write.
    """
    from tfos.worker.ported_context import PortedContext

    PortedContext.export_saved_model(sess, sess, export_dir, tag_set, signatures)


def release_port(ctx: Any) -> None:
    """Give up the port that `ctx.tmp_socket` holds."""
    ctx.release_port()


def next_batch(mgr: Any, batch_size: int, qname: str = "input") -> Any:
    """Return up to `batch_size` rows, as in the first release; DataFeed.next_batch replaced it.

    Args:
        mgr: `ctx.mgr`.
        batch_size: largest number of rows.
        qname: name of the feed.
    """
    return _feed(mgr, qname).next_batch(batch_size)


def batch_results(mgr: Any, results: Any, qname: str = "output") -> None:
    """Return results for the rows of the last next_batch(mgr, ...) of this manager.

    Args:
        mgr: `ctx.mgr`.
        results: one per row, in order.
        qname: name of the results' queue; no effect: results return to the senders of their rows.
    """
    del qname
    for feed in _feeds.get(mgr, {}).values():
        feed.batch_results(results)


def terminate(mgr: Any, qname: str = "input") -> None:
    """Stop reading: unread and later rows are dropped.

    Args:
        mgr: `ctx.mgr`.
        qname: name of the feed.
    """
    _feed(mgr, qname).terminate()


def _feed(mgr: Any, qname: str) -> Any:
    feeds = _feeds.setdefault(mgr, {})
    if qname not in feeds:
        feeds[qname] = mgr.data_feed(qname_in=qname)
    return feeds[qname]
