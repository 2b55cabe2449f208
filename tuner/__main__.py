"""`python -m tuner`: the same as the command `tuner`."""

import sys

from tuner.cli import main

if __name__ == "__main__":
    sys.exit(main())
