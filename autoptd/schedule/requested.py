"""The schedule of a request: built or read from a file, with transfers once the values that cross stages are
known.

In: options, and the links between stages. Out: orders.

    orders = requested_orders(options, num_microbatches=4)
    orders = connect_orders(orders, links=[(0, 1, True)])
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autoptd.ir.actions import Orders
from autoptd.options import Options
from autoptd.schedule.check import has_transfers
from autoptd.schedule.orders import build_orders
from autoptd.schedule.simulate import simulate
from autoptd.schedule.transfers import add_reduces, add_transfers, has_reduces
from autoptd.schedule.weight_gradients import delay_weight_gradients
from autoptd.schedule.wiring import Link
from autoptd.schedule.written import read_schedule


def written_orders(options: Options) -> Orders | None:
    """Return the user's schedule if the request names a file."""
    if not isinstance(options.schedule, Path):
        return None
    return read_schedule(options.schedule, options.mesh.pipeline_ranks, options.v, options.num_microbatches)


def requested_orders(options: Options, num_microbatches: int) -> Orders:
    """Return the computations of every pipeline rank, which also place the stages."""
    written = written_orders(options)
    if written is not None:
        return written
    orders = build_orders(str(options.schedule), options.mesh.pipeline_ranks, options.v, num_microbatches)
    if options.hooks.delay_wgrad is not None:
        orders = delay_weight_gradients(orders, options.hooks.delay_wgrad)
    return orders


def connect_orders(orders: Orders, links: Sequence[Link]) -> Orders:
    """Add the transfers, unless a user's schedule has them, and check by simulation that it ends."""
    if not has_transfers(orders):
        orders = add_transfers(orders, links)
    elif not has_reduces(orders):
        orders = add_reduces(orders)
    simulate(orders, links=links)
    return orders


__all__ = ["connect_orders", "requested_orders", "written_orders"]
