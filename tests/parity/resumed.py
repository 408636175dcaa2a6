"""Train, save, load on another mesh and train on, beside the model on one device: loss, gradients and parameters.

In: a model, its batches, and two meshes. Out: nothing, or the AssertionError that names the first value that differs.

    goes_on(model, [batch(0), batch(1)], {"t": 2, "d": 2, "zero": 1}, {"p": 2}, folder)
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import autoptd
from autoptd.ir.machine import Machine
from autoptd.trace.widen import Widen, widen_model
from autoptd.verify.widening import masks_of
from tests.parity.covering import aliases, compare

# Collectives start at once: models as small as these are split.
MACHINE = Machine(latency=1e-9)
LR = 1e-2
Batch = dict[str, Tensor]


def goes_on(
    model: nn.Module, batches: Sequence[Batch], mesh: dict[str, Any], other: dict[str, Any], folder: Path
) -> None:
    """Train on the first batch, save; load on `other` and train on the rest. In float64, at 1e-9."""
    reference, untouched = widen_model(model), widen_model(model)
    trained = [parameter for parameter in reference.parameters() if parameter.requires_grad]
    plain = torch.optim.AdamW(trained, lr=LR, eps=1e-3)
    for step, batch in enumerate(batches):
        here = mesh if step == 0 else other
        keywords = {"backend": "local", "example_inputs": batch, "machine": MACHINE, **here}
        # Users are told that storage would be float32.
        with mock.patch("autoptd.api.check_precision"), Widen():
            pm = autoptd.parallelize(copy.deepcopy(untouched), **keywords)
        with closing(pm):
            ours = pm.optimizer(torch.optim.AdamW, lr=LR, eps=1e-3)
            if step:
                pm.load(folder / f"step {step}", optimizer=ours)
            our_loss = pm.step(**batch)
            with masks_of(pm.program, pm.steps), Widen():
                loss = reference(**batch).loss
            loss.backward()
            gradients = {name: p.grad for name, p in aliases(reference).items() if p.grad is not None}
            compare("loss", step, {"": our_loss}, {"": loss})
            compare("gradient", step, pm.gradients(), gradients)
            for optimizer in (plain, ours):
                optimizer.step()
                optimizer.zero_grad()
            compare("parameter", step, pm.state_dict(), aliases(reference), floor=LR)
            pm.save(folder / f"step {step + 1}", optimizer=ours)
