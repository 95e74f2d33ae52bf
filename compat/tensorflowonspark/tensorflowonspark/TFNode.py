"""tfos.tensorflowonspark.TFNode under the name that programs import."""

import sys

from tfos.tensorflowonspark import TFNode

sys.modules[__name__] = TFNode
