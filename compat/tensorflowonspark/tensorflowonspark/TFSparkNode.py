"""tfos.tensorflowonspark.TFSparkNode under the name that programs import."""

import sys

from tfos.tensorflowonspark import TFSparkNode

sys.modules[__name__] = TFSparkNode
