"""Load the state of another model, buffers included, and hold step and evaluation against that model, in float64.

In: two models of one class, the call and the keywords of `parallelize`. Out: nothing, or an InternalError as `verify` raises.

    check_loaded(model, other, t=2, example_inputs=(ids, labels))
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import autoptd
from autoptd.errors import InternalError
from autoptd.subject.call import split_call
from autoptd.trace.loss import WithLoss
from autoptd.trace.precision import Widen, widen_inputs
from autoptd.verify.one_device import masks_of

TOLERANCE = 1e-9


def check_loaded(
    model: nn.Module, other: nn.Module, *, example_inputs: Any, loss_fn: Any = None, **keywords: Any
) -> None:
    """Evaluate and train `other`'s state on the program of `model`."""
    model, other = (copy.deepcopy(one).double() for one in (model, other))
    call = widen_inputs(example_inputs)
    args, kwargs = split_call(call)
    with Widen():
        pm = autoptd.parallelize(model, **keywords, loss_fn=loss_fn, backend="local", example_inputs=call)
        try:
            pm.load_state_dict(other.state_dict())
            with masks_of(pm.program, 1):
                trained = WithLoss(other, loss_fn)(*args, **kwargs).detach()
            _compare("the loss", pm.step(*args, **kwargs), trained)
            with torch.no_grad():
                evaluated = WithLoss(copy.deepcopy(other).eval(), loss_fn)(*args, **kwargs)
            _compare("the evaluation", pm.eval_step(*args, **kwargs), evaluated)
        finally:
            pm.close()


def _compare(what: str, ours: Tensor, wanted: Tensor) -> None:
    size = float((ours - wanted).abs() / wanted.abs().clamp(min=1e-300))
    if not size <= TOLERANCE:
        raise InternalError("load_state_dict", f"{what} behind it differs from the model's by {size:.1e}")
