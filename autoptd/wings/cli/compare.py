"""`autoptd diff A B`: what differs between two plans or saved programs."""

from __future__ import annotations

from argparse import Namespace

from autoptd.wings.reports.diff import diff


def compare(asked: Namespace) -> int:
    """Print what differs; 0 where nothing does, 1 where something does."""
    text = diff(asked.a, asked.b)
    print(text, end="")
    return 1 if text else 0
