"""What is communicated: executed calls equal the compiled list, and for a GPT the closed formulas, exactly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.ir.mesh import Coordinate
from autoptd.program.calls import Call, expected_calls
from tests.parity.models import LENGTH, VOCAB, batch, gpt, separate, skipping, uneven

CONTROL = "dtype of the loss"  # ranks tell each other once, in the first step


class Smoothed(nn.Module):
    """Everything that a vocabulary-parallel loss can sum: class weights, label smoothing, ignored labels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.register_buffer("class_weight", torch.rand(VOCAB))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.mlp(self.embed(ids))).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), weight=self.class_weight, label_smoothing=0.1)  # type: ignore[arg-type]


class Frozen(nn.Module):
    """A frozen table in front: the first f has nothing to send back."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB, bias=False)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.embed.weight.requires_grad_(False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        return F.cross_entropy(self.head(x + self.down(F.relu(self.up(x)))).flatten(0, 1), labels.flatten())


class Scaled(Smoothed):
    """A loss by the largest and smallest of numbers that are known before the first forward, and by their sum."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        numbers = ids.float()
        share = (numbers - numbers.min()) / (1 + numbers.amax(0)) / numbers.sum()
        return super().forward(ids, labels) * share.amax()


HOOKS = {
    "async_tensor_model_parallel_allreduce": True,
    "accumulate_allreduce_grads_in_fp32": True,
    "delay_wgrad_compute": "before_reduce",
}
# The first one runs by default.
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "scaled t2 d2": (Scaled, {"t": 2, "d": 2, "num_microbatches": 2}),
    "summed t4 m4": (lambda: separate(reduction="sum"), {"t": 4, "num_microbatches": 4}),
    "gpt t2 p2 d2": (gpt, {"t": 2, "p": 2, "d": 2}),
    "separate t2 p2 d2 v2": (separate, {"t": 2, "p": 2, "d": 2, "v": 2, "num_microbatches": 2}),
    "gpt scattered t4 p2 v2": (gpt, {"t": 4, "p": 2, "v": 2, "num_microbatches": 4, "p2p": "scatter_gather"}),
    "skipping scattered t3 p4": (skipping, {"t": 3, "p": 4, "p2p": "scatter_gather"}),
    "separate scattered t2 p4 v2": (
        lambda: separate(2),
        {"t": 2, "p": 4, "v": 2, "num_microbatches": 4, "p2p": "scatter_gather"},
    ),
    "smoothed t2 d2": (Smoothed, {"t": 2, "d": 2}),
    "frozen t2 p2": (Frozen, {"t": 2, "p": 2}),
    "hooked gpt t2 p2 d2": (gpt, {"t": 2, "p": 2, "d": 2, "num_microbatches": 2, **HOOKS}),
    "gpt by tokens t2 p2": (gpt, {"t": 2, "p": 2, "sequence_parallel": True}),
    "hooked separate by tokens t2 p2": (separate, {"t": 2, "p": 2, "sequence_parallel": True, **HOOKS}),
    "shared update p2 d4": (gpt, {"p": 2, "d": 4, "zero": 1, "dp_shard": 2}),
    "hooked bf16 t2 d2": (lambda: gpt(2).bfloat16(), {"t": 2, "d": 2, **HOOKS}),
}


@pytest.mark.parametrize(("make", "mesh"), CASES.values(), ids=CASES)
def test_executed_calls_are_those_of_the_program(make: Callable[[], nn.Module], mesh: dict[str, Any]) -> None:
    ids, targets = batch()
    targets = targets if make is skipping else uneven(targets)  # it looks its labels up
    pm = autoptd.parallelize(make(), **mesh, backend="local", example_inputs=(ids, targets))
    for step in range(2):
        with pm.record() as record:
            pm.step(ids, targets)
        for rank in range(pm.program.mesh.size):
            executed = Counter(call for call in record.of(rank) if call.kind != "objects")
            assert executed == expected_calls(pm.program, rank)
            assert all(call.why for call in executed)
        control = [
            call.site for call in record.collectives if call.kind == "objects"
        ]  # what ranks ask each other once
        assert control.count(CONTROL) == (pm.program.mesh.size if step == 0 and pm.program.mesh.p > 1 else 0)
        assert step == 0 or not control
    with pm.record() as record:
        pm.eval_step(ids, targets)
    (evaluated,) = pm.sizes.evaluating
    for rank in range(pm.program.mesh.size):
        found = Counter(
            call for call in record.of(rank) if call.phase != "step" or call.site in ("loss", LABELS, SUMS)
        )
        assert found == expected_calls(evaluated, rank, training=False)
    pm.close()


LABELS, SUMS = "count of labels", "sums over the batch"
GPTS: list[dict[str, Any]] = [
    {"t": 2, "p": 1, "d": 1, "v": 1, "m": 1},
    {"t": 2, "p": 2, "d": 2, "v": 1, "m": 2},
    {"t": 4, "p": 1, "d": 2, "v": 1, "m": 2},
    {"t": 2, "p": 2, "d": 1, "v": 2, "m": 4},
    {"t": 1, "p": 4, "d": 2, "v": 1, "m": 4},
    {"t": 1, "p": 2, "d": 1, "v": 2, "m": 2},
]
ROWS, WIDTH, LAYERS, ITEM = 8, 32, 4, 4  # float32


@pytest.mark.parametrize("size", GPTS, ids=lambda size: "".join(f"{k}{n}" for k, n in size.items()))
def test_a_gpt_communicates_what_the_formulas_say(size: dict[str, int]) -> None:
    """SC'21, section 3: per layer and microbatch 2 + 2 all-reduces of b s h, and nothing that is not named here."""
    t, p, d, v, m = size.values()
    ids, targets = batch(ROWS)
    model = gpt(LAYERS, width=WIDTH)
    even = {"cut": [LAYERS // (p * v)] * (p * v)}
    mesh: dict[str, Any] = {"t": t, "p": p, "d": d, "v": v, "num_microbatches": m, "plan": even}
    pm = autoptd.parallelize(model, **mesh, backend="local", example_inputs=(ids, targets))
    pm.step(ids, targets)
    with pm.record() as record:
        pm.step(ids, targets)
    for rank in range(t * p * d):
        assert tally(record.of(rank)) == formulas(model, size, pm.program.mesh.coordinate(rank).pp), (
            f"rank {rank}"
        )
    pm.close()


Tally = Counter[tuple[str, str, str, int]]  # (kind, axis, phase, payload bytes)


def tally(calls: list[Call]) -> Tally:
    return Counter((call.kind, call.axis, call.phase, call.payload_bytes) for call in calls)


def formulas(model: nn.Module, size: dict[str, int], pp: int) -> Tally:
    """What one rank of pipeline rank `pp` does; layers are dealt out to stages evenly."""
    t, p, d, v, m = size.values()
    tokens = ROWS // (d * m) * LENGTH  # b s
    hidden, stages = tokens * WIDTH * ITEM, p * v
    found: Tally = Counter()
    mine = [stage for stage in range(stages) if stage % p == pp]
    if t > 1:
        found["all-reduce", "tp", "forward", hidden] += (
            2 * m * len(mine) * LAYERS // stages
        )  # g: attention, MLP
        found["all-reduce", "tp", "backward", hidden] += (
            2 * m * len(mine) * LAYERS // stages
        )  # f: attention, MLP
    if t > 1 and 0 in mine:
        found["all-reduce", "tp", "forward", hidden] += m  # embedding of tokens and positions, one sum
    if t > 1 and stages - 1 in mine:
        found["all-reduce", "tp", "backward", hidden] += m  # input of the head
        # Cross-entropy: three reductions of b s numbers, the two sums among them in one call.
        found["all-reduce", "tp", "forward", tokens * ITEM] += m
        found["all-reduce", "tp", "forward", 2 * tokens * ITEM] += m
    if p > 1:
        sent = sum(1 for stage in mine if stage < stages - 1)
        back = sum(1 for stage in mine if stage > 0)
        found["send", "pp", "forward", hidden] += m * sent
        found["send", "pp", "backward", hidden] += m * back
    tied = VOCAB * WIDTH * ITEM // t
    layer = sum(parameter_bytes(name, x, t) for name, x in model.named_parameters() if ".h.0." in name)
    if d > 1:
        for stage in mine:  # one bucket (less than 25 MiB) a stage; a tied weight has its own
            owned = layer * LAYERS // stages
            owned += LENGTH * WIDTH * ITEM // t if stage == 0 else 0  # positions
            owned += 2 * WIDTH * ITEM if stage == stages - 1 else 0  # last norm
            owned += tied if p == 1 else 0
            found["all-reduce", "dp", "step", owned] += 1
        if p > 1 and {0, stages - 1} & set(mine):
            found["all-reduce", "dp", "step", tied] += 1
    if p > 1 and {0, stages - 1} & set(mine):
        found["all-reduce", "pp", "step", tied] += 1  # over the owners of the tied weight
    if d > 1 and stages - 1 in mine:
        found["all-reduce", "dp", "step", 8] += 1  # number of labels of the global batch
    for axis in [axis for axis, degree in (("dp", d), ("pp", p)) if degree > 1]:  # tensor ranks have it all
        found["all-reduce", axis, "step", 8] += 1  # the loss
    return +found


def parameter_bytes(name: str, x: Tensor, t: int) -> int:
    """Column weights and biases and row weights are sharded; norms and row biases are not."""
    whole = "ln_" in name or name.endswith("c_proj.bias")
    return x.numel() * ITEM // (1 if whole else t)


@pytest.mark.parametrize("p", [2, 4])
def test_interleaving_sends_v_times_as_much(p: int) -> None:
    """SC'21, section 2.2.2: boundaries, and bytes over them, are p v - 1 instead of p - 1."""
    totals = []
    ids, targets = batch(ROWS)
    for v in (1, 2):
        model = gpt(2 * p)
        pm = autoptd.parallelize(
            model, p=p, v=v, num_microbatches=4, backend="local", example_inputs=(ids, targets)
        )
        with pm.record() as record:
            pm.step(ids, targets)
        totals.append(sum(call.payload_bytes for call in record.collectives if call.kind == "send"))
        pm.close()
    assert totals[1] * (p - 1) == totals[0] * (2 * p - 1)
    assert totals[0] == 2 * 4 * (p - 1) * (ROWS // 4) * LENGTH * WIDTH * ITEM


@pytest.mark.parametrize(("t", "p", "v"), [(2, 2, 1), (4, 2, 2), (2, 4, 1)])
def test_scattering_sends_a_part_of_t(t: int, p: int, v: int) -> None:
    """SC'21, section 4.1: b s h / t from each tensor rank over every boundary, each way; all-gathers of b s h over tp."""
    ids, targets = batch(ROWS)
    m = 4
    hidden = ROWS // m * LENGTH * WIDTH * ITEM
    found = []
    for p2p in ("scatter_gather", "direct"):
        pm = autoptd.parallelize(
            gpt(p * v), t, p, v=v, num_microbatches=m, p2p=p2p, backend="local", example_inputs=(ids, targets)
        )
        with pm.record() as record:
            pm.step(ids, targets)
        mine = [tally(record.of(pm.program.mesh.rank(Coordinate(pp=pp)))) for pp in range(p)]
        assert all(tally(record.of(rank)) == mine[rank // t] for rank in range(t * p))
        found.append(mine)
        pm.close()
    boundaries = p * v - 1
    for phase in ("forward", "backward"):
        sent = {
            one: sum(calls["send", "pp", phase, one] for calls in found[0]) for one in (hidden, hidden // t)
        }
        assert sent == {hidden: 0, hidden // t: m * boundaries}
        assert sum(calls["all-gather", "tp", phase, hidden] for calls in found[0]) == m * boundaries
        assert sum(calls["send", "pp", phase, hidden] for calls in found[1]) == m * boundaries
    ways = {("send", "pp"), ("all-gather", "tp")}
    for scattered, direct in zip(*found, strict=True):  # nothing else changes
        assert {k: n for k, n in scattered.items() if k[:2] not in ways} == {
            k: n for k, n in direct.items() if k[:2] not in ways
        }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("mesh", [{"t": 2, "d": 2}, {"p": 2, "num_microbatches": 2}], ids=str)
def test_divisors_that_stay_on_the_device_are_those_of_the_host(
    mesh: dict[str, int], dtype: torch.dtype
) -> None:
    """As on CUDA from the second step on, where a number would wait for the device."""
    ids, targets = batch()
    found: list[list[Tensor]] = []
    for runs_ahead in (False, True):
        torch.manual_seed(0)
        pm = autoptd.parallelize(
            Smoothed().to(dtype), **mesh, backend="local", fuse=False, example_inputs=(ids, targets)
        )
        executors = [rank.executor for rank in pm.run.started("test").here]
        for executor in executors:
            executor._runs_ahead = runs_ahead
        losses = [pm.step(ids, uneven(targets)) for _ in range(2)]
        totals = [total for one in executors for stage in one.stages.values() for total in stage.totals]
        assert totals and all(isinstance(total, Tensor) == runs_ahead for total in totals)
        assert losses[0].dtype == losses[1].dtype == dtype
        found.append([*losses, *pm.gradients().values()])
        pm.close()
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    for ahead, host in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ahead, host, rtol=tolerance, atol=tolerance)
