"""Recomputation: the same bits, the bytes that were promised, and no more arithmetic than backward needs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.errors import PlanError
from autoptd.ir.notes import note
from autoptd.program.calls import expected_calls
from autoptd.runtime.ops import recompute as again
from autoptd.runtime.ops.linear import Deferred
from autoptd.runtime.step.stage import Stage
from examples.gpt import GPT
from tests.parity import models
from tests.parity.kept import fullest, kept_by_stage

VOCAB, LENGTH, WIDTH = 32, 8, 16
Found = dict[str, Tensor]
MODES: tuple[Any, ...] = ("full", "selective", "full:1/2", ("*.mlp", "*.ln_1"), ("*",))


def gpt(layers: int = 4, dropout: float = 0.0, width: int = WIDTH, length: int = LENGTH) -> GPT:
    return models.gpt(layers, width=width, vocab=VOCAB, length=length, dropout=dropout)


def batch(rows: int = 8, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    ids, targets = torch.randint(VOCAB, (2, rows, length))
    return ids, targets


def trained(model: nn.Module, steps: int = 2, **keywords: Any) -> Found:
    """Losses, gradients and parameters of some steps."""
    call = batch()
    pm = autoptd.parallelize(model, backend="local", timeout=60, example_inputs=call, **keywords)
    found: Found = {}
    try:
        optimizer = pm.optimizer(torch.optim.AdamW, lr=1e-2)
        for step in range(steps):
            found[f"loss {step}"] = pm.step(*call)
            found |= {f"{name} gradient {step}": x for name, x in pm.gradients().items()}
            optimizer.step()
            optimizer.zero_grad()
        return found | pm.state_dict()
    finally:
        pm.close()


def differing(one: Found, other: Found) -> list[str]:
    assert one.keys() == other.keys() and len(one) > 20
    return [name for name in one if not torch.equal(one[name], other[name])]


SETTINGS: tuple[dict[str, Any], ...] = (
    {"t": 2, "num_microbatches": 2},
    {"t": 2, "p": 2, "num_microbatches": 4, "sequence_parallel": True},
    {"t": 2, "fuse": False, "num_microbatches": 2},
    {"p": 3, "schedule": "zb_h1", "num_microbatches": 4},
    {"t": 2, "p": 2, "v": 2, "schedule": "zbv", "num_microbatches": 4, "sequence_parallel": True},
    {
        **{"t": 2, "p": 2, "d": 2, "v": 2, "zero": 1, "num_microbatches": 2},
        "async_tensor_model_parallel_allreduce": True,
        "accumulate_allreduce_grads_in_fp32": True,
    },
    {"p": 2, "delay_wgrad_compute": "before_reduce", "num_microbatches": 2},
    {"t": 2, "p": 2, "precision": "bf16-mixed", "num_microbatches": 2},
    {"t": 2, "p": 2, "precision": "bf16", "sequence_parallel": True, "num_microbatches": 2},
    {"p": 2, "plan": {"cut": ["transformer.h.1.attn"]}, "num_microbatches": 2},  # within a layer
)


@cache
def kept_whole(number: int, dropout: float) -> Found:
    return trained(gpt(dropout=dropout), **SETTINGS[number])


CASES = [(number, mode, rate) for number in range(len(SETTINGS)) for mode in MODES for rate in (0.2, 0.0)]


@pytest.mark.one_in(96)
@pytest.mark.parametrize(("number", "mode", "dropout"), CASES, ids=map(str, CASES))
def test_the_same_bits(number: int, mode: Any, dropout: float) -> None:
    found = trained(gpt(dropout=dropout), recompute=mode, **SETTINGS[number])
    assert differing(found, kept_whole(number, dropout)) == []


PRICES = (None, 1e-12, 1e-11, 1e-8, 1e-6)


@pytest.mark.thorough  # by default in 16 bits
@pytest.mark.parametrize(("number", "price"), [*product(range(len(SETTINGS)), PRICES)])
def test_values_chosen_by_price(number: int, price: float | None) -> None:
    """Beside a run of the same price, which counts in the layout as well."""
    keywords = {**SETTINGS[number], "memory_price": price}
    found = trained(gpt(dropout=0.2), recompute="auto", **keywords)
    assert differing(found, trained(gpt(dropout=0.2), **keywords)) == []


def test_a_higher_price_keeps_fewer_bytes() -> None:
    """Without a layout to choose: from all that is saved down to what layers cannot make again."""

    def kept(recompute: Any, price: float | None = None) -> int:
        program = autoptd.compile(gpt(2), recompute=recompute, memory_price=price, example_inputs=batch())
        return sum(program.costs.cut.saved_bytes)

    ladder = [kept("auto", price) for price in PRICES]
    assert ladder == sorted(ladder, reverse=True) and ladder[0] == kept(None)
    assert kept("full") in ladder and len(set(ladder)) >= 3


@pytest.mark.thorough
def test_the_least_price_that_fits_into_memory() -> None:
    keywords: dict[str, Any] = {"p": 2, "num_microbatches": 4, "example_inputs": batch()}
    whole = autoptd.compile(gpt(), recompute="auto", **keywords)
    least = autoptd.compile(gpt(), recompute="auto", memory_price=1e-6, **keywords)
    assert not whole.plan["options"]["memory_price"]
    most, fewest = fullest(whole), fullest(least)
    prices = []
    for share in (0.9, 0.5, 0.1):
        memory = fewest + share * (most - fewest)
        program = autoptd.compile(gpt(), recompute="auto", memory=memory, **keywords)
        assert fullest(program) <= memory
        prices.append(
            max(row["price"] + row["share"] * (row["more"] - row["price"]) for row in program.plan["keep"])
        )
        again = autoptd.compile(gpt(), recompute="auto", plan=program.plan, **keywords)
        assert again.sources == program.sources
    assert prices == sorted(prices) and prices[0] > 0
    with pytest.raises(PlanError, match="recompute='auto'"):
        autoptd.compile(gpt(), recompute=False, memory=1.1 * fewest, **keywords)
    with pytest.raises(PlanError, match="the fullest rank takes"):
        autoptd.compile(gpt(), recompute="auto", memory=0.5 * fewest, **keywords)


@pytest.mark.thorough
def test_what_ranks_pay_is_least() -> None:
    """The rank with most in flight makes values again, the others keep theirs, and one layer less would not fit."""
    keywords: dict[str, Any] = {"p": 4, "num_microbatches": 8, "example_inputs": batch(), "recompute": "auto"}
    model = gpt(layers=8)
    cut = [2, 2, 2, 2]
    whole = autoptd.compile(model, plan={"cut": cut}, memory=1e15, **keywords)
    peaks = whole.costs.cut.peak_bytes
    assert not any(whole.costs.cut.again_seconds) and max(peaks) == peaks[0]
    bound = autoptd.compile(model, plan={"cut": cut}, memory=0.97 * max(peaks), **keywords)
    again = bound.costs.cut.again_seconds
    assert again[0] > 0.0 == max(again[1:]) and max(bound.costs.cut.peak_bytes) <= 0.97 * max(peaks)
    # The pinned rates are what was chosen; with one layer less at the higher rate the rank would not fit.
    keep = bound.plan["keep"]
    assert autoptd.compile(model, plan=bound.plan, **keywords).sources == bound.sources
    less = [{**keep[0], "share": keep[0]["share"] - 0.5}, *keep[1:]]
    if less[0]["share"] < 0:
        prices = sorted({row["more"] for row in keep} | {row["price"] for row in keep})
        below = max(price for price in prices if price < keep[0]["price"])
        less[0] = {"rank": 0, "price": below, "more": keep[0]["price"], "share": 0.5}
    with pytest.raises(PlanError, match="memory"):
        autoptd.compile(model, plan={"cut": cut, "keep": less}, memory=0.97 * max(peaks), **keywords)


@pytest.mark.thorough
@pytest.mark.parametrize("count", [4, pytest.param(10, marks=pytest.mark.thorough)])
def test_less_memory_takes_no_less_time(count: int) -> None:
    """Budgets from all that is saved down to what full recomputation holds, which takes longer than ours there."""
    keywords: dict[str, Any] = {"p": 3, "num_microbatches": 6, "example_inputs": batch(rows=6)}
    model = gpt(layers=9, width=64)
    full, none = (autoptd.compile(model, recompute=asked, **keywords) for asked in ("full", None))
    least, most = fullest(full), fullest(none)
    budgets = [most - share / (count - 1) * (most - least) for share in range(count)]
    cuts = [
        autoptd.compile(model, recompute="auto", memory=memory, **keywords).costs.cut for memory in budgets
    ]
    seconds = [cut.makespan for cut in cuts]
    assert seconds == sorted(seconds) and seconds[0] == none.costs.cut.makespan
    assert seconds[-1] < full.costs.cut.makespan
    for cut, memory in zip(cuts, budgets, strict=True):
        assert max(cut.peak_bytes) <= memory


PIPELINES: tuple[dict[str, Any], ...] = (
    {"p": 2, "num_microbatches": 4},
    {"p": 4, "num_microbatches": 8},
    {"p": 2, "v": 2, "num_microbatches": 4},
    {"p": 4, "schedule": "zb_h1", "num_microbatches": 8},
)


@pytest.mark.thorough
@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
def test_ten_budgets_and_whole_layers_in_equal_bytes(pipeline: dict[str, Any]) -> None:
    """From the least to the most that a rank can take at its fullest moment; beside layers that are computed again in full."""
    model = gpt(layers=8, width=64)

    def cut(recompute: Any, **asked: Any) -> Any:
        asked = {"memory": 1e15, "example_inputs": batch(), **pipeline, **asked}
        return autoptd.compile(model, recompute=recompute, **asked).costs.cut

    least, most = (max(cut("auto", memory_price=price).peak_bytes) for price in (1e-6, None))
    budgets = [least + share / 9 * (most - least) for share in range(10)]
    cuts = [cut("auto", memory=memory) for memory in budgets]
    for found, memory in zip(cuts, budgets, strict=True):
        assert max(found.peak_bytes) <= memory
    seconds = [found.makespan for found in cuts]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]
    for asked in ("full", "full:1/2", "full:1/4"):
        whole = cut(asked)
        by_value = cut("auto", memory=max(whole.peak_bytes))
        assert max(by_value.peak_bytes) <= max(whole.peak_bytes)
        # Bytes between operators are put aside as the fullest plan had them that was tried: a few layers' worth of a budget
        # that is all but the least, and 0.06% of a step in one of these.
        assert by_value.makespan <= 1.001 * whole.makespan


@pytest.mark.parametrize(
    ("keep", "asked", "words"),
    [
        ([{"rank": 0, "price": 0.0, "more": 0.0, "share": 0.0}], "auto", "1 pipeline ranks, there are 2"),
        ([{"rank": 0, "price": 0.0}], "auto", "for pipeline rank 0"),
        ([{"rank": 1, "price": 0.0, "more": 0.0, "share": 0.0}], "auto", "for pipeline rank 0"),
        ([{"rank": 0, "price": 0.0, "more": -1.0, "share": 0.0}], "auto", "for pipeline rank 0"),
        ([{"rank": k, "price": 0.0, "more": 0.0, "share": 0.0} for k in range(2)], "full", "goes with"),
    ],
)
def test_bad_pins(keep: list[dict[str, Any]], asked: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        autoptd.compile(gpt(), p=2, recompute=asked, plan={"keep": keep}, example_inputs=batch())


class Turned(nn.Module):
    """Layers that compute with complex numbers, made of pairs of real ones, read as these, and conjugated."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        angles = torch.outer(torch.arange(ids.shape[1]), 10.0 ** -torch.arange(WIDTH // 2))
        turns = torch.polar(torch.ones_like(angles), angles)
        for layer in self.layers:
            pairs = torch.view_as_complex(layer(x).unflatten(-1, (-1, 2)))
            turned = pairs * turns
            x = x + torch.view_as_real(turned * pairs.conj() + turned.conj().sin()).flatten(-2).tanh()
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@pytest.mark.thorough
@pytest.mark.parametrize("asked", [{"recompute": ["layers.*"]}, {"recompute": "auto", "memory_price": 1e-6}])
def test_complex_numbers(asked: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Turned()
    price = {name: value for name, value in asked.items() if name != "recompute"}
    kept = trained(model, p=2, num_microbatches=2, **price)
    assert differing(trained(model, p=2, num_microbatches=2, **asked), kept) == []
    autoptd.verify(model, p=2, num_microbatches=2, example_inputs=batch(), **asked)


class Parallel(nn.Module):
    """One layer, whose attention and MLP read the same value."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 8)
        self.layers = nn.ModuleList([ParallelBlock()])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 61, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.norm(self.layers[0](2.0 * self.embed(ids)))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class ParallelBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out, self.up, self.down = (nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.out(y.transpose(1, 2).flatten(-2))
        return x + 0.7 * (y + self.down(nn.functional.gelu(self.up(x))))


@pytest.mark.thorough
def test_a_layer_that_begins_with_what_two_stages_compute() -> None:
    """The part that one of them has is a method of that one."""
    torch.manual_seed(0)
    asked: dict[str, Any] = {"t": 2, "p": 2, "v": 2, "num_microbatches": 4, "schedule": "interleaved"}
    asked["plan"] = {"cut": ["layers.0:scaled_dot_product_attention[0]", "layers.0", "norm"]}
    asked["machine"] = autoptd.ir.machine.Machine(latency=1e-9)
    model = Parallel()
    program = autoptd.compile(model, recompute="full", example_inputs=batch(), **asked)
    assert "_ = self.again(" not in "".join(program.sources.values())
    assert (0, 1) in stages_of_operators(program).values()
    assert differing(trained(model, recompute="full", **asked), trained(model, **asked)) == []


def stages_of_operators(program: autoptd.Program) -> dict[str, tuple[int, ...]]:
    return {
        node.name: note(node).stages for node in program.graphs["CUT"].nodes if node.op == "call_function"
    }


@pytest.mark.thorough
def test_equal_layers_have_a_recipe_each() -> None:
    """Three layers that keep less and one that keeps more, twice: one recipe of four layers would hold what all four make."""
    keep = [{"rank": rank, "price": 0.0, "more": 1e-6, "share": 0.75} for rank in range(2)]
    asked: dict[str, Any] = {"p": 2, "num_microbatches": 2, "plan": {"cut": [4, 4], "keep": keep}}
    program = autoptd.compile(gpt(layers=8), recompute="auto", example_inputs=batch(), **asked)
    recipes = [line for text in program.sources.values() for line in re.findall(r"def \w+_again\(.*", text)]
    assert recipes and not [line for line in recipes if "w1" in line]
    found = trained(gpt(layers=8, dropout=0.2), recompute="auto", **asked)
    asked["plan"] = {"cut": [4, 4]}
    assert differing(found, trained(gpt(layers=8, dropout=0.2), **asked)) == []


@pytest.mark.parametrize("layers", [2, 3])
def test_layers_that_share_a_kept_input(layers: int) -> None:
    found = trained(gpt(dropout=0.2), recompute="full", recompute_num_layers=layers, **SETTINGS[0])
    assert differing(found, kept_whole(0, 0.2)) == []


def test_a_layer_that_does_not_repeat() -> None:
    """It becomes a method of its own."""
    model = gpt(layers=1, dropout=0.2)
    found = trained(model, t=2, num_microbatches=2, recompute="full")
    assert differing(found, trained(model, t=2, num_microbatches=2)) == []
    program = autoptd.compile(model, t=2, recompute="full", example_inputs=batch())
    assert "def h_0_again(self, x" in program.sources["stage_0.py"]


BF16: tuple[dict[str, Any], ...] = ({}, {"p": 2, "schedule": "zb_h1", "plan": {"cut": [2, 2]}})


@cache
def kept_in_16_bits(number: int, price: float | None) -> Found:
    return trained(
        gpt(dropout=0.2).to(torch.bfloat16), num_microbatches=4, memory_price=price, **BF16[number]
    )


BF16_MODES = ("auto", "full", "full:1/2", "selective")


@pytest.mark.thorough
@pytest.mark.parametrize(("number", "mode"), [*product(range(len(BF16)), BF16_MODES)])
def test_the_same_bits_in_16_bits(number: int, mode: str) -> None:
    """A model of bfloat16, with dropout; "auto" at a price that every value which can be made again is too dear for."""
    price = 1e-6 if mode == "auto" else None
    asked = {"recompute": mode, "memory_price": price, "num_microbatches": 4, **BF16[number]}
    program = autoptd.compile(gpt(dropout=0.2).to(torch.bfloat16), example_inputs=batch(), **asked)
    assert min(program.costs.cut.again_seconds) > 0
    found = trained(gpt(dropout=0.2).to(torch.bfloat16), **asked)
    assert found["transformer.h.0.mlp.c_fc.weight"].dtype == torch.bfloat16
    assert differing(found, kept_in_16_bits(number, price)) == []


@pytest.mark.one_in(96)
@pytest.mark.parametrize("mode", [*MODES, None])
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"fuse": False},
        {"t": 2},
        {"t": 2, "sequence_parallel": True},
        {"p": 2},
        {"p": 2, "schedule": "zb_h1"},
    ],
    ids=str,
)
def test_kept_bytes_are_those_that_were_told(asked: dict[str, Any], mode: Any) -> None:
    call = batch(rows=4, length=64)
    model = gpt(layers=3, dropout=0.2, width=64, length=64)
    pm = autoptd.parallelize(
        model, num_microbatches=1, backend="local", recompute=mode, example_inputs=call, **asked
    )
    told = pm.program.costs.cut.saved_bytes
    found = kept_by_stage(pm, call)
    pm.close()
    assert found == {stage: told[stage] for stage in found} and min(found.values()) > 0


def test_what_is_computed_again_is_what_backward_needs() -> None:
    """All of a layer are 24 b s h^2 + 4 b s^2 h (Korthikanti et al. 2022, section 5); the last product is not needed."""
    b, s, h, layers = 4, 64, 64, 3
    call = batch(rows=b, length=s)
    for tokens, collectives in (
        (False, {"all-reduce": layers}),
        (True, {"all-gather": 2, "reduce-scatter": 1}),
    ):
        model = gpt(layers=layers, width=h, length=s)
        asked = {"t": 2, "num_microbatches": 1, "recompute": "full", "sequence_parallel": tokens}
        # With a latency, values of this size would stay whole.
        machine = autoptd.ir.machine.Machine(latency=1e-9)
        pm = autoptd.parallelize(model, backend="local", machine=machine, example_inputs=call, **asked)
        with pm.record() as record:
            pm.step(*call)
        calls = Counter(record.of(0))
        assert calls == expected_calls(pm.program, 0)
        again_calls = Counter(call.kind for call in calls.elements() if call.phase == "recompute")
        times = 1 if not tokens else layers
        assert again_calls == {kind: times * count for kind, count in collectives.items()}
        flops = Counter[str]()
        for work in record.flops:
            if work.rank == 0:
                flops[work.phase] += work.flops
        pm.close()
        assert flops["recompute"] * 2 == layers * (16 * b * s * h * h + 4 * b * s * s * h)


def test_evaluation_keeps_nothing() -> None:
    call = batch()
    pm = autoptd.parallelize(gpt(2, dropout=0.2), p=2, recompute="full", backend="local", example_inputs=call)
    losses = [pm.eval_step(*call)]
    pm.step(*call)
    losses.append(pm.eval_step(*call))
    assert torch.equal(*losses)
    pm.close()


def test_what_was_dropped_is_let_go_with_its_last_reader() -> None:
    """Nothing of a step is left when it is over, also where a stage is not run again."""
    call = batch()
    pm = autoptd.parallelize(gpt(dropout=0.2), recompute="full", backend="local", example_inputs=call)
    alive: list[Any] = []
    make = again.Dropped.fill
    refs: list[again.StorageWeakRef] = []

    def fill(self: again.Dropped, x: Tensor) -> None:
        refs.append(again.StorageWeakRef(x.untyped_storage()))
        alive.append(sum(not ref.expired() for ref in refs))
        make(self, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(again.Dropped, "fill", fill)
        pm.step(*call)
    pm.close()
    of_layer = len(refs) // (4 * pm.program.num_microbatches)
    assert max(alive) <= 2 * of_layer and all(ref.expired() for ref in refs)


# Faults, each of which must show.


def current_masks(patch: pytest.MonkeyPatch) -> None:
    """The recipe draws the masks of the microbatch that ran last."""
    patch.setattr(Stage, "_repeat", lambda self, recipe, args, drawing: torch.no_grad()(recipe)(*args))


def other_order(patch: pytest.MonkeyPatch) -> None:
    """Two dropped values are exchanged."""
    repeat = Stage._repeat

    def swapped(self: Stage, recipe: Callable[..., Any], args: Any, drawing: Any) -> Any:
        values = list(repeat(self, recipe, args, drawing))
        shapes = [x.shape for x in values]
        i, j = next((i, j) for i in range(len(values)) for j in range(i) if shapes[i] == shapes[j])
        values[i], values[j] = values[j], values[i]
        return tuple(values)

    patch.setattr(Stage, "_repeat", swapped)


def by_address(patch: pytest.MonkeyPatch) -> None:
    """Storages are known by their addresses, which are given out again."""
    patch.setattr(again, "StorageWeakRef", lambda storage: storage.data_ptr())


def last_inputs(patch: pytest.MonkeyPatch) -> None:
    """A recipe reads what the microbatch after its own had."""
    last: dict[str, list[Any]] = {}
    make = again.Call.__init__
    run = again.Call.run

    def noted(self: again.Call, *args: Any) -> None:
        make(self, *args)
        last[self.name] = list(self._args or ())

    def wrong(self: again.Call) -> None:
        self._args = last[self.name]
        run(self)

    patch.setattr(again.Call, "__init__", noted)
    patch.setattr(again.Call, "run", wrong)


@pytest.mark.thorough
@pytest.mark.parametrize("plant", [current_masks, other_order, by_address, last_inputs])
def test_faults_show(plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    asked: dict[str, Any] = {"p": 2, "num_microbatches": 4}
    right = trained(gpt(dropout=0.2), **asked)
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        try:
            wrong = trained(gpt(dropout=0.2), recompute="full", **asked)
        except autoptd.RuntimeFault:
            return
    assert differing(right, wrong)


@pytest.mark.thorough
def test_a_weight_gradient_of_another_microbatch_shows() -> None:
    """Of zero-bubble schedules: a GEMM input that B made again is held until its W."""
    asked: dict[str, Any] = {"p": 2, "num_microbatches": 4, "schedule": "zb_h1"}
    right = trained(gpt(), recompute="full", **asked)
    with pytest.MonkeyPatch.context() as patch:
        before: dict[Tensor, Tensor] = {}
        exchanged: list[Tensor] = []
        take = Deferred.take

        def older(self: Deferred) -> list[Any]:
            """Every W but a weight's first one reads the input of the microbatch before."""
            gemms: list[Any] = []
            for gemm in take(self):
                last = before.get(gemm.weight, gemm.input)
                before[gemm.weight] = gemm.input
                exchanged.extend([] if last is gemm.input else [last])
                gemms.append(gemm._replace(input=last))
            return gemms

        patch.setattr(Deferred, "take", older)
        wrong = trained(gpt(), recompute="full", **asked)
    assert exchanged
    # The losses and the other gradients of the first step are right.
    assert "loss 0" not in (found := differing(right, wrong))
    assert "transformer.h.0.mlp.c_proj.weight gradient 0" in found


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"recompute": "some"}, "no such choice"),
        ({"recompute": "full:3/2"}, "no such choice"),
        ({"recompute": True}, "does not select anything"),
        ({"recompute": []}, "does not select anything"),
        ({"recompute": "full", "fuse": "inductor"}, "torch's compiler"),
        ({"recompute": "selective", "recompute_num_layers": 2}, "recompute='full' only"),
    ],
)
def test_bad_requests(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        autoptd.compile(gpt(), example_inputs=batch(), **asked)


class Biased(nn.Module):
    """A layer of attention with a bias that is trained, as T5 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        heads = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return x + self.o(F.scaled_dot_product_attention(*heads, attn_mask=bias).transpose(1, 2).flatten(2))


class BiasedLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.bias, self.head = nn.Embedding(16, 8), nn.Embedding(6, 2), nn.Linear(8, 16)
        self.layers = nn.ModuleList(Biased() for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, places = self.embed(ids), torch.arange(6)
        bias = self.bias((places[:, None] - places).abs()).permute(2, 0, 1)[None]
        for layer in self.layers:
            x = layer(x, bias.contiguous())
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def test_attention_is_computed_again_by_the_kernel_of_forward() -> None:
    """Torch has another one for masks that ask for no gradient, whose last bits differ."""
    ids = torch.arange(24).view(4, 6) * 7 % 16
    found = []
    for recompute in (False, "full"):
        pm = autoptd.parallelize(
            BiasedLayers().double(),
            d=2,
            recompute=recompute,
            backend="local",
            example_inputs=(ids, ids.flip(1)),
        )
        pm.step(ids, ids.flip(1))
        found.append(pm.gradients())
        pm.close()
    assert [name for name, x in found[0].items() if not torch.equal(x, found[1][name])] == []
