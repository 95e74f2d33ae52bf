"""`python -m ps`: see ps.checkpoint_command. Servers are started by `python -m ps.server`."""

import sys

from ps.checkpoint_command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
