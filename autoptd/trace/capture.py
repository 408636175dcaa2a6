"""Capture an unmodified model and its loss as one FX graph of aten operators (form TRACED).

In: a module, the call `(args, kwargs)` of one microbatch (at least two rows), and the position of the loss.
Out: `Captured`, whose graph has placeholders for parameters (each tied group once), buffers and batch inputs,
operators with module path and source line, and the loss as its only output.

    captured = capture(model, (ids, targets), {}, loss_fn=None)

`record.py` writes down the operators of a forward (`record`), while `watch.py` and `watched.py` refuse what the graph
would not do. `normalize.py` then brings it into the form TRACED.
"""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx import Graph

from autoptd.compat import DATA_DEPENDENT, load_compiler, tree_flatten
from autoptd.errors import AutoptdError, TraceError
from autoptd.ir.names import USED, identifier
from autoptd.ir.notes import note, placeholders
from autoptd.subject.storage import first_names, is_same_memory, tied_names
from autoptd.trace.autocast import OFF, Autocast, Casting
from autoptd.trace.functions import other_functions
from autoptd.trace.normalize import bring_to_traced
from autoptd.trace.reads import Reads
from autoptd.trace.record import Recorder, in_model
from autoptd.trace.results import Results
from autoptd.trace.tensor_values import VALUE_REMEDY, Checks, value_error
from autoptd.trace.watch import (
    Operands,
    called_at,
    check_loss_fn,
    check_model,
    checkpoint_sites,
    watch_tracing,
)
from autoptd.trace.watched import Watched, check_changes

# Messages of torch where tracing would need the values of a tensor.
OF_VALUES = re.compile(r"data-dependent|\.numpy\(\) is not supported")


@dataclass
class Captured:
    """Hold the TRACED graph of a model, and the meaning of its placeholders.

    `aliases` maps the first name of every parameter to all its names; `inputs` are (placeholder name, leaf
    index) pairs of the flattened call; `constants` are the leaves that are not tensors; `buffers` hold values
    of buffers and constants. `checkpointed` are modules whose activation checkpoints are not in the graph, `whole`
    custom autograd functions that are one operator each; `reads` is the Python state that the forward may depend on.
    """

    graph: Graph
    aliases: dict[str, tuple[str, ...]]
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    persistent: frozenset[str]
    inputs: tuple[tuple[str, int], ...]
    constants: tuple[tuple[int, Any], ...]
    tree: str
    checkpointed: tuple[str, ...] = ()
    whole: frozenset[Any] = frozenset()
    checks: Checks = field(default_factory=Checks)
    reads: Reads | None = None


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: Callable[..., Any] | None,
    autocast: Autocast = OFF,
    *,
    like: Captured | None = None,
    is_known: bool = False,
) -> Captured:
    """Trace `model(*args, **kwargs)` down to its scalar loss, under `autocast`.

    TraceError names the user's source line. `like` is a trace with other rows: what took several runs to find out is
    taken from it. A model that `is_known`, because it was traced before, is not run.
    """
    load_compiler()
    check_model(model)
    check_loss_fn(loss_fn)
    leaves, tree = tree_flatten((args, kwargs))
    checks, whole = (Checks(), set()) if like is None else (like.checks, set(like.whole))
    passed = set(checks.passed)
    results = Results()
    wrapper = watched_model(model, loss_fn, checks, results)
    aliases = tied_names(model)
    tied = {name: names[0] for names in aliases.values() for name in names}
    first_name = tied | first_names(wrapper)
    fresh = partial(Recorder, wrapper, results=results, first_name=first_name)
    recorder, checkpointed = record(fresh, wrapper, args, kwargs, autocast, whole, checks)
    checks.warn(passed)
    # After the trace, as `Watched` has restored the model by then; runs it again where something changed.
    if not is_known:
        with autocast.ambient():
            check_changes(wrapper, args, kwargs)
    graph, inputs = recorder.graph, []
    names = input_names(model, args, kwargs)
    for leaf, node in recorder.inputs.items():
        note(node).name = names[leaf]
        inputs.append((names[leaf], leaf))
    buffers = values_of_buffers(recorder, wrapper)
    bring_to_traced(graph, model, autocast.dtype, wrapper.seen.assigned.keys())
    persistent = frozenset(model.state_dict(keep_vars=True)) - set(tied)
    constants = tuple((i, leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor))
    every = dict(model.named_parameters(remove_duplicate=False))
    parameters = {name: every[name] for name in aliases}
    return Captured(
        graph,
        aliases,
        parameters,
        buffers,
        persistent,
        tuple(inputs),
        constants,
        str(tree),
        checkpointed,
        frozenset(whole),
        checks,
        wrapper.seen.reads(),
    )


def capture_again(
    first: Captured,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: Callable[..., Any] | None,
    autocast: Autocast = OFF,
) -> Graph:
    """Trace the call of `first` with other rows."""
    return capture(model, args, kwargs, loss_fn, autocast, like=first).graph


def watched_model(
    model: nn.Module, loss_fn: Callable[..., Any] | None, checks: Checks, results: Results
) -> Watched:
    # Take the real parameters now: during tracing the model has fake ones.
    registered = {id(parameter): name for name, parameter in model.named_parameters()}
    return Watched(model, loss_fn, around=partial(Operands, model, registered, checks, results))


def values_of_buffers(recorder: Recorder, wrapper: Watched) -> dict[str, torch.Tensor]:
    """Return the values of the placeholders of buffers and constants, by name."""
    stored = {in_model(name): x for name, x in wrapper.named_buffers(remove_duplicate=False)}
    found: dict[str, torch.Tensor] = {}
    for node in placeholders(recorder.graph, "buffer"):
        record = note(node)
        is_constant = record.origin.constant is not None
        held = (record.origin.constant if is_constant else stored[record.name]).detach()
        check_kept(held, wrapper)
        if is_constant:
            record.origin = replace(record.origin, constant=held)
        found[record.name] = held
    return found


def input_names(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Name every leaf of the call after the parameter of forward that receives it."""
    try:
        bound = list(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):
        bound = []
    names: list[str] = []
    for i, arg in enumerate(args):
        names += _leaf_names(bound[i] if i < len(bound) else f"input_{i}", arg)
    for key, arg in kwargs.items():
        names += _leaf_names(key, arg)
    return distinct_names(names)


def distinct_names(names: list[str]) -> list[str]:
    """Return names valid as arguments of an emitted function: identifiers, distinct, not used in its body."""
    made: list[str] = []
    for name in names:
        # Inside a class, Python mangles names that begin with two underscores.
        free = identifier(name.lstrip("_") if name.startswith("__") else name, "input_")
        while free in made or free in USED:
            free = f"{free}_"
        made.append(free)
    return made


def _leaf_names(name: str, arg: Any) -> list[str]:
    leaves = tree_flatten(arg)[0]
    return [name] if len(leaves) == 1 else [f"{name}_{i}" for i in range(len(leaves))]


def record(
    fresh: Callable[[Casting], Recorder],
    wrapper: Watched,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    autocast: Autocast,
    whole: set[Any],
    checks: Checks,
) -> tuple[Recorder, tuple[str, ...]]:
    """Record the forward; return the record, and the modules whose activation checkpoints it omits.

    Records again if the backward of some custom autograd functions is not the derivative of their forward
    (these join `whole`), if a check of values has raised (it joins `checks`), or if the forward observes more of
    results than is remembered (then all operators run).
    """
    recorder, checks.tried, checks.refused = fresh(Casting(autocast)), None, None
    results, known = recorder.results, not recorder.results.run_all
    try:
        with ExitStack() as around:
            met = around.enter_context(watch_tracing(wrapper, whole, checks))
            around.enter_context(autocast.ambient())
            around.enter_context(torch.enable_grad())
            recorder.record(args, kwargs)
        others = set() if known and results.run_all else other_functions(met.functions)
        if not others and not (known and results.run_all):
            if checks.refused is not None:
                raise checks.refused
            if checks.tried is not None:
                fact = "raises on the value of a tensor, and the forward catches the exception and continues"
                raise TraceError(checks.site(), fact, VALUE_REMEDY)
            return recorder, tuple(checkpoint_sites(wrapper.model, met.checkpointed))
        whole |= others
    except Exception as error:
        if not (known and results.run_all):
            if isinstance(error, AutoptdError):
                raise
            if not checks.has_left(error):
                raise _refusal(error) from error
    return record(fresh, wrapper, args, kwargs, autocast, whole, checks)


def _refusal(error: BaseException) -> TraceError:
    """Make a TraceError from an exception of torch or of the model."""
    line = user_line(error)
    fact = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if isinstance(error, DATA_DEPENDENT) or OF_VALUES.search(fact):
        return value_error(error, called_at(error), line)
    remedy = "the model must run on these example inputs, and on fake tensors, which have no values"
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


def check_kept(constant: torch.Tensor, wrapper: Watched) -> None:
    """Raise TraceError for a tensor attribute that the forward reads and replaces: it is state.

    An attribute that is only written is harmless.
    """
    for path, replaced in wrapper.seen.replaced.items():
        if is_same_memory(replaced, constant):
            fact = "a tensor attribute that the forward reads and then replaces, which the traced graph would not do"
            raise TraceError(path, fact, "keep state out of the forward, and pass it as an input")
