"""`python -m topotrain` is the command `topotrain`."""

import sys

from topotrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
