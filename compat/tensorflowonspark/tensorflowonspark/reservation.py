"""tfos.tensorflowonspark.reservation under the name that programs import."""

import sys

from tfos.tensorflowonspark import reservation

sys.modules[__name__] = reservation
