"""The command line: `autoptd show gpt2 --t 4 --p 2`.

`wings/cli/parser.py` defines the flags, `wings/cli/commands.py` maps commands to functions. Neither loads
torch, so `--help` is fast.

    main(["diff", "out/a", "out/b"])        # 0: equal, 1: they differ, 2: one cannot be read
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from autoptd.errors import AutoptdError, PlanError, TraceError
from autoptd.wings.cli.commands import COMMANDS
from autoptd.wings.cli.live import shown
from autoptd.wings.cli.parser import parse
from autoptd.wings.reports.excepthook import is_interrupt, reported_once

# Commands that run the ranks of a launch.
WITH_RANKS = ("train", "doctor")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0 on success, 1 for a difference or failure, 2 for an invalid
    request.

    Errors are printed on stderr, one line each, and once per node if all ranks fail alike; `--debug` adds the
    traceback.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        args = parse(given)
        if args.command in WITH_RANKS and args.backend != "local" and "SLURM_STEP_ID" in os.environ:
            # Imported here: it loads torch.
            from autoptd.runtime.world.slurm import join_slurm_step

            join_slurm_step(os.environ)
        with shown(args.quiet):
            status = COMMANDS[args.command](args)
        # Flush inside the `try`, so that a closed pipe is handled below.
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        # Shell convention: 128 plus the signal number.
        return 130
    # The reader closed the pipe, as in `autoptd show ... | head`.
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except Exception as error:
        if is_interrupt(error):
            return 130
        if "--debug" in given:
            traceback.print_exc()
        else:
            with reported_once(error) as is_own:
                if is_own:
                    print(_error_line(error), file=sys.stderr)
        return 2 if isinstance(error, (PlanError, TraceError)) else 1


def _error_line(error: Exception) -> str:
    if isinstance(error, AutoptdError):
        return f"{type(error).__name__}: {error}"
    return f"{type(error).__name__}: {error} (--debug shows where)"


__all__ = ["main"]
