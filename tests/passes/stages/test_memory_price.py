"""A bound on memory that the fastest plan does not keep: bytes are made dearer until one does, or it is refused."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch

import autoptd
from autoptd.compiler import memory_search
from autoptd.compiler.memory_search import MAX_POWER, MIN_POWER, find_memory_price
from autoptd.errors import PlanError
from autoptd.passes.stages.held_bytes import TooFull
from autoptd.program.program import Program
from examples.gpt import GPT, GPTConfig
from tests.parity.kept import fullest
from tests.parity.models import batch, gpt


@pytest.mark.parametrize("enough", [MIN_POWER, -1, 0, 7, MAX_POWER - 1, MAX_POWER])
def test_the_lowest_price_that_fits(enough: int) -> None:
    tried: list[float] = []

    def solve(price: float) -> str | TooFull:
        tried.append(price)
        if price < 3.0 * 2**enough:
            return TooFull("memory", "does not fit", "more")
        return f"at {price}"

    assert find_memory_price(solve, 0.0, 3.0) == (f"at {3.0 * 2**enough}", 3.0 * 2**enough)
    assert len(tried) <= 9
    # What fits at first is taken.
    most = 3.0 * 2**MAX_POWER
    assert find_memory_price(solve, most, 3.0) == (f"at {most}", most)


def test_no_price_fits() -> None:
    found = find_memory_price(lambda price: TooFull("memory", f"{price}", "more"), 0.0, 1.0)
    assert isinstance(found, TooFull) and found.fact == "16384.0"


@cache
def compiled(layers: int = 1, **keywords: Any) -> Program:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=512, block_size=256, n_layer=layers, n_head=8, n_embd=256))
        ids = torch.zeros(16, 256, dtype=torch.long)
    return autoptd.compile(model, t=4, num_microbatches=4, example_inputs=(ids, ids.clone()), **keywords)


def held(program: Program) -> float:
    """What the fullest rank holds beside the work of operators."""
    return max(program.costs.cut.rank_bytes)


def kinds(program: Program) -> set[str]:
    """What layers communicate in a forward."""
    return {
        one.forward
        for one in program.collectives
        if ".h." in one.site and one.forward in ("all-reduce", "reduce-scatter")
    }


@pytest.mark.thorough
def test_tokens_are_split_where_nothing_else_fits() -> None:
    machine = autoptd.Machine(latency=6e-6)  # two collectives in the place of one cost something
    free = compiled(sequence_parallel="auto", machine=machine)
    bound = 0.69 * fullest(free)
    assert "reduce-scatter" not in kinds(free) and free.plan["options"]["memory_price"] is None
    program = compiled(sequence_parallel="auto", recompute=False, memory=bound, machine=machine)
    assert fullest(program) <= bound and kinds(program) == {"reduce-scatter"}
    assert program.plan["options"]["memory_price"] > 0
    pinned = {"sequence_parallel": False, "recompute": False, "memory": bound}
    for request, left in ((pinned, ("sequence_parallel=", "recompute=")), ({"memory": bound / 3}, ())):
        with pytest.raises(PlanError, match=r"memory: with the .* the fullest rank takes") as caught:
            compiled(machine=machine, **request)
        named = {
            name for name in ("sequence_parallel=", "recompute=", "zero=") if name in caught.value.remedy
        }
        assert named == set(left)


def test_dearer_bytes_are_never_more_bytes() -> None:
    prices = [2.0**k / 200e9 for k in (-4, 0, 4, 8)]
    sizes = [held(compiled(sequence_parallel="auto", memory_price=price)) for price in prices]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < sizes[0]


def test_its_own_plan_gives_the_same_program_and_what_the_model_computes() -> None:
    request: dict[str, Any] = {"t": 2, "p": 2, "sequence_parallel": "auto", "example_inputs": batch()}
    bound = 0.98 * fullest(autoptd.compile(gpt(2).double(), **request))
    request["recompute"] = False
    program = autoptd.compile(gpt(2).double(), memory=bound, **request)
    assert program.plan["options"]["memory_price"] > 0
    again = autoptd.compile(gpt(2).double(), plan=program.plan, example_inputs=batch())
    assert again.fingerprint() == program.fingerprint()
    autoptd.verify(gpt(2).double(), plan=program.plan, steps=2, example_inputs=batch())


@pytest.mark.thorough
def test_a_bound_on_memory_opens_what_was_not_asked_for() -> None:
    """First the replicas share the optimizer's state, then ranks compute again; nothing, where all of it fits."""
    request: dict[str, Any] = {"p": 2, "d": 2, "num_microbatches": 4, "example_inputs": batch()}
    free = autoptd.compile(gpt(4), **request)
    state = autoptd.compile(gpt(4), zero=1, **request)
    assert free.plan["options"]["zero"] == 0 and "relief" not in free.plan
    least = autoptd.compile(gpt(4), zero=1, recompute="auto", memory_price=1e-6, **request)
    chosen = []
    for memory in (fullest(free), fullest(state), (fullest(state) + fullest(least)) / 2):
        program = autoptd.compile(gpt(4), memory=memory, **request)
        options, relief = program.plan["options"], program.plan["relief"]
        assert (
            held(program) == relief["fullest_rank_bytes"] < fullest(program) == relief["peak_bytes"] <= memory
        )
        assert options["recompute"] == options["sequence_parallel"] == "auto"
        chosen.append((options["zero"], relief["again_seconds"][0] > 0))
        again = autoptd.compile(gpt(4), plan=program.plan, example_inputs=batch())
        assert again.fingerprint() == program.fingerprint() and again.plan == program.plan
        autoptd.verify(gpt(4).double(), memory=2 * memory, steps=2, **request)
    assert chosen == [(0, False), (1, False), (1, True)]
    kept = autoptd.compile(gpt(4), memory=0.99 * fullest(free), zero=0, sequence_parallel=False, **request)
    assert kept.plan["options"]["zero"] == 0 and kept.plan["relief"]["again_seconds"][0] > 0
    # A choice that goes with another one is made with that one.
    with pytest.raises(PlanError, match="zero=1, or leave dp_shard out"):
        autoptd.compile(gpt(4), memory=fullest(free), dp_shard=2, **request)


OPEN: dict[str, Any] = {"t": 2, "p": 2, "num_microbatches": 4}


@pytest.mark.thorough
@pytest.mark.parametrize("shares", [(0.0, 0.4, 1.0), pytest.param(range(0, 11), marks=pytest.mark.thorough)])
def test_more_memory_takes_no_longer_where_tokens_may_be_split(shares: Sequence[float]) -> None:
    """Splitting them takes less memory and less time here: a bound with room for the slower layout must not choose it."""
    model, request = gpt(layers=6, width=64), {**OPEN, "example_inputs": batch(rows=12), "recompute": "auto"}
    free = fullest(autoptd.compile(model, sequence_parallel=False, **request))
    least = fullest(autoptd.compile(model, sequence_parallel=True, memory_price=1e-3, **request))
    seconds = []
    for share in shares:
        memory = least + share / max(shares) * (free - least)
        cut = autoptd.compile(model, memory=memory, **request).costs.cut
        assert max(cut.peak_bytes) <= memory
        seconds.append(cut.makespan)
    assert seconds == sorted(seconds, reverse=True)
    plain = autoptd.compile(model, sequence_parallel=False, memory=free, **request)
    assert seconds[-1] < plain.costs.cut.makespan


@pytest.mark.thorough
def test_a_plan_of_the_fastest_layout_gives_the_same_program() -> None:
    model, request = gpt(layers=6, width=64), {**OPEN, "example_inputs": batch(rows=12)}
    memory = 0.9 * fullest(autoptd.compile(model, **request))
    program = autoptd.compile(model, memory=memory, **request)
    again = autoptd.compile(model, plan=program.plan, example_inputs=request["example_inputs"])
    assert again.fingerprint() == program.fingerprint() and again.plan == program.plan


@pytest.mark.thorough
def test_what_the_least_plan_takes_is_enough() -> None:
    """The first plan holds more, and so does what is put aside for it: the bound must not be refused for that."""
    request: dict[str, Any] = {"p": 2, "v": 2, "schedule": "interleaved", "num_microbatches": 4}
    request |= {"example_inputs": batch(rows=12), "recompute": "auto"}
    model = gpt(layers=6, width=64)
    memory = fullest(autoptd.compile(model, memory_price=1e-3, **request))
    assert fullest(autoptd.compile(model, memory=memory, **request)) <= memory
    with pytest.raises(PlanError, match="the fullest rank takes"):
        autoptd.compile(model, memory=0.97 * memory, **request)


@pytest.mark.thorough
def test_layouts_are_searched_for_once_however_often_a_step_is_rehearsed() -> None:
    """What is put aside for the work of operators changes with every rehearsal; a layout's price does not."""
    asked: dict[str, Any] = {
        "layers": 2,
        "sequence_parallel": "auto",
        "memory": 0.9 * fullest(compiled(layers=2)),
    }
    searched, rehearsed = memory_search._Search._find_layout_prices, memory_search.peak_memory
    with (
        mock.patch.object(
            memory_search._Search, "_find_layout_prices", autospec=True, side_effect=searched
        ) as once,
        mock.patch.object(memory_search, "peak_memory", side_effect=rehearsed) as often,
    ):
        program = compiled.__wrapped__(**asked)
    assert once.call_count == 1 < often.call_count
    # As if they were searched for each time.
    with mock.patch.object(memory_search._Search, "_layout_prices", searched):
        assert compiled.__wrapped__(**asked).sources == program.sources
