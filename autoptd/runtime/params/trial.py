"""Check that an optimizer may step shards: it is elementwise, and treats local tensors like the full parameters.

In: a torch optimizer's class, its keywords, the options of its groups, and the parameters of the ranks. Out: nothing, or
the reason why it may not.

- `check_elementwise`: the update of a shard must be the shard of the update. torch's own optimizers are known, as are
  subclasses that override no method. Other classes step small tensors a few times: whole, in halves and, for ZeRO, in flat
  pieces.
- `ShapeTrial`: a constructor may choose groups by `p.ndim` (the same in every shard and piece), by `p.numel()` (it is not)
  or by position; `step` may skip small tensors. So the groups of a user-defined class are compared with those that it makes
  from the full shapes and then, for every pair of different shapes, the operators of two steps and their numeric arguments.
  No values are computed: the tensors are on the meta device.

    check_elementwise(torch.optim.AdamW, {"lr": 1e-3}, [{"weight_decay": 0.1}], has_pieces=True)
    ShapeTrial(cls, keywords, ranks, [(names, options)]).finding(optimizer.param_groups)     # "" or the reason
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain, product
from typing import Any, NamedTuple, Protocol

import torch
from torch import optim

from autoptd.compat import TorchDispatchMode, tree_leaves
from autoptd.errors import PlanError
from autoptd.ir.scopes import on_cpu
from autoptd.program.specs import ParamSpec
from autoptd.runtime.params.parts import dtype_of
from autoptd.runtime.params.storage import as_piece

# The settings of a group, without its parameters.
Options = Mapping[str, Any]
Tensors = list[torch.Tensor]

ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.Adagrad,
    optim.RMSprop,
    optim.Rprop,
    optim.Adamax,
    optim.Adadelta,
    optim.ASGD,
)
# Every dim is even, so that it can be halved.
SHAPES = ((6, 4), (4,), (2, 4, 6))
# The scale of the gradients in each of the trial steps: a norm or a bound within the optimizer shows at one of them.
SCALES = (1.0, 1e-3, 1e3, 1e-6)
# Scales of the initial parameters: an optimizer may bound a step by the norm of the parameter.
STARTS = (1.0, 1e-4)
# For classes that take matrices only.
MATRICES = ((6, 4), (4, 6), (4, 4))
DEPENDS = "its update of a tensor depends on which other tensors are in the group"


def check_elementwise(
    cls: type[optim.Optimizer],
    keywords: Mapping[str, Any],
    groups: Sequence[Options] = ({},),
    *,
    has_pieces: bool = False,
) -> None:
    """Raise PlanError for a class that is neither known to be elementwise nor found to be by trial.

    `groups` are the options of its groups. With `has_pieces` it steps flat pieces of parameters, as ZeRO stores them.
    """
    # `elementwise = True` on a class is its author's word: see the remedies below.
    if cls in ELEMENTWISE or getattr(cls, "elementwise", False):
        return
    base = next((parent for parent in cls.__mro__ if parent in ELEMENTWISE), None)
    if base is None:
        raise PlanError(
            f"optimizer {cls.__name__}",
            "is not known to be elementwise, so shards might be updated differently from the whole",
            f"one of {', '.join(known.__name__ for known in ELEMENTWISE)}, or a class derived from one; "
            "or set elementwise = True on the class if it is, else whole = True, with which it steps whole tensors",
        )
    own = own_methods(cls)
    if own and (reason := try_parts(cls, keywords, groups, has_pieces)):
        fact = f"derives from {base.__name__} and overrides its {own[0]}: {reason}"
        remedy = f"{base.__name__}; or set whole = True on the class, with which it steps whole tensors, or elementwise = True "
        remedy += "if that difference is intended"
        raise PlanError(f"optimizer {cls.__name__}", fact, remedy)


def check_independent(
    cls: type[optim.Optimizer], keywords: Mapping[str, Any], groups: Sequence[Options] = ({},)
) -> None:
    """Raise PlanError for a class of whole tensors whose update of one depends on others, as far as a trial shows."""
    if cls.__module__.startswith("torch.optim."):
        return
    generator = torch.Generator("cpu").manual_seed(0)
    sets = []
    for _ in range(3):
        sets.append(
            [torch.randn(size, generator=generator, dtype=torch.float64, device="cpu") for size in MATRICES]
        )
    first, *grads = sets
    try:
        with torch.random.fork_rng(devices=[]):
            whole = _train(cls, keywords, groups, first, grads)
            depends = _depends_on_others(cls, keywords, groups, first, grads, whole)
    except Exception:
        # It may take other tensors only; what it promises is believed.
        return
    if depends:
        fact = f"whole = True, but {DEPENDS}, and each rank steps some of the model's tensors"
        remedy = "an update of a tensor from its own values, gradient and state; pm.clip_grad_norm_ for a norm of all"
        raise PlanError(f"optimizer {cls.__name__}", fact, remedy)


def own_methods(cls: type) -> list[str]:
    """Return the methods of torch's own class that classes derived from it override, the constructor last."""
    base = next((parent for parent in cls.__mro__ if parent in ELEMENTWISE), None)
    between = cls.__mro__ if base is None else cls.__mro__[: cls.__mro__.index(base)]
    names = {name for derived in between for name in vars(derived)}
    found = sorted(
        name for name in names if hasattr(base or optim.Optimizer, name) and not name.startswith("__")
    )
    return found + ["constructor"] * ("__init__" in names)


# The trial must not advance the user's random state.
@torch.random.fork_rng(devices=[])
def try_parts(
    cls: type[optim.Optimizer], keywords: Mapping[str, Any], groups: Sequence[Options], has_pieces: bool
) -> str:
    """Step small tensors whole, in halves along every dim, in pieces, and without the first; return why the results
    differ, or "".
    """
    torch.manual_seed(0)
    values = [torch.randn(size, dtype=torch.float64, device="cpu") for size in SHAPES]
    for start in STARTS:
        first = [start * x for x in values]
        if reason := _try_from(first, cls, keywords, groups, has_pieces):
            return reason
    return ""


def _try_from(
    first: Tensors,
    cls: type[optim.Optimizer],
    keywords: Mapping[str, Any],
    groups: Sequence[Options],
    has_pieces: bool,
) -> str:
    grads = []
    for scale in SCALES:
        grads.append([scale * torch.randn_like(x) for x in first])
    # The parts that one of two ranks has, with their description.
    cuts = [
        (f"halves of a tensor along dim {dim}", partial(_half, dim=dim, number=number))
        for dim in range(max(map(len, SHAPES)))
        for number in range(2)
    ]
    if has_pieces:
        what = "flat pieces of a tensor, in which zero=1 divides it,"
        cuts += [(what, partial(_piece, number=number)) for number in range(2)]
    try:
        whole = _train(cls, keywords, groups, first, grads)
        for what, cut in cuts:
            parts = _train(cls, keywords, groups, cut(first), [cut(step_grads) for step_grads in grads])
            for own, expected in zip(parts, whole, strict=True):
                # Not to the bit, as kernels vectorise parts differently; a norm of the whole is far off.
                pairs = zip(own, cut(expected), strict=True)
                if not all(torch.allclose(x, y, rtol=1e-9, atol=1e-12) for x, y in pairs):
                    return f"{what} are updated differently from the whole"
        if _depends_on_others(cls, keywords, groups, first, grads, whole):
            return DEPENDS
    except Exception as error:
        # A user's optimizer may raise anything.
        return f"it could not be tried ({type(error).__name__}: {error})"
    return ""


def _depends_on_others(
    cls: type[optim.Optimizer],
    keywords: Mapping[str, Any],
    groups: Sequence[Options],
    first: Tensors,
    grads: Sequence[Tensors],
    whole: Sequence[Tensors],
) -> bool:
    """Tell whether tensors are updated differently than in `whole` if the first one of each group is not there."""
    # A rank has some of the model's tensors, and of ranks as threads one has several copies.
    rest = _train(cls, keywords, groups, first, grads, without_first=True)
    return any(
        not torch.equal(x, y)
        for own, expected in zip(rest, whole, strict=True)
        for x, y in zip(own[1:], expected[1:], strict=True)
    )


def _half(tensors: Tensors, dim: int, number: int) -> Tensors:
    """Return one half of each tensor along `dim`, or all of it if it has no such dim."""
    return [x.chunk(2, dim)[number].contiguous() if dim < x.dim() else x for x in tensors]


def _piece(tensors: Tensors, number: int) -> Tensors:
    """Return one of two flat ranges of each tensor, which meet where no row ends."""
    pieces: Tensors = []
    for x in tensors:
        first = x.numel() // 2 - 1
        ranges = x.reshape(-1).split([first, x.numel() - first])
        pieces.append(as_piece(ranges[number], x.dim()))
    return pieces


def _train(
    cls: type[optim.Optimizer],
    keywords: Mapping[str, Any],
    groups: Sequence[Options],
    first: Tensors,
    grads: Sequence[Tensors],
    *,
    without_first: bool = False,
) -> list[Tensors]:
    """Return by group the values after one step per entry of `grads`, each group from the values `first`.

    With `without_first`, the first tensor of each group is removed from the optimizer after its creation.
    """
    # What the optimizer counts is where its parameters are.
    with on_cpu():
        held = [_parameters(first) for _ in groups]
        optimizer = make(cls, keywords, list(zip(held, groups, strict=True)))
        gone = {id(parameters[0]) for parameters in held} if without_first else ()
        for group in optimizer.param_groups:
            group["params"] = [x for x in group["params"] if id(x) not in gone]
        for step_grads in grads:
            for parameters in held:
                for x, grad in zip(parameters, step_grads, strict=True):
                    x.grad = grad.clone()
            optimizer.step()
    return held


def _parameters(values: Tensors) -> Tensors:
    return [torch.nn.Parameter(x.clone()) for x in values]


def make(
    cls: type[optim.Optimizer],
    keywords: Mapping[str, Any],
    groups: Sequence[tuple[Sequence[torch.Tensor], Options]],
) -> optim.Optimizer:
    """Return an optimizer for a trial, with copies of tensors among the settings; one group without options is a list."""
    local = [{**_copied(options), "params": list(parameters)} for parameters, options in groups]
    is_list = len(groups) == 1 and not groups[0][1]
    return cls(local[0]["params"] if is_list else local, **_copied(keywords))


def _copied(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
        for key, value in settings.items()
    }


# Options that change how an update is computed, but not its result; and torch's record of names.
IGNORED = frozenset({"params", "param_names", "fused", "foreach", "capturable", "differentiable"})
# Options that torch's optimizers accept on some devices only.
HOW = frozenset({"fused", "capturable"})
# Classes that do not accept meta tensors are tried on real ones, of at most this number of elements.
MOST_ELEMENTS = 1 << 22


class Model(NamedTuple):
    """A parameter of the unmodified model."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def parameter(self, device: str) -> torch.nn.Parameter:
        x = torch.zeros(self.shape, dtype=self.dtype, device=device)
        return torch.nn.Parameter(x, self.requires_grad)


# The parameters of each group, and its options; and by their names.
Whole = Sequence[tuple[Sequence[Model], Options]]
NamedGroups = Sequence[tuple[Sequence[str], Options]]


class Groups(NamedTuple):
    """The names in each group that an optimizer makes from the full parameters, and the group's settings."""

    names: list[list[str]]
    settings: list[dict[str, Any]]


class Stepped(Protocol):
    """A rank, and the tensors that an optimizer steps there, by name."""

    @property
    def specs(self) -> Sequence[ParamSpec]: ...

    @property
    def stored(self) -> Mapping[str, torch.Tensor]: ...


class ShapeTrial:
    """The trial of a user-defined class over the parameters of the ranks of this process."""

    def __init__(
        self,
        cls: type[optim.Optimizer],
        keywords: Mapping[str, Any],
        ranks: Sequence[Stepped],
        groups: NamedGroups,
    ) -> None:
        self._cls, self._keywords, self._ranks, self._groups = cls, keywords, ranks, groups
        self._models = {
            spec.name: Model(spec.name, spec.shape, dtype_of(spec.storage.dtype), spec.requires_grad)
            for spec in ranks[0].specs
        }
        self.name_of = {id(x): name for rank in ranks for name, x in rank.stored.items()}
        # The order of the model's parameters in the groups of the class if known, else in the model.
        self.order = list(self._models)

    def finding(self, local: Sequence[Mapping[str, Any]]) -> str:
        """Return how an optimizer with the groups `local` differs from the whole model's, or ""."""
        held = chain.from_iterable(group["params"] for group in local)
        if any(id(x) not in self.name_of for x in held):
            return "its constructor adds parameters that are not in the model, and that ranks do not share"
        # `elementwise = True` is a promise about values; the class need not accept meta tensors.
        is_trusted = getattr(self._cls, "elementwise", False)
        try:
            groups = self._of_the_model()
        except Exception as error:
            # A user's optimizer may raise anything.
            text = f"its constructor could not be tried on the whole model ({type(error).__name__}: {error})"
            return "" if is_trusted else text
        self.order = list(chain.from_iterable(groups.names))
        if text := differing_groups(groups, local, self.name_of):
            return text
        if is_trusted or not own_methods(self._cls):
            return ""
        return next(filter(None, map(self._differing, self._pairs())), "")

    def check_whole(self) -> None:
        """Raise PlanError if the constructor does not take the model's parameters."""
        try:
            self._of_the_model()
        except Exception as error:
            fact = f"its constructor does not take these parameters of the model ({type(error).__name__}: {error})"
            remedy = "the names of those that it takes, such as ['*.mlp.*.weight'], and another pm.optimizer for the rest"
            raise PlanError(f"pm.optimizer({self._cls.__name__}, params)", fact, remedy) from error

    def _of_the_model(self) -> Groups:
        whole = []
        for names, options in self._groups:
            whole.append(([self._models[name] for name in names], options))
        return groups_of(self._cls, self._keywords, whole)

    def names(self, group: Mapping[str, Any]) -> list[str]:
        """Return the names of a group's parameters, repeated for each local rank with a part of it."""
        return _names(group, self.name_of)

    def _pairs(self) -> list[tuple[Options, Model, Model]]:
        """Return the options, the model's parameter and the rank's wherever shapes differ, alike ones once."""
        found: dict[Any, tuple[Options, Model, Model]] = {}
        for number, (names, options) in enumerate(self._groups):
            for name, rank in product(names, self._ranks):
                model, own = self._models[name], rank.stored.get(name)
                if own is not None and tuple(own.shape) != tuple(model.shape):
                    there = model._replace(shape=tuple(own.shape))
                    found.setdefault((number, model.shape, there[1:]), (options, model, there))
        return list(found.values())

    def _differing(self, pair: tuple[Options, Model, Model]) -> str:
        options, model, there = pair
        return differing_step(self._cls, self._keywords, options, model, there)


def groups_of(cls: type[optim.Optimizer], keywords: Mapping[str, Any], whole: Whole) -> Groups:
    """Return the groups that a class makes of the full parameters; raise what its constructor raises."""
    total = 0
    for some, _ in whole:
        total += sum(torch.Size(x.shape).numel() for x in some)

    def trial(device: str) -> Groups:
        name_of: dict[int, str] = {}
        groups = []
        for some, options in whole:
            held = [x.parameter(device) for x in some]
            name_of |= {id(x): model.name for x, model in zip(held, some, strict=True)}
            groups.append((held, _portable(options)))
        made = make(cls, _portable(keywords), groups).param_groups
        names = [_names(group, name_of) for group in made]
        return Groups(names, [_settings(group) for group in made])

    return _on_meta(trial, total)  # type: ignore[no-any-return]


def differing_groups(whole: Groups, local: Sequence[Mapping[str, Any]], name_of: Mapping[int, str]) -> str:
    """Return the local tensor whose group or settings differ from those of its full parameter."""
    if len(local) != len(whole.names):
        return f"its constructor makes {len(whole.names)} groups from the model's parameters, but {len(local)} from a rank's"
    place: dict[str, int] = {}
    for number, names in enumerate(whole.names):
        place |= dict.fromkeys(names, number)
    for number, group in enumerate(local):
        for x in group["params"]:
            name = name_of[id(x)]
            if place.get(name) != number:
                what = f"{name}, of shape {tuple(x.shape)} on a rank"
                return f"its constructor puts {what}, into another group than the model's own parameter"
        if not group["params"]:
            continue
        for key, value in _settings(group).items():
            if not same(value, whole.settings[number].get(key)):
                return f"its constructor sets {key} of group {number} according to the shapes of a rank's tensors"
    return ""


def differing_step(
    cls: type[optim.Optimizer], keywords: Mapping[str, Any], options: Options, one: Model, other: Model
) -> str:
    """Return why two steps differ on a tensor of the shape of `one` and on one of the shape of `other`."""
    settings, own = _portable(keywords), _portable(options)

    def trial(device: str) -> bool:
        calls = []
        for model in (one, other):
            parameter = model.parameter(device)
            optimizer = make(cls, settings, [([parameter], own)])
            log = _Log()
            for _ in range(2):
                parameter.grad = torch.zeros_like(parameter)
                with log:
                    optimizer.step()
            calls.append(log.calls)
        return calls[0] == calls[1]

    try:
        is_same = _on_meta(trial, max(torch.Size(model.shape).numel() for model in (one, other)))
    except Exception as error:
        # A user's optimizer may raise anything.
        return f"it could not be tried on {one.name} ({type(error).__name__}: {error})"
    if is_same:
        return ""
    return f"it treats {one.name} differently in its shape {one.shape} and in the shape {other.shape} of a rank's part"


def same(one: Any, other: Any) -> bool:
    """Tell whether two settings of groups are equal."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and bool((one.cpu() == other.cpu()).all())
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:
        # Settings may be anything: the comparison of arrays, say, is not one bool.
        return repr(one) == repr(other)


def _on_meta(trial: Any, numel: int) -> Any:
    try:
        return trial("meta")
    except Exception:
        if numel > MOST_ELEMENTS:
            raise
        return trial("cpu")


def _portable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those that torch refuses where there is no device."""
    return {key: value for key, value in settings.items() if key not in HOW}


def _names(group: Mapping[str, Any], name_of: Mapping[int, str]) -> list[str]:
    return [name_of[id(x)] for x in group["params"]]


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in IGNORED}


class _Log(TorchDispatchMode):
    """Notes the operators that run in a `with` block, and the numbers that they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[str, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        every = [*args, *(kwargs or {}).values()]
        self.calls.append((str(func), tuple(_numbers(every))))
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            # A number that Python reads.
            return torch.zeros((), dtype=args[0].dtype, device="cpu").item()
        return func(*args, **(kwargs or {}))


def _numbers(args: Sequence[Any]) -> list[str]:
    """Return the numbers among the arguments of an operator, without sizes, which are lists of integers."""
    found: list[str] = []
    for arg in args:
        if isinstance(arg, (list, tuple)):
            leaves = tree_leaves(arg)
            found += [] if all(type(x) is int for x in leaves) else _numbers(leaves)
        elif isinstance(arg, torch.Tensor):
            found += [repr(arg.item())] if arg.dim() == 0 and arg.device.type == "cpu" else []
        elif isinstance(arg, (bool, int, float, complex)):
            # As text: NaN does not equal NaN.
            found.append(repr(arg))
    return found
