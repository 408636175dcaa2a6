"""Schedules as data: integers in, lists of `Action` per pipeline rank out. Nothing here imports torch.

`orders` puts each rank's computations in order, `weight_gradients` may split the backwards, `transfers` adds
sends and receives, `simulate` proves that the run ends and measures it. `check` finds the faults in a
hand-written order (`written` reads one), and `requested` builds the schedule of a request.

    orders = add_transfers(build_orders("1f1b", p=2, v=1, m=4), links=[(0, 1, True)])
    simulate(orders).bubble == 1 / 4
"""

from autoptd.schedule.check import has_transfers
from autoptd.schedule.in_flight import in_flight_moments
from autoptd.schedule.measure import Memory, Simulation, Span
from autoptd.schedule.orders import build_orders, gpipe, interleaved, looped_bfs, one_f_one_b
from autoptd.schedule.requested import (
    connect_orders,
    num_microbatches,
    read_schedule,
    requested_orders,
    written_orders,
)
from autoptd.schedule.simulate import makespan_of, simulate
from autoptd.schedule.transfers import add_reduces, add_transfers, has_reduces
from autoptd.schedule.weight_gradients import delay_weight_gradients
from autoptd.schedule.wiring import Link
from autoptd.schedule.zero_bubble import zb_2p, zb_h1, zbv

__all__ = [
    "Link",
    "Memory",
    "Simulation",
    "Span",
    "add_reduces",
    "add_transfers",
    "build_orders",
    "connect_orders",
    "delay_weight_gradients",
    "gpipe",
    "has_reduces",
    "has_transfers",
    "in_flight_moments",
    "interleaved",
    "looped_bfs",
    "makespan_of",
    "num_microbatches",
    "one_f_one_b",
    "read_schedule",
    "requested_orders",
    "simulate",
    "written_orders",
    "zb_2p",
    "zb_h1",
    "zbv",
]
