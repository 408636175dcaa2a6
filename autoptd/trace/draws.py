"""Random numbers: the normal form of dropout and other draws in a traced graph, and runs of a model with given numbers.

A dropout that stays is `aten.dropout(x, rate, True)` with 0 < rate < 1. Fused attention with dropout is decomposed
into scores, mask, softmax, dropout and values, because the random numbers of a fused kernel depend on the layout.
Every other draw becomes `uniform`, `normal` or `exponential` (`ir/noise.py`) of a tensor that gives the shape, scaled
and shifted as in the call. Draws from the model's own generator are refused.

    empty_like(x).uniform_(0.9, 1.1)        ->  uniform(x) * 0.2 + 0.9
    randn(4, 8)                             ->  normal(zeros(4, 8))

The numbers are drawn at run time from the number of their site: 0, 1, 2 ... in the order in which the model draws. To
compare with such a graph, the model itself runs with given masks and numbers: the operators with which torch draws
are intercepted, in the order of the calls, which is that of the sites.

    rewrite_dropouts(graph);  rewrite_noise(graph)
    [note(node).draw.site for node in draws(graph)]                             # [0, 1, 2, ...]
    with given_masks(lambda site, x, keep: torch.rand(x.shape) < keep):
        loss = model(ids, targets)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.nn.attention import SDPBackend, sdpa_kernel

from autoptd.compat import OpOverload, TorchDispatchMode, plain_checkpoints
from autoptd.errors import PlanError
from autoptd.ir.noise import NAMES, OPERATORS, is_draw
from autoptd.ir.notes import Note, Origin, note, op_name, ops, set_note, shape, site, value
from autoptd.trace.new_nodes import Maker, put

aten = torch.ops.aten
NAME = "aten.dropout"
OTHERS = ("aten.feature_dropout", "aten.alpha_dropout", "aten.feature_alpha_dropout")
ATTENTION = "aten.scaled_dot_product_attention"
UNFUSED = "unfused: exact dropout"


def rewrite_dropouts(graph: Graph) -> None:
    """Remove dropouts without effect and decompose attention with dropout; `rewrite_noise` numbers the sites.

    PlanError for other kinds of dropout.
    """
    futures: dict[tuple[int, int], Node] = {}
    for node in list(ops(graph)):
        if op_name(node) in OTHERS and drops(node):
            fact = f"{op_name(node)} draws masks other than one number per element"
            raise PlanError(site(node), fact, "nn.Dropout, or p=0")
        if op_name(node) in (NAME, *OTHERS):
            _rewrite_dropout(graph, node)
        elif op_name(node) == ATTENTION and _attention_rate(node):
            _unfuse(graph, node, futures)


def drops(node: Node) -> bool:
    """Tell whether a dropout of any kind changes its operand."""
    return bool(node.args[1]) and bool(node.args[2])


def _attention_rate(node: Node) -> float:
    return node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)


def _rewrite_dropout(graph: Graph, node: Node) -> None:
    if not drops(node):
        put(node, node.args[0])
    # A rate of 1 draws nothing: the result is 0.
    elif node.args[1] == 1:
        node.target, node.args = aten.mul.Tensor, (node.args[0], 0.0)


def _unfuse(graph: Graph, node: Node, futures: dict[tuple[int, int], Node]) -> None:
    """Write attention out as softmax(scale * q k^T, masked) with dropout, times v.

    `futures` are causal masks by size, made once for the graph.
    """
    q, k, v, *rest = node.args
    given = dict(zip(("attn_mask", "dropout_p", "is_causal"), rest, strict=False)) | node.kwargs
    mask, scale = given.get("attn_mask"), given.get("scale")
    size = (shape(q)[-2], shape(k)[-2])
    if given.get("is_causal") and size not in futures:
        futures[size] = _future(graph, size, q)
    make = Maker(node)

    def call(name: str, target: Any, *args: Any) -> Node:
        made = make(target, *args)
        note(made).origin = Origin(name=name)
        return made

    if given.get("enable_gqa") and shape(q)[-3] != shape(k)[-3]:
        times = shape(q)[-3] // shape(k)[-3]
        k, v = (
            call(name, aten.repeat_interleave.self_int, heads, times, -3)
            for name, heads in (("k", k), ("v", v))
        )
    scaled = call("q", aten.mul.Tensor, q, scale if scale is not None else shape(q)[-1] ** -0.5)
    scores = call("scores", aten.matmul.default, scaled, call("k", aten.transpose.int, k, -2, -1))
    if given.get("is_causal"):
        scores = call("scores", aten.masked_fill.Scalar, scores, futures[size], float("-inf"))
    elif mask is not None and value(mask).dtype == torch.bool:
        hidden = call("hidden", aten.logical_not.default, mask)
        scores = call("scores", aten.masked_fill.Scalar, scores, hidden, float("-inf"))
    elif mask is not None:
        scores = call("scores", aten.add.Tensor, scores, mask)
    # A mask may leave a row without keys: its probabilities are zeros, not NaN, as in the fused operator.
    softmax = aten._safe_softmax.default if mask is not None else aten.softmax.int
    probabilities = call("probabilities", softmax, scores, -1)
    dropped = call("probabilities", aten.dropout.default, probabilities, given["dropout_p"], True)
    note(dropped).reason = UNFUSED
    _rewrite_dropout(graph, dropped)
    put(node, make(aten.matmul.default, dropped, v))


def _future(graph: Graph, size: tuple[int, int], like: Any) -> Node:
    """Return the mask of the keys that causal attention hides, created before all operators."""
    with graph.inserting_before(next(ops(graph))):
        ones = graph.call_function(aten.ones.default, (list(size),), {"dtype": torch.bool})
    ones.meta["val"] = value(like).new_ones(size, dtype=torch.bool)
    set_note(ones, Note())
    return Maker(ones, ones.next, Note(origin=Origin(name="future")))(aten.triu.default, ones, 1)


# Operators by the kind of numbers; each name also has an in-place form.
LIKE = {"aten.rand_like": "uniform", "aten.randn_like": "normal"}
SIZED = {"aten.rand": "uniform", "aten.randn": "normal"}
FILLED = {"aten.uniform": "uniform", "aten.exponential": "exponential", "aten.normal_functional": "normal"}
# Arguments that scale and shift the numbers.
STEPS = {"uniform": {"from", "to"}, "normal": {"mean", "std"}, "exponential": {"lambd"}}
# Only the shape of these is read.
SHAPES = ("aten.empty_like", "aten.zeros_like", "aten.ones_like", "aten.full_like")


def draws(graph: Graph) -> Iterator[Node]:
    """Yield all draws of a normalised graph, including dropouts, in order."""
    return (node for node in ops(graph) if is_draw(node))


def check_generators(graph: Graph) -> None:
    """Raise PlanError where numbers are drawn from the model's own generator."""
    for node in ops(graph):
        if node.kwargs.get("generator") is not None:
            fact = f"{op_name(node)} draws from the model's own generator, whose state the ranks do not share"
            raise PlanError(site(node), fact, "leave generator= out; seed= determines the numbers")


def rewrite_noise(graph: Graph) -> None:
    """Rewrite the draws of a graph, and number all of them."""
    for node in list(ops(graph)):
        name = op_name(node)
        if name in (*LIKE, *SIZED, *FILLED):
            _rewrite_noise(graph, node)
    for number, node in enumerate(draws(graph)):
        note(node).draw = replace(note(node).draw, site=number)


def kind_of(func: Any) -> str | None:
    """Return the kind of numbers that an overload draws, in place or not; None if it draws no known kind."""
    if not isinstance(func, OpOverload) or func._overloadname not in ("default", "names"):
        return None
    name = func._schema.name.replace("::", ".")
    name = "aten.normal_functional" if name == "aten.normal_" else name
    return {**LIKE, **SIZED, **FILLED, **NAMES}.get(name.removesuffix("_"))


def steps_of(func: Any, kind: str, args: Any, kwargs: Any) -> list[tuple[Any, float]]:
    """Return the steps, (operator, number), from standard numbers to those that a call requests."""
    defaults = {argument.name: argument.default_value for argument in func._schema.arguments}
    given = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
    if not STEPS[kind] & given.keys():
        return []
    if kind == "uniform":
        low, high = given["from"], given["to"]
        steps = [(aten.mul.Tensor, high - low), (aten.add.Tensor, low)]
    elif kind == "normal":
        steps = [(aten.mul.Tensor, given["std"]), (aten.add.Tensor, given["mean"])]
    else:
        steps = [(aten.mul.Tensor, 1 / given["lambd"])]
    return [(op, float(number)) for op, number in steps if number != (1 if op is aten.mul.Tensor else 0)]


def _rewrite_noise(graph: Graph, node: Node) -> None:
    name, dtype = op_name(node), value(node).dtype
    kind = {**LIKE, **SIZED, **FILLED}[name]
    make = Maker(node, about=note(node))
    if name in SIZED:
        x = make(aten.zeros.default, list(shape(node)), dtype=dtype)
        # On the device of the node that it replaces.
        x.meta["val"] = value(node).new_zeros(shape(node))
    else:
        x = node.args[0]  # type: ignore[assignment]
        while op_name(x) in SHAPES and value(x).dtype == value(x.args[0]).dtype:  # type: ignore[arg-type]
            x = x.args[0]  # type: ignore[assignment]
        x = make.cast(x, dtype)
    made = make(OPERATORS[kind]._opoverload, x)
    for target, number in steps_of(node.target, kind, node.args, node.kwargs):
        made = make(target, made, number)
    put(node, made)


# (site, a tensor of that size, fraction that is kept) -> boolean mask
MaskOf = Callable[[int, torch.Tensor, float], torch.Tensor]
# (site, a tensor of the size and dtype, "uniform", "normal" or "exponential") -> standard numbers of that kind
NoiseOf = Callable[[int, torch.Tensor, str], torch.Tensor]


@contextmanager
def given_masks(
    mask_of: MaskOf, sites: Iterable[int] | None = None, noise_of: NoiseOf | None = None
) -> Iterator[None]:
    """Make dropouts use the masks of `mask_of`, and noise the numbers of `noise_of` (default `any_noise`).

    `sites` are the site numbers of the calls (default 0, 1, 2 ...). Activation checkpoints do not recompute, as
    that would consume the masks of other sites.
    """
    masks = _Masks(mask_of, noise_of or any_noise, iter(sites if sites is not None else itertools.count()))
    with written_out_attention(), plain_checkpoints(), masks:
        yield


def written_out_attention() -> AbstractContextManager[None]:
    """Run attention with math operators, on all threads: fused kernels draw masks internally, and round
    differently.
    """
    return sdpa_kernel(SDPBackend.MATH)  # type: ignore[no-any-return]


def any_mask(site: int, x: torch.Tensor, keep: float) -> torch.Tensor:
    """Return a mask that depends only on the site."""
    generator = torch.Generator(x.device).manual_seed(site)
    return torch.rand(x.shape, generator=generator, device=x.device) < keep


def any_noise(site: int, x: torch.Tensor, kind: str) -> torch.Tensor:
    """Return numbers that depend only on the site."""
    generator = torch.Generator(x.device).manual_seed(site)
    u = torch.rand(x.shape, generator=generator, device=x.device, dtype=torch.float64)
    if kind == "normal":
        u = torch.special.ndtri(u.clamp(1e-9, 1 - 1e-9))
    elif kind == "exponential":
        u = -torch.log1p(-u.clamp(min=1e-9))
    return u.to(x.dtype)


class _Masks(TorchDispatchMode):
    def __init__(self, mask_of: MaskOf, noise_of: NoiseOf, sites: Iterator[int]) -> None:
        super().__init__()
        self._mask_of, self._noise_of, self._sites = mask_of, noise_of, sites

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Dropout on the CPU and in attention; the fused dropout of CUDA uses the other operator.
        if func is aten.bernoulli_.float:
            # A default rate is not among the arguments.
            x, keep = args[0], args[1] if len(args) > 1 else 0.5
            return x.copy_(self._mask_of(next(self._sites), x, keep))
        if func is aten.native_dropout.default:
            x, rate = args[:2]
            kept = self._mask_of(next(self._sites), x, 1.0 - rate)
            return x * kept / (1.0 - rate), kept
        drawn = kind_of(func)
        if drawn is not None and (kwargs or {}).get("generator") is None:
            return self._drawn(func, drawn, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _drawn(self, func: Any, kind: str, args: Any, kwargs: Any) -> Any:
        """Return the result of a noise operator, by its kind of numbers."""
        is_in_place = func._schema.is_mutable
        if is_in_place:
            x = args[0]
        elif isinstance(args[0], torch.Tensor):
            x = torch.empty_like(args[0], dtype=kwargs.get("dtype"))
        else:
            x = torch.empty(args[0], dtype=kwargs.get("dtype"), device=kwargs.get("device"))
        numbers = self._noise_of(next(self._sites), x, kind)
        for target, number in steps_of(func, kind, args, kwargs):
            numbers = target(numbers, number)
        return x.copy_(numbers) if is_in_place else numbers
