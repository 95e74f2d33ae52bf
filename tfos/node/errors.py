"""Everything that starting and running one node can raise.

NodeError (a TFOSError)
├── NodeStartError      the supervisor did not come up on this executor → read its last words
│   └── VersionSkew     this executor cannot work with this driver      → the same environment
├── LinkError           a child and its supervisor do not understand each other → our defect
├── ClusterStopped      the driver ended the cluster while user code waited → expected
└── NoServersError      the cluster has no parameter servers → num_ps >= 1
"""

from __future__ import annotations

from rpc.errors import TFOSError


class NodeError(TFOSError):
    """Base of this room's errors."""


class NodeStartError(NodeError):
    """The supervisor of a node did not come up."""


class VersionSkew(NodeStartError):
    """This executor has another Python or another tfos than the driver."""


class LinkError(NodeError):
    """The peer of the link sent something that is no message."""


class ClusterStopped(NodeError):
    """The cluster was stopped while this node still ran."""


class NoServersError(NodeError):
    """Parameter servers were asked for in a cluster without any."""
