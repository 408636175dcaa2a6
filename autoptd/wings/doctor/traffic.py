"""Messages and sums within layers and over replicas under way at once, in the order in which a schedule has them.

In: a world, and the orders of a schedule. Out: what is wrong, in `Checks`. It is a training step without a
model: an F sums over tp and sends on; a B starts a sum over tp, waits for it, and sends back; meanwhile a sum
over dp is under way, begun at the first B and waited for at the end, and another is begun at each REDUCE.
Nothing is looked at before the end: that would hold the device up.

    play(checks, "1f1b", step_orders("1f1b", p=2))
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from autoptd.errors import InternalError
from autoptd.ir.actions import RECVS, SENDS, Action, Kind, Orders, ranks_of_stages
from autoptd.program.calls import joint_axis
from autoptd.runtime.world.world import Communicators, Group, Pending
from autoptd.schedule import add_transfers, build_orders
from autoptd.wings.doctor.calls import Checks, Result, over_stages, peer, settle
from autoptd.wings.doctor.patterns import message, share, total

# Schedule -> model chunks of a rank.
SCHEDULES = {"1f1b": 1, "interleaved": 2, "looped_bfs": 2, "zbv": 2}
# Elements of messages, used in turn.
LENGTHS = (257, 65_537, 1021)
# Elements of a sum over replicas.
BUCKET = 1 << 20
AWAITED_BY = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B}


def step_orders(name: str, p: int) -> Orders:
    """Return what every pipeline rank does in a step of the schedule, with messages between neighbouring
    stages.
    """
    v = SCHEDULES[name]
    # Enough for a steady state between warm-up and end; of a long pipeline less, as it takes p times as long.
    m = 2 * p if p <= 4 else p
    return add_transfers(
        build_orders(name, p, v, m), [(stage, stage + 1, True) for stage in range(p * v - 1)]
    )


def all_orders(p: int) -> dict[str, Orders]:
    """Return the orders of every schedule that p pipeline ranks are checked with."""
    return {name: step_orders(name, p) for name, v in SCHEDULES.items() if p > 1 or v == 1}


def communicators_of_orders(p: int, orders: Iterable[Orders]) -> Communicators:
    """Return the channels of all these orders, and the group of those ranks that a tied embedding has."""
    links: set[tuple[int, int]] = set()
    for order in orders:
        ranks = ranks_of_stages(order)
        for rank, actions in enumerate(order):
            links |= {(rank, ranks[action.peer]) for action in actions if action.kind in SENDS}
    return Communicators(owners=((0, p - 1),) if p > 1 else (), links=tuple(sorted(links)))


def play(checks: Checks, name: str, orders: Orders) -> None:
    """Do what the orders say for this rank."""
    world, step = checks.world, _Step(checks, orders)
    for action in orders[world.pipeline_rank]:
        world.at = f"{action} of {name}"
        step.do(action)
    world.at = f"end of {name}"
    step.finish()
    settle(world, f"doctor: {name}")
    for what, over, ranks, result in step.results:
        checks.hold(f"{what} in {name}", over, ranks, result)


class _Step:
    """One rank's step."""

    def __init__(self, checks: Checks, orders: Orders) -> None:
        self._world, self._ranks = checks.world, ranks_of_stages(orders)
        mesh = self._world.mesh
        self._value_groups = {axis: self._world.group((axis,)) for axis in mesh.value_axes}
        # Gradients are summed over all ranks with other samples or tokens at once.
        axes = mesh.gradient_axes
        self._gradient_groups = {joint_axis(mesh, axes) or axes[0]: self._world.group(axes)}
        self._arriving: dict[Action, Pending] = {}
        self._leaving: list[Pending] = []
        # Sums over replicas that are under way, each with its axes.
        self._sums: list[tuple[str, Pending]] = []
        # How many sums over value axes were made: their sizes take turns.
        self._count = 0
        self.results: list[tuple[str, str, tuple[int, ...], Result]] = []

    def do(self, action: Action) -> None:
        if action.kind in SENDS:
            self._send(action)
        elif action.kind in RECVS:
            (like,) = self._messages(action)
            channel = self._world.incoming(self._peer(action))
            self._arriving[action] = channel.receive([(like.shape, like.dtype)], f"doctor: {action}")
        elif action.kind in AWAITED_BY:
            self._take(action)
            if action.kind is Kind.B and not self._sums:
                self._start_sums()
            for axis in self._value_groups:
                self._sum_values(action, axis)
        elif action.kind is Kind.REDUCE:
            self._start_sums()

    def finish(self) -> None:
        """Wait for all that is under way."""
        for pending in self._leaving:
            pending.wait()
        for axis, pending in self._sums:
            self._hold_sum("all_reduce_start", self._gradient_groups[axis], axis, pending.wait())
        if self._arriving:
            raise InternalError(self._world.at, f"nobody took {', '.join(map(str, self._arriving))}")

    def _messages(self, action: Action) -> list[torch.Tensor]:
        """What a SEND sends, or a RECV receives."""
        is_send, is_back = action.kind in SENDS, action.kind in (Kind.SEND_B, Kind.RECV_B)
        ends = (self._world.rank, self._peer(action)) if is_send else (self._peer(action), self._world.rank)
        from_stage = action.stage if is_send else action.peer
        # Any two messages of a pair differ, so that one that overtakes another shows.
        number = 2 * (from_stage * 31 + action.microbatch) + is_back
        dtype = (torch.float32, torch.bfloat16)[action.microbatch % 2]
        return [message(*ends, LENGTHS[action.microbatch % 3], dtype, self._world.device, number)]

    def _peer(self, action: Action) -> int:
        return peer(self._world, self._ranks[action.peer])

    def _send(self, action: Action) -> None:
        channel = self._world.outgoing(self._peer(action))
        self._leaving.append(channel.send(self._messages(action), f"doctor: {action}"))

    def _take(self, action: Action) -> None:
        """Wait for what a computation needs."""
        kind = AWAITED_BY[action.kind]
        mine = (kind, action.stage, action.microbatch)
        arrived = []
        for receive in self._arriving:
            if (receive.kind, receive.stage, receive.microbatch) == mine:
                arrived.append(receive)
        for receive in arrived:
            (got,), (expected,) = self._arriving.pop(receive).wait(), self._messages(receive)
            ends = (self._peer(receive), self._world.rank)
            self.results.append(("message", over_stages(self._world), ends, Result(got, expected, 0)))

    def _sum_values(self, action: Action, axis: str) -> None:
        """Sum over an axis along which ranks have parts of values: at once in F, started first in B."""
        group, site = self._value_groups[axis], f"doctor: sum over {axis} in {action}"
        count = LENGTHS[self._count % 3]
        self._count += 1
        mine = share(group.index, group.size, count, torch.bfloat16, self._world.device)
        if action.kind is Kind.B:
            # As a backward does, which computes a weight's gradient beside it.
            got = group.all_reduce_start(mine.clone(), site).wait()
            self._hold_sum("all_reduce_start", group, axis, got)
        else:
            got = group.all_reduce(mine, site)
            self._hold_sum("all_reduce", group, axis, got)

    def _start_sums(self) -> None:
        """Start a sum over replicas, as a bucket of gradients does."""
        for axis, group in self._gradient_groups.items():
            flat = share(group.index, group.size, BUCKET, torch.float32, self._world.device)
            self._sums.append((axis, group.all_reduce_start(flat.clone(), f"doctor: sum over {axis}")))

    def _hold_sum(self, what: str, group: Group, over: str, got: torch.Tensor) -> None:
        if group.size == 1:
            return
        expected = total(group.size, got.numel(), got.dtype, got.device)
        self.results.append((what, over, group.ranks, Result(got, expected, size=group.size)))


__all__ = ["SCHEDULES", "all_orders", "communicators_of_orders", "play", "step_orders"]
