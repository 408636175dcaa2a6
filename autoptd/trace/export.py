"""Run torch.export on a model, with the layers of one kind traced once.

In: a wrapped model and a call. Out: the exported program, or a TraceError that names the user's line.

    exported, checkpointed, copied = export(wrapper, args, kwargs, casting, whole, checks, Kinds(model))
"""

from __future__ import annotations

import re
import traceback
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch

from autoptd.compat import calls_of_modules, light_export, traced_through
from autoptd.errors import AutoptdError, TraceError
from autoptd.options.elsewhere import EXPERTS
from autoptd.trace.autocast import Casting
from autoptd.trace.functions import other_functions
from autoptd.trace.layers.calls import Layers, Recorded
from autoptd.trace.layers.copies import Copied, Unlike
from autoptd.trace.layers.kinds import Kinds
from autoptd.trace.tensor_values import Checks
from autoptd.trace.users import UserFrames
from autoptd.trace.watch import called_at, checkpoint_sites, watch_tracing
from autoptd.trace.watched import Watched

# Messages of torch where tracing would need the values of a tensor.
OF_VALUES = re.compile(r"data-dependent|unbacked symbols|infer dtype of Sym|\.numpy\(\) is not supported")
VALUE_REMEDY = (
    "compute with the tensor itself (x * scale, torch.where, gather; torch.arange(n) < length for a slice), "
)
VALUE_REMEDY += "or keep the number as an attribute"


class Followed(BaseException):
    """Signal that the whole forward followed the first trace, so torch.export has nothing left to do."""


def export(
    wrapper: Watched,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    casting: Casting,
    whole: set[Any],
    checks: Checks,
    kinds: Kinds,
    follower: Any = None,
) -> tuple[torch.export.ExportedProgram | None, tuple[str, ...], list[Copied]]:
    """Export the forward; return the program (None where a `follower` ran the forward instead), the modules
    whose activation checkpoints it omits, and the layers that were copied.

    Exports again if the backward of some custom autograd functions is not the derivative of their forward
    (these join `whole`), or if a check of values has raised (it joins `checks`).
    """
    exported, checks.tried = None, None
    again = partial(export, wrapper, args, kwargs, casting, whole, checks)
    try:
        with ExitStack() as around:
            met = around.enter_context(watch_tracing(wrapper, whole))
            met_now = lambda: (len(met.functions), len(met.checkpointed), len(whole))  # noqa: E731
            layers = Layers(kinds, wrapper, casting, met_now, follower or Recorded())
            around.enter_context(calls_of_modules(layers.call))
            around.enter_context(casting.autocast.ambient())
            around.enter_context(torch.enable_grad())
            around.enter_context(
                light_export(UserFrames(Watched.forward.__code__), follower and follower.run)
            )
            around.enter_context(traced_through(casting.call))
            around.enter_context(suppress(Followed))
            exported = torch.export.export(wrapper, args, kwargs, strict=False)
        others = other_functions(met.functions)
        if others:
            whole |= others
            casting.with_grad.clear()
            return again(kinds, follower)
        if checks.tried is not None:
            fact = "raises on the value of a tensor, and the forward catches the exception and continues"
            raise TraceError(checks.site(), fact, VALUE_REMEDY)
        layers.check()
        copied = layers.expand(exported.graph) if exported is not None else []
        return exported, tuple(checkpoint_sites(wrapper.model, met.checkpointed)), copied
    except Exception as error:
        if layers.skipped or layers.read or isinstance(error, Unlike):
            if follower is not None:
                raise Unlike from error
            kinds = kinds.without(layers.read)
        elif isinstance(error, AutoptdError):
            raise
        elif not checks.has_left(error):
            raise _refusal(error, checks) from error
    finally:
        kinds.restore()
    casting.with_grad.clear()
    return again(kinds, follower)


def _refusal(error: Exception, checks: Checks) -> TraceError:
    """Make a TraceError from an exception of torch.export or of the model."""
    line = user_line(error)
    fact = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if OF_VALUES.search(fact):
        if (refusal := checks.sizes.refusal(error, called_at(error), line)) is not None:
            return refusal
        fact = "the value of a tensor becomes a Python number, and a branch or a size may depend on it"
        remedy = f"{VALUE_REMEDY}; {EXPERTS}" if "for expert" in line else VALUE_REMEDY
        return TraceError(line, fact, remedy)
    remedy = "the model must run on these example inputs; torch.export must be able to trace it"
    return TraceError(line, f"cannot be traced: {type(error).__name__}: {fact}", remedy)


def user_line(error: BaseException) -> str:
    """Return `file:line  code` of the innermost frame that is neither torch's nor AutoPTD's."""
    own = ("/torch/", "/autoptd/trace/", "/contextlib.py", "<string>", "<eval_with_key>")
    frames = traceback.extract_tb(error.__traceback__)
    mine = []
    for frame in frames:
        if not any(part in frame.filename for part in own):
            mine.append(frame)
    mine = [frame for frame in mine if "/autoptd/" not in frame.filename] or mine
    return f"{mine[-1].filename}:{mine[-1].lineno}  {mine[-1].line}" if mine else "model"
