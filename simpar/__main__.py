"""``python -m simpar`` is the ``simpar`` command."""

import sys

from simpar.cli import main

if __name__ == "__main__":
    sys.exit(main())
