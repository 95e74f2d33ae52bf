"""TensorFlowOnSpark's modules under their names, over tfos; `tensorflowonspark` forwards to them.

Each is a thin door: TFCluster and TFParallel start tfos' cluster, TFNode reads its feeds, pipeline
trains by it. What TensorFlow 2 or tfos does otherwise raises UnsupportedError with what to write.
docs/guides/coming-from-tensorflowonspark.md has the differences.
"""

from tfos.tensorflowonspark import estimator_stand_in

estimator_stand_in.offer()
