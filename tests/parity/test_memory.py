"""What a rank keeps, from the memory that is really alive: activations as many as the schedule says, and no more.

The storage of everything that a forward computes is watched; a (stage, microbatch) is live on its rank as long as one of these
is alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import autoptd
from autoptd.compat import tree_flatten
from autoptd.ir.actions import Action, Kind
from autoptd.ir.fusion import counts
from autoptd.ir.machine import Machine
from autoptd.passes.fusion import losses
from autoptd.program.program import Program
from autoptd.runtime.step.launch import LocalRanks, Rank
from autoptd.runtime.step.microbatches import cut
from autoptd.runtime.world.threads import ThreadChannel
from autoptd.runtime.world.world import Pending
from autoptd.schedule import simulate
from examples.gpt import GPT, GPTConfig
from tests.parity.models import batch, gpt, skipping

Pair = tuple[int, int]  # stage, microbatch


class Made(TorchDispatchMode):
    """Notes the storage of every result."""

    def __init__(self, found: list[StorageWeakRef]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = {
            x.untyped_storage().data_ptr() for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for x in tree_flatten(out)[0]:
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in read:
                self.found.append(StorageWeakRef(x.untyped_storage()))
        return out


class Watched:
    """The executor of one rank, looked at after every action."""

    def __init__(self, rank: Rank) -> None:
        self.executor = rank.executor
        self.made: dict[Pair, list[StorageWeakRef]] = {}
        self.kept: dict[Pair, int] = {}  # storages that a forward leaves alive
        self.peak = 0
        self.after_last: list[int] = []  # of every (stage, microbatch) that is through: storages still alive
        self.messages = 0  # the most that were posted or left, and not taken
        last = (
            Kind.W
            if any(one.kind is Kind.W for order in self.executor.program.orders for one in order)
            else Kind.B
        )
        for kind, do in list(self.executor._do.items()):
            self.executor._do[kind] = lambda action, do=do: self._see(action, do, last)

    def _see(self, action: Action, do: Any, last: Kind) -> None:
        pair = action.stage, action.microbatch
        if action.kind is Kind.F:
            with Made(self.made.setdefault(pair, [])):
                do(action)
            self.kept[pair] = self._alive(pair)
        else:
            do(action)
        self.peak = max(self.peak, sum(self._alive(one) > 0 for one in self.made))
        messages = self.executor._messages
        self.messages = max(self.messages, len(messages._arriving) + len(messages._leaving))
        if action.kind is last:
            self.after_last.append(self._alive(pair))

    def _alive(self, pair: Pair) -> int:
        return sum(not one.expired() for one in self.made[pair])


def run_watched(program: Program, model: torch.nn.Module, rows: int) -> list[Watched]:
    """One step on threads, every rank watched."""
    ranks = LocalRanks(program, model.state_dict(), timeout=60.0)
    watched = [Watched(rank) for rank in ranks.here]

    def body(rank: Rank) -> None:
        rank.executor.step(cut(program, batch(rows), rank.executor.inputs, 0, rank.world.device))

    ranks.run("step", body)
    ranks.close()
    return watched


def one_f_one_b(p: int, v: int, m: int) -> list[int]:
    return [min(m, p - r) for r in range(p)]


def interleaved(p: int, v: int, m: int) -> list[int]:
    return [min(m * v, 2 * (p - 1 - r) + (v - 1) * p + 1) for r in range(p)]


def all_of_them(p: int, v: int, m: int) -> list[int]:
    return [m * v] * p


def zero_bubble(most: Callable[[int], int]) -> Callable[[int, int, int], list[int]]:
    return lambda p, v, m: [min(m * v, most(p))] * p


# No tensor ranks: the last thread to join a collective makes the results of all.
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpipe": (all_of_them, {"p": 2, "schedule": "gpipe", "num_microbatches": 4}),
    "1f1b": (one_f_one_b, {"p": 4, "num_microbatches": 8}),
    "1f1b, few microbatches": (one_f_one_b, {"p": 4, "num_microbatches": 2}),
    "interleaved": (interleaved, {"p": 2, "v": 2, "num_microbatches": 8}),
    "interleaved, three chunks": (interleaved, {"p": 2, "v": 3, "num_microbatches": 4}),
    "looped_bfs": (all_of_them, {"p": 2, "v": 2, "schedule": "looped_bfs", "num_microbatches": 4}),
    "zb_h1": (zero_bubble(lambda p: p), {"p": 3, "schedule": "zb_h1", "num_microbatches": 8}),
    "zb_2p": (zero_bubble(lambda p: 2 * p - 1), {"p": 2, "schedule": "zb_2p", "num_microbatches": 8}),
    "zbv": (zero_bubble(lambda p: 2 * p), {"p": 2, "v": 2, "schedule": "zbv", "num_microbatches": 8}),
    "W behind its B": (one_f_one_b, {"p": 4, "num_microbatches": 8, "delay_wgrad_compute": "after_b"}),
    "W at the end": (all_of_them, {"p": 2, "num_microbatches": 4, "delay_wgrad_compute": "before_reduce"}),
}


@pytest.mark.parametrize(("formula", "request_"), CASES.values(), ids=CASES)
def test_live_activations_are_those_of_the_schedule(formula: Any, request_: dict[str, Any]) -> None:
    model = gpt(request_["p"] * request_.get("v", 1))
    program = autoptd.compile(model, **request_, example_inputs=batch(8))
    watched = run_watched(program, model, rows=8)
    found = [one.peak for one in watched]
    assert found == formula(program.mesh.p, program.v, program.num_microbatches)
    assert found == list(simulate(program.orders).peak_live)
    for one in watched:
        pairs = program.num_microbatches * program.v
        assert one.after_last == [0] * pairs, "a backward left tensors alive"
        assert min(one.kept.values()) >= 5, "nothing was watched"


SCHEDULES: dict[str, tuple[int, dict[str, Any]]] = {
    "gpipe": (2, {"p": 3, "schedule": "gpipe"}),
    "1f1b": (3, {"p": 3}),
    "interleaved": (6, {"p": 2, "v": 3}),
    "zb_2p": (3, {"p": 3, "schedule": "zb_2p"}),
    "zbv": (6, {"p": 2, "v": 2, "schedule": "zbv"}),
    "interleaved, scattered": (6, {"t": 2, "p": 2, "v": 3, "p2p": "scatter_gather"}),
}


@pytest.mark.parametrize(("bound", "request_"), SCHEDULES.values(), ids=SCHEDULES)
def test_messages_under_way_do_not_grow_with_the_microbatches(bound: int, request_: dict[str, Any]) -> None:
    """Buffers that are posted and not yet taken, and outputs not yet sent; `skipping` has a link over the stages between."""
    few, many = messages_under_way(request_)
    assert few == many <= bound


def test_looped_bfs_receives_all_microbatches_before_their_turn() -> None:
    """All forwards of a chunk come before those of the next, and all that arrive are inputs kept for a backward anyway.

    Left with their sender they would hold up what it sends to others: a device has one queue for all of it.
    """
    assert messages_under_way({"p": 2, "v": 2, "schedule": "looped_bfs"}) == [6, 24]


def messages_under_way(request_: dict[str, Any]) -> list[int]:
    """The most on a rank, of 6 and of 24 microbatches."""
    most: list[int] = []
    plan: dict[str, Any] = {}
    for m in (6, 24):
        model = skipping()
        program = autoptd.compile(
            model, **request_, plan=plan, num_microbatches=m, example_inputs=batch(2 * m)
        )
        plan = {"cut": program.plan["cut"]}  # the same for both
        most.append(max(one.messages for one in run_watched(program, model, rows=2 * m)))
    return most


class SentWhenTaken(Pending):
    """A send that has left when it was received: a rendezvous, as large messages are over a network."""

    def __init__(self, channel: ThreadChannel, number: int, tensors: list[Tensor]) -> None:
        self.messages, self.number, self.tensors = channel._pipe.messages, number, tensors

    def is_done(self) -> bool:
        return self.number not in self.messages

    def wait(self) -> None:
        while not self.is_done():
            torch.empty(0)  # others run
        self.tensors = []


@pytest.mark.parametrize("request_", [{"p": 3}, {"p": 2, "v": 3}], ids=str)
def test_what_was_sent_is_let_go_when_it_has_left(
    monkeypatch: pytest.MonkeyPatch, request_: dict[str, Any]
) -> None:
    send = ThreadChannel.send
    refs: dict[ThreadChannel, list[weakref.ref[Tensor]]] = {}
    held: list[int] = []

    def watched(self: ThreadChannel, tensors: Any, site: str) -> Pending:
        mine = refs.setdefault(self, [])
        mine += [weakref.ref(x) for x in tensors]
        number = self._pipe.sent
        send(self, tensors, site)
        held.append(sum(one() is not None for one in mine))
        return SentWhenTaken(self, number, list(tensors))

    monkeypatch.setattr(ThreadChannel, "send", watched)
    model = skipping()
    program = autoptd.compile(model, **request_, num_microbatches=24, example_inputs=batch(24))
    run_watched(program, model, rows=24)
    assert len(held) >= 24 and max(held) <= 2 * program.mesh.p * program.v


def kept_by_autograd(pm: autoptd.ParallelModel, *call: Tensor) -> int:
    """Bytes that the forward of one microbatch leaves for backward on rank 0, parameters left out."""
    stage = pm.run.ranks.here[0].executor.stages[0]
    own = {one.untyped_storage().data_ptr() for one in pm.run.ranks.here[0].params.local.values()}
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    forward = stage.forward

    def watched(*args: Any, **keywords: Any) -> Any:
        found.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            return forward(*args, **keywords)

    stage.forward = watched  # type: ignore[method-assign]
    pm.step(*call)
    return sum(nbytes for where, nbytes in found.items() if where not in own)


@pytest.mark.parametrize("fuse", ["eager", False])
# with the larger one at t=2, tp slices a weight, which is not counted
@pytest.mark.parametrize(("t", "vocab"), [(1, 4096), (2, 64)])
def test_bytes_saved_for_backward_are_what_autograd_saves(t: int, vocab: int, fuse: str | bool) -> None:
    """A fused head keeps the gradients of its operands instead of logits."""
    check_bytes_saved(t, vocab, fuse)


def test_a_fused_head_in_16_bits_keeps_its_gradient_in_32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "MIN_LOGITS_BYTES", 1)
    # From 64 tokens on, torch's attention on a CPU with AMX needs AVX-512 as well, which ATEN_CPU_CAPABILITY may have off.
    check_bytes_saved(1, 4096, "eager", torch.bfloat16, "linear_cross_entropy x 1", width=16, length=32)


def check_bytes_saved(
    t: int,
    vocab: int,
    fuse: str | bool,
    dtype: torch.dtype = torch.float32,
    fused: str = "",
    width: int = 64,
    length: int = 64,
) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=vocab, block_size=64, n_layer=2, n_head=4, n_embd=width)).to(dtype)
    ids, targets = torch.randint(vocab, (2, 4, length))
    request = {"t": t, "num_microbatches": 4, "fuse": fuse, "machine": Machine()}
    pm = autoptd.parallelize(model, **request, backend="local", example_inputs=(ids, targets))
    told = pm.program.costs.cut.saved_bytes[0]
    assert fused in counts(pm.program.fusions)
    assert told == pytest.approx(kept_by_autograd(pm, ids, targets), rel=0.05)
    pm.close()
