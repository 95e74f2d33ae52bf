"""tfos.tensorflowonspark.util under the name that programs import."""

import sys

from tfos.tensorflowonspark import util

sys.modules[__name__] = util
