"""The steps of a LightningModule as the forward of a module, which is what AutoPTD traces.

In: a LightningModule. Out: another view of it, with the same attributes, parameters and names. Its forward takes the
name of a step and the batch, and returns a loss, and what an evaluation logs and returns. Only names and settings of
`self.log` are known while a step is traced; the values are those of the ranks, which `Strategy` logs.

    pm = parallelize(as_forward(module), example_inputs={"batch": batch, "step": "training_step", "count": 1, ...})
    loss, found = pm.eval_step(batch=batch, step="validation_step", ..., outputs=found_of)
    log_values(module, found, rows=8)
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch

from autoptd.errors import PlanError, a_type
from autoptd.runtime.step.microbatches import flatten

TRAINING = "training_step"
# What a step knows of its place in the run, which a program that was compiled once does not.
OF_THE_LOOP = ("trainer", "current_epoch", "global_step")
# What the module is to Lightning, which no step depends on.
OF_LIGHTNING = ("_trainer", "_current_fx_name", "_metric_attributes")
# In the names of what an evaluation finds.
LOGGED, RETURNED = "log", "return"


def of_the_loop(name: str) -> Any:
    """Return a property that a traced step must not read."""

    def read(self: Any) -> NoReturn:
        fact = "is read, and the step is compiled once for all batches and epochs"
        remedy = (
            "a hook or a callback for what depends on it; a tensor in the batch for what the loss depends on"
        )
        raise PlanError(f"LightningModule: self.{name} in a step", fact, remedy)

    return property(read)


@dataclass
class Logs:
    """What a step logs of a batch: names, values and settings."""

    rows: int
    found: list[tuple[str, torch.Tensor, str]] = field(default_factory=list)


class Steps:
    """Mixin, placed before the class of a LightningModule."""

    # Where steps put what they log, and what the one that runs now logs: in the class, and not in containers, since
    # a trace undoes what a forward writes to the module.
    noted: SimpleQueue[list[str]]
    running: ContextVar[Logs | None]
    trainer, current_epoch, global_step = map(of_the_loop, OF_THE_LOOP)

    @property
    def device(self) -> torch.device:
        """Where the model is traced; Lightning says where batches are."""
        return next(self.parameters()).device  # type: ignore[attr-defined]

    def forward(self, *args: Any, **call: Any) -> Any:
        if self.running.get() is not None:
            return super().forward(*args, **call)  # type: ignore[misc]
        step, batch = call["step"], call["batch"]
        logs = Logs(rows_of(batch))
        token = self.running.set(logs)
        try:
            output = getattr(self, step)(batch, *[Unknown(), call["loader"]][: call["count"]])
        finally:
            self.running.reset(token)
        if step != TRAINING:
            return evaluated(step, output, logs)
        loss = loss_of(output)
        self.noted.put([how for name, value, how in logs.found if is_loss(name, value, loss)])
        return loss / call["parts"]

    def log(self, name: str, value: Any, *args: Any, **keywords: Any) -> None:
        """Keep a value with its settings; PlanError for what ranks do not give."""
        site, logs = f"self.log({name!r})", self.running.get()
        assert logs is not None
        bound = inspect.signature(pl.LightningModule.log).bind(self, name, value, *args, **keywords).arguments
        how = {
            key: one for key, one in bound.items() if key not in ("self", "name", "value") and one is not None
        }
        if not isinstance(value, torch.Tensor):
            fact = f"gets {a_type(value)}, which would be that of the batch that was traced"
            raise PlanError(
                site, fact, "a tensor that the step computes; other values in a hook or a callback"
            )
        if "batch_size" in how:
            # A trace has fewer rows than a batch.
            rows, how["batch_size"] = how["batch_size"], True
            if rows != logs.rows:
                fact = f"batch_size={rows} is not the number of rows, {logs.rows}"
                raise PlanError(site, fact, "leave it out: means over an epoch are weighted by rows")
        try:
            text = json.dumps([LOGGED, name, how])
        except TypeError as error:
            raise PlanError(site, f"a setting is not a plain value ({error})", "reduce_fx='mean'") from error
        logs.found.append((name, value, text))


class Unknown:
    """Stand in for the number of a batch, which a step may take but not use."""


def _refuse(self: Any, *_: Any) -> NoReturn:
    fact = "is used, and the step is compiled once for all batches"
    raise PlanError(
        "LightningModule: batch_idx", fact, "on_train_batch_end, or a callback, for what depends on it"
    )


for _name in "add radd sub rsub mul mod rmod floordiv truediv eq ne lt le gt ge bool index int float str format".split():
    setattr(Unknown, f"__{_name}__", _refuse)


def as_forward(module: pl.LightningModule) -> torch.nn.Module:
    """Return a view of `module` whose forward runs its steps, with its parameters, buffers and submodules.

    `noted` gets, each time that the training step is traced, what it logs: the settings of each `self.log`.
    """
    cls = type(module)
    parts = {"noted": SimpleQueue(), "running": ContextVar("running", default=None)}
    view: Any = object.__new__(type(cls.__name__, (Steps, cls), parts))
    vars(view)["_trainer"] = None
    follow(view, module)
    return view


def follow(view: torch.nn.Module, module: pl.LightningModule) -> None:
    """Let a view have the attributes of its module, so that changes by hooks are noticed."""
    vars(view).update({name: x for name, x in vars(module).items() if name not in OF_LIGHTNING})


def rows_of(batch: Any) -> int:
    """Return the number of rows of a batch: of its first tensor."""
    return next(
        (len(x) for x in flatten((), {"batch": batch})[0] if isinstance(x, torch.Tensor) and x.ndim), 0
    )


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss that training_step returns; PlanError where there is none, or more than it."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, torch.Tensor):
        raise PlanError(TRAINING, f"returns {a_type(output)}, and no loss", "return loss, or {'loss': loss}")
    if isinstance(output, Mapping) and len(output) > 1:
        names = ", ".join(sorted(set(output) - {"loss"}))
        raise PlanError(TRAINING, f"returns {names} as well", "the loss alone; all else in validation_step")
    return loss


def is_loss(name: str, value: torch.Tensor, loss: torch.Tensor) -> bool:
    """Return True; PlanError for a value that is not the loss, which alone comes back from a step of the ranks."""
    if value is loss or value.untyped_storage()._cdata == loss.untyped_storage()._cdata:
        return True
    fact = "is not the loss, which is all that ranks return of a training step"
    raise PlanError(f"{TRAINING}: self.log({name!r})", fact, "log it in validation_step")


def evaluated(step: str, output: Any, logs: Logs) -> dict[str, Any]:
    """Return what an evaluation gives, with a number among it as the loss; PlanError where there is none."""
    returned = output if isinstance(output, Mapping) else {"": output}
    found = {json.dumps([RETURNED, name]): x for name, x in returned.items() if x is not None}
    found |= {how: value for _, value, how in logs.found}
    if others := [x for x in found.values() if not isinstance(x, torch.Tensor)]:
        raise PlanError(step, f"returns {a_type(others[0])}", "a tensor, or a dict of tensors")
    numbers = [x for x in found.values() if x.numel() == 1 and x.is_floating_point()]
    if not numbers:
        fact = "neither logs nor returns a floating-point number of the batch, which ranks run up to"
        raise PlanError(step, fact, "self.log('val_loss', loss), among others")
    return {"loss": numbers[0], "found": found}


def found_of(output: Mapping[str, Any], **_: Any) -> Any:
    """Give what an evaluation found: `outputs` of `pm.eval_step`."""
    return output["found"]


def log_values(module: pl.LightningModule, found: Mapping[str, torch.Tensor], rows: int) -> Any:
    """Log what a step of ranks found in a batch, and return what the step would have returned."""
    returned: dict[str, Any] = {}
    for text, value in found.items():
        kind, name, *settings = json.loads(text)
        if kind == RETURNED:
            returned[name] = value
            continue
        (how,) = settings
        own = {"batch_size": rows} if "batch_size" in how else {}
        module.log(name, value, **{**how, **own})
    return returned.get("", returned or None)
