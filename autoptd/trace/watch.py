"""Watch the model while it is traced, and refuse what a graph of its operators would drop silently.

Handled here: tensor hooks, custom autograd functions (`functions.py`), activation checkpoints (traced as plain
calls), unregistered parameters, single positions used as an index, numbers turned into tensors.

    with watch_tracing(wrapper, whole, checks) as met:
        recorder.record(args, kwargs)
    whole |= other_functions(met.functions)
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from autoptd.compat import DATA_DEPENDENT, FakeTensor, plain_checkpoints, tree_leaves
from autoptd.errors import AutoptdError, TraceError
from autoptd.ir.expert_mm import GroupedProducts, grouped_mm
from autoptd.subject.storage import attribute_tensors, check_storage, own_containers
from autoptd.trace.functions import Call, NeedsContext, call_whole, run_forward, takes_others
from autoptd.trace.loss import LossAndOutputs, WithLoss
from autoptd.trace.results import Results
from autoptd.trace.statistics import mark_cumulative
from autoptd.trace.tensor_values import Branches, Checks, make_tensor
from autoptd.trace.users import users_line
from autoptd.trace.writes import Writes

DATA, SET_DATA = Tensor.data.__get__, Tensor.data.__set__  # type: ignore[attr-defined]
VERSION = Tensor._version.__get__  # type: ignore[attr-defined]
DATA_REMEDY = "compute a new tensor, or write to a buffer: self.name.copy_(...)"
HOOK_REMEDY = "remove the hook: change the gradient after pm.step, or the model's forward"
REENTRANT_REMEDY = "checkpoint(..., use_reentrant=False), with transformers gradient_checkpointing_enable("
REENTRANT_REMEDY += "gradient_checkpointing_kwargs={'use_reentrant': False})"


def check_model(model: nn.Module) -> None:
    """Refuse what tracing would drop: backward hooks of modules and parameters, an ambient autocast."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        fact = "it is on around parallelize, and is not traced"
        raise TraceError("autocast", fact, "leave autocast off; cast the model")
    check_storage(model)
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise TraceError(name or "model", "has a backward hook, which is not traced", HOOK_REMEDY)
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise TraceError(name, "has a gradient hook, which is not traced", HOOK_REMEDY)


def check_loss_fn(loss_fn: object) -> None:
    """Refuse a loss function with parameters: the optimizer would not train them."""
    loss_fn = loss_fn.loss_fn if isinstance(loss_fn, LossAndOutputs) else loss_fn
    names = [name for name, _ in loss_fn.named_parameters()] if isinstance(loss_fn, nn.Module) else []
    if names:
        fact = f"it is a module with parameters ({', '.join(names)}), and only the model's are trained"
        raise TraceError("loss_fn", fact, "make it a part of the model, whose forward then returns the loss")


@dataclass
class Met:
    """Collect custom autograd functions, and the functions in activation checkpoints, in call order."""

    functions: list[Call] = field(default_factory=list)
    checkpointed: list[Any] = field(default_factory=list)


@contextmanager
def watch_tracing(wrapper: WithLoss, whole: set[Any], checks: Checks) -> Iterator[Met]:
    """Trace parts of a model that a graph of operators would drop: custom autograd functions as their forward,
    checkpoints as plain calls, grouped matmuls as ours, batch norms that average over all steps. Refuse tensor hooks.

    Functions in `whole` are one operator each; those that cannot be tested on random numbers are added to it.
    """
    met = Met()

    # Replaces `Function.apply`: the operators of its forward would be traced, and its backward silently dropped.
    def trace_function(cls: type, *args: Any, **kwargs: Any) -> Any:
        try:
            return called(cls, *args, **kwargs)
        except AutoptdError as error:
            checks.refuse(error)
            raise

    def called(cls: type, *args: Any, **kwargs: Any) -> Any:
        # torch's own Function that implements a registered operator: that is one node, with its backward.
        if cls.__module__ == "torch._library.autograd":
            return apply.__func__(cls, *args, **kwargs)
        if cls is CheckpointFunction:
            site = checkpoint_sites(wrapper.model, args[:1])[0]
            raise TraceError(site, "reentrant activation checkpointing is not traced", REENTRANT_REMEDY)
        call = Call.of(cls, args)
        if cls in whole or takes_others(args):
            whole.add(cls)
            return call_whole(cls, args)
        try:
            made = run_forward(cls, args)
        except NeedsContext:
            whole.add(cls)
            return call_whole(cls, args)
        met.functions.append(call)
        return made

    def refuse_hook(self: Tensor, hook: Callable[..., Any]) -> Any:
        fact = "a hook in the forward is not traced"
        raise checks.refuse(TraceError("Tensor.register_hook", fact, HOOK_REMEDY))

    apply, hook = torch.autograd.Function.__dict__["apply"], Tensor.register_hook
    torch.autograd.Function.apply = classmethod(trace_function)  # type: ignore[assignment, method-assign]
    Tensor.register_hook = refuse_hook  # type: ignore[method-assign]
    try:
        products = GroupedProducts(grouped_mm, lambda x: True)
        with plain_checkpoints() as met.checkpointed, own_containers(wrapper), products:
            # `own_containers` restores attributes.
            mark_cumulative(wrapper)
            yield met
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        Tensor.register_hook = hook  # type: ignore[method-assign]


class Operands(TorchFunctionMode):
    """Check the operands of every call in the traced forward: registered parameters are fake, others real.

    `writes` pauses inside torch's calls, which would take most of the tracing time.
    """

    def __init__(
        self, model: nn.Module, registered: dict[int, str], checks: Checks, results: Results, writes: Writes
    ) -> None:
        super().__init__()
        self._model, self._registered, self._writes = model, registered, writes
        self._checks, self._branches, self._results = checks, Branches(checks), results

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._writes.pause()
        try:
            if func is Tensor.__bool__:
                outcome = self._branches.outcome(args[0], sys._getframe(1))
                return func(*args) if outcome is None else outcome
            made = self._call(func, args, kwargs or {})
            self._branches.see(func, args, made)
            return made
        except (AutoptdError, *DATA_DEPENDENT) as error:
            self._checks.refuse(error)
            raise
        finally:
            self._writes.resume()

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._results.observe(func)
        for arg in args:
            if isinstance(arg, Tensor):
                self._check(arg)
            elif isinstance(arg, (list, tuple, dict)):
                self._check_all(arg)
        if kwargs:
            self._check_all(kwargs)
        # A 0-d index would become a Python number, which depends on values.
        if func is Tensor.__getitem__:
            args = _with_index_of_one(*args)
        if func is torch.tensor:
            return make_tensor(args, kwargs)
        # `.data` of a fake parameter would become a new constant.
        if func == DATA:
            return args[0].detach()
        if func == SET_DATA and isinstance(args[0], FakeTensor):
            fact = "has its data replaced by the forward (tensor.data = ...), which the traced graph would not do"
            raise TraceError(f"a tensor of shape {tuple(args[0].shape)} ({users_line()})", fact, DATA_REMEDY)
        if func == VERSION and isinstance(args[0], FakeTensor):
            fact = "has its number of writes read by the forward (tensor._version), which the traced graph would not count"
            remedy = "count them in a buffer, or outside of the model"
            raise TraceError(f"a tensor of shape {tuple(args[0].shape)} ({users_line()})", fact, remedy)
        return func(*args, **kwargs)

    def _check_all(self, nested: Any) -> None:
        for leaf in tree_leaves(nested):
            if isinstance(leaf, Tensor):
                self._check(leaf)

    def _check(self, one: Tensor) -> None:
        # Registered parameters are fake during tracing: a real one was reached another way.
        if isinstance(one, FakeTensor) or not (one.requires_grad or isinstance(one, nn.Parameter)):
            return
        if id(one) in self._registered:
            fact = "is read from a list or a global, where tracing sees no parameter"
            raise TraceError(self._registered[id(one)], fact, "read it from its module: self.weight")
        names = [path for path, tensor in attribute_tensors(self._model) if tensor is one]
        kind = "parameter" if isinstance(one, nn.Parameter) else "tensor that requires a gradient"
        name = names[0] if names else f"a {kind} of shape {tuple(one.shape)}"
        fact = f"is read by the forward ({users_line()}) but is not a registered parameter: it would not be trained"
        raise TraceError(
            name,
            fact,
            "assign it to a module (self.name = nn.Parameter(...), nn.ParameterList), or .detach() it",
        )


def called_at(error: BaseException) -> Any:
    """Return the torch function whose call raised the error; None if there is none."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code is not Operands.__torch_function__.__code__:
        frame = frame.tb_next
    return frame.tb_frame.f_locals["func"] if frame is not None else None


def _with_index_of_one(x: Tensor, index: Any) -> tuple[Tensor, Any]:
    """Rewrite `x[i.argmax()]` as a gather of one position, so that the index stays a tensor."""
    items = list(index) if isinstance(index, tuple) else [index]
    advanced = [i for i, item in enumerate(items) if isinstance(item, (Tensor, list))]
    if len(advanced) != 1 or not _is_position(items[advanced[0]]):
        return x, index
    at = advanced[0]
    taken = sum(isinstance(item, (Tensor, int, slice)) and not isinstance(item, bool) for item in items)
    dims = [1 if isinstance(item, slice) or item is None else 0 for item in items[:at]]
    dims += [x.dim() - taken for item in items[:at] if item is Ellipsis]
    items[at] = items[at].reshape(1)
    gathered = x[tuple(items)]
    return gathered, (*[slice(None)] * sum(dims), 0)


def _is_position(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dim() == 0 and item.dtype in (torch.int64, torch.int32)


def checkpoint_sites(model: nn.Module, functions: Any) -> list[str]:
    """Name the modules that activation checkpoints wrap.

    A function that is not a module's method is listed by its own name.
    """
    names = {id(module): name for name, module in model.named_modules()}
    found = []
    for function in functions:
        # transformers checkpoints a partial of a bound method: look in its arguments and `__self__`.
        bound: list[Any] = [function]
        while isinstance(function, functools.partial):
            bound += function.args
            function = function.func
        bound += [function, getattr(function, "__self__", None)]
        modules = [names[id(argument)] for argument in bound if names.get(id(argument))]
        found.append(modules[0] if modules else getattr(function, "__qualname__", type(function).__name__))
    return list(dict.fromkeys(found))
