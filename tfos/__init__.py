"""tfos: parameter servers on Spark executors for Keras 3.

Public names: TFCluster with its settings and reports; NodeContext, which `main_fun` receives; run,
Runner, MirroredStrategyRunner and runner, for functions as ranks; map_train; predict_column;
timeseries; register_data_sources; and modules of TensorFlowOnSpark that programs import (TFNode,
TFParallel, dfutil, pipeline, gpu_info, compat). They load on first use, so that `import tfos` costs
neither pyspark nor TensorFlow; node processes import parts of this package a thousand times.
keras, ml, orca, serving and errors load the same way, but not by `from tfos import *`, which would
replace Keras by tfos.keras.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tfos.import_check import check_packages
from tfos.version import __version__

check_packages(os.path.dirname(os.path.dirname(__file__)))

from rpc.lazy import lazy_names  # noqa: E402 - only if rpc is ours

if TYPE_CHECKING:
    from tfos import dfutil as dfutil
    from tfos import errors as errors
    from tfos import keras as keras
    from tfos import ml as ml
    from tfos import orca as orca
    from tfos import runner as runner
    from tfos import serving as serving
    from tfos import timeseries as timeseries
    from tfos.cluster import TFCluster
    from tfos.collectives.group import RankGroup
    from tfos.config import Checkpoints, ClusterConfig, InputMode, Restarts
    from tfos.datasource import register_data_sources
    from tfos.errors import NodeFailedError, TFOSError
    from tfos.failure import NodeFailure
    from tfos.files.inputs import InputFiles
    from tfos.many.map_train import map_train
    from tfos.many.queue import ItemTraining, TrainingState
    from tfos.many.trainings import ManyTrainings
    from tfos.monitor.history import BestCheckpoint, Evaluation, History, TrainedEpoch
    from tfos.monitor.reports import (
        ClusterReport,
        EpochReport,
        ExecutorReport,
        NodeReport,
        StepTimes,
        TrainReport,
    )
    from tfos.phases import ClusterPhase
    from tfos.predict.column import PredictColumn, predict_column
    from tfos.reading.file_rows import FileRows
    from tfos.reading.reading import Reading
    from tfos.runner.horovod_runner import Runner
    from tfos.runner.mirrored_runner import MirroredStrategyRunner
    from tfos.runner.spark_run import run
    from tfos.slots.resources import Resources
    from tfos.streaming.handle import StreamTraining
    from tfos.streaming.state import StreamLag
    from tfos.tensorflowonspark import TFNode as TFNode
    from tfos.tensorflowonspark import TFParallel as TFParallel
    from tfos.tensorflowonspark import compat as compat
    from tfos.tensorflowonspark import gpu_info as gpu_info
    from tfos.tensorflowonspark import pipeline as pipeline
    from tfos.worker.context import NodeContext

__all__ = [
    "BestCheckpoint",
    "Checkpoints",
    "ClusterConfig",
    "ClusterPhase",
    "ClusterReport",
    "EpochReport",
    "Evaluation",
    "ExecutorReport",
    "FileRows",
    "History",
    "InputFiles",
    "InputMode",
    "ItemTraining",
    "ManyTrainings",
    "MirroredStrategyRunner",
    "NodeContext",
    "NodeFailedError",
    "NodeFailure",
    "NodeReport",
    "PredictColumn",
    "RankGroup",
    "Reading",
    "Resources",
    "Restarts",
    "Runner",
    "StepTimes",
    "StreamLag",
    "StreamTraining",
    "TFCluster",
    "TFNode",
    "TFOSError",
    "TFParallel",
    "TrainReport",
    "TrainedEpoch",
    "TrainingState",
    "__version__",
    "compat",
    "dfutil",
    "gpu_info",
    "map_train",
    "pipeline",
    "predict_column",
    "register_data_sources",
    "run",
    "runner",
    "timeseries",
]

_HOMES = {
    "BestCheckpoint": "tfos.monitor.history",
    "Checkpoints": "tfos.config",
    "ClusterConfig": "tfos.config",
    "ClusterPhase": "tfos.phases",
    "ClusterReport": "tfos.monitor.reports",
    "EpochReport": "tfos.monitor.reports",
    "ExecutorReport": "tfos.monitor.reports",
    "FileRows": "tfos.reading.file_rows",
    "History": "tfos.monitor.history",
    "InputFiles": "tfos.files.inputs",
    "InputMode": "tfos.config",
    "ItemTraining": "tfos.many.queue",
    "ManyTrainings": "tfos.many.trainings",
    "MirroredStrategyRunner": "tfos.runner.mirrored_runner",
    "NodeContext": "tfos.worker.context",
    "NodeFailedError": "tfos.errors",
    "NodeFailure": "tfos.failure",
    "NodeReport": "tfos.monitor.reports",
    "PredictColumn": "tfos.predict.column",
    "RankGroup": "tfos.collectives.group",
    "Reading": "tfos.reading.reading",
    "Resources": "tfos.slots.resources",
    "Restarts": "tfos.config",
    "Runner": "tfos.runner.horovod_runner",
    "StepTimes": "tfos.monitor.reports",
    "StreamLag": "tfos.streaming.state",
    "StreamTraining": "tfos.streaming.handle",
    "TFCluster": "tfos.cluster",
    "TFNode": "tfos.tensorflowonspark.TFNode:",
    "TFOSError": "tfos.errors",
    "TFParallel": "tfos.tensorflowonspark.TFParallel:",
    "TrainReport": "tfos.monitor.reports",
    "Evaluation": "tfos.monitor.history",
    "TrainedEpoch": "tfos.monitor.history",
    "TrainingState": "tfos.many.queue",
    "compat": "tfos.tensorflowonspark.compat:",
    "dfutil": "tfos.dfutil:",
    "errors": "tfos.errors:",
    "gpu_info": "tfos.tensorflowonspark.gpu_info:",
    "keras": "tfos.keras:",
    "map_train": "tfos.many.map_train",
    "ml": "tfos.ml:",
    "orca": "tfos.orca:",
    "pipeline": "tfos.tensorflowonspark.pipeline:",
    "predict_column": "tfos.predict.column",
    "register_data_sources": "tfos.datasource",
    "run": "tfos.runner.spark_run",
    "runner": "tfos.runner:",
    "serving": "tfos.serving:",
    "timeseries": "tfos.timeseries:",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
