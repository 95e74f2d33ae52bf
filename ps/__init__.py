"""The parameter server: dense parameters, sparse tables, update rules, modes, checkpoints.

Public names: PSClient and PSServer; what a program passes to them and what they return. They load
on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rpc.lazy import lazy_names

if TYPE_CHECKING:
    from ps import errors as errors
    from ps.checkpoint.choice import RestoreOptions
    from ps.checkpoint.fencing import Generation, GenerationFence
    from ps.checkpoint.score import Score
    from ps.checkpoint.storage import Storage
    from ps.client.channel_stats import LinkStats
    from ps.client.client import PSClient
    from ps.client.lookup_batch import TrainingBatch
    from ps.client.metadata import RunNotes
    from ps.client.saving.saver import SaveOptions
    from ps.client.tables import TableClient
    from ps.config import ServerSettings
    from ps.errors import PSError
    from ps.manifest import initializer_spec as initializers
    from ps.manifest import rule_spec as rules
    from ps.manifest.manifest import (
        Bucket,
        GroupLayout,
        GroupSpec,
        Hyper,
        Layout,
        Manifest,
        ParamSpec,
    )
    from ps.manifest.table_spec import Admission, TableSpec
    from ps.metadata import AttachedMetadata, pushed
    from ps.protocol.messages import Ack, Description
    from ps.protocol.permissions import ServerPhase
    from ps.server.server import PSServer
    from ps.stats.server_stats import OpenRendezvous, ServerStats, TableStats, WorkerStats
    from ps.tables.routing import RoutedIds

_PART_OF = "tfos"  # tfos/import_check.py looks for this line

__all__ = [
    "Ack",
    "Admission",
    "AttachedMetadata",
    "Bucket",
    "Description",
    "Generation",
    "GenerationFence",
    "GroupLayout",
    "GroupSpec",
    "Hyper",
    "Layout",
    "LinkStats",
    "Manifest",
    "OpenRendezvous",
    "PSClient",
    "PSError",
    "PSServer",
    "ParamSpec",
    "RestoreOptions",
    "RoutedIds",
    "RunNotes",
    "SaveOptions",
    "Score",
    "ServerPhase",
    "ServerSettings",
    "ServerStats",
    "Storage",
    "TableClient",
    "TableSpec",
    "TableStats",
    "TrainingBatch",
    "WorkerStats",
    "errors",
    "initializers",
    "pushed",
    "rules",
]

_HOMES = {
    "Ack": "ps.protocol.messages",
    "Admission": "ps.manifest.table_spec",
    "AttachedMetadata": "ps.metadata",
    "Bucket": "ps.manifest.manifest",
    "Description": "ps.protocol.messages",
    "Generation": "ps.checkpoint.fencing",
    "GenerationFence": "ps.checkpoint.fencing",
    "GroupLayout": "ps.manifest.manifest",
    "GroupSpec": "ps.manifest.manifest",
    "Hyper": "ps.manifest.manifest",
    "Layout": "ps.manifest.manifest",
    "LinkStats": "ps.client.channel_stats",
    "Manifest": "ps.manifest.manifest",
    "OpenRendezvous": "ps.stats.server_stats",
    "PSClient": "ps.client.client",
    "PSError": "ps.errors",
    "PSServer": "ps.server.server",
    "ParamSpec": "ps.manifest.manifest",
    "RestoreOptions": "ps.checkpoint.choice",
    "RoutedIds": "ps.tables.routing",
    "RunNotes": "ps.client.metadata",
    "SaveOptions": "ps.client.saving.saver",
    "Score": "ps.checkpoint.score",
    "ServerPhase": "ps.protocol.permissions",
    "ServerSettings": "ps.config",
    "ServerStats": "ps.stats.server_stats",
    "Storage": "ps.checkpoint.storage",
    "TableClient": "ps.client.tables",
    "TableSpec": "ps.manifest.table_spec",
    "TableStats": "ps.stats.server_stats",
    "TrainingBatch": "ps.client.lookup_batch",
    "WorkerStats": "ps.stats.server_stats",
    "errors": "ps.errors:",
    "initializers": "ps.manifest.initializer_spec:",
    "pushed": "ps.metadata",
    "rules": "ps.manifest.rule_spec:",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
