"""tfos.tensorflowonspark.gpu_info under the name that programs import."""

import sys

from tfos.tensorflowonspark import gpu_info

sys.modules[__name__] = gpu_info
