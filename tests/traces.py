"""Traces that are kept: a model is traced once per process, with few rows and with many, if nothing about it, its weights and
its inputs differs.

Tracing is most of the time of a small test, and a trace knows nothing of meshes and schedules. What cannot be pickled (a class
or a loss inside of a test) is traced every time.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph

from autoptd import trace
from autoptd.compat import FakeTensor, load_compiler
from autoptd.ir.notes import copy_graph

# Traces that are kept: what is asked for again is asked for soon, and what walks over all objects walks over these.
MANY = 16
HOOKS = ("_forward_pre_hooks", "_forward_hooks")
seen: dict[bytes, trace.Captured] = {}
seen_again: dict[bytes, Graph] = {}
trace_now, trace_now_again = trace.capture, trace.capture_again
# Tests trace without `Request.capture`, which does this first.
load_compiler()


class Key(pickle.Pickler):
    """Pickles tensors as what they hold, not as where they are; parameters, whose values no trace reads, as which of them share
    memory; and modules without hooks on their state dicts, which no trace follows. What other hooks are called by, numbers of
    this process, is left out: `parallelize` gives every model one.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.memories: dict[int, int] = {}

    def reducer_override(self, what: object) -> Any:
        if isinstance(what, nn.Module):
            made, arguments, state, *rest = what.__reduce_ex__(4)
            if isinstance(state, dict):
                state = {name: value for name, value in state.items() if name != "_state_dict_pre_hooks"}
                state |= {name: list(state[name].values()) for name in HOOKS if state.get(name)}
            return made, arguments, state, *rest
        if not isinstance(what, Tensor):
            return NotImplemented
        about = (
            type(what),
            str(what.dtype),
            what.device.type,
            tuple(what.shape),
            what.stride(),
            what.requires_grad,
            # Refused.
            bool(what._backward_hooks or getattr(what, "_post_accumulate_grad_hooks", None)),
        )
        if isinstance(what, nn.Parameter):
            memory = self.memories.setdefault(what.untyped_storage()._cdata, len(self.memories))
            return tuple, ((about, memory, what.storage_offset()),)
        is_held = what.device.type == "cpu" and not isinstance(what, FakeTensor)
        data = what.detach().reshape(-1).view(torch.uint8).numpy().tobytes() if is_held else b""
        return tuple, ((about, data),)


def key_of(*what: Any) -> bytes | None:
    """Equal for what would be traced alike; None for what cannot be pickled."""
    made = io.BytesIO()
    try:
        Key(made).dump((what, torch.get_default_dtype()))
    except (
        pickle.PicklingError,
        AttributeError,
        TypeError,
        RuntimeError,
    ):  # the last of modules with parametrizations
        return None
    return made.getvalue()


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: Any,
    autocast: trace.Autocast = trace.OFF,
) -> trace.Captured:
    """What `trace.capture` returns, for the parameters and buffers of this model."""
    key = key_of(model, args, kwargs, loss_fn, autocast)
    if key is None:
        return trace_now(model, args, kwargs, loss_fn, autocast)
    found = seen.pop(key, None) or trace_now(model, args, kwargs, loss_fn, autocast)
    keep(seen, key, found)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return replace(
        found,
        graph=copy_graph(found.graph),
        parameters={name: parameters[name] for name in found.parameters},
        buffers=found.buffers | {name: x for name, x in model.named_buffers() if name in found.buffers},
    )


def capture_again(
    first: trace.Captured,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: Any,
    autocast: trace.Autocast = trace.OFF,
) -> Graph:
    """What `trace.capture_again` returns."""
    key = key_of(model, args, kwargs, loss_fn, autocast)
    if key is None:
        return trace_now_again(first, model, args, kwargs, loss_fn, autocast)
    found = seen_again.pop(key, None) or trace_now_again(first, model, args, kwargs, loss_fn, autocast)
    keep(seen_again, key, found)
    return copy_graph(found)


def keep(many: dict[bytes, Any], key: bytes, found: Any) -> None:
    """Keep what was found as the last one, of not too many."""
    many[key] = found
    if len(many) > MANY:
        del many[next(iter(many))]
