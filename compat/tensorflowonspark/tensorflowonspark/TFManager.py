"""tfos.tensorflowonspark.TFManager under the name that programs import."""

import sys

from tfos.tensorflowonspark import TFManager

sys.modules[__name__] = TFManager
