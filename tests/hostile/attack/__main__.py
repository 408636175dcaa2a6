"""`python -m tests.hostile.attack --cases 300 --seed 11`: counts, refusals by fact, and every case that is wrong or raw."""

from __future__ import annotations

import sys

from tests.hostile.__main__ import drive
from tests.hostile.attack.generate import cases
from tests.hostile.judge import judge
from tests.hostile.processes import drawn_cases

if __name__ == "__main__":
    run = lambda case: judge(case.source, case.script)  # noqa: E731
    sys.exit(drive("hostile.attack", __doc__, 11, 300, cases, run, in_processes=drawn_cases))
