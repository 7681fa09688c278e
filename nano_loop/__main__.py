"""Run the command line as ``python -m nano_loop``."""

import sys

from nano_loop.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
