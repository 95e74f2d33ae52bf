"""Two runs of an example, one after the other, in one driver: `PROGRAM MODEL_DIR FLAGS…`.

Run by test_hdfs_training through spark-submit. The second run trains one epoch more on the files
that the first one wrote; both are the program itself, as `__main__`.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

program, model_dir, *flags = sys.argv[1:]
sys.path.insert(0, str(Path(program).parent))
flags += ["--model_dir", model_dir]
for more in (["--epochs", "2"], ["--epochs", "1", "--images_labels", f"{model_dir}/digits"]):
    sys.argv = [program, *flags, *more]
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
