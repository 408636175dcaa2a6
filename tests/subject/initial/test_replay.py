"""Replays of tapes that are written by hand: memory, layouts, and what a replay must not feel or change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autoptd.subject.initial.tape import Constant, Place, Replay, Step, Tape, key_of, state_of


def by_hand(*functions: Callable[[Tensor], Tensor]) -> tuple[Tape, list[Place]]:
    """A tape of a constant and of functions, each of the result of the one before."""
    tape, places = Tape(seed=0, order=False), []
    value: Any = Constant(torch.arange(6.0).view(2, 3))
    for number, function in enumerate(functions):
        tape.sizes.append(24)
        tape.writers.append([])
        places.append(Place(number, torch.float32, (2, 3), (3, 1), 0))
        reads = frozenset({number - 1}) if number else frozenset[int]()
        made = frozenset({number})
        tape.add(Step(function, (value,), {}, (places[-1],), reads, made, made, torch.float32))
        value = places[-1]
    return tape, places


def test_a_result_has_memory_of_its_own_in_the_layout_that_was_recorded() -> None:
    tape, places = by_hand(
        lambda x: x, lambda x: x.mul_(2), lambda x: x, lambda x: (x * 1).t().contiguous().t()
    )
    wanted = torch.arange(6.0).view(2, 3)
    for _ in range(2):
        first, second, third, fourth = Replay(tape, {}).make(places)
        assert torch.equal(first, wanted * 2) and torch.equal(fourth, wanted * 2) and fourth.is_contiguous()
        assert len({x.data_ptr() for x in (first, second, third, fourth)}) == 4


def test_a_replay_runs_on_one_thread_and_puts_back_what_was() -> None:
    threads, before = torch.get_num_threads(), torch.get_rng_state()
    seen: list[Any] = []

    def look(x: Tensor) -> Tensor:
        seen.extend([torch.get_num_threads(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")])
        return x + torch.rand(2, 3)

    tape, places = by_hand(look)
    torch.set_num_threads(3)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            Replay(tape, {}).make(places)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    assert seen == [1, False, False] and torch.equal(torch.get_rng_state(), before)


def test_draws_by_name_begin_in_states_of_their_own() -> None:
    """No two are alike, of neighbours neither, and their first numbers are those of uniform noise."""
    generator, first = torch.Generator(), []
    for seed in (0, 1, 2**32, 2**63):
        for number in range(300):
            generator.set_state(state_of(key_of(seed, f"h.{number}.weight", number % 2)))
            first.append(torch.rand(2, generator=generator, dtype=torch.float64))
    one, two = torch.stack(first).T
    assert len(set(one.tolist())) == len(first)
    for x in (one, two):
        assert abs(x.mean() - 0.5) < 0.04 and abs(x.std() - 12**-0.5) < 0.02
    for x, y in ((one, two), (one[:-1], one[1:])):
        assert abs(torch.corrcoef(torch.stack([x, y]))[0, 1]) < 0.15
    # Nothing but the numbers of the twister differs from a generator that was seeded.
    generator.manual_seed(0)
    other = state_of("x")
    changed = (other != generator.get_state()).nonzero().flatten()
    assert len(changed) > 2400 and changed.min() >= 24 and changed.max() < 24 + 8 * 624
