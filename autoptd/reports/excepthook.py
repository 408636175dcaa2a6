"""Who tells of an error that ends all ranks alike: one process a node, in one line where the user pressed Ctrl-C.

A request that cannot be met fails on every rank of torchrun with the same words, and Ctrl-C reaches all of them. Every other
exception is told by the rank that raised it.

    print_errors_once()          # once for all, by `parallelize`: uncaught errors of a script
    if is_told_here(error): ...  # the command line asks for itself
"""

from __future__ import annotations

import os
import sys
from types import TracebackType

from autoptd.errors import PlanError, RuntimeFault, TraceError


def is_interrupt(error: BaseException) -> bool:
    """Whether it is Ctrl-C, or what a rank saw of another's."""
    return isinstance(error, KeyboardInterrupt) or (
        isinstance(error, RuntimeFault) and "KeyboardInterrupt" in error.fact
    )


def is_told_here(error: BaseException) -> bool:
    """Whether this process is to tell of `error`: false for what another process of the node tells in the same words."""
    is_alike = isinstance(error, (PlanError, TraceError)) or is_interrupt(error)
    return not is_alike or os.environ.get("LOCAL_RANK", "0") == "0"


def print_errors_once() -> None:
    """Let this process, if it is one of several ranks, keep quiet about uncaught errors that another one tells of."""
    before = sys.excepthook
    if "LOCAL_RANK" not in os.environ or getattr(before, "is_of_autoptd", False):
        return

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if not is_told_here(error):
            return
        if is_interrupt(error):
            print("KeyboardInterrupt", file=sys.stderr)
        else:
            before(kind, error, traceback)

    hook.is_of_autoptd = True  # type: ignore[attr-defined]
    sys.excepthook = hook
