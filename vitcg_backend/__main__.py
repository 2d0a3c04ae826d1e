"""``python -m vitcg_backend COMMAND``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
