"""tfos.tensorflowonspark.pipeline under the name that programs import."""

import sys

from tfos.tensorflowonspark import pipeline

sys.modules[__name__] = pipeline
