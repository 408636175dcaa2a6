"""Orders of forwards and backwards per pipeline rank: pure functions of integers.

Terms: p pipeline ranks, v model chunks per rank, m microbatches. Stages are numbered 0 .. p*v-1 in model
order; stage s is on pipeline rank s % p and is that rank's chunk s // p. All schedules here have one shape
(Narayanan et al., SC'21, section 2.2): warm-up forwards, then forwards and backwards in turn, then the
remaining backwards. They differ in the length of the warm-up and in the k-th (stage, microbatch).

    one_f_one_b(p=2, m=2)
    # rank 0: F0.0 F0.1 B0.0 B0.1
    # rank 1: F1.0 B1.0 F1.1 B1.1
"""

from __future__ import annotations

from itertools import accumulate

from autoptd.ir.actions import Action, Kind, Orders, check_schedule
from autoptd.schedule.zero_bubble import zb_2p, zb_h1, zbv


def gpipe(p: int, m: int) -> Orders:
    """Run all forwards, then all backwards (SC'21, section 2.2.1, figure 3): bubble (p-1)/m, m
    microbatches live.
    """
    return [
        _alternate(_one_stage(Kind.F, rank, m), _one_stage(Kind.B, rank, m), warmup=m) for rank in range(p)
    ]


def one_f_one_b(p: int, m: int) -> Orders:
    """Run one forward, one backward (PipeDream-Flush; SC'21, section 2.2.1, figure 4 top).

    The bubble is GPipe's, (p-1)/m, but rank r keeps only min(m, p-r) microbatches live: its warm-up has one
    forward per downstream rank.
    """
    orders = []
    for rank in range(p):
        warmup = min(m, p - 1 - rank)
        orders.append(_alternate(_one_stage(Kind.F, rank, m), _one_stage(Kind.B, rank, m), warmup))
    return orders


def interleaved(p: int, v: int, m: int) -> Orders:
    """Run one forward, one backward over v chunks per rank (SC'21, section 2.2.2, figure 4 bottom).

    Microbatches advance in groups: a rank takes a group through its first chunk, then through its second, and
    so on; backward takes the chunks in reverse. Where m is a multiple of p, the groups are of p and the
    bubble is (p-1)/(v*m). Any other m works as well: in m // p groups that differ by one at most, the larger
    ones first, or in one group for m < p. Rank r keeps min(v*m, (v-1)*g + 2*(p-1-r) + 1) chunks live, where g
    is the size of the first group.
    """
    groups = _groups(p, m)
    return [_interleaved_rank(rank, p, v, m, groups) for rank in range(p)]


def looped_bfs(p: int, v: int, m: int) -> Orders:
    """Run breadth first (Lamy-Poirier 2022): all microbatches through a rank's first chunk, then through
    its next.

    Backward the other way around, the last microbatch first. The bubble is (p-1)/(v*m) for m >= p, v*m chunks
    live.
    """
    orders: Orders = []
    for rank in range(p):
        forwards: list[Action] = []
        for chunk in range(v):
            forwards += _one_stage(Kind.F, chunk * p + rank, m)
        backwards = [Action(Kind.B, action.stage, action.microbatch) for action in reversed(forwards)]
        orders.append(forwards + backwards)
    return orders


def build_orders(name: str, p: int, v: int, m: int) -> Orders:
    """Return the orders of the schedule called `name`, one of `ir.actions.SCHEDULES`: F, B and, for zero bubble,
    W.
    """
    check_schedule(name, v)
    of_one_chunk = {"gpipe": gpipe, "1f1b": one_f_one_b, "zb_h1": zb_h1, "zb_2p": zb_2p, "zbv": zbv}
    of_chunks = {"interleaved": interleaved, "looped_bfs": looped_bfs}
    return of_chunks[name](p, v, m) if name in of_chunks else of_one_chunk[name](p, m)


def _groups(p: int, m: int) -> list[range]:
    """Divide the microbatches 0 .. m-1 into groups of at least p.

    None is larger than the first, which sets the warm-up.
    """
    count = max(1, m // p)
    sizes = [m // count + (number < m % count) for number in range(count)]
    ends = list(accumulate(sizes))
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _interleaved_rank(rank: int, p: int, v: int, m: int, groups: list[range]) -> list[Action]:
    walk = [(chunk, microbatch) for group in groups for chunk in range(v) for microbatch in group]
    forwards = [Action(Kind.F, chunk * p + rank, microbatch) for chunk, microbatch in walk]
    backwards = [Action(Kind.B, (v - 1 - chunk) * p + rank, microbatch) for chunk, microbatch in walk]
    # Before the first backward: all but the last chunk of the first group, and the way to the last rank and
    # back.
    warmup = min(m * v, 2 * (p - 1 - rank) + (v - 1) * len(groups[0]))
    return _alternate(forwards, backwards, warmup)


def _one_stage(kind: Kind, stage: int, m: int) -> list[Action]:
    return [Action(kind, stage, microbatch) for microbatch in range(m)]


def _alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    """Order `warmup` forwards, then forwards and backwards in turn, then the remaining backwards."""
    order = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - warmup :]
