"""Trace a model again in its current state, and report where it differs from the compiled program.

In: the record of the first trace (`Traced`), and the model. Out: the site in the forward that differs, "" if none.

    traced = Traced.of(model, captured, call, loss_fn, autocast, precision, cast)
    traced.differs(model)         # "layers.0: aten.mul.Tensor (net.py:41)"

Values are compared, not operators: the order of operators does not matter, nor do values unused by the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from autoptd.compat import tree_map
from autoptd.errors import AutoptdError
from autoptd.ir.notes import note, output, placeholders, site
from autoptd.trace.autocast import Autocast
from autoptd.trace.capture import Captured, capture
from autoptd.trace.changed_buffers import updated_buffers
from autoptd.trace.differences import Reference
from autoptd.trace.draws import any_mask, given_masks
from autoptd.trace.evaluation import Numbers, number_values
from autoptd.trace.loss import Picked, WithLoss
from autoptd.trace.precision import computing_in
from autoptd.trace.reads import Reads, Stamp

Stamps = Mapping[str, Stamp]
# Relative to the largest entry, between two runs of one model.
TOLERANCE = 1e-5


@dataclass(frozen=True, eq=False)
class Traced:
    """Hold the trace of a program, stamps of its tensors, and everything needed to trace the model again."""

    graph: Graph
    trained: frozenset[str]
    constants: Stamps
    reads: Reads
    call: tuple[tuple[Any, ...], dict[str, Any]]
    loss_fn: Callable[..., Any] | None
    autocast: Autocast
    precision: str | None
    cast: tuple[str, ...]
    # Whether each module was in train mode, by path.
    modes: Mapping[str, bool]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        captured: Captured,
        call: tuple[tuple[Any, ...], dict[str, Any]],
        loss_fn: Callable[..., Any] | None,
        autocast: Autocast,
        precision: str | None,
        cast: tuple[str, ...],
    ) -> Traced:
        """Record the inputs of a trace, with tensors on the CPU, off the ranks' devices."""
        call = tree_map(lambda x: x.detach().cpu() if isinstance(x, Tensor) and not x.is_meta else x, call)
        constants = _constants(captured)
        trained, reads = _trained(captured), captured.reads or Reads()
        modes = {path: module.training for path, module in model.named_modules()}
        return cls(captured.graph, trained, constants, reads, call, loss_fn, autocast, precision, cast, modes)

    @property
    def _parameters(self) -> set[str]:
        return {note(node).name for node in placeholders(self.graph, "param")}

    @property
    def updated(self) -> frozenset[str]:
        """Return the buffers that the forward updates."""
        return frozenset(name for name, _ in updated_buffers(self.graph))

    def has(self, name: str) -> bool:
        """Tell whether the forward reads a buffer."""
        return any(note(node).name == name for node in placeholders(self.graph, "buffer"))

    def differs(self, model: nn.Module) -> str:
        """Trace the model and return the first site that computes something different; "" if none."""
        try:
            with computing_in(model, self.precision, self.cast):
                call = self._call_on(model)
                captured = capture(model, *call, self.loss_fn, self.autocast, is_known=True)
        # The model was traceable before, so this error is a difference.
        except AutoptdError as error:
            return f"{error.site}: {error.fact}"
        # The model's own error.
        except Exception as error:
            return f"its {type(error).__name__}: {str(error).splitlines()[:1]}"
        # Parameters that lost or gained gradients.
        if others := (_trained(captured) ^ self.trained) & captured.parameters.keys() & self._parameters:
            return f"the gradient of {min(others)}"
        numbers: Numbers = {}
        before = number_values(self.graph, numbers, constants=self.constants)
        known = len(numbers)
        after = number_values(captured.graph, numbers, constants=_constants(captured))
        if [before[node] for node in _results(self.graph)] == [
            after[node] for node in _results(captured.graph)
        ]:
            return ""
        read = _ancestors(_results(captured.graph))
        new = [node for node in captured.graph.nodes if node in read and after[node] >= known]
        # A forward that only omits operators has no new values: report its loss.
        return site((new or _results(captured.graph))[0])

    def is_same(self, model: nn.Module, before: Callable[[], AbstractContextManager[None]]) -> bool:
        """Tell whether loss, outputs and gradients of the traced call are the same as `before` some changes."""
        args, kwargs = self._call_on(model)
        twin = WithLoss(model, self.loss_fn)
        trained = {name: x for name, x in model.named_parameters() if x.requires_grad}

        def run() -> tuple[Tensor, Picked]:
            # Both runs need the same masks.
            with given_masks(any_mask):
                return twin.results(*args, **kwargs)

        with computing_in(model, self.precision, self.cast), self.autocast.around(), torch.enable_grad():
            with before():
                loss, outputs = run()
                wanted = Reference(loss, trained, share=1.0)
            try:
                loss, others = run()
            # The model ran before the changes, so failing is a difference.
            except Exception:
                return False
            is_same = outputs.keys() == others.keys() and all(
                _is_near(x, others[name]) for name, x in outputs.items()
            )
            return is_same and max(wanted.differences(loss, trained).values()) <= TOLERANCE

    def _call_on(self, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
        home = next((x.device for x in model.parameters() if not x.is_meta), torch.device("cpu"))
        return tree_map(  # type: ignore[no-any-return]
            lambda x: x.to(home) if isinstance(x, Tensor) and not x.is_meta else x, self.call
        )


def _is_near(x: Tensor, other: Tensor) -> bool:
    if x.shape != other.shape or not x.is_floating_point():
        return torch.equal(x, other)
    return bool((x - other).abs().max() <= TOLERANCE * x.abs().max()) if x.numel() else True


def _trained(captured: Captured) -> frozenset[str]:
    return frozenset(name for name, x in captured.parameters.items() if x.requires_grad)


def _constants(captured: Captured) -> Stamps:
    """Return stamps of the constant tensors other than the model's buffers, by their names in the graph."""
    found = {}
    for node in placeholders(captured.graph, "buffer"):
        if note(node).origin.constant is not None:
            found[note(node).name] = Stamp.of(captured.buffers[note(node).name])
    return found


def _results(graph: Graph) -> list[Node]:
    """Return the loss and the new values of buffers."""
    return [output(graph).args[0], *(new for _, new in updated_buffers(graph))]  # type: ignore[list-item]


def _ancestors(nodes: list[Node]) -> set[Node]:
    found: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found
