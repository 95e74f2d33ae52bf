"""What TensorFlow's strategies read from the environment, and whether main_fun has built one.

Covers: TF_CONFIG, gRPC's switches, the check for a strategy, the notice that one is built.
Does not: import TensorFlow.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from types import ModuleType
from typing import Any

from tfos.native.at_import import at_import

_STRATEGY = "tensorflow.python.distribute.parameter_server_strategy_v2"


def announce_to_tensorflow(
    environment: MutableMapping[str, str],
    cluster: Mapping[str, Sequence[str]],
    *,
    has_tensorflow_servers: bool,
) -> None:
    """Set TensorFlow's gRPC switches in an environment, unless they are set.

    gRPC takes `https_proxy` and `http_proxy` for its own, and a proxy does not reach the nodes:
    TensorFlow would wait for them forever.

    Args:
        environment: environment of the process that imports TensorFlow.
        cluster: `host:port` of each node that TensorFlow connects to, by job; empty: the process
            learns of them later, and connects to nothing else.
        has_tensorflow_servers: whether a coordinator must learn of lost servers. TensorFlow then
            advises that its calls fail at once; other strategies wait for peers that start.
    """
    environment.setdefault("TF_GRPC_REUSE_PORT", "true")  # else ReservedPort would block the port
    if has_tensorflow_servers:
        environment.setdefault("GRPC_FAIL_FAST", "use_caller")
    hosts = {each.rpartition(":")[0].strip("[]") for nodes in cluster.values() for each in nodes}
    if not hosts:
        environment.setdefault("grpc_proxy", "")  # to gRPC, which looks here first: none
        return
    known = environment.get("no_grpc_proxy", environment.get("no_proxy", ""))
    environment["no_grpc_proxy"] = ",".join([*([known] if known else []), *sorted(hosts)])


def tf_config(
    cluster: Mapping[str, Sequence[str]], job: str, index: int, *, has_tensorflow_servers: bool
) -> str:
    """Return TF_CONFIG for a node.

    Args:
        cluster: `host:port` of each node, by job.
        job: this node's job.
        index: this node's index within its job.
        has_tensorflow_servers: whether TensorFlow runs on the `ps` nodes. If not, they are left
            out, because tf.distribute would wait for them forever. The evaluator, which is not part
            of the training, is always left out.
    """
    jobs = dict(cluster)
    jobs.pop("evaluator", None)
    if not has_tensorflow_servers:
        jobs.pop("ps", None)
    return json.dumps({"cluster": jobs, "task": {"type": job, "index": index}})


def is_connected_to_servers() -> bool:
    """Whether TensorFlow in this process has connected to its parameter servers.

    ParameterServerStrategy does so when it is built.
    """
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None:
        return False
    return any("/job:ps/" in each.name for each in tensorflow.config.list_logical_devices())


def after_strategy(tell: Callable[[], object]) -> None:
    """Call `tell` each time main_fun has built ParameterServerStrategy, which connects it to all.

    Args:
        tell: called without arguments; at the import of the strategy's module if that has no such
            class.
    """
    at_import(_STRATEGY, lambda module: _tell_after(module, tell))


def _tell_after(module: ModuleType, tell: Callable[[], object]) -> None:
    strategy = getattr(module, "ParameterServerStrategyV2", None)
    if strategy is None:
        tell()
        return
    plain = strategy.__init__

    @functools.wraps(plain)
    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        tell()

    strategy.__init__ = built
