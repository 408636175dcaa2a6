"""A user's own schedule: read from a text file, checked, and compared with what was asked for.

In: the text, one line per pipeline rank, as `ir/actions.py` writes it; empty lines and lines that start with
# say nothing. Out: its orders. Sends, receives and REDUCE may be left out: they are added once it is known
what crosses between the stages. How many pipeline ranks, chunks and microbatches there are, and which rank
has which stage, is read from the actions.

    # two ranks, two microbatches: what the built-in "1f1b" does
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

    PlanError unless they run to their end, on p ranks with v chunks and (if given) m each.
    """
    site = f"schedule={str(path)!r}"
    try:
        orders = parse_orders(path.read_text())
    except OSError as error:
        fact = f"cannot be read: {error.strerror}"
        raise PlanError(site, fact, "the path of a text file with a line per pipeline rank") from error
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
        raise PlanError(site, f"is for {has}; asked for was {wants}", f"ask for {has}, or change the file")
    return orders


def num_stages(orders: Orders) -> int:
    return 1 + max(action.stage for order in orders for action in order)


def num_microbatches(orders: Orders) -> int:
    return 1 + max(action.microbatch for order in orders for action in order)
