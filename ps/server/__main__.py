"""`python -m ps.server`: see ps.cli.serve."""

import sys

from ps.cli.serve import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
