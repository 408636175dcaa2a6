"""Build a model without memory, whose weights are made where they are needed.

In: a constructor. Out: a model of fake tensors, with a recording of how they are made
(subject/initial/recording.py). With `parallelize`, each rank makes its own slices; `materialize` makes all
values here. Both have the same bits.

    with autoptd.deferred(seed=0):
        model = GPT(GPTConfig(n_layer=96, n_embd=12288))
    pm = autoptd.parallelize(model, t=8, p=8)        # no rank ever holds more than its slices and one parameter
    model = autoptd.materialize(model)               # one device, the same weights
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autoptd.compat import FakeTensor
from autoptd.errors import PlanError
from autoptd.ir.scopes import paused_collection
from autoptd.subject.initial.recipes import Recipes, recording_of
from autoptd.subject.initial.recording import Recording
from autoptd.subject.match_folder import fake_mode, fake_parameter
from autoptd.subject.storage import attribute_tensors, tied_names

Model = TypeVar("Model", bound=nn.Module)


@contextmanager
def deferred(seed: int = 0, *, order: bool = False) -> Iterator[None]:
    """Build models in this `with` block without memory; their constructors are recorded, and run later, piece
    by piece.

    The model is then passed to `parallelize`, `compile`, `verify` or `materialize`. Every draw has separate
    random numbers, by `seed` and the parameter's name in that model: weights are the same on every mesh, and
    a layer that is added changes no other. With `order`, draws follow one another as in the usual
    constructor, and the weights are to the bit those of `torch.manual_seed(seed); model = ...`: each rank
    then draws everything. torch's generator does not change. Values that the constructor reads (`.item()`)
    are made for it.

    After the block, the model can be changed (`model.bfloat16()`, `weight.data.mul_(2)`, other modules put
    into it), but nothing can be drawn any more. PlanError for what cannot be recorded: nested blocks, tensors
    on the meta device, sparse tensors, and writing to tensors from outside.
    """
    check_outside("autoptd.deferred", "one block around all")
    # The first mode imports torch's compiler.
    with paused_collection():
        recording = Recording(checked_seed(seed), order=order)
    with recording.open():
        yield


def checked_seed(seed: int) -> int:
    """Return a seed as torch takes it; PlanError for another value."""
    # True is an int, but not a seed.
    if (
        not hasattr(seed, "__index__")
        or isinstance(seed, bool)
        or not -(2**63) <= operator.index(seed) < 2**64
    ):
        raise PlanError(f"autoptd.deferred(seed={seed!r})", "must be a 64-bit integer", "for example seed=0")
    return operator.index(seed)


def check_outside(site: str, remedy: str) -> None:
    """Refuse calls inside a block where tensors are fake."""
    if isinstance(torch.empty(0, device="cpu"), FakeTensor):
        raise PlanError(site, "is used inside a block of fake tensors", remedy)


def materialize(model: Model) -> Model:
    """Return a copy of a deferred model with values, which are the initial values on every mesh.

    A model that has values is returned unchanged.
    """
    if not is_deferred(model):
        return model
    check_outside("autoptd.materialize", "call it after the block")
    tensors = named_tensors(model)
    recipes = Recipes(tensors)
    made = recipes.make(recipes.entries)
    values = {id(x): made[name] for name, x in tensors.items()}
    return copied(model, lambda x: like(x, values[id(x)] if id(x) in values else value_of(x)))


def traceable(model: nn.Module) -> tuple[nn.Module, Recipes]:
    """Return a copy of a deferred model with fake parameters and other tensors with values; and the recipes
    of its parameters.
    """
    check_outside("model", "pass it after the block")
    tensors = named_tensors(model)
    recipes = Recipes(tensors)
    parameters = stand_ins(model)
    # All at once, since buffers may share memory.
    made = recipes.make(name for name, x in tensors.items() if id(x) not in parameters)
    values = {id(tensors[name]): x for name, x in made.items()}

    def replace(x: Tensor) -> Tensor:
        return like(x, values[id(x)] if id(x) in values else value_of(x))

    return copied(model, replace, parameters), recipes


def stand_ins(model: nn.Module) -> dict[int, Tensor]:
    """Return parameters without memory by the id of the originals, with the same ties."""
    mode, parameters = fake_mode(), dict(model.named_parameters(remove_duplicate=False))
    found: dict[int, Tensor] = {}
    for first, *others in tied_names(model).values():
        own = parameters[first]
        fake = found[id(own)] = fake_parameter(own, mode, own.device)
        for name in others:
            # Frozen ones may be two objects over the same memory.
            if id(parameters[name]) not in found:
                found[id(parameters[name])] = nn.Parameter(fake.detach(), requires_grad=False)
    return found


def is_deferred(model: nn.Module) -> bool:
    """Tell whether any tensor of a model was made in a deferred block."""
    return any(recording_of(x) is not None for x in named_tensors(model).values())


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all tensors of the model, each under its first name, parameters first."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    named: dict[str, Tensor] = {name: parameters[name] for name in tied_names(model)}
    # Frozen parameters that are tied may be two objects, over the same memory.
    for name, x in chain(model.named_parameters(), model.named_buffers(), attribute_tensors(model)):
        named.setdefault(name, x)
    for name, x in named.items():
        # A fake tensor has no memory, unless a real one's was put in its place.
        if isinstance(x, FakeTensor) and x.untyped_storage().device.type != "meta":
            remedy = (
                "copy values into it: parameter.data.copy_(values); or put a new nn.Parameter in its place"
            )
            raise PlanError(name, "its .data was replaced by a tensor with values", remedy)
    return named


def value_of(x: Tensor) -> Tensor:
    """Make a tensor that has no name."""
    return Recipes({"": x}).make([""])[""]


def like(x: Tensor, value: Tensor) -> Tensor:
    """Return `value` like `x`: a parameter if that is one, on its device, with attributes that users have
    set.
    """
    value = value.detach().to(x.device)
    if isinstance(x, nn.Parameter):
        value = nn.Parameter(value, requires_grad=x.requires_grad)
    with fake_mode():
        usual = vars(nn.Parameter(torch.empty(0)))
    for name, attribute in vars(x).items():
        if name not in usual:
            setattr(value, name, attribute)
    return value


def copied(
    model: Model, replace: Callable[[Tensor], Tensor], known: Mapping[int, Tensor] | None = None
) -> Model:
    """Copy a model. `known` has copies by the id of the original; `replace` makes those of other fake
    tensors.
    """
    with _Replacing(replace):
        return copy.deepcopy(model, dict(known or {}))


class _Replacing(TorchFunctionMode):
    """A context in which `copy.deepcopy` of a fake tensor calls a function."""

    def __init__(self, replace: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._replace = replace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Once for each tensor: `deepcopy` remembers what it has copied.
        if func is Tensor.__deepcopy__ and isinstance(args[0], FakeTensor):
            return self._replace(args[0])
        return func(*args, **(kwargs or {}))
