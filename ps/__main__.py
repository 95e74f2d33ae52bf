"""`python -m ps`: see ps.cli.checkpoints. Servers are started by `python -m ps.server`."""

import sys

from ps.cli.checkpoints import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
