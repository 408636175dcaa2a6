"""What to call instead of what scripts try on a `ParallelModel`: methods of nn.Module, of DDP and of trainers.

    pm.eval()          # WrongCall: pm.eval: a ParallelModel has no such attribute. Remedy: ... pm.eval_step(...)

`hasattr(pm, "eval")` is False, and `getattr(pm, "eval", None)` gives the default, as code that asks what it has got expects:
the error is an AttributeError as well. `pm(...)` alone is found by its type, so that `callable(pm)` is True.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from autoptd.errors import PlanError

_MODES = "pm.step(...) trains in the modes that modules had at parallelize, pm.eval_step(...) evaluates in eval mode"
_STEP = "loss = pm.step(*pm.local_batch(x, y)): forward and backward; without gradients pm.eval_step(...)"
_DEVICE = "parallelize(..., device=...), and under torchrun each rank's own GPU"
_DTYPE = "parallelize(..., precision='bf16-mixed'), or the model in this dtype before parallelize"
_MODEL = "the model that was handed to parallelize, whose modules do not change"
_BEFORE = "call it on the model, before parallelize"
_WEIGHTS = "weights = pm.state_dict() on every rank, and on rank 0 model.load_state_dict(weights), and then the model itself"
INSTEAD = {
    **dict.fromkeys(("train", "eval", "training"), _MODES),
    **dict.fromkeys(("forward", "backward", "loss", "train_step", "train_batch", "training_step"), _STEP),
    **dict.fromkeys(("validation_step", "eval_batch", "evaluate"), "pm.eval_step(*pm.local_batch(x, y))"),
    **dict.fromkeys(("to", "cuda", "cpu", "to_empty", "device"), _DEVICE),
    **dict.fromkeys(("half", "float", "double", "bfloat16", "type", "dtype"), _DTYPE),
    **dict.fromkeys(("children", "named_children", "module", "config"), _MODEL),
    # DDP and FSDP ask for them.
    **dict.fromkeys(
        ("modules", "named_modules"), f"{_MODEL}; DDP and FSDP are left out: d= makes the replicas"
    ),
    **dict.fromkeys(("requires_grad_", "register_forward_hook", "register_buffer", "apply"), _BEFORE),
    **dict.fromkeys(("generate", "predict", "push_to_hub", "merge_and_unload", "merge_adapter"), _WEIGHTS),
    **dict.fromkeys(("buffers", "named_buffers"), "pm.state_dict(), which has the buffers as well"),
    "configure_optimizers": "pm.optimizer(torch.optim.AdamW, params=groups, lr=...): groups take names, globs, and parameters "
    "of the model",
    "zero_grad": "optimizer.zero_grad() of optimizer = pm.optimizer(torch.optim.AdamW, lr=...)",
    **dict.fromkeys(
        ("no_sync", "require_backward_grad_sync", "set_requires_gradient_sync"),
        "one pm.step of the whole batch; parallelize(..., num_microbatches=) divides it",
    ),
    # A model that torch.compile has wrapped is refused.
    "compile": "parallelize(..., fuse='inductor'), which compiles the stages",
    **dict.fromkeys(
        ("gradient_checkpointing_enable", "set_grad_checkpointing"),
        "parallelize(..., recompute='full' or 'selective'), or the model's own checkpoints, enabled before parallelize",
    ),
    **dict.fromkeys(
        ("register_full_backward_hook", "register_backward_hook"), "change parameter.grad after pm.step"
    ),
    **dict.fromkeys(("clip_grad_norm", "clip_gradients"), "pm.clip_grad_norm_(max_norm)"),
    "clip_grad_value": "pm.clip_grad_value_(clip_value)",
    **dict.fromkeys(
        ("save_checkpoint", "save_state"), "pm.save(folder, optimizer=optimizer), or pm.checkpointer(...)"
    ),
    **dict.fromkeys(
        ("load_checkpoint", "load_state", "from_pretrained"), "pm.load(folder, optimizer=optimizer)"
    ),
}


class WrongCall(PlanError, AttributeError):
    """A `ParallelModel` was asked for what it does not have; `hasattr` sees that it has not."""


class InsteadOf:
    """Answers what a `ParallelModel` does not have with the call to use."""

    # Not for a type checker, which sees itself what there is.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if name in INSTEAD:
                raise WrongCall(f"pm.{name}", "a ParallelModel has no such attribute", INSTEAD[name])
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
            )

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise PlanError: a step is forward and backward at once."""
        raise PlanError(
            "pm(...)", "a ParallelModel is not called: its step is forward and backward at once", _STEP
        )


__all__ = ["INSTEAD", "InsteadOf", "WrongCall"]
