"""tfos.dfutil under the name that programs import."""

import sys

from tfos import dfutil

sys.modules[__name__] = dfutil
