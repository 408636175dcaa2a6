"""The command line: `python -m autoptd diff A B` tells what differs between two plans or saved programs.

A and B are plan.json files, or folders that `program.save` (or `pm.show`) wrote. Ends with 0 where nothing differs, 1 where
something does, 2 where a file cannot be read: as diff(1) does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from autoptd.diff import diff
from autoptd.errors import PlanError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return how the process is to end."""
    parser = argparse.ArgumentParser(prog="autoptd", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    of_diff = commands.add_parser("diff", help="what differs between two plans or saved programs")
    of_diff.add_argument("a", help="a plan.json, or a folder with one")
    of_diff.add_argument("b", help="likewise")
    asked = parser.parse_args(arguments)
    try:
        text = diff(asked.a, asked.b)
    except PlanError as error:
        print(error, file=sys.stderr)
        return 2
    print(text, end="")
    return 1 if text else 0


if __name__ == "__main__":
    sys.exit(main())
