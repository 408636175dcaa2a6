"""The optimal interval between saves: Young's rule (Communications of the ACM 17, 1974).

In: the seconds for which a save stops training, and the mean seconds between failures of the whole job. Out:
the interval, in seconds, that minimizes the time lost to saves and repeated work.

    young_interval(stall=2.0, mtbf=3600.0)      # 120.0
"""

from __future__ import annotations

import math


def young_interval(stall: float, mtbf: float) -> float:
    """Return sqrt(2 stall mtbf)."""
    return math.sqrt(2 * stall * mtbf)


__all__ = ["young_interval"]
