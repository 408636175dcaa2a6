"""Proof of the proof: take one thing away from a right program, and `verify` must fail."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autoptd
from autoptd.program import transfers
from autoptd.program.program import Program
from autoptd.program.specs import TransferBuffer
from autoptd.runtime.ops.dropout import Drawing
from autoptd.runtime.params import gradients
from autoptd.runtime.step import messages
from autoptd.runtime.step.executor import Executor
from autoptd.runtime.world.threads import ThreadRank
from autoptd.runtime.world.world import Done, Group
from tests.parity.models import batch, gpt, separate, uneven
from tests.parity.test_dropout import gpt as dropping_gpt
from tests.parity.test_links import COLUMNS, Chain

verify_module = importlib.import_module("autoptd.verify.verify")


def edit_source(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> list[str]:
    """Make `verify` run a program in which the first `old` of its stage files is `new`; returns what was edited."""
    edited: list[str] = []
    right = verify_module.compile_program

    def wrong(*args: object, **kwargs: object) -> Program:
        program = right(*args, **kwargs)
        for name, text in program.sources.items():
            if old in text and not edited:
                edited.append(name)
                sources = {**program.sources, name: text.replace(old, new, 1)}
                return dataclasses.replace(program, sources=sources)
        return program

    monkeypatch.setattr(verify_module, "compile_program", wrong)
    return edited


def check_is_found(
    monkeypatch: pytest.MonkeyPatch, edit: tuple[str, str], model: nn.Module, **asked: Any
) -> None:
    """Check that `verify` finds a program in which `edit` = (old, new) was made."""
    edited = edit_source(monkeypatch, *edit)
    found = ""
    try:
        autoptd.verify(model, **asked, steps=1)
    except autoptd.InternalError as error:
        found = str(error)
    # First: a program that is right because its text is another than was thought proves nothing.
    assert edited, f"no stage has {edit[0]!r}"
    assert "differs" in found


EDITS = {
    "one f, in the backward of a column-split GEMM": (
        '= rt.i_to_r(ln_2, tp, owned=True, site=w.at("mlp.c_fc"))',
        "= ln_2",
    ),
    "one g, behind a row-split GEMM": (
        '= rt.p_to_i(c_proj, tp, owned=True, site=w.at("attn.c_proj"))',
        "= c_proj",
    ),
    "a row bias is added by every rank": ("= rt.i_to_p(w.attn.c_proj.bias, tp)", "= w.attn.c_proj.bias"),
}


@pytest.mark.thorough
@pytest.mark.parametrize(("old", "new"), EDITS.values(), ids=EDITS)
def test_one_conversion_less_is_found(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    edited = edit_source(monkeypatch, old, new)
    with pytest.raises(autoptd.InternalError, match="differs"):
        autoptd.verify(
            gpt(), t=2, d=2, example_inputs=batch(), steps=2
        )  # biases start at zero: one step shows no difference
    assert edited


@pytest.mark.thorough
def test_one_loss_weight_less_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of microbatch means instead of the global mean."""
    ids, targets = batch()
    model, mesh = separate(), {"p": 2, "d": 2, "num_microbatches": 4}
    autoptd.verify(model, **mesh, example_inputs=(ids, uneven(targets)), steps=1)
    edited = edit_source(monkeypatch, "/ self.totals[0]", "/ (8 * (labels != -100).sum().clamp(min=1))")
    with pytest.raises(autoptd.InternalError, match="differs"):
        autoptd.verify(model, **mesh, example_inputs=(ids, uneven(targets)), steps=1)
    assert edited


def test_one_tied_sum_less_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThreadRank, "owners", lambda self, pp_ranks: self._solo)
    with pytest.raises(autoptd.InternalError, match=r"gradient .* at transformer\.wte\.weight"):
        autoptd.verify(gpt(), p=2, example_inputs=batch(), steps=1)


def skip_bucket(wanted: Callable[[gradients.Bucket], bool]) -> Callable[..., None]:
    start = gradients.Bucket.start

    def changed(self: gradients.Bucket) -> None:
        start(self)
        if wanted(self):
            flat = self.pending.wait() / self.params.world.mesh.d
            self.pending = Done(flat)

    return changed


def test_one_gradient_bucket_less_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients.Bucket, "start", skip_bucket(lambda bucket: bucket.number == 0))
    with pytest.raises(autoptd.InternalError, match="differs"):
        autoptd.verify(gpt(), d=2, example_inputs=batch(), steps=1)


DROPOUT_EDITS = {
    "every microbatch draws the mask of row 0": ("self.draw(site=0), batch=0)", "self.draw(site=0))"),
    "every tensor rank draws the mask of the first": ("batch=0, shard=(1, 1), group=tp", "batch=0"),
    "two dropouts of a layer draw one mask": ("self.draw(site=3 * i + 3)", "self.draw(site=3 * i + 2)"),
}


@pytest.mark.thorough
@pytest.mark.parametrize(("old", "new"), DROPOUT_EDITS.values(), ids=DROPOUT_EDITS)
def test_another_dropout_mask_is_found(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    edited = edit_source(monkeypatch, old, new)
    with pytest.raises(autoptd.InternalError, match="differs"):
        autoptd.verify(dropping_gpt(2), t=2, num_microbatches=2, example_inputs=batch(), steps=1)
    assert edited


def test_replicas_that_draw_the_same_masks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Executor._drawing

    def of_the_first_replica(self: Executor, number: int) -> Drawing | None:
        drawing = right(self, number)
        return dataclasses.replace(drawing, first_row=number * drawing.rows) if drawing is not None else None

    monkeypatch.setattr(Executor, "_drawing", of_the_first_replica)
    with pytest.raises(autoptd.InternalError, match="differs"):
        autoptd.verify(dropping_gpt(1), d=2, num_microbatches=1, example_inputs=batch(), steps=1)


def own_piece_only(buffer: TransferBuffer, arrived: torch.Tensor, tp: Group) -> torch.Tensor:
    return arrived.repeat(buffer.parts)[: buffer.numel]


def scaled(buffer: TransferBuffer, arrived: torch.Tensor, tp: Group) -> torch.Tensor:
    whole = tp.all_gather(arrived, 0, buffer.site)[: buffer.numel] if buffer.parts > 1 else arrived
    return whole / buffer.parts


def in_another_order(buffer: TransferBuffer, arrived: torch.Tensor, tp: Group) -> torch.Tensor:
    return tp.all_gather(arrived.unsqueeze(0), 0, buffer.site).flip(0).flatten()[: buffer.numel]


@pytest.mark.thorough
@pytest.mark.parametrize("wrong", [own_piece_only, scaled, in_another_order], ids=lambda one: one.__name__)
def test_another_gather_is_found(monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., torch.Tensor]) -> None:
    request = {"t": 2, "p": 2, "p2p": "scatter_gather", "example_inputs": batch(), "steps": 1}
    autoptd.verify(gpt(2), **request)
    monkeypatch.setattr(messages, "gather", wrong)
    with pytest.raises(autoptd.InternalError, match="differs"):
        autoptd.verify(gpt(2), **request)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["EQUAL_VALUE", "EQUAL_GRADIENT"])
def test_scattering_what_differs_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    request = {"t": 2, "p": 4, "v": 2, "num_microbatches": 4, "p2p": "scatter_gather", "plan": COLUMNS}
    autoptd.verify(Chain(), **request, steps=1, example_inputs=batch())
    monkeypatch.setattr(transfers, name, ("I", "R", "P"))
    with pytest.raises(autoptd.InternalError, match="differs"):
        autoptd.verify(Chain(), **request, steps=1, example_inputs=batch())
