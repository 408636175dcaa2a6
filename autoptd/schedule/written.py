"""Read a user's schedule from a text file, check it, and compare it with the request.

In: the text, one line per pipeline rank, in the format of `ir/actions.py`; empty lines and lines that start
with # are ignored. Out: its orders. Sends, receives and REDUCE may be left out: they are added once the
values that cross stages are known. The numbers of pipeline ranks, chunks and microbatches, and the rank of
each stage, are read from the actions.

    # two ranks, two microbatches: the built-in "1f1b"
    F0.0 F0.1 B0.0 B0.1
    F1.0 B1.0 F1.1 B1.1
"""

from __future__ import annotations

from pathlib import Path

from autoptd.errors import PlanError
from autoptd.ir.actions import Orders, parse_orders
from autoptd.schedule.simulate import simulate


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
