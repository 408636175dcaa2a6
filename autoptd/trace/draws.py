"""Detect draws from the process-wide random generators of Python and NumPy.

Out: a number per generator that identifies its state, and changes with a draw.

    before = random_states()      # {"random": 81238, "numpy.random": 5513}
"""

from __future__ import annotations

import random
import sys

RANDOM = {"random": "Python's random module", "numpy.random": "numpy's random numbers"}


def random_states() -> dict[str, int]:
    """Identify the states of generators whose draws a graph would freeze to one outcome."""
    states = {"random": hash(random.getstate())}
    if "numpy" in sys.modules:
        drawn = sys.modules["numpy"].random.get_state()
        states["numpy.random"] = hash((drawn[1].tobytes(), *drawn[2:]))
    return states


__all__ = ["RANDOM", "random_states"]
