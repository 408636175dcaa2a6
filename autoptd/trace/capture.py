"""Capture an unmodified model and its loss as one FX graph of aten operators (form TRACED).

In: a module, the call `(args, kwargs)` of one microbatch (at least two rows), and the position of the loss.
Out: `Captured`, whose graph has placeholders for parameters (each tied group once), buffers and batch inputs,
operators with module path and source line, and the loss as its only output.

    captured = capture(model, (ids, targets), {}, loss_fn=None)

torch.export does the tracing; anything it would drop silently is refused here or repaired in `normalize.py`.
"""

from __future__ import annotations

import inspect
import re
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from autoptd.compat import OpOverload, light_export, traced_through, tree_flatten, tree_unflatten
from autoptd.elsewhere import EXPERTS
from autoptd.errors import AutoptdError, TraceError
from autoptd.ir.expert_mm import GroupedProducts, grouped_mm
from autoptd.ir.names import USED, identifier
from autoptd.ir.notes import copy_graph, note, op_name, ops, placeholders, site
from autoptd.ir.scopes import on_cpu
from autoptd.subject.attributes import own_containers
from autoptd.subject.storage import first_names, tied_names
from autoptd.trace.autocast import OFF, Autocast, Casting, cast_once
from autoptd.trace.batch_norms import mark_cumulative
from autoptd.trace.branches import Checks
from autoptd.trace.dependence import mark_dependence
from autoptd.trace.faithful import check_loss_fn, check_model
from autoptd.trace.functions import other_functions
from autoptd.trace.normalize import normalize
from autoptd.trace.read import VALUE_REMEDY, check_kept, read_graph
from autoptd.trace.reads import Reads
from autoptd.trace.retrace import IGNORED, Differs, Followed, Follower, Raw
from autoptd.trace.updates import check_updates
from autoptd.trace.user_frames import UserFrames
from autoptd.trace.watch import Operands, called_at, checkpoint_sites, watch_tracing
from autoptd.trace.watched import Watched, check_changes

aten = torch.ops.aten
# Messages of torch where tracing would need the values of a tensor.
OF_VALUES = re.compile(r"data-dependent|unbacked symbols|infer dtype of Sym|\.numpy\(\) is not supported")


@dataclass
class Captured:
    """Hold the TRACED graph of a model, and the meaning of its placeholders.

    `aliases` maps the first name of every parameter to all its names; `inputs` are (placeholder name, leaf
    index) pairs of the flattened call; `constants` are the leaves that are not tensors; `buffers` hold values
    of buffers and constants. `raw` is the graph before it was normalised, for a second trace (`retrace.py`).
    `checkpointed` are modules whose activation checkpoints are not in the graph, `whole` custom autograd functions
    that are one operator each; `reads` is the Python state that the forward may depend on.
    """

    graph: Graph
    aliases: dict[str, tuple[str, ...]]
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    persistent: frozenset[str]
    inputs: tuple[tuple[str, int], ...]
    constants: tuple[tuple[int, Any], ...]
    tree: str
    raw: Raw
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
    is_known: bool = False,
) -> Captured:
    """Trace `model(*args, **kwargs)` down to its scalar loss, under `autocast`.

    TraceError names the user's source line. A model that `is_known`, because it was traced before, is not run.
    """
    check_model(model)
    check_loss_fn(loss_fn)
    leaves, tree = tree_flatten((args, kwargs))
    checks = Checks()
    wrapper = _watched(model, loss_fn, checks)
    casting = Casting(autocast)
    whole: set[Any] = set()
    exported, checkpointed = _export(
        wrapper, *_fresh(args, kwargs), casting=casting, whole=whole, checks=checks
    )
    assert exported is not None
    checks.warn()
    # After the trace, as `Watched` has restored the model by then; runs it again where something changed.
    if not is_known:
        with autocast.ambient():
            check_changes(wrapper, args, kwargs)
    aliases = tied_names(model)
    tied = {name: names[0] for names in aliases.values() for name in names}
    first_name = tied | first_names(wrapper)
    graph, inputs, buffers = read_graph(
        exported, wrapper, first_name, leaves, input_names(model, args, kwargs)
    )
    check_grad_modes(graph, casting)
    # Copy first: `normalize` drops and rewrites operators that a second run of the forward will call.
    read = copy_graph(graph)
    raw = Raw(read, _given(read, wrapper, first_name, inputs, len(leaves)))
    _finish(graph, wrapper, autocast)
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
        inputs,
        constants,
        str(tree),
        raw,
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
    """Trace the call of `first` with other rows, following `first` while the forward does the same.

    Returns the same graph as `capture`.
    """
    wrapper, follower = _watched(model, loss_fn, first.checks), Follower(first.raw, Casting(autocast))
    known: dict[str, Any] = {"whole": set(first.whole), "checks": first.checks}
    try:
        fresh = _fresh(args, kwargs)
        _export(wrapper, *fresh, casting=Casting(autocast), **known, run=follower.run)
    # A full trace reports whatever the forward does differently, or where it fails.
    except (Differs, AutoptdError):
        return capture(model, args, kwargs, loss_fn, autocast).graph
    with autocast.ambient():
        check_changes(wrapper, args, kwargs)
    graph = follower.graph()
    # `read_graph` refuses these in a trace; the first trace did not have them.
    for node in placeholders(graph, "buffer"):
        if note(node).origin.constant is not None:
            check_kept(note(node).origin.constant, wrapper)
    _finish(graph, wrapper, autocast)
    return graph


def _watched(model: nn.Module, loss_fn: Callable[..., Any] | None, checks: Checks) -> Watched:
    # Take the real parameters now: during tracing the model has fake ones.
    registered = {id(parameter): name for name, parameter in model.named_parameters()}
    return Watched(model, loss_fn, around=partial(Operands, model, registered, checks))


def _fresh(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy the tensors of a call: torch.export leaves marks on the tensors that it has seen."""
    leaves, tree = tree_flatten((args, kwargs))
    fresh = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return tree_unflatten(fresh, tree)


def _given(
    graph: Graph,
    wrapper: Watched,
    first_name: dict[str, str],
    inputs: tuple[tuple[str, int], ...],
    leaves: int,
) -> tuple[Node | None, ...]:
    """Return the placeholders of the values with which torch.export calls the forward, in its order."""
    named = {(note(node).kind, note(node).name): node for node in graph.find_nodes(op="placeholder")}
    given: list[Node | None] = []
    for name, _ in wrapper.named_parameters(remove_duplicate=False):
        given.append(named.get(("param", first_name[name.removeprefix("model.")])))
    for name, _ in wrapper.named_buffers(remove_duplicate=False):
        name = name.removeprefix("model.")
        given.append(named.get(("buffer", first_name.get(name, name))))
    name_of = {leaf: name for name, leaf in inputs}
    given += [named.get(("input", name_of.get(leaf, ""))) for leaf in range(leaves)]
    return tuple(given)


def check_grad_modes(graph: Graph, casting: Casting) -> None:
    """Refuse a trace whose operators have gradients that the forward disabled: torch.export drops inference
    mode, and no_grad inside an autocast region.
    """
    # Constants are made and copied in any mode; a detached value has no gradient.
    without = (*IGNORED, aten.lift_fresh_copy.default, aten.detach.default)
    met: Counter[Any] = Counter()
    for node in ops(graph):
        if not isinstance(node.target, OpOverload) or node.target in without:
            continue
        if note(node).origin.without_grad or note(node).origin.ends_region:
            continue
        met[node.target] += 1
        if met[node.target] > casting.with_grad[node.target]:
            fact = f"{op_name(node)} is called under no_grad or inference mode, which torch.export loses here"
            raise TraceError(
                site(node), fact, ".detach() its results; no_grad around torch.autocast, not in it"
            )


def _finish(graph: Graph, wrapper: Watched, autocast: Autocast) -> None:
    """Bring a newly read graph into the form TRACED."""
    with on_cpu():
        normalize(graph)
        if autocast.dtype is not None:
            cast_once(graph, autocast.dtype)
        mark_dependence(graph, dict(wrapper.model.named_parameters()))
    check_updates(graph, wrapper.model, wrapper.seen.assigned.keys())


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


def _export(
    wrapper: Watched,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    casting: Casting,
    whole: set[Any],
    checks: Checks,
    run: Callable[[Any, tuple[Any, ...]], None] | None = None,
) -> tuple[torch.export.ExportedProgram | None, tuple[str, ...]]:
    """Export the forward; return the program (None where `run` followed the forward instead), and the modules
    whose activation checkpoints it omits.

    Exports again if the backward of some custom autograd functions is not the derivative of their forward
    (these join `whole`), or if a check of values has raised (it joins `checks`).
    """
    exported, checks.tried = None, None
    try:
        with ExitStack() as around:
            met = around.enter_context(watch_tracing(wrapper.model, whole))
            around.enter_context(casting.autocast.ambient())
            around.enter_context(own_containers(wrapper))
            # `own_containers` restores attributes.
            mark_cumulative(wrapper)
            around.enter_context(torch.enable_grad())
            around.enter_context(light_export(UserFrames(Watched.forward.__code__), run))
            around.enter_context(traced_through(casting.call))
            around.enter_context(GroupedProducts(grouped_mm, lambda x: True))
            around.enter_context(suppress(Followed))
            exported = torch.export.export(wrapper, args, kwargs, strict=False)
        others = other_functions(met.functions)
        if others:
            whole |= others
            casting.with_grad.clear()
            return _export(wrapper, args, kwargs, casting, whole, checks, run)
        if checks.tried is not None:
            fact = "raises on the value of a tensor, and the forward goes on where the exception is caught"
            raise TraceError(checks.site(), fact, VALUE_REMEDY)
        return exported, tuple(checkpoint_sites(wrapper.model, met.checkpointed))
    except AutoptdError:
        raise
    except Exception as error:
        if not checks.has_left(error):
            raise _refusal(error, checks) from error
    casting.with_grad.clear()
    return _export(wrapper, args, kwargs, casting, whole, checks, run)


def _refusal(error: Exception, checks: Checks) -> TraceError:
    """Make a TraceError from an exception of torch.export or of the model."""
    line = user_line(error)
    fact = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if OF_VALUES.search(fact):
        if (refusal := checks.sizes.refusal(error, called_at(error), line)) is not None:
            return refusal
        fact = "the value of a tensor becomes a Python number, and a branch or a size may follow it"
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
