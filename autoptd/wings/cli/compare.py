"""`autoptd diff A B`: compare two plans or saved programs."""

from __future__ import annotations

from argparse import Namespace

from autoptd.wings.reports.diff import diff


def compare(args: Namespace) -> int:
    """Print the differences; return 0 if there are none, else 1."""
    text = diff(args.a, args.b)
    print(text, end="")
    return 1 if text else 0
