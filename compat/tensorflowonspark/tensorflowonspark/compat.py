"""tfos.tensorflowonspark.compat under the name that programs import."""

import sys

from tfos.tensorflowonspark import compat

sys.modules[__name__] = compat
