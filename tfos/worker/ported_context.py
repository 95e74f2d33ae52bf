"""Members of the context that programs written for TensorFlowOnSpark use, under its names.

Covers: `worker_num`, `mgr`, the reserved port; refusing the calls of TensorFlow 1.
Does not: feed, export or serve.
Runs in: the worker's process.      Threads: main_fun's.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

from tfos.errors import UnsupportedError

if TYPE_CHECKING:
    from tfos.native.reserved_port import ReservedPort
    from tfos.worker.manager import OpenFeed, WorkerManager


class PortedContext:
    """TensorFlowOnSpark's members of `ctx`."""

    rank: int
    get_data_feed: OpenFeed
    _manager: WorkerManager | None = None
    _reserved_port: ReservedPort | None
    _shows_port: bool

    @property
    def worker_num(self) -> int:
        """TensorFlowOnSpark's name of `rank`."""
        return self.rank

    @property
    def mgr(self) -> Any:
        """TensorFlowOnSpark's manager: `TFNode.DataFeed(ctx.mgr)` is `ctx.get_data_feed()`."""
        if self._manager is None:
            from tfos.worker.manager import WorkerManager

            self._manager = WorkerManager(self.get_data_feed)
        return self._manager

    @property
    def tmp_socket(self) -> socket.socket | None:
        """The socket that holds this worker's port after `run(release_port=False)`, else None.

        It is None after `release_port()`, too.
        """
        port = self._reserved_port
        return port.socket if port is not None and self._shows_port else None

    def release_port(self) -> None:
        """Give up this worker's port in `cluster_spec`, for a server that binds it exclusively.

        TensorFlow's server needs no call: TF_GRPC_REUSE_PORT lets it bind the reserved port.
        """
        if self._reserved_port is not None:
            self._reserved_port.release()

    def start_cluster_server(self, num_gpus: int = 1, rdma: bool = False) -> None:
        """Refuse TensorFlow 1's server; TensorFlow 2 starts its own from TF_CONFIG.

        Args:
            num_gpus: number of the server's GPUs, in TensorFlowOnSpark.
            rdma: whether the server uses RDMA, in TensorFlowOnSpark.

        Raises:
            UnsupportedError: always; names what to write.
        """
        del num_gpus, rdma
        raise UnsupportedError(
            "start_cluster_server() starts TensorFlow 1's server, but parameter servers do not "
            "run main_fun here. To train through them, write ctx.distribute(model) after "
            "model.compile(...). With num_ps=0, use tf.distribute.MultiWorkerMirroredStrategy(), "
            "which starts its server from TF_CONFIG"
        )

    def export_saved_model(
        self, sess: object, export_dir: str, tag_set: object, signatures: object
    ) -> None:
        """Refuse the export of a session, which TensorFlow 2 does not have.

        Args:
            sess: TensorFlow 1's session.
            export_dir: directory of the SavedModel.
            tag_set: tags of the SavedModel.
            signatures: signatures of the SavedModel.

        Raises:
            UnsupportedError: always; names what to write.
        """
        del sess, tag_set, signatures
        raise UnsupportedError(
            "export_saved_model() exports TensorFlow 1's session. Write "
            f"ctx.export(model, {export_dir!r}) on the chief, or "
            f"compat.export_saved_model(model, {export_dir!r}, ctx.is_chief) on every worker"
        )
