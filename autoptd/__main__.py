"""`python -m autoptd` is the command `autoptd`: see `autoptd/cli`."""

from __future__ import annotations

import sys

from autoptd.cli import main

if __name__ == "__main__":
    sys.exit(main())

__all__ = ["main"]
