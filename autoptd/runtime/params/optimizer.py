"""Create torch optimizers over local parameters, with state dicts in the model's own names.

In: an optimizer class, groups by names, globs or tensors, and the parameters of the ranks of this process (all ranks as
threads, or one). Out: an instance of the class over those local tensors, so that learning-rate schedulers work. Its
`state_dict` is a collective that returns full tensors by original names on rank 0:

    {"state": {"lm_head.weight": {"step": ..., "exp_avg": <full>}}, "param_groups": [{"lr": ..., "params": ["lm_head.weight"]}]}

A state dict of torch's own optimizers, which number parameters, is loaded as well. Elementwise optimizers step shards, if
they treat these like the full parameters (`trial.py`). Others, such as Muon, step whole tensors at their homes (`whole.py`).

    opt = make_optimizer(torch.optim.AdamW, ranks, run, params=[{"params": ["*.weight"], "weight_decay": 0.1}], lr=3e-4)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import optim

from autoptd.errors import PlanError
from autoptd.program.specs import ParamSpec
from autoptd.runtime.ops.shards import real_rows
from autoptd.runtime.params.full_values import gather_full
from autoptd.runtime.params.grad_norm import grad_norm
from autoptd.runtime.params.guard import install_guards, remove_guards, unguarded
from autoptd.runtime.params.loss_scale import LossScaler
from autoptd.runtime.params.parameters import RankParameters
from autoptd.runtime.params.parts import dtype_of, own_piece, shard_of
from autoptd.runtime.params.storage import alias
from autoptd.runtime.params.trial import (
    ELEMENTWISE,
    NamedGroups,
    ShapeTrial,
    check_elementwise,
    check_independent,
)
from autoptd.runtime.params.whole import Homes, is_whole

Result = TypeVar("Result")
# Runs a collective on all ranks; returns rank 0's (or this rank's) result.
Run = Callable[[Callable[[RankParameters], Result]], Result]
# Called with the optimizer, and the arguments of its step.
Hook = Callable[..., None]
# By parameter: the optimizer's state of it.
State = dict[str, dict[str, Any]]
SITE = "optimizer.load_state_dict"
# Classes with a fused form on the CPU and on CUDA.
FUSED: tuple[type[optim.Optimizer], ...] = (optim.Adam, optim.AdamW, optim.SGD)
# A user who passes one of these has chosen.
CHOICES = ("fused", "foreach", "differentiable", "capturable")


@dataclass(frozen=True)
class Binding:
    """An optimizer's link to the ranks: their parameters, a runner of collectives, and names per group.

    `homes` has by rank the whole tensors that it steps; it is empty for an optimizer that steps what ranks store.
    """

    ranks: tuple[RankParameters, ...]
    run: Run[Any]
    groups: tuple[tuple[str, ...], ...]
    homes: Mapping[int, Homes]


class NamedOptimizer(optim.Optimizer):
    """Mixin, placed before the user's class, whose state dict has full tensors under original names."""

    binding: Binding
    # Set with precision="fp16", else None.
    loss_scale: LossScaler | None = None
    # Number of `step` calls skipped for a non-finite gradient, and whether the last one was.
    skipped: int = 0
    # Called by `zero_grad`.
    on_zero: Callable[[], None] | None = None
    step_was_skipped: bool = False
    # Number of completed `step` calls.
    updates: int = 0
    # Whether the step of the class runs: a user-defined one may call torch's, around which hooks run again.
    is_within: bool = False
    # The hook that must run last, and its handle.
    finish: Hook | None = None
    finish_hook: Any = None

    # Hidden from type checkers, which would accept any attribute.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            # `accelerator.prepare` asks for it, and would wrap an optimizer whose state_dict is collective.
            if name == "_is_accelerate_prepared":
                fact = (
                    "the optimizer of the ranks needs no accelerator, whose save_state would save no weights"
                )
                raise PlanError(
                    "accelerator.prepare", fact, "leave pm and the optimizer out; pm.save(folder, optimizer)"
                )
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
            )

    def step(self, *args: Any, **kwargs: Any) -> Any:
        own: Any = super().step
        # Hooks run around this method: not once more around that of a class with other instances.
        if getattr(own, "hooked", False):
            own = partial(own.__wrapped__, self)
        self.is_within = True
        try:
            return own(*args, **kwargs)
        finally:
            self.is_within = False

    def state_dict(self) -> dict[str, Any]:
        """Return the full state on rank 0 and for ranks as threads, {} elsewhere; a collective."""
        homes = self.binding.homes

        def gather(params: RankParameters) -> State:
            if not homes:
                return gather_state(params, self.state)
            return homes[params.world.rank].gather_state(self.state)

        state = self.binding.run(gather)
        if not any(params.world.rank == 0 for params in self.binding.ranks):
            return {}
        scale = {} if self.loss_scale is None else {"loss_scale": self.loss_scale.state_dict()}
        return {"state": state, "param_groups": self.named_groups(), **scale}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of full tensors, the same on every rank; raise PlanError if its groups differ.

        A state dict of a torch optimizer over the unmodified model is accepted, too: see `to_names`.
        """
        homes = self.binding.homes
        if is_numbered(state_dict):
            is_like = not is_whole(type(self))
            state_dict = to_names(state_dict, self.binding.ranks[0].specs, self.binding.groups, is_like)
        check_groups(state_dict["param_groups"], self.binding.groups, SITE)
        # In torch's format groups hold indices instead of parameters.
        own = super().state_dict()["param_groups"]
        pairs = zip(state_dict["param_groups"], own, strict=True)
        groups = [{**saved, "params": numbers["params"]} for saved, numbers in pairs]
        # Ranks as threads share one optimizer: a parameter occurs once per rank that holds a part of it.
        holders: dict[int, tuple[RankParameters | Homes, ParamSpec]] = {}
        for params in self.binding.ranks:
            stepped = homes.get(params.world.rank, params)
            holders |= {id(x): (stepped, spec) for spec, x in stored_of(stepped)}
        state = {}
        for group, numbers in zip(self.param_groups, own, strict=True):
            for parameter, number in zip(group["params"], numbers["params"], strict=True):
                holder, spec = holders[id(parameter)]
                if spec.name in state_dict["state"]:
                    state[number] = local_record(holder, spec, state_dict["state"][spec.name])
        super().load_state_dict({"state": state, "param_groups": groups})
        if self.loss_scale is not None and "loss_scale" in state_dict:
            self.loss_scale.load_state_dict(state_dict["loss_scale"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        # torch's constructor calls this too, for each group, before there is a binding.
        if hasattr(self, "binding"):
            raise PlanError(
                "optimizer.add_param_group", "groups are fixed", "pass all groups to pm.optimizer(params=...)"
            )
        super().add_param_group(param_group)

    def register_step_post_hook(self, hook: Any) -> Any:
        handle = super().register_step_post_hook(hook)
        if self.finish is not None:
            # The user's hooks may change weights, so publish after them.
            self.finish_hook.remove()
            self.finish_hook = super().register_step_post_hook(self.finish)
        return handle

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.on_zero is not None:
            self.on_zero()
        with unguarded():
            super().zero_grad(set_to_none)
            for params in self.binding.ranks:
                params.zero_gradients(chain.from_iterable(self.binding.groups), set_to_none)
                params.is_update_due = False

    def named_groups(self) -> list[dict[str, Any]]:
        """Return the groups with the names of their parameters."""
        pairs = zip(self.param_groups, self.binding.groups, strict=True)
        return [{**group, "params": list(names)} for group, names in pairs]


def check_groups(groups: Sequence[Mapping[str, Any]], own_groups: Sequence[Sequence[str]], site: str) -> None:
    """Raise PlanError unless the saved groups hold the same parameters as an optimizer's own."""
    saved = [list(group["params"]) for group in groups]
    remedy = "create the optimizer with the saved groups"
    if len(saved) != len(own_groups):
        fact = f"{len(saved)} groups were saved, this optimizer has {len(own_groups)}"
        raise PlanError(site, fact, remedy)
    findings = []
    for i, (names, own) in enumerate(zip(saved, own_groups, strict=True)):
        if unknown := set(names) - set(own):
            findings.append(f"group {i} was saved with {_some_of(unknown)}")
        if missing := set(own) - set(names):
            findings.append(f"group {i} lacks {_some_of(missing)}")
    if findings:
        raise PlanError(site, f"{'; '.join(findings)}, unlike this optimizer's", remedy)


def make_optimizer(
    cls: type[optim.Optimizer],
    ranks: Sequence[RankParameters],
    run: Run[Any],
    params: Iterable[Any] | None = None,
    loss_scale: LossScaler | None = None,
    **keywords: Any,
) -> NamedOptimizer:
    """Return an instance of (a subclass of) `cls` over the local parameters of `ranks`; a collective.

    `params` is None (all), or names, globs, tensors and (name, tensor) pairs, or group dicts with such "params". Where
    torch has a fused form of `cls`, that is the default. PlanError for a `cls` that is neither elementwise nor known to
    step whole tensors.
    """
    mine = resolve_groups(ranks, params)
    specs = ranks[0].specs
    # From the specs, which are the same on all ranks: some ranks have no piece of any parameter.
    mesh = ranks[0].world.mesh
    sharing = {spec.sharing_axes for spec in specs}
    has_pieces = any(mesh.degree(axis) > 1 for axis in chain.from_iterable(sharing))
    options = [options for _, options in mine]
    if is_whole(cls):
        check_independent(cls, keywords, options)
    else:
        check_elementwise(cls, keywords, options, has_pieces=has_pieces)
    groups = _agree(run, [names for names, _ in mine], [spec.name for spec in specs])
    # No name matches: torch rejects an empty list too.
    if specs and not any(groups):
        fact, remedy = (
            "has no parameter in any group",
            f"names such as {specs[0].name!r}, or None for all parameters",
        )
        raise PlanError(f"pm.optimizer({cls.__name__}, params)", fact, remedy)
    named_groups = [(names, options) for names, (_, options) in zip(groups, mine, strict=True)]
    # From the parameters of all ranks, so that all ranks decide alike.
    dtypes = {dtype_of(spec.storage.dtype) for spec in specs}
    if takes_fused(cls, [keywords, *(options for _, options in mine)], ranks[0].world.device, dtypes):
        keywords["fused"] = True
    # Of the user's class by name and by `isinstance`; the methods of NamedOptimizer come first.
    named_class = type(cls.__name__, (NamedOptimizer, cls), {"__doc__": cls.__doc__})
    homes: dict[int, Homes] = {}
    if is_whole(cls) and len(mesh.ranks_at(0)) > 1:
        run(lambda rank: homes.update({rank.world.rank: Homes(rank, chain.from_iterable(groups))}))
    homes = dict(sorted(homes.items()))
    stepped = [homes.get(rank.world.rank, rank) for rank in ranks]
    trial = ShapeTrial(cls, keywords, stepped, named_groups)
    if is_whole(cls):
        # What its constructor refuses, it refuses on all ranks.
        trial.check_whole()
    try:
        with unguarded():
            optimizer = named_class(_local_groups(cls, stepped, named_groups), **keywords)
    except Exception as error:
        # It may be refused on this rank alone.
        if len(ranks) == 1:
            ranks[0].world.report_fault(error)
        raise
    if cls not in ELEMENTWISE:
        groups = names_in_groups(trial, optimizer, run)
    optimizer.binding = Binding(tuple(ranks), run, groups, homes)
    optimizer.loss_scale = loss_scale
    for rank in ranks:
        rank.is_lent = True
    register_hooks(optimizer, ranks, run)
    return optimizer


def resolve_groups(
    ranks: Sequence[RankParameters], params: Iterable[Any] | None
) -> list[tuple[list[str], dict[str, Any]]]:
    """Return (names, options) per group; raise PlanError for an unknown parameter or one in two groups."""
    specs = ranks[0].specs
    if params is None:
        return [([spec.name for spec in specs], {})]
    items: list[Any] = [params] if isinstance(params, (str, torch.Tensor)) else list(params)
    if not any(isinstance(item, Mapping) for item in items):
        items = [{"params": items}]
    name_of = {id(x): name for rank in ranks for name, x in rank.local.items()}
    groups, seen = [], set[str]()
    for group in items:
        wanted = group["params"]
        wanted = [wanted] if isinstance(wanted, (str, torch.Tensor)) else wanted
        # One parameter may match several globs of a group.
        matched: dict[str, None] = {}
        for item in wanted:
            matched |= dict.fromkeys(_names(item, specs, name_of))
        names = list(matched)
        twice = sorted(seen.intersection(names))
        if twice:
            raise PlanError(
                "optimizer groups", f"{', '.join(twice)} are in two groups", "name each parameter once"
            )
        seen.update(names)
        groups.append((names, {key: value for key, value in group.items() if key != "params"}))
    return groups


def _names(item: Any, specs: Sequence[ParamSpec], name_of: Mapping[int, str]) -> list[str]:
    """Return the first names of the parameters that one entry of a group selects."""
    if isinstance(item, tuple):
        item = item[0]
    if isinstance(item, torch.Tensor):
        if id(item) not in name_of:
            fact = f"a tensor of shape {tuple(item.shape)} is not a local parameter"
            raise PlanError(
                "optimizer groups", fact, "take tensors from pm.named_parameters(), or give names"
            )
        return [name_of[id(item)]]
    # A name may contain glob characters, such as `[`.
    found = [spec.name for spec in specs if item in (spec.name, *spec.aliases)]
    if not found:
        named = [(spec.name, alias) for spec in specs for alias in (spec.name, *spec.aliases)]
        found = list(dict.fromkeys(name for name, alias in named if fnmatchcase(alias, item)))
    if not found:
        raise PlanError(
            "optimizer groups",
            f"{item!r} does not match any parameter",
            "the model's own names, or globs such as '*.bias'",
        )
    return found


def _agree(run: Run[Any], mine: list[list[str]], order: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the names of each group over all ranks: groups given as tensors contain local ones only."""
    everywhere = run(lambda params: params.world.everyone().gather_objects(mine, "optimizer groups"))
    if len({len(groups) for groups in everywhere}) > 1:
        sizes = [len(groups) for groups in everywhere]
        raise PlanError(
            "optimizer groups", f"ranks have {sizes} groups", "create the same groups on every rank"
        )
    agreed = []
    for i in range(len(mine)):
        named = set().union(*(groups[i] for groups in everywhere))
        # In the program's order, which is the same on all ranks.
        agreed.append(tuple(name for name in order if name in named))
    return tuple(agreed)


def _some_of(names: Collection[str], most: int = 4) -> str:
    """Return `a, b and 3 more`."""
    shown = ", ".join(sorted(names)[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def _local_groups(
    cls: type[optim.Optimizer], ranks: Sequence[RankParameters | Homes], groups: NamedGroups
) -> list[Any]:
    """Return the optimizer's first argument: groups of local tensors, or a list of tensors without groups."""
    local: list[dict[str, Any]] = []
    for names, options in groups:
        tensors = [rank.stored[name] for name in names for rank in ranks if name in rank.stored]
        local.append({**options, "params": tensors})
    # A user-defined constructor often iterates over the parameters; torch's rejects an empty list.
    is_list = cls not in ELEMENTWISE and len(local) == 1 and not groups[0][1]
    return local[0]["params"] or local if is_list else local


def names_in_groups(
    trial: ShapeTrial, optimizer: optim.Optimizer, run: Run[Any]
) -> tuple[tuple[str, ...], ...]:
    """Return the names in each group of a user-defined class, which may have regrouped its parameters.

    Raise PlanError if it would treat the full parameters of the model differently; a collective.
    """
    finding = trial.finding(optimizer.param_groups)
    findings = run(lambda params: params.world.everyone().gather_objects(finding, "optimizer groups"))
    for text in filter(None, findings):
        remedy = "choose groups by p.ndim, which is the same on every mesh, or by names: pm.optimizer(params=[{...}, ...])"
        raise PlanError(f"optimizer {type(optimizer).__name__}", text, remedy)
    mine = [trial.names(group) for group in optimizer.param_groups]
    # In the order of an optimizer of the whole model, whose state dict numbers parameters.
    return _agree(run, mine, trial.order)


def register_hooks(optimizer: NamedOptimizer, ranks: Sequence[RankParameters], run: Run[Any]) -> None:
    """Register the hooks that run before and after every `step` of an optimizer, in this order."""

    def before(hook: Hook) -> None:
        optimizer.register_step_pre_hook(outermost(hook))

    def after(hook: Hook) -> Any:
        return optimizer.register_step_post_hook(outermost(hook))

    every = [x for group in optimizer.param_groups for x in group["params"]]
    if len(ranks) == 1:
        # A step may have returned before the device failed. (Rank threads are stopped by their pool.)
        before(lambda *_: ranks[0].world.raise_first_fault())
    homes = optimizer.binding.homes
    if optimizer.loss_scale is not None or homes or any(rank.is_apart for rank in ranks):
        before(refuse_closure)
    for rank in ranks:
        before(lambda *_, rank=rank: before_update(rank))  # type: ignore[misc]
    if homes:
        before(collect)
    if optimizer.loss_scale is not None:
        hide, show = hiding_where_infinite(optimizer, optimizer.loss_scale, every, run)
        before(hide)
        after(show)
    # torch's foreach and fused implementations accept its own tensor classes only.
    before(lambda *_: remove_guards(every))
    before(lambda *_: lay_out(optimizer.param_groups))
    # After what works on plain tensors.
    after(lambda *_: install_guards(every))
    paddings = [padding for rank in ranks for padding in padding_of(rank)]
    is_apart = any(rank.is_apart for rank in ranks)

    def finish(*_: Any) -> None:
        optimizer.updates += 1
        if homes:
            spread(optimizer)
        clear_padding(paddings)
        if is_apart:
            publish(optimizer, run)

    optimizer.finish = outermost(finish)
    optimizer.finish_hook = optim.Optimizer.register_step_post_hook(optimizer, optimizer.finish)


def outermost(hook: Hook) -> Hook:
    """Return a hook that does not run around the step of torch's class that a user-defined step calls."""

    def call(optimizer: NamedOptimizer, *given: Any) -> None:
        if not optimizer.is_within:
            hook(optimizer, *given)

    return call


def hiding_where_infinite(
    optimizer: NamedOptimizer, scale: LossScaler, parameters: Sequence[torch.Tensor], run: Run[Any]
) -> tuple[Hook, Hook]:
    """Return hooks that make `step` a no-op, by hiding the gradients, if one is not finite on any rank."""
    hidden: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    @unguarded()
    def hide(*_: Any) -> None:
        hidden.clear()
        optimizer.step_was_skipped = scale.settle(lambda: run(grad_norm))
        if optimizer.step_was_skipped:
            optimizer.skipped += 1
            hidden.extend((x, x.grad) for x in parameters)
            for x in parameters:
                x.grad = None

    @unguarded()
    def show(*_: Any) -> None:
        for x, gradient in hidden:
            x.grad = gradient
        hidden.clear()

    return hide, show


def refuse_closure(_: optim.Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise PlanError for `step(closure)`: gradients are handed over before the closure would be called."""
    if any(callable(arg) for arg in (*args, *kwargs.values())):
        fact = "does not take a closure with precision=, zero=1 or whole matrices: its gradients would come too late"
        raise PlanError("optimizer.step", fact, "pm.step(...) first, then optimizer.step()")


def publish(optimizer: NamedOptimizer, run: Run[Any]) -> None:
    """Publish an update to all ranks that use it, if there was one."""
    if not optimizer.step_was_skipped:
        run(RankParameters.publish)


def collect(optimizer: NamedOptimizer, *_: Any) -> None:
    """Bring values and gradients of whole tensors home, before an update."""
    homes = optimizer.binding.homes
    optimizer.binding.run(lambda params: homes[params.world.rank].collect())


def spread(optimizer: NamedOptimizer) -> None:
    """Send updated whole tensors to all ranks that store them, if there was an update."""
    homes = optimizer.binding.homes
    if not optimizer.step_was_skipped:
        optimizer.binding.run(lambda params: homes[params.world.rank].spread())
    for home in homes.values():
        home.forget()


@unguarded()
def before_update(params: RankParameters) -> None:
    """Copy the user's edits of parameters and their gradients to storage."""
    # Parameters must not change while the last update is still being sent.
    params.wait()
    params.absorb_edits()
    params.hand_gradients()
    params.is_update_due = False


def takes_fused(
    cls: type[optim.Optimizer],
    groups: Iterable[Mapping[str, Any]],
    device: torch.device,
    dtypes: Iterable[torch.dtype],
) -> bool:
    """Tell whether `fused=True` is the default of an optimizer; `groups` are its keywords, and those of each group.

    A fused optimizer makes one pass over parameters, gradients and moments instead of one per operation. All ranks decide
    alike, because copies of a parameter must stay equal.
    """
    if cls not in FUSED or device.type not in ("cpu", "cuda"):
        return False
    if not all(dtype.is_floating_point for dtype in dtypes):
        return False
    for keywords in groups:
        # A learning rate in a tensor is not supported by all fused kernels.
        if isinstance(keywords.get("lr"), torch.Tensor) or any(name in keywords for name in CHOICES):
            return False
    return True


def lay_out(groups: Iterable[Mapping[str, Any]]) -> None:
    """Make the gradients of fused groups contiguous, as their parameters and loaded state are.

    The CPU's fused kernels ignore strides (torch 2.11 to 2.13; CUDA's refuse tensors with different ones).
    """
    for group in groups:
        for parameter in group["params"] if group.get("fused") else ():
            grad = parameter.grad
            if grad is not None and grad.layout is torch.strided and not grad.is_contiguous():
                parameter.grad = grad.contiguous()


class Padding(NamedTuple):
    """The padding of a parameter that this rank stores: a view of it, or its indices in a flat piece."""

    stored: torch.Tensor
    indices: torch.Tensor | None


def padding_of(params: RankParameters) -> list[Padding]:
    """Return the padding in what a rank stores, parameter by parameter."""
    found = []
    for spec in params.specs:
        size, x = spec.padded_size(params.world.mesh), params.stored.get(spec.name)
        if not size or x is None:
            continue
        local = params.local[spec.name]
        width = local.shape[spec.cut_dim]
        real = real_rows(size, width, own_piece(spec, params.world)[0])
        if not params.is_shared(spec.name):
            found.append(Padding(alias(x).narrow(spec.cut_dim, real, width - real), None))
            continue
        mask = torch.zeros(local.shape, dtype=torch.bool, device=x.device)
        mask.narrow(spec.cut_dim, real, width - real).fill_(True)
        piece = params.piece_of(spec.name, mask)
        assert piece is not None
        found.append(Padding(alias(x).view(-1), piece.view(-1).nonzero().flatten()))
    return found


@torch.no_grad()
def clear_padding(paddings: Sequence[Padding]) -> None:
    """Set the padding of parameters to zero again: without an epsilon, an optimizer computes 0 / 0 there."""
    for stored, indices in paddings:
        if indices is None:
            stored.zero_()
        else:
            stored.index_fill_(0, indices, 0)


def gather_state(params: RankParameters, state: Mapping[torch.Tensor, Mapping[str, Any]]) -> State:
    """Return the optimizer's state with full CPU tensors by name on rank 0, {} elsewhere; a collective of all ranks."""
    world = params.world
    # First all ranks learn which state every parameter has: gathering a tensor is a collective of all of them.
    mine: State = {}
    for spec, x in stored_of(params):
        # Copies of a parameter have equal state: one rank describes it for all.
        if spec.name in params.counted and x in state:
            mine[spec.name] = {key: _described(value, x) for key, value in state[x].items()}
    described: State = {}
    for part in world.everyone().gather_objects(mine, "optimizer state"):
        described |= part
    full: State = {}
    for spec in params.specs:
        own = params.stored.get(spec.name)
        for key, value in described.get(spec.name, {}).items():
            if isinstance(value, Whole):
                shard = None if own is None else state[own][key]
                value = gather_full(params, spec, shard, value.dtype)
            full.setdefault(spec.name, {})[key] = value
    return full if world.rank == 0 else {}


@dataclass(frozen=True)
class Whole:
    """A placeholder for a tensor that is laid out and gathered like its parameter."""

    dtype: torch.dtype


def _described(value: Any, parameter: torch.Tensor) -> Any:
    """Return one entry of a parameter's state, `Whole` in place of a tensor of the parameter's shape."""
    if not isinstance(value, torch.Tensor):
        return value
    # Moments have the parameter's shape; what has another one (a step count, 0-d) is the same on every rank.
    is_like_parameter = value.dim() > 0 and value.shape == parameter.shape
    return Whole(value.dtype) if is_like_parameter else value.detach().to("cpu", copy=True)


def local_record(
    params: RankParameters | Homes, spec: ParamSpec, record: Mapping[str, Any]
) -> dict[str, Any]:
    """Return this rank's part of one parameter's state, in new tensors: at its home, that is all of it."""
    local = {}
    for key, value in record.items():
        if isinstance(value, torch.Tensor):
            # A step count is 0-d, as the moments of a 0-d parameter are.
            is_like = tuple(value.shape) == spec.shape and (value.dim() > 0 or key != "step")
            if is_like and not isinstance(params, Homes):
                value = params.piece_of(spec.name, shard_of(spec, value, params.world))
            value = value.clone(memory_format=torch.contiguous_format)
        local[key] = value
    return local


def stored_of(params: RankParameters | Homes) -> list[tuple[ParamSpec, torch.Tensor]]:
    return [(spec, params.stored[spec.name]) for spec in params.specs if spec.name in params.stored]


def is_numbered(state_dict: Mapping[str, Any]) -> bool:
    return any(isinstance(name, int) for group in state_dict["param_groups"] for name in group["params"])


def to_names(
    state_dict: Mapping[str, Any], specs: Sequence[ParamSpec], groups: Sequence[Sequence[str]], is_like: bool
) -> dict[str, Any]:
    """Return a state dict of torch's optimizers with names instead of numbers; PlanError if groups or shapes differ.

    torch numbers parameters in the order of the groups, and within a group in that of the model. With `is_like`, tensors
    in the state of a parameter have its shape.
    """
    by_name = {spec.name: spec for spec in specs}
    saved = state_dict["param_groups"]
    fact = f"comes from a torch optimizer, with {[len(group['params']) for group in saved]} numbered parameters in its groups"
    remedy = "create this optimizer with the same groups, each in the order of model.named_parameters()"
    if len(saved) != len(groups):
        raise PlanError(SITE, f"{fact}, but this optimizer has {list(map(len, groups))}", remedy)
    name_of: dict[int, str] = {}
    for group, names in zip(saved, groups, strict=True):
        trained = [name for name in names if by_name[name].requires_grad]
        # Frozen parameters may have been left out.
        fits = next((some for some in (names, trained) if len(some) == len(group["params"])), None)
        if fits is None:
            raise PlanError(SITE, f"{fact}, but this optimizer has {list(map(len, groups))}", remedy)
        name_of |= dict(zip(group["params"], fits, strict=True))
    for number, record in state_dict["state"].items():
        shape = by_name[name_of[number]].shape
        for key, value in record.items():
            is_other = isinstance(value, torch.Tensor) and value.dim() and tuple(value.shape) != shape
            if is_like and is_other:
                text = f"{key} of parameter {number} has shape {tuple(value.shape)}, and {name_of[number]} {shape}"
                raise PlanError(SITE, f"{fact}: {text}", remedy)
    named_groups = [{**group, "params": list(names)} for group, names in zip(saved, groups, strict=True)]
    state = {name_of[number]: record for number, record in state_dict["state"].items()}
    return {**state_dict, "state": state, "param_groups": named_groups}
