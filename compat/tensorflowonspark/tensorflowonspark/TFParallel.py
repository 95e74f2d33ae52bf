"""tfos.tensorflowonspark.TFParallel under the name that programs import."""

import sys

from tfos.tensorflowonspark import TFParallel

sys.modules[__name__] = TFParallel
