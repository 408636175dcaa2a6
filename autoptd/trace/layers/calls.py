"""Trace layers of one kind once: calls of the others become one operator each, until they are copied.

In: the calls of modules in a trace. Out: their results, and the traced calls, for `copies.expand`.

    layers = Layers(Kinds(model), watched, casting, met, Recorded())
    with calls_of_modules(layers.call):
        exported = torch.export.export(...)
    layers.check()                           # Unlike: trace again without
    copied = layers.expand(exported.graph)

Of each kind (`kinds.py`) the first two modules that are called are traced, and the last one. A call of any other
is replaced by `autoptd::layer`, if nothing distinguishes it from the call of the second: the arguments, the state of
the thread (gradient mode, autocast), and that no Python code has written to anything since the last call of the kind.
Afterwards, the operators of the last one must be those of the second, and the forward must not have changed any
object. Whatever cannot be compared is traced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from autoptd.compat import FakeTensor, TraceGraph, tree_flatten, tree_unflatten
from autoptd.subject.contents import PLAIN
from autoptd.trace.autocast import Casting
from autoptd.trace.layers.copies import Call, Copied, Skipped, Unlike, expand, is_copyable
from autoptd.trace.layers.kinds import Kinds, Member
from autoptd.trace.layers.stand_in import Metadata, call_layer
from autoptd.trace.watched import Watched


class Layers:
    """Handle the calls of modules in one run of a forward: run them, or replace them by `autoptd::layer`.

    `graph` records the run; `met` returns numbers that grow when something is met that is not an operator.
    """

    def __init__(
        self, kinds: Kinds, watched: Watched, casting: Casting, met: Callable[[], Any], graph: Any
    ) -> None:
        self._kinds, self._seen, self._casting, self._met, self._graph = (
            kinds,
            watched.seen,
            casting,
            met,
            graph,
        )
        self._called: set[str] = set()
        # The names of numbers that differ among modules of a kind, and were read.
        self.read: set[str] = set()
        self._is_inside = False
        # How much Python code had written after the last call of each kind.
        self._written: dict[int, int] = {}
        self._first: set[int] = set()
        self.templates: dict[int, Template] = {}
        self.last: dict[int, Template] = {}
        # The module of each call of `autoptd::layer`, by its number.
        self.skipped: dict[int, Skipped] = {}

    def call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a module; `original` is the method `nn.Module.__call__`."""
        member = self._kinds.of(module)
        if member is None or self._is_inside:
            return original(module, *args, **kwargs)
        writes = self._seen.writes
        self._is_inside = True
        try:
            with self._own_code():
                call = Started(module, args, kwargs, self._casting, self._met())
                call.is_new = member.path not in self._called
                self._called.add(member.path)
                if self._is_copy(call, member):
                    return self._copied(call, member)
                call.begin = self._graph.mark(call.tensors) if call.given is not None else None
                writes.begin()
            with member.unread(self.read):
                result = original(module, *args, **kwargs)
            with self._own_code():
                self._end(call, member, result)
            return result
        finally:
            self._is_inside = False
            self._written[member.kind] = writes.count

    @contextmanager
    def _own_code(self) -> Iterator[None]:
        """Run code that is neither watched as the user's, nor seen by modes of torch functions."""
        self._seen.writes.pause()
        try:
            with torch._C.DisableTorchFunction():
                yield
        finally:
            self._seen.writes.resume()

    def check(self) -> None:
        """Raise Unlike if modules that were not run may have read or changed what the forward has changed."""
        seen = self._seen
        if self.read or (self.skipped and (seen.changes or seen.filled or seen.replaced or seen.assigned)):
            raise Unlike

    def expand(self, graph: Graph) -> list[Copied]:
        """Replace every call of `autoptd::layer` by copies of operators; see `copies.py`."""
        return expand(graph, self.templates, self.last, self.skipped)

    def _is_copy(self, call: Started, member: Member) -> bool:
        """Tell whether a call that begins would call the operators of another one."""
        template = self.templates.get(member.kind)
        if (
            template is None
            or call.given is None
            or not call.is_new
            or self._kinds.last[member.kind] in self._called
        ):
            return False
        return template.given == call.given.text and self._written[member.kind] == self._seen.writes.count

    def _copied(self, call: Started, member: Member) -> Any:
        assert call.given is not None
        template = self.templates[member.kind]
        self._casting.with_grad.update(template.with_grad)
        made, number, own = self._graph.layer(call.given.tensors, call.own, template)
        if describe(made, made) != template.described:
            raise Unlike
        self.skipped[number] = Skipped(member.kind, member.path, own)
        return template.unflatten(made, call.given.tensors)

    def _end(self, call: Started, member: Member, result: Any) -> None:
        """Keep the second call of a kind, and that of its last module."""
        kind = member.kind
        if kind not in self._first:
            self._first.add(kind)
        elif call.is_new and (kind not in self.templates or member.is_last):
            nodes = None
            is_pure = kind in self.templates or not self._seen.writes.has_changed()
            if call.given is not None and call.met == self._met() and is_pure:
                nodes = self._graph.since(call.begin, call.tensors, result)
            known = Template.of(call.given, call.own, result, nodes, self._casting.with_grad - call.with_grad)
            known.path = member.path
            (self.last if kind in self.templates else self.templates)[kind] = known


class Started:
    """Describe a call that begins."""

    is_new = False
    begin: Any = None

    def __init__(self, module: nn.Module, args: Any, kwargs: Any, casting: Casting, met: Any) -> None:
        self.own = own_tensors(module)
        self.given = Given.of(args, kwargs, casting)
        self.with_grad, self.met = casting.with_grad.copy(), met

    @property
    def tensors(self) -> list[Tensor]:
        assert self.given is not None
        return [*self.given.tensors, *self.own]


@dataclass
class Given:
    """Describe the arguments of a call, and the state of its thread: `tensors` are those among its leaves."""

    text: Any
    tensors: list[Tensor]

    @classmethod
    def of(cls, args: Any, kwargs: Any, casting: Casting) -> Given | None:
        """Return None for arguments that cannot be compared."""
        leaves, tree = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        described = describe(leaves, tensors)
        if described is None:
            return None
        devices = casting.autocast.devices
        state = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()
        casts = [(torch.is_autocast_enabled(one), torch.get_autocast_dtype(one)) for one in devices]
        return cls((described, tree, state, casts), tensors)


def describe(leaves: Sequence[Any], tensors: Sequence[Tensor]) -> list[Any] | None:
    """Describe the arguments or results of a call by what a model's Python code sees of them; None if it may see values.

    Tensors are counted by their first position in `tensors`.
    """
    found: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, PLAIN):
            found.append((type(leaf), repr(leaf)))
        elif not _has_known_sizes(leaf) or leaf.constant is not None:
            return None
        else:
            grad = leaf.requires_grad, leaf.is_leaf, leaf.is_inference()
            state = *grad, leaf.storage_offset(), leaf._is_view()
            first = next(i for i, one in enumerate(tensors) if one is leaf)
            found.append((Metadata.of(leaf), state, first, isinstance(leaf, nn.Parameter)))
    return found


def _has_known_sizes(leaf: Any) -> bool:
    is_dense = isinstance(leaf, FakeTensor) and leaf.layout is torch.strided
    return is_dense and all(type(size) is int for size in leaf.shape)


def own_tensors(module: nn.Module) -> list[Tensor]:
    """Return parameters and buffers by all their names."""
    parameters = [x for _, x in module.named_parameters(remove_duplicate=False)]
    return parameters + [x for _, x in module.named_buffers(remove_duplicate=False)]


@dataclass
class Template:
    """Hold a traced call: `given` describes its arguments, None if it cannot be copied. `results` are the leaves of what it
    returned: positions of tensors, among the inputs or `outputs`, and other values.
    """

    given: Any
    call: Call | None = None
    outputs: list[Metadata] = field(default_factory=list)
    described: Any = None
    results: list[Any] = field(default_factory=list)
    tree: Any = None
    with_grad: Counter[Any] = field(default_factory=Counter)
    path: str = ""

    @classmethod
    def of(
        cls, given: Given | None, own: list[Tensor], result: Any, call: Call | None, with_grad: Counter[Any]
    ) -> Template:
        leaves, tree = tree_flatten(result)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if given is None or call is None or describe(leaves, tensors) is None:
            return cls(None)
        # As those of `autoptd::layer`, which does not have the parameters.
        has_grad = torch.is_grad_enabled() and any(x.requires_grad for x in given.tensors)
        taken = {x.untyped_storage()._cdata for x in (*given.tensors, *own)}
        results: list[Any] = []
        outputs: list[Tensor] = []
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                results.append(("plain", leaf))
            elif (at := position(leaf, given.tensors)) is not None:
                results.append(("input", at))
            elif (at := position(leaf, outputs)) is not None:
                results.append(("output", at))
            # A part of another tensor, or one of other gradients than an operator's.
            elif (
                leaf.untyped_storage()._cdata in taken
                or leaf.storage_offset()
                or leaf.untyped_storage().nbytes() != leaf.nbytes
                or leaf.requires_grad != (has_grad and leaf.is_floating_point())
            ):
                return cls(None)
            else:
                taken.add(leaf.untyped_storage()._cdata)
                results.append(("output", len(outputs)))
                outputs.append(leaf)
        described = describe(outputs, outputs)
        return cls(given.text, call, list(map(Metadata.of, outputs)), described, results, tree, with_grad)

    def unflatten(self, made: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        """Return the results of another call, whose outputs are `made`."""
        values = {"input": inputs, "output": made}
        return tree_unflatten(
            [at if kind == "plain" else values[kind][at] for kind, at in self.results], self.tree
        )


def position(x: Tensor, among: Sequence[Tensor]) -> int | None:
    return next((i for i, one in enumerate(among) if one is x), None)


class Recorded:
    """Find the nodes of calls in the graph of a running trace."""

    def mark(self, tensors: list[Tensor]) -> tuple[Node, list[Node | None]]:
        """Return the newest node, and those of the tensors that a call may read."""
        graph = TraceGraph()
        return graph.last(), list(map(graph.node_of, tensors))

    def since(self, begin: Any, tensors: list[Tensor], result: Any) -> Call | None:
        """Return the call that has ended, which began at `begin`; None if it cannot be copied."""
        graph, (last, operands) = TraceGraph(), begin
        outputs: list[Tensor] = []
        for leaf in tree_flatten(result)[0]:
            if isinstance(leaf, Tensor) and position(leaf, [*tensors, *outputs]) is None:
                outputs.append(leaf)
        nodes, made = graph.after(last), [graph.node_of(x) for x in outputs]
        if None in operands or not all(map(is_copyable, nodes)) or not {*made} <= {*nodes}:
            return None
        now = list(map(graph.node_of, tensors))
        moved = {i: node for i, node in enumerate(now) if node is not operands[i] and node is not None}
        return Call(operands, nodes, made, moved)  # type: ignore[arg-type]

    def layer(
        self, inputs: list[Tensor], own: list[Tensor], template: Template
    ) -> tuple[list[Tensor], int, list[Node]]:
        """Record one operator for a call; return its results, its number, and the nodes of parameters and buffers."""
        nodes = list(map(TraceGraph().node_of, own))
        if None in nodes:
            raise Unlike
        return *call_layer(inputs, template.outputs), nodes  # type: ignore[return-value]
