"""What a model keeps in plain attributes, its tensors among it, and a state dict that holds something else.

In: a model. Out: the objects in its attributes, their containers and objects (`held_by`), the tensors among them
(`attribute_tensors`), or a TraceError (`check_state_dict`).

    dict(attribute_tensors(model))      # {"rope.table": tensor(...)}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from autoptd.errors import TraceError
from autoptd.ir.buffers import same_entries
from autoptd.subject.contents import PLAIN, entries_of, has_entries

# Attributes of nn.Module itself: hooks, and the dicts of parameters, buffers and modules.
OWN = {key for key in vars(nn.Module()) if key.startswith("_")}
# Levels of nesting to search.
DEEPEST = 5


def check_state_dict(model: nn.Module) -> None:
    """Refuse a state dict other than the parameters and buffers by name, which ranks load and save."""
    own = dict(model.named_parameters(remove_duplicate=False))
    expected = own | dict(model.named_buffers(remove_duplicate=False))
    found = model.state_dict(keep_vars=True)
    more = [name for name in found if name not in expected]
    other = [name for name, attribute in own.items() if not _is_equal(found.get(name), attribute)]
    if more or other:
        what = []
        if more:
            what.append(f"has {', '.join(more)} beside them")
        if other:
            what.append(f"lacks or changes {', '.join(other)}")
        fact = f"is not its parameters and buffers: it {' and '.join(what)}, which the ranks would not follow"
        remedy = "leave out get_extra_state and hooks of state_dict; keep state in buffers"
        raise TraceError("state_dict of the model", fact, remedy)


def _is_equal(found: Tensor | None, own: Tensor) -> bool:
    if found is own or found is None:
        return found is own
    return found.shape == own.shape and (own.is_meta or same_entries(found, own))


def attribute_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors that modules keep as plain attributes, in containers as well: neither parameters nor
    buffers.
    """
    for path, value in held_by(model):
        if isinstance(value, Tensor):
            yield path, value


def map_attribute_tensors(model: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replace the tensors that modules keep as plain attributes, in lists and dicts as well."""
    holders = [vars(module) for module in model.modules()]
    for _, value in held_by(model):
        if isinstance(value, (dict, list)):
            holders.append(value)  # type: ignore[arg-type]
        elif not isinstance(value, (Tensor, *PLAIN)) and hasattr(value, "__dict__"):
            holders.append(vars(value))
    for holder in holders:
        for key, item in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
            if isinstance(item, Tensor) and (made := change(item)) is not item:
                holder[key] = made


@contextmanager
def own_containers(model: nn.Module) -> Iterator[None]:
    """Restore the attributes of modules: torch.export replaces lists and dicts by copies."""
    kept = [(vars(module), dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for names, own in kept:
            names.update(own)


def held_by(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what the modules of a model hold in plain attributes, and what that holds, by its path."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in OWN:
                yield from _walk(f"{path}.{name}".removeprefix("."), value, 0, seen)


def _walk(path: str, value: Any, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    # Modules are visited by the model's own list, under their names.
    if isinstance(value, nn.Module):
        return
    yield path, value
    if isinstance(value, (Tensor, *PLAIN)) or id(value) in seen or depth > DEEPEST or not has_entries(value):
        return
    seen.add(id(value))
    if isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from _walk(f"{path}[{i}]", item, depth + 1, seen)
    elif not isinstance(value, set):
        for name, item in entries_of(value).items():
            yield from _walk(f"{path}{name}", item, depth + 1, seen)


__all__ = ["attribute_tensors", "check_state_dict", "held_by", "map_attribute_tensors", "own_containers"]
