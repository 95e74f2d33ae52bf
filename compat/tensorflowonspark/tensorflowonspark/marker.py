"""tfos.tensorflowonspark.marker under the name that programs import."""

import sys

from tfos.tensorflowonspark import marker

sys.modules[__name__] = marker
