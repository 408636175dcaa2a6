"""Faults on the way from a parameter's storage to its use and of its gradient back, each of which must show.

Every case trains two steps with clipping, once as it is and once with a fault planted; the second one raises, or ends with
another loss, norm, gradient or parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import autoptd
from autoptd.ir.actions import Action, Kind
from autoptd.runtime.params import grad_norm, gradient_buckets, gradients, optimizer, parameters
from autoptd.runtime.step import messages
from autoptd.runtime.world.world import Done
from tests.parity.models import batch, gpt
from tests.parity.test_fp16 import SCALE, planted

Patch = pytest.MonkeyPatch
Found = dict[str, Tensor]


def trained(*, plant: tuple[int, int, int] | None = None, reload: bool = False, **keywords: Any) -> Found:
    """Train two steps; return losses, norms, the last gradients, and parameters.

    `plant`: rank, stage and microbatch that leave an infinity in the first step. `reload`: first weights are loaded again in
    between.
    """
    data = batch(8)
    usual = {"backend": "local", "timeout": 20, "fuse": False, "example_inputs": data}
    pm = autoptd.parallelize(gpt(), **usual, **keywords)
    found: Found = {}
    try:
        first = pm.state_dict()
        stepper = pm.optimizer(torch.optim.AdamW, lr=1e-2)
        for step in range(2):
            with ExitStack() as stack:
                if plant is not None and step == 0:
                    stack.enter_context(planted(pm, plant))
                found[f"loss {step}"] = pm.step(*data)
            found[f"norm {step}"] = pm.clip_grad_norm_(0.5)
            found |= {f"gradient of {name}": x for name, x in pm.gradients().items()}
            stepper.step()
            stepper.zero_grad()
            if reload and step == 0:
                pm.load_state_dict(first)
        return found | pm.state_dict()
    finally:
        pm.close()


@cache
def expected(keywords: tuple[tuple[str, Any], ...]) -> Found:
    return trained(**dict(keywords))


def differs(found: Found, wanted: Found) -> bool:
    """Tell whether anything is off by more than 1e-4 of its largest entry, or is finite in one alone."""
    for name, x in wanted.items():
        y = found[name]
        if not torch.equal(x.isfinite(), y.isfinite()):
            return True
        if float((x - y).nan_to_num().abs().max()) > 1e-4 * float(x.nan_to_num().abs().max()):
            return True
    return False


def no_late_sums(patch: Patch) -> None:
    real = gradient_buckets.Bucket.__init__

    def init(self: gradient_buckets.Bucket, *args: Any) -> None:
        real(self, *args)
        self.late = []

    patch.setattr(gradient_buckets.Bucket, "__init__", init)


def all_count(patch: Patch) -> None:
    patch.setattr(parameters, "is_first_holder", lambda spec, world: True)


def first_replica_counts(patch: Patch) -> None:
    patch.setattr(parameters, "is_first_holder", lambda spec, world: world.leads(world.mesh.batch_axes))


def never_unscaled(patch: Patch) -> None:
    real = gradients.Gradients.commit
    patch.setattr(gradients.Gradients, "commit", lambda self, scale: real(self, None))


def scaled_by_each_stage(patch: Patch) -> None:
    real = messages.Messages.take

    def take(self: messages.Messages, receive: Action) -> dict[str, Tensor]:
        message = real(self, receive)
        if receive.kind is Kind.RECV_B:
            return {name: 2 * x for name, x in message.items()}
        return message

    patch.setattr(messages.Messages, "take", take)


def first_rank_decides(patch: Patch) -> None:
    def norm(params: parameters.RankParameters, p: float = 2.0) -> Tensor:
        own = [x for name in params.stored if (x := params.gradient(name)) is not None]
        return grad_norm.sum_of_powers(own, params.world.device).sqrt()

    patch.setattr(optimizer, "grad_norm", norm)
    # Else the update asks for no norm of its own.
    patch.setattr("autoptd.runtime.params.loss_scale.LossScaler.saw", lambda self, norm: None)


def storage_is_not_loaded(patch: Patch) -> None:
    def load(self: parameters.RankParameters, spec: Any, part: Tensor) -> None:
        with torch.no_grad():
            self.local[spec.name].copy_(part)
        self._versions[spec.name] = self.local[spec.name]._version

    patch.setattr(parameters.RankParameters, "load", load)


def sums_in_16_bits(patch: Patch) -> None:
    real = gradients.set_grad_dtype
    patch.setattr(gradients, "set_grad_dtype", lambda x, dtype: real(x, torch.bfloat16))


def cut_elsewhere_on_an_owner(patch: Patch) -> None:
    real = gradient_buckets.Bucket.result

    def result(self: gradient_buckets.Bucket) -> Found:
        if self.is_tied and self.params.world.pipeline_rank == 1:
            assert self.pending is not None
            self.pending = Done(self.pending.wait().roll(64))
        return real(self)

    patch.setattr(gradient_buckets.Bucket, "result", result)


def starts_a_microbatch_early(patch: Patch) -> None:
    real = gradients.Gradients.__init__

    def init(self: gradients.Gradients, program: Any, *args: Any) -> None:
        real(self, program, *args)
        self._expected = {name: n - n // program.num_microbatches for name, n in self._expected.items()}

    patch.setattr(gradients.Gradients, "__init__", init)


def nothing_is_published(patch: Patch) -> None:
    patch.setattr(parameters.RankParameters, "publish", lambda self: None)


SHARDED = {"d": 2, "zero": 1, "num_microbatches": 2}
FP16 = {"precision": "fp16", "loss_scale": SCALE, "num_microbatches": 2}
FAULTS: list[tuple[Callable[[Patch], None], dict[str, Any]]] = [
    (no_late_sums, {**SHARDED, "t": 2, "sequence_parallel": True}),
    (all_count, {"d": 2, "num_microbatches": 2}),
    (all_count, {**SHARDED, "t": 2}),
    (first_replica_counts, SHARDED),
    (never_unscaled, FP16),
    (scaled_by_each_stage, {**FP16, "p": 2}),
    (first_rank_decides, {**FP16, **SHARDED, "p": 2, "plant": (3, 1, 0)}),
    (storage_is_not_loaded, {**SHARDED, "precision": "bf16", "reload": True}),
    (sums_in_16_bits, {"precision": "bf16", "num_microbatches": 8}),
    (cut_elsewhere_on_an_owner, {**SHARDED, "p": 2}),
    (starts_a_microbatch_early, SHARDED),
    (nothing_is_published, {"precision": "bf16-mixed", "num_microbatches": 2}),
]


def ids() -> Iterator[str]:
    for plant, keywords in FAULTS:
        yield f"{plant.__name__}-{' '.join(f'{name}={value}' for name, value in keywords.items())}"


@pytest.mark.thorough
@pytest.mark.parametrize(("plant", "keywords"), FAULTS, ids=ids())
def test_a_fault_shows(monkeypatch: Patch, plant: Callable[[Patch], None], keywords: dict[str, Any]) -> None:
    wanted = expected(tuple(keywords.items()))
    plant(monkeypatch)
    try:
        found = trained(**keywords)
    except autoptd.AutoptdError:
        return
    assert differs(found, wanted)
