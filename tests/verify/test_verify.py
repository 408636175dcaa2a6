"""What `verify` does besides training in float64: new data, the model's own dtype, a save, an evaluation; its report."""

from __future__ import annotations

import dataclasses
import importlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.model.parallel_model import ParallelModel
from autoptd.program.program import Program
from autoptd.verify.fresh import fresh_calls
from autoptd.wings.cli import main
from tests.parity.models import VOCAB, batch, dropping_gpt, gpt

verify_module = importlib.import_module("autoptd.verify.verify")
EVERY = ("own dtype", "reload", "evaluation")


@pytest.fixture(autouse=True)
def all_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "CHECKS", EVERY)


def tokens(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids, targets = (torch.randint(0, VOCAB, (4, 8), generator=generator) for _ in range(2))
    return ids, targets


def test_report_tells_what_was_done() -> None:
    report = autoptd.verify(gpt(2), t=2, d=2, num_microbatches=2, example_inputs=tokens(0), steps=3)
    kinds = {one.what for one in report.differences}
    assert report.passed and kinds == {"loss", "gradient", "parameter", "evaluation", "own dtype"}
    assert "own dtype" in str(report) and "(tolerance 1e-05)" in str(report)
    assert "saved, and loaded into a new model, before step 1" in str(report)


def test_model_is_as_it_was() -> None:
    """Weights, gradients, buffers and attributes, though it made a step."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm = nn.Embedding(VOCAB, 8), nn.Linear(8, 8)
            self.register_buffer("scale", torch.ones(8))

        def forward(self, ids: Tensor) -> Tensor:
            return self.norm(self.embed(ids) * self.scale).square().mean()

    model = Counting()
    model(tokens(0)[0]).backward()
    state = {name: x.clone() for name, x in model.state_dict().items()}
    gradients = {name: p.grad for name, p in model.named_parameters()}
    tensors, attributes = dict(model.named_parameters()), list(vars(model))
    autoptd.verify(model, example_inputs=(tokens(0)[0],), steps=2)
    assert all(torch.equal(state[name], x) for name, x in model.state_dict().items())
    assert all(p is tensors[name] and p.grad is gradients[name] for name, p in model.named_parameters())
    assert list(vars(model)) == attributes


def test_a_model_that_keeps_what_it_computed() -> None:
    """As for a loss of its own, or to be looked at: a tensor with a history, which cannot be copied."""

    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.up = nn.Embedding(VOCAB, 8), nn.Linear(8, 8)

        def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
            self.last = self.up(self.embed(ids))
            return self.last.square().mean() + 0 * targets.sum()

    model = Keeping()
    assert autoptd.verify(model, t=2, example_inputs=tokens(0), steps=2).passed
    assert not hasattr(model, "last")


def test_batches_are_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    step = ParallelModel.step

    def watched(self: ParallelModel, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(args[0])
        return step(self, *args, **kwargs)

    monkeypatch.setattr(ParallelModel, "step", watched)
    given = [tokens(seed) for seed in range(4)]
    autoptd.verify(gpt(1).double(), example_inputs=tokens(0), batches=iter(given), steps=3)
    assert all(torch.equal(x, ids) for x, (ids, _) in zip(seen, given, strict=False)) and len(seen) == 3


def test_batches_that_do_not_do() -> None:
    with pytest.raises(autoptd.PlanError, match="2 batches given for 3 steps"):
        autoptd.verify(gpt(1), example_inputs=tokens(0), batches=[tokens(0)] * 2, steps=3)
    ids, targets = tokens(0)
    with pytest.raises(autoptd.PlanError, match=r"\[2, 8\] int64, expected \[4, 8\] int64"):
        autoptd.verify(gpt(1), example_inputs=tokens(0), batches=[tokens(0), (ids[:2], targets[:2])], steps=2)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)

    def forward(self, ids: Tensor, labels: Tensor, keep: Tensor, bias: Tensor, floats: Tensor) -> Tensor:
        x = self.embed(ids) * keep[..., None] + bias.exp()[..., None] + floats[..., None]
        return F.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), labels.flatten())


def test_fresh_data_has_the_values_of_the_example() -> None:
    ids, labels = tokens(0)
    labels[1, 2:5] = -100
    keep = (torch.arange(32).view(4, 8) % 3 > 0).long()
    bias = keep.log()
    call = (ids, labels, keep, bias, torch.randn(4, 8))
    program = autoptd.compile(Masked(), d=2, num_microbatches=1, example_inputs=call)
    first, *others = fresh_calls(program, (call, {}), 4)
    assert all(torch.equal(x, y) for x, y in zip(first[0], call, strict=True))
    for step, (other, _) in enumerate(others, 1):
        new_ids, new_labels, new_keep, new_bias, new_floats = other
        for old, new in ((ids, new_ids), (labels, new_labels)):
            assert torch.equal(old.flatten().sort().values, new.flatten().sort().values) and not torch.equal(
                old, new
            )
        assert torch.equal(new_labels == -100, (labels == -100).roll(step, 0))
        assert torch.equal(new_keep, keep.roll(step, 0)) and torch.equal(new_bias, bias.roll(step, 0))
        assert sorted(map(tuple, new_floats.tolist())) == sorted(map(tuple, call[4].tolist()))
    assert not torch.equal(others[0][0][0], others[1][0][0])
    autoptd.verify(Masked(), d=2, example_inputs=call, steps=2)


def test_evaluation_that_is_refused_is_told() -> None:
    class Always(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, 8)

        def forward(self, ids: Tensor) -> Tensor:
            if not self.training:
                raise ValueError("for training only")
            return self.embed(ids).square().mean()

    report = autoptd.verify(Always(), example_inputs=(tokens(0)[0],), steps=1)
    assert report.passed and "not evaluated" in str(report) and "for training only" in str(report)


def test_dropout_is_evaluated_without() -> None:
    report = autoptd.verify(dropping_gpt(1), num_microbatches=2, example_inputs=tokens(0), steps=2)
    assert any(one.what == "evaluation" for one in report.differences)


def lossy(monkeypatch: pytest.MonkeyPatch, edit: Callable[[int, Program], Program]) -> None:
    """Let `verify` run programs that `edit` changed; they are numbered: own dtype, float64."""
    right, count = verify_module.compile_program, iter(range(9))

    def wrong(*args: Any, **kwargs: Any) -> Program:
        return edit(next(count), right(*args, **kwargs))

    monkeypatch.setattr(verify_module, "compile_program", wrong)


@pytest.mark.parametrize(("number", "what"), [(0, "own dtype"), (1, "loss")])
def test_a_wrong_program_is_found(monkeypatch: pytest.MonkeyPatch, number: int, what: str) -> None:
    def edit(i: int, program: Program) -> Program:
        if i != number:
            return program
        sources = {name: text.replace("F.gelu(", "F.silu(") for name, text in program.sources.items()}
        sources = {name: text.replace(", approximate='tanh'", "") for name, text in sources.items()}
        assert sources != program.sources
        return dataclasses.replace(program, sources=sources)

    lossy(monkeypatch, edit)
    with pytest.raises(autoptd.InternalError, match="differs from the model") as raised:
        autoptd.verify(gpt(1), num_microbatches=2, example_inputs=tokens(0), steps=1, fuse=False)
    wrong = [
        line.split()[0] for line in str(raised.value).splitlines() if "largest" in line and "e-0" in line
    ]
    assert what.split()[0] in wrong


def test_a_wrong_evaluation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ParallelModel.eval_step
    monkeypatch.setattr(ParallelModel, "eval_step", lambda self, *args: right(self, *args) * (1 + 1e-6))
    with pytest.raises(autoptd.InternalError, match=r"evaluation  largest difference 1\.0e-06"):
        autoptd.verify(gpt(1), num_microbatches=2, example_inputs=tokens(0), steps=1)


def test_a_lost_optimizer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    make = ParallelModel.optimizer

    def forgetful(self: ParallelModel, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        made = make(self, *args, **kwargs)
        made.load_state_dict = lambda state: None  # type: ignore[method-assign, assignment]
        return made

    monkeypatch.setattr(ParallelModel, "optimizer", forgetful)
    with pytest.raises(autoptd.InternalError, match="differs from the model"):
        autoptd.verify(gpt(1), num_microbatches=2, example_inputs=tokens(0), steps=3)


@pytest.mark.thorough
def test_command_line_tells_all(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [
        part for one in ("n_layer=1", "n_head=2", "n_embd=8", "vocab_size=64") for part in ("--set", one)
    ]
    arguments = ["verify", "examples/gpt.py:make_gpt", *sizes, "--seq", "8", "--batch", "2", "--steps", "2"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "evaluation" in text and "own dtype" in text and "saved, and loaded" in text


def test_batch_alone() -> None:
    """A model in float64 is its own copy's equal at 1e-6, and compiled once."""
    report = autoptd.verify(gpt(1).double(), num_microbatches=2, example_inputs=batch(4), steps=2)
    assert {one.what for one in report.differences} == {"loss", "gradient", "parameter", "evaluation"}


@pytest.mark.one_in(9)
@pytest.mark.parametrize("rate", [0.1, 0.0])
def test_ranks_run_the_attention_that_the_model_runs(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With given masks torch writes attention out, which rounds otherwise than its fused kernels."""
    fused: set[bool] = set()
    attention = F.scaled_dot_product_attention

    def watched(q: Tensor, *args: Any, **keywords: Any) -> Tensor:
        if threading.current_thread().name.startswith("rank") and q.dtype == torch.float32:
            fused.add(torch.backends.cuda.flash_sdp_enabled())
        return attention(q, *args, **keywords)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    model = gpt(1)
    model.transformer.drop.p = rate
    autoptd.verify(model, t=2, example_inputs=tokens(0), steps=1)
    assert fused == {rate == 0}


class Growing(nn.Module):
    """Training makes values larger, until float16 cannot hold them."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)
        self.scale = scale

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
        return 1e-3 * (loss - (self.scale * x).square().square().mean())


def test_a_model_that_overflows_by_itself() -> None:
    """What float16 cannot hold is no difference between model and ranks."""
    torch.manual_seed(0)
    report = autoptd.verify(Growing(5.06), precision="fp16", example_inputs=tokens(0), steps=2)
    compared = [one.step for one in report.differences if one.what == "own dtype"]
    assert report.passed and compared == [0]
    with pytest.raises(autoptd.PlanError, match=r"precision='fp16': the model's own first loss is -inf"):
        autoptd.verify(Growing(30.0), precision="fp16", example_inputs=tokens(0), steps=2)
