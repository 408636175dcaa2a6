"""Record the operators that a forward calls as one FX graph.

The forward runs once, on fake tensors; every operator becomes a node with its operands, its fake result, the user's
module and source line, and whether gradients were on. Operators are recorded above autograd, composite ones whole.

    recorder = Recorder(wrapper, casting, results, first_name)
    recorder.record(args, kwargs)
    recorder.graph, recorder.inputs
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.utils.weak import WeakTensorKeyDictionary

from autoptd.compat import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    PreDispatchMode,
    enable_python_dispatcher,
    fake_like,
    known_as_traced,
    new_fake,
    tree_flatten,
    tree_unflatten,
    without_modes,
)
from autoptd.errors import TraceError
from autoptd.ir.notes import Note, Origin, note, op_name, ops, set_note, site, value
from autoptd.trace.autocast import Casting
from autoptd.trace.loss import WithLoss
from autoptd.trace.results import Results
from autoptd.trace.users import ForwardLines, users_line

aten = torch.ops.aten
# Calls that compute nothing. While a model is exported, a cast asserts its source dtype.
IGNORED = (torch.ops.prim.device.default, aten._assert_tensor_metadata.default)
# Copies of a constant, made by `torch.tensor`.
COPIES = (aten.lift_fresh_copy.default, aten.detach_.default)
MADE_REMEDY = "make it with torch operators in the forward, or register it as a buffer of its module"


class Recorder(PreDispatchMode):
    """Record the operators of one forward of `wrapper`, which has the model as `model`.

    After `record`: `graph`, and `inputs`, the placeholders of tensors in the call, by leaf. `first_name` maps names of
    parameters and buffers to the first name of the same tensor.
    """

    def __init__(
        self, wrapper: WithLoss, casting: Casting, results: Results, first_name: Mapping[str, str]
    ) -> None:
        super().__init__()
        self.graph, self.inputs = Graph(), dict[int, Node]()
        self._wrapper, self._casting, self.results = wrapper, casting, results
        self._first_name = first_name
        # By their first name, as parameters.
        self._paths = {id(module): in_model(path) for path, module in wrapper.named_modules()}
        # Before the forward, which may assign others. Keeping the tensors alive keeps their ids unique.
        self._held = list(_held_tensors(wrapper))
        self._modules, self._lines = [""], ForwardLines(type(wrapper).forward.__code__)
        # Weak, as torch copies results of operators that are referenced elsewhere.
        self._node_of = WeakTensorKeyDictionary()
        # By metadata: nodes of equal metadata share one fake value.
        self._shown: dict[tuple[Any, ...], FakeTensor] = {}
        self._lifted: dict[Node, Tensor] = {}
        self._taken = {in_model(path) for path, _ in wrapper.named_buffers(remove_duplicate=False)}
        self._taken |= {in_model(path) for path, _ in wrapper.named_parameters(remove_duplicate=False)}
        self._taken |= {path for path, _ in self._held}
        self._mode = FakeTensorMode(allow_non_fake_inputs=True, export=True)
        self._in_inference: Node | None = None
        self._number = 0

    def record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call the module, and finish the graph."""
        with (
            without_modes(),
            known_as_traced(),
            self._mode,
            enable_python_dispatcher(),
            ExitStack() as around,
        ):
            around.enter_context(self._fake_state())
            leaves, tree = tree_flatten((args, kwargs))
            for leaf, x in enumerate(leaves):
                if isinstance(x, Tensor):
                    leaves[leaf] = fake_like(x, self._mode)
                    node = self.graph.placeholder(f"input_{leaf}")
                    self.inputs[leaf] = self._enter(node, Note(kind="input"), leaves[leaf])
            args, kwargs = tree_unflatten(leaves, tree)
            self.results.begin()
            with self._modules_followed(), self:
                loss = self._wrapper(*args, **kwargs)
            set_note(self.graph.output(self._operand(loss)), Note(kind="output"))
        self._finish()

    @contextmanager
    def _fake_state(self) -> Iterator[None]:
        """Put fake tensors in place of parameters and buffers, and make a placeholder for each."""
        made, fakes = dict[str, Tensor](), dict[int, Tensor]()
        for kind, named in (
            ("param", self._wrapper.named_parameters),
            ("buffer", self._wrapper.named_buffers),
        ):
            for path, x in named(remove_duplicate=False):
                name = self._first_name.get(in_model(path), in_model(path))
                if name not in made:
                    made[name] = fake_like(x, self._mode)
                    node = self.graph.placeholder(re.sub(r"\W", "_", f"{kind[0]}_{name}"))
                    self._enter(node, Note(kind=kind, name=name), made[name])
                fakes[id(x)] = made[name]
        holders = [held for one in self._wrapper.modules() for held in (one._parameters, one._buffers)]
        real = [(held, dict(held)) for held in holders]
        try:
            for held, tensors in real:
                held.update({name: fakes[id(x)] for name, x in tensors.items() if x is not None})
            yield
        finally:
            for held, tensors in real:
                held.update(tensors)

    def _enter(self, node: Node, record: Note, held: Any) -> Node:
        """Record a node, and the tensor that it stands for."""
        set_note(node, record)
        node.meta["val"] = self._show(held)
        if isinstance(held, Tensor):
            self._node_of[held] = node
        return node

    def _show(self, held: Any) -> Any:
        """Return the fake value of a node whose result is `held`, apart from the model's own."""
        if isinstance(held, (list, tuple)):
            return type(held)(map(self._show, held))
        if not isinstance(held, Tensor):
            return held
        if held.layout is not torch.strided:
            return self._mode.from_tensor(held.detach())
        known = held.shape, held.stride(), held.dtype, held.device
        if known not in self._shown:
            self._shown[known] = new_fake(self._mode, *known)
        return self._shown[known]

    @contextmanager
    def _modules_followed(self) -> Iterator[None]:
        """Know the user's module that runs."""
        call, paths, running = nn.Module.__call__, self._paths, self._modules

        def follow(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            running.append(paths.get(id(module), running[-1]))
            try:
                return call(module, *args, **kwargs)
            finally:
                running.pop()

        nn.Module.__call__ = follow  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = call  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._casting.call(self._record, func, args, kwargs or {})

    def _record(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Call an operator, and append it to the graph."""
        if func in IGNORED or func.namespace == "profiler":
            return func(*args, **kwargs)
        # The graph copies a tensor made by `torch.tensor`, so as not to write to the constant.
        target = aten.lift_fresh_copy.default if func is aten.lift_fresh.default else func
        # Before the call: after an operator in place, its operand is the result.
        operands = self._operand(args), self._operand(kwargs)
        made = self.results.call(func, args, kwargs)
        # A number that does not depend on the batch: torch has computed it from constants.
        if isinstance(made, (bool, int, float, complex)):
            return made
        # `x.to(x.dtype)` under no_grad is x, with its gradient.
        if not torch.is_grad_enabled() and not func._schema.is_mutable and any(made is x for x in args):
            return made
        node = self.graph.create_node("call_function", target, *operands, name=func.overloadpacket.__name__)
        source, code = self._lines.innermost()
        origin = Origin(without_grad=not torch.is_grad_enabled())
        self._enter(node, Note(module=self._modules[-1], source=source, code=code, origin=origin), made)
        if torch.is_inference_mode_enabled():
            self._in_inference = self._in_inference or node
        self._enter_pieces(node, made)
        return made

    def _enter_pieces(self, node: Node, made: Any) -> None:
        for index, piece in enumerate(made if isinstance(made, (list, tuple)) else ()):
            got = self.graph.call_function(operator.getitem, (node, index))
            self._enter(got, note(node).copy(), piece)
            self._enter_pieces(got, piece)

    def _operand(self, met: Any) -> Any:
        """Return an argument with tensors replaced by their nodes."""
        if isinstance(met, Tensor):
            return self._node_of.get(met) or self._constant(met)
        if isinstance(met, dict):
            return {key: self._operand(one) for key, one in met.items()}
        if isinstance(met, (list, tuple)):
            return type(met)(map(self._operand, met))
        return met

    def _constant(self, met: Tensor) -> Node:
        """Return the new placeholder of a tensor that is neither given nor computed."""
        if isinstance(met, FakeTensor) and not any(met is held for _, held in self._held):
            raise TraceError(users_line(), "reads a tensor that the trace has not seen made", MADE_REMEDY)
        if torch._C._functorch.is_functorch_wrapped_tensor(met):
            fact = "torch.func or torch.vmap cannot be traced"
            remedy = "write it with operators on whole tensors, and gradients by hand"
            raise TraceError(users_line(), fact, remedy)
        with self.graph.inserting_before(next(iter(self.inputs.values()), self._first_op())):
            node = self.graph.placeholder("constant")
        self._lifted[node] = met
        record = Note(kind="buffer", module=self._modules[-1], origin=Origin(constant=met))
        return self._enter(node, record, met)

    def _first_op(self) -> Node | None:
        return next(iter(ops(self.graph)), None)

    def _finish(self) -> None:
        """Refuse what no rank could do; drop what computes nothing; name the constants; end regions without gradients."""
        if self._in_inference is not None:
            fact = f"{op_name(self._in_inference)} is called in inference mode, whose results autograd cannot use"
            raise TraceError(site(self._in_inference), fact, "use torch.no_grad(), or .detach() the results")
        for node in reversed(self.graph.nodes):
            if node.target in (*COPIES, aten.detach.default) and not node.users:
                self.graph.erase_node(node)
        for node in self._lifted:
            if node.users:
                self._name(node)
            else:
                self.graph.erase_node(node)
        _detach_regions(self.graph)

    def _name(self, node: Node) -> None:
        """Name a constant by the attribute that holds it, else by its number and the module that reads it."""
        constant, record = self._lifted[node], note(node)
        name = next((path for path, held in self._held if held is constant), "")
        if not name:
            while (name := f"{record.module}.lifted_tensor_{self._number}".removeprefix(".")) in self._taken:
                self._number += 1
            self._number += 1
        record.name, record.module = name, ""


def in_model(path: str) -> str:
    """Return the path in the user's model of a path in its wrapper."""
    return path.removeprefix("model").removeprefix(".")


def _held_tensors(wrapper: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors that are plain attributes of modules: constants are named by them."""
    for path, module in wrapper.named_modules():
        for name, held in vars(module).items():
            if isinstance(held, Tensor):
                yield f"{in_model(path)}.{name}".removeprefix("."), held


def _detach_regions(graph: Graph) -> None:
    """Detach the results of operators that ran without gradients, where others read them."""
    regions = groupby(ops(graph), lambda node: note(node).origin.without_grad)
    for region in [list(nodes) for without_grad, nodes in regions if without_grad]:
        inner, last = set(region), region[-1]
        for node in region:
            if _is_write_to_buffer(node):
                _detach_written(graph, node)
                continue
            readers = [user for user in node.users if user not in inner]
            if not readers or not _is_floating(value(node)):
                continue
            with graph.inserting_after(last):
                last = graph.call_function(aten.detach.default, (node,))
            for reader in readers:
                reader.replace_input_with(node, last)
            _end_region(last, node, node)


def _is_write_to_buffer(node: Node) -> bool:
    """Tell whether an operator writes to a buffer, or to a view of one: later writes have to reach the same buffer."""
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return False
    at: Any = node
    while isinstance(at, Node) and isinstance(at.target, OpOverload):
        is_same_memory = at.target._schema.is_mutable or at.target.is_view
        at = at.args[0] if is_same_memory and at.args else None
    return isinstance(at, Node) and note(at).kind == "buffer"


def _detach_written(graph: Graph, node: Node) -> None:
    """Detach the values that an operator without gradients writes to a buffer."""
    for given in node.all_input_nodes:
        if given is not node.args[0] and _is_floating(value(given)):
            with graph.inserting_before(node):
                detached = graph.call_function(aten.detach.default, (given,))
            node.replace_input_with(given, detached)
            _end_region(detached, given, node)


def _end_region(detached: Node, inside: Node, at: Node) -> None:
    detached.meta["val"] = value(inside)
    record = Note(module=note(at).module, source=note(at).source, origin=Origin(ends_region=True))
    set_note(detached, record)


def _is_floating(held: Any) -> bool:
    return isinstance(held, Tensor) and held.is_floating_point()
