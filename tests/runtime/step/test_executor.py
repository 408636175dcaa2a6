"""The executor on programs written by hand, ranks as threads, against the plain model in float64."""

from __future__ import annotations

import dataclasses
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from autoptd.errors import InternalError, RuntimeFault
from autoptd.ir.actions import Kind
from autoptd.program.program import Program
from autoptd.runtime.params.full_values import gather_gradients
from autoptd.runtime.params.namespace import Withheld
from autoptd.runtime.step.launch import LocalRanks, Rank, communicators_of, make_rank
from autoptd.runtime.step.microbatches import cut
from autoptd.runtime.step.stage import load_stage, make_namespace
from autoptd.runtime.world.threads import ThreadWorld, run_ranks
from autoptd.runtime.world.world import World
from tests.runtime.tied_model import Case, TiedModel, make_batch, make_model, make_program

CASES = [
    Case(),
    Case(t=2),
    Case(t=4),
    Case(d=2),
    Case(p=2),
    Case(p=2, m=4, schedule="gpipe"),
    Case(p=4, m=4),
    Case(p=3, m=2, layers=3),
    Case(p=2, v=2, m=4, schedule="interleaved"),
    Case(t=2, p=2, d=2, v=2, m=2, schedule="interleaved"),
    Case(t=2, p=2, m=4, p2p="scatter_gather"),
    Case(t=4, p=2, v=2, m=2, schedule="interleaved", p2p="scatter_gather"),
]


@contextmanager
def running(program: Program, model: TiedModel, timeout: float = 20.0) -> Iterator[LocalRanks]:
    ranks = LocalRanks(program, model.state_dict(), timeout=timeout)
    try:
        yield ranks
    finally:
        ranks.close()


def step(
    ranks: LocalRanks, program: Program, batch: tuple[Tensor, Tensor], nan: str = "raise"
) -> list[Tensor]:
    """One step on every rank; the losses that the ranks return."""
    losses: dict[int, Tensor] = {}

    def body(rank: Rank) -> None:
        one = cut(program, batch, rank.executor.inputs, rank.world.coordinate.dp, rank.world.device)
        losses[rank.world.rank] = rank.executor.step(one, nan)

    ranks.run("step", body)
    return [losses[rank] for rank in sorted(losses)]


def evaluate(ranks: LocalRanks, program: Program, batch: tuple[Tensor, Tensor]) -> Tensor:
    def body(rank: Rank) -> Tensor:
        one = cut(program, batch, rank.executor.inputs, rank.world.coordinate.dp, rank.world.device)
        return rank.executor.evaluate(one)

    return ranks.run("evaluate", body)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_gradients_equal_the_models(case: Case) -> None:
    model = make_model(case.layers)
    program = make_program(case, model)
    with running(program, model) as ranks:
        for seed in (1, 2):  # two steps: gradients accumulate
            batch = make_batch(case.rows, seed)
            expected = model(*batch)
            expected.backward()
            losses = step(ranks, program, batch)
            assert len(losses) == program.mesh.size
            for loss in losses:
                assert torch.equal(loss, losses[0]) and loss.dtype == torch.float64 and not loss.requires_grad
            assert abs(losses[0] - expected.detach()) < 1e-14
            gradients = ranks.run("gradients", lambda rank: gather_gradients(rank.params))
            assert set(gradients) == {*dict(model.named_parameters()), "head.weight"} - {"offset"}
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-12, atol=1e-14)


def test_all_copies_of_a_tied_weight_get_one_gradient() -> None:
    model = make_model()
    program = make_program(Case(t=2, p=2), model)
    with running(program, model) as ranks:
        step(ranks, program, make_batch())
        first, last = (ranks.here[rank].params.local["wte.weight"].grad for rank in (1, 3))
        assert first is not None and last is not None and torch.equal(first, last) and first.abs().sum() > 0


@pytest.mark.parametrize("case", [Case(), Case(t=2, p=2, d=2, v=2, schedule="interleaved")], ids=str)
def test_evaluation_gives_the_loss_and_no_gradients(case: Case) -> None:
    model = make_model()
    program = make_program(case, model)
    with running(program, model) as ranks:
        loss = evaluate(ranks, program, make_batch())
        assert abs(loss - model(*make_batch()).detach()) < 1e-14 and not loss.requires_grad
        for rank in ranks.here:
            assert all(x.grad is None for x in [*rank.params.local.values(), *rank.params.leaves.values()])
            assert not rank.executor._saved and not rank.executor._messages._arriving


def test_sent_outputs_are_let_go() -> None:
    """An output that autograd does not need must not outlive its SEND; its gradient edge is enough."""
    model = make_model()
    program = make_program(Case(p=2, m=2, schedule="gpipe"), model)
    outputs: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    with running(program, model) as ranks:
        executor = ranks.here[0].executor
        forward = executor.stages[0].forward

        def watched(**values: Tensor) -> tuple[Tensor, ...]:
            alive.append(sum(one() is not None for one in outputs))
            results = forward(**values)
            outputs.append(weakref.ref(results[0]))
            return results

        executor.stages[0].forward = watched  # type: ignore[method-assign]
        step(ranks, program, make_batch())
    assert alive == [0, 0] and len(outputs) == 2


@pytest.mark.parametrize("kind", [Kind.RECV_F, Kind.RECV_B, Kind.SEND_F], ids=str)
def test_a_missing_transfer_is_found(kind: Kind) -> None:
    model = make_model()
    program = make_program(Case(p=2), model)
    orders = [[one for one in order if one.kind is not kind] for order in program.orders]
    broken = dataclasses.replace(program, orders=orders)
    # Nobody learns of a message that is never sent but by the time.
    words, timeout = ("waited", 0.5) if kind is Kind.SEND_F else ("not posted", 60.0)
    with (
        running(broken, model, timeout=timeout) as ranks,
        pytest.raises((InternalError, RuntimeFault), match=words),
    ):
        step(ranks, broken, make_batch())


def test_an_exception_in_a_stage_names_rank_and_action_and_leaves_a_working_model() -> None:
    model = make_model()
    program = make_program(Case(p=2, d=2), model)
    with running(program, model) as ranks:
        executor = ranks.here[3].executor
        forward, calls = executor.stages[1].forward, []

        def failing(**values: Tensor) -> tuple[Tensor, ...]:
            calls.append(1)
            if len(calls) == 2:
                raise ZeroDivisionError("one over zero")
            return forward(**values)

        executor.stages[1].forward = failing  # type: ignore[method-assign]
        with pytest.raises(RuntimeFault, match=r"rank 3 at F1\.1: ZeroDivisionError: one over zero"):
            step(ranks, program, make_batch())
        assert all(x.grad is None for rank in ranks.here for x in rank.params.local.values())
        loss = model(*make_batch())
        loss.backward()
        assert abs(step(ranks, program, make_batch())[0] - loss.detach()) < 1e-14
        ours = ranks.run("gradients", lambda rank: gather_gradients(rank.params))["wte.weight"]
        torch.testing.assert_close(ours, model.wte.weight.grad, rtol=1e-12, atol=1e-14)


def test_nan_is_raised_together_and_adds_nothing() -> None:
    model = make_model()
    program = make_program(Case(p=2, d=2), model)
    with running(program, model) as ranks:
        step(ranks, program, make_batch())
        before = ranks.run("gradients", lambda rank: gather_gradients(rank.params))
        weight = ranks.here[3].params.local["wte.weight"]  # replica 1, last stage
        good = weight.detach().clone()
        with torch.no_grad():
            weight.fill_(float("nan"))
        with pytest.raises(RuntimeFault, match=r"step 2: the loss is NaN on rank 3 "):
            step(ranks, program, make_batch())
        after = ranks.run("gradients", lambda rank: gather_gradients(rank.params))
        assert all(torch.equal(before[name], after[name]) for name in before)
        losses = step(ranks, program, make_batch(), nan="ignore")
        assert len(losses) == 4 and all(loss.isnan() for loss in losses)
        with torch.no_grad():
            weight.copy_(good)
        assert step(ranks, program, make_batch())[0].isfinite()


def test_a_device_that_is_behind_tells_of_a_nan_one_step_later() -> None:
    """As on CUDA: the step passes, the next one raises on all ranks."""
    model = make_model()
    program = make_program(Case(p=2, d=2), model)
    with running(program, model) as ranks:
        for rank in ranks.here:
            rank.executor._nan.is_late = True
        weight = ranks.here[3].params.local["wte.weight"]  # replica 1, last stage
        good = weight.detach().clone()
        with torch.no_grad():
            weight.fill_(float("nan"))
        assert all(loss.isnan() for loss in step(ranks, program, make_batch()))
        before = ranks.run("gradients", lambda rank: gather_gradients(rank.params))
        with torch.no_grad():
            weight.copy_(good)
        with pytest.raises(RuntimeFault, match=r"^step 2: the loss of step 1 was NaN on rank 3 .* later"):
            step(ranks, program, make_batch())
        after = ranks.run("gradients", lambda rank: gather_gradients(rank.params))
        assert all(
            torch.allclose(before[name], after[name], rtol=0, atol=0, equal_nan=True) for name in before
        )
        assert all(step(ranks, program, make_batch())[0].isfinite() for _ in range(2))


def test_ranks_with_another_program_are_named() -> None:
    model = make_model()
    program = make_program(Case(d=3, rows=6, m=1), model)
    other = dataclasses.replace(program, plan={}, weighted=False)

    def body(world: World) -> None:
        make_rank(other if world.rank == 1 else program, world, model.state_dict())

    with pytest.raises(RuntimeFault, match="rank 1 compiled a different program than rank 0"):
        run_ranks(ThreadWorld(program.mesh, communicators_of(program), timeout=20.0), body)


def test_communicators_name_links_both_ways_and_owner_sets() -> None:
    program = make_program(Case(p=3, m=2, layers=3), make_model(3))
    communicators = communicators_of(program)
    assert communicators.owners == ((0, 2),)
    assert communicators.links == ((0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1))
    assert communicators_of(make_program(Case(t=2), make_model())).links == ()


def test_namespace_reads_like_the_model() -> None:
    root: Any = make_namespace(
        {"h.0.ln.weight": torch.ones(1), "h.11.ln.weight": torch.zeros(1), "2.bias": torch.full((1,), 5.0)}
    )
    assert (
        root.h[11].ln.weight.item() == 0 and root["h"][0].ln.weight.item() == 1 and root[2].bias.item() == 5
    )


def test_what_is_withheld_is_back_when_one_of_it_is_read() -> None:
    root: Any = make_namespace(
        {"h.0.weight": torch.zeros(1), "h.0.at": torch.ones(1), "head.bias": torch.ones(2)}
    )
    withheld, waits = Withheld(), list[str]()
    withheld.add(root, "h.0.weight")
    withheld.add(root, "h.0.at")
    for read in (lambda: root.h[0].weight, lambda: root.h[0]["at"], lambda: root.h[0]["weight"]):
        waits.clear()
        # Two updates, and nothing was read in between.
        withheld.withhold(partial(waits.append, "older"))
        withheld.withhold(partial(waits.append, "newer"))
        assert root.head.bias.numel() == 2 and not waits
        assert read().numel() == 1 and waits == ["newer"]
        assert root.h[0].weight.item() == 0 and root.h[0]["at"].item() == 1 and len(waits) == 1
    with pytest.raises(AttributeError, match=r"h\.0 has no 'bias'"):
        _ = root.h[0].bias
    # A stage of another program, which is loaded while the update is under way.
    withheld.withhold(partial(waits.append, "newest"))
    other: Any = make_namespace({"h.0.weight": torch.zeros(1)})
    withheld.add(other, "h.0.weight")
    assert other.h[0].weight.numel() == root.h[0].weight.numel() == 1 and waits[-1] == "newest"
    withheld.withhold(partial(waits.append, "last"))
    assert other.h[0].weight.numel() == 1 and waits[-1] == "last"


def test_tracebacks_show_emitted_lines() -> None:
    lines = ["from autoptd import runtime as rt", "class Stage7(rt.Stage):", "    def forward(self):"]
    source = "\n".join([*lines, "        return 1 / 0  # here\n"])
    stage = load_stage(source, "<stage_7.py of a test>")
    with pytest.raises(ZeroDivisionError) as caught:
        stage.forward(None)  # type: ignore[arg-type]
    assert "return 1 / 0  # here" in "".join(traceback.format_exception(caught.value))
    with pytest.raises(InternalError, match="one class derived from Stage"):
        load_stage("x = 1\n", "<nothing>")
