"""The sources of random numbers that Python and numpy keep for the whole process: whether a call has drawn from them.

In: nothing. Out: a number for the state of each, which is another one after a draw.

    before = random_states()      # {"random": 81238, "numpy.random": 5513}
"""

from __future__ import annotations

import random
import sys

RANDOM = {"random": "Python's random module", "numpy.random": "numpy's random numbers"}


def random_states() -> dict[str, int]:
    """A forward that draws from these would repeat one outcome for ever, once it is a graph."""
    states = {"random": hash(random.getstate())}
    if "numpy" in sys.modules:
        drawn = sys.modules["numpy"].random.get_state()
        states["numpy.random"] = hash((drawn[1].tobytes(), *drawn[2:]))
    return states


__all__ = ["RANDOM", "random_states"]
