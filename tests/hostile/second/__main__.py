"""`python -m tests.hostile.second --cases 400 --seed 5`: counts by kind, refusals, and what is wrong or raw."""

from __future__ import annotations

import sys

from tests.hostile.__main__ import drive
from tests.hostile.second.generate import TABLES, cases

if __name__ == "__main__":
    sys.exit(drive("hostile.second", __doc__, 5, 400, cases, lambda case: case.run(), tuple(TABLES)))
