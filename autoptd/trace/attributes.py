"""Tensors of a model beside its parameters and buffers, and a state dict that holds something else.

In: a model. Out: its plain tensor attributes by path (`attribute_tensors`), or a TraceError
(`check_state_dict`).

    dict(attribute_tensors(model))      # {"rope.table": tensor(...)}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn

from autoptd.errors import TraceError
from autoptd.ir.buffers import same_entries
from autoptd.trace.state import State


def check_state_dict(model: nn.Module) -> None:
    """Refuse a state dict that is not the parameters and buffers under their own names: these the ranks load
    and save.
    """
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
    yield from State(model).tensors.items()


def map_attribute_tensors(model: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replace the tensors that modules keep as plain attributes, in lists and dicts as well."""
    for holder, content in State(model).holders:
        if not isinstance(holder, (dict, list)):
            continue
        for key, item in content.items() if isinstance(content, dict) else enumerate(content):
            if isinstance(item, Tensor) and (made := change(item)) is not item:
                holder[key] = made


__all__ = ["attribute_tensors", "check_state_dict", "map_attribute_tensors"]
