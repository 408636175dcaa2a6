"""Report an error that ends all ranks alike once: by one process per node, and in one line for Ctrl-C.

A request that cannot be met fails on every rank of torchrun with the same text, and Ctrl-C reaches all of them. The
first rank to fail reports it; the others end after that, as torchrun kills all ranks when one has ended. Every other
exception is reported by the rank that raised it.

    print_errors_once()          # called by `parallelize`: uncaught errors of a script
    with reported_once(error) as is_own: ...  # for the command line
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from autoptd.errors import PlanError, RuntimeFault, TraceError


def is_interrupt(error: BaseException) -> bool:
    """Tell whether an error is Ctrl-C, on this rank or another one."""
    is_of_another = isinstance(error, RuntimeFault) and "KeyboardInterrupt" in error.fact
    return isinstance(error, KeyboardInterrupt) or is_of_another


@contextmanager
def reported_once(error: BaseException) -> Iterator[bool]:
    """Yield whether this process reports `error`: not if another process of the node reports the same text."""
    if is_interrupt(error):
        yield os.environ.get("LOCAL_RANK", "0") == "0"
    # Errors of plans and traces are usually the same in every process.
    elif isinstance(error, (PlanError, TraceError)) and "RANK" in os.environ:
        # Imported here, as a command of one process may fail before it loads torch.
        from autoptd.runtime.world.rendezvous import told_once

        with told_once(f"{type(error).__name__}: {error}") as is_own:
            yield is_own
    else:
        yield True


def print_errors_once() -> None:
    """Install a hook that does not print uncaught errors that another rank reports."""
    # A second `parallelize` finds the hook of the first.
    before = sys.excepthook
    if "LOCAL_RANK" not in os.environ or getattr(before, "is_of_autoptd", False):
        return

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        with reported_once(error) as is_own:
            if is_own:
                report(kind, error, traceback)

    def report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, RuntimeFault) and is_interrupt(error):
            # Ctrl-C may have reached only that rank.
            print(f"autoptd: {error.site}: {error.fact.partition(' [seen by')[0]}", file=sys.stderr)
        elif is_interrupt(error):
            print("KeyboardInterrupt", file=sys.stderr)
        else:
            before(kind, error, traceback)

    hook.is_of_autoptd = True  # type: ignore[attr-defined]
    sys.excepthook = hook
