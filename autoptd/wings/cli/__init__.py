"""The command line: `autoptd show gpt2 --t 4 --p 2`.

`wings/cli/parser.py` says what may be asked, `wings/cli/commands.py` which function answers. Neither loads torch: `--help` is
quick.

    main(["diff", "out/a", "out/b"])        # 0: they are the same, 1: they differ, 2: one cannot be read
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence

from autoptd.errors import AutoptdError, PlanError, TraceError
from autoptd.wings.cli.commands import COMMANDS
from autoptd.wings.cli.live import shown
from autoptd.wings.cli.parser import parse
from autoptd.wings.reports.excepthook import is_interrupt, reported_once


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Return how the process is to end: 0 well, 1 it differs or failed, 2 the request cannot be met.

    Errors are one line on stderr, one for all ranks of a node where they are alike; with `--debug` they have
    their traceback.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        asked = parse(given)
        with shown(asked.quiet):
            status = COMMANDS[asked.command](asked)
        # Here, where a reader that is gone is no error.
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        # The shells' convention: 128 plus the number of the signal.
        return 130
    # The reader of the output is gone: `autoptd show ... | head`.
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
