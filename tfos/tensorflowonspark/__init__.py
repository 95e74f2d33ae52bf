"""TensorFlowOnSpark's modules under their names, over tfos; `tensorflowonspark` forwards to them.

Each is thin: TFCluster and TFParallel start tfos' cluster, TFNode reads its feeds, pipeline trains
with it. Where TensorFlow 2 or tfos differs, UnsupportedError says what to write instead.
docs/guides/coming-from-tensorflowonspark.md has the differences.
"""

from tfos.tensorflowonspark import estimator_stand_in

estimator_stand_in.offer()
