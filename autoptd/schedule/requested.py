"""The schedule of a request: built, or read from the user's file; with transfers once the values that cross stages are
known.

In: options, and the links between stages. Out: orders.

    orders = requested_orders(options, num_microbatches=4)
    orders = connect_orders(orders, links=[(0, 1, True)])

A file has one line per pipeline rank, in the format of `ir/actions.py`; empty lines and lines that start with # are
ignored. Sends, receives and REDUCE may be left out: they are added. The numbers of pipeline ranks, chunks and
microbatches, and the rank of each stage, are read from the actions, and must be those of the request.

    # two ranks, two microbatches: the built-in "1f1b"
    F0.0 F0.1 B0.0 B0.1
    F1.0 B1.0 F1.1 B1.1
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autoptd.errors import PlanError
from autoptd.ir.actions import Orders, parse_orders
from autoptd.options import Options
from autoptd.schedule.check import has_transfers
from autoptd.schedule.orders import build_orders
from autoptd.schedule.simulate import simulate
from autoptd.schedule.transfers import add_reduces, add_transfers, has_reduces
from autoptd.schedule.weight_gradients import delay_weight_gradients
from autoptd.schedule.wiring import Link


def requested_orders(options: Options, num_microbatches: int) -> Orders:
    """Return the computations of every pipeline rank, which also place the stages."""
    written = written_orders(options)
    if written is not None:
        return written
    orders = build_orders(str(options.schedule), options.mesh.pipeline_ranks, options.v, num_microbatches)
    if options.hooks.delay_wgrad is not None:
        orders = delay_weight_gradients(orders, options.hooks.delay_wgrad)
    return orders


def written_orders(options: Options) -> Orders | None:
    """Return the user's schedule if the request names a file."""
    if not isinstance(options.schedule, Path):
        return None
    return read_schedule(options.schedule, options.mesh.pipeline_ranks, options.v, options.num_microbatches)


def connect_orders(orders: Orders, links: Sequence[Link]) -> Orders:
    """Add the transfers, unless a user's schedule has them, and check by simulation that it ends."""
    if not has_transfers(orders):
        orders = add_transfers(orders, links)
    elif not has_reduces(orders):
        orders = add_reduces(orders)
    simulate(orders, links=links)
    return orders


def read_schedule(path: Path, p: int, v: int, m: int | None) -> Orders:
    """Return the orders in the file.

    PlanError unless they run to their end, on p ranks with v chunks and (if given) m microbatches.
    """
    site = f"schedule={str(path)!r}"
    try:
        orders = parse_orders(path.read_text())
    except OSError as error:
        fact = f"cannot be read: {error.strerror}"
        raise PlanError(site, fact, "pass a text file with one line per pipeline rank") from error
    except ValueError as error:
        remedy = "F2.1, B2.1, W2.1 (stage 2, microbatch 1), SEND_F2.1>3, RECV_F3.1<2, SEND_B3.1>2, RECV_B2.1<3, REDUCE2"
        raise PlanError(site, str(error), remedy) from error
    try:
        simulate(orders)
    except PlanError as error:
        raise PlanError(site, error.fact, error.remedy) from None
    found = {
        "p": len(orders),
        "v": num_stages(orders) // len(orders),
        "num_microbatches": num_microbatches(orders),
    }
    wanted = {"p": p, "v": v, "num_microbatches": m or found["num_microbatches"]}
    wrong = [name for name in found if found[name] != wanted[name]]
    if wrong:
        has = ", ".join(f"{name}={found[name]}" for name in wrong)
        wants = ", ".join(f"{name}={wanted[name]}" for name in wrong)
        raise PlanError(
            site, f"is for {has}, but the request has {wants}", f"request {has}, or change the file"
        )
    return orders


def num_stages(orders: Orders) -> int:
    return 1 + max(action.stage for order in orders for action in order)


def num_microbatches(orders: Orders) -> int:
    return 1 + max(action.microbatch for order in orders for action in order)
