"""`python -m ps`: see ps.cli.main. Servers are started by `python -m ps.server`."""

import sys

from ps.cli.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
