"""tfos.tensorflowonspark.TFCluster under the name that programs import."""

import sys

from tfos.tensorflowonspark import TFCluster

sys.modules[__name__] = TFCluster
