"""Tell a model that fails without AutoPTD from one that cannot be traced.

In: a call that could not be traced, or compared with its trace. Out: the model's own error on that call, as a
TraceError; None if it runs. It costs a step on one device, and only runs after something has failed.

    if (failure := own_failure(model, args, kwargs, loss_fn, autocast)) is not None:
        raise failure
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autoptd.compat import plain_checkpoints
from autoptd.errors import AutoptdError, TraceError
from autoptd.subject.module import has_values
from autoptd.trace.autocast import Autocast
from autoptd.trace.capture import user_line
from autoptd.trace.changed_buffers import KeptBuffers
from autoptd.trace.loss import WithLoss

REMEDY = "pass a model and example_inputs that run, with gradients, without AutoPTD"


def own_failure(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: Callable[..., Any] | None,
    autocast: Autocast,
    precision: str | None = None,
) -> TraceError | None:
    """Run the unmodified model forward and backward; return its error, None if there is none.

    Also returns None for a model without values, or one that does not fit on its device. Buffers, gradients and
    random states are restored.
    """
    if not has_values(model):
        return None
    kept = KeptBuffers(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    cards = {parameter.device for parameter in trained if parameter.is_cuda}
    try:
        with torch.random.fork_rng(devices=list(cards)), torch.enable_grad():
            with plain_checkpoints(), autocast.around():
                loss = WithLoss(model, loss_fn)(*args, **kwargs)
            if loss.requires_grad:
                torch.autograd.grad(loss, trained, allow_unused=True)
    except (AutoptdError, torch.OutOfMemoryError):
        return None
    except Exception as error:
        what = f"the model, cast as precision={precision!r} says," if precision else "the model"
        fact = f"{what} fails without AutoPTD as well: {type(error).__name__}: {error}"
        return TraceError(user_line(error), fact, REMEDY)
    finally:
        kept.put_back()
    return None
