"""How often to save: Young's rule (Communications of the ACM 17, 1974).

In: the seconds for which a save stops training, and the mean seconds between two faults of the whole job. Out: the seconds
from one save to the next with which saves and work that is done again cost least together.

    young_interval(stall=2.0, mtbf=3600.0)      # 120.0
"""

from __future__ import annotations

import math


def young_interval(stall: float, mtbf: float) -> float:
    """Return sqrt(2 stall mtbf)."""
    return math.sqrt(2 * stall * mtbf)


__all__ = ["young_interval"]
