"""Every row of the axis table, split for real: values and gradients of the slices against the whole operator.

An example is a small call. It is traced, and *every* operator of its trace is held: each letter that its row claims, over 2 or
3 ranks, whichever divide it, and each linear group. The harness itself is tested with rows that are wrong on purpose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import autoptd
from autoptd.ir.notes import op_name, ops
from autoptd.ir.operators import links
from autoptd.ir.operators.record import FIRST, Operator
from autoptd.ir.operators.table import FOURIER, TABLE, linear_groups
from autoptd.passes.axes.axes import Axes
from autoptd.passes.solve.splits import is_exact
from examples.gpt import GPT, GPTConfig
from tests.compiler.test_compile import Einsum, UnequalFused
from tests.passes.sharding import TOGETHER, check_letter, check_linear, trace_call, trace_model

Tensor = torch.Tensor


def r(*size: int) -> Tensor:
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(size)))


def ids(high: int, *size: int) -> Tensor:
    return torch.randint(high, size, generator=torch.Generator().manual_seed(sum(size)))


def labels(high: int, *size: int) -> Tensor:
    """Labels of which some are ignored."""
    found = ids(high, *size)
    found.view(-1)[::3] = -100
    return found


def fourier(name: str) -> Callable[[Tensor], Tensor]:
    """A transform between real numbers."""
    return lambda x: getattr(torch.fft, name)(x).abs()


RNN = [r(3, 4, 6), r(1, 4, 2), r(2, 6), r(2, 2)]
GRU = [r(3, 4, 6), r(1, 4, 2), r(6, 6), r(6, 2)]
GRU_FIRST = [r(4, 6, 3), r(1, 4, 2), r(6, 6), r(6, 2)]
CAUSAL = torch.ones(4, 4, dtype=torch.bool).tril()
sdpa = F.scaled_dot_product_attention
T = torch.ops.aten

Example = tuple[Callable[..., Any], list[Tensor]]
EXAMPLES: dict[str, Example] = {
    "linear": (F.linear, [r(2, 4, 6), r(12, 6), r(12)]),
    "linear no bias": (F.linear, [r(4, 6), r(12, 6)]),
    "linear square": (F.linear, [r(4, 6), r(6, 6), r(6)]),
    "linear of a vector": (F.linear, [r(6), r(12, 6), r(12)]),
    "linear by a vector": (F.linear, [r(2, 4, 6), r(6)]),
    "linear by a vector, square": (lambda x, w, b: F.linear(x, w, b[0]), [r(6, 6, 6), r(6), r(6)]),
    "linear of vectors": (F.linear, [r(6), r(6)]),
    "mv": (torch.mv, [r(4, 6), r(6)]),
    "torch.dot": (torch.dot, [r(6), r(6)]),
    "vdot": (torch.vdot, [r(6), r(6)]),
    "einsum without an arrow": (lambda x, w: torch.einsum("bsi,i", x, w), [r(2, 4, 6), r(6)]),
    "einsum of a trace": (lambda x: torch.einsum("ii", x), [r(6, 6)]),
    "batch_norm": (
        lambda x, m, v, w, b: F.batch_norm(x, m, v.exp(), w, b),
        [r(4, 6, 2), r(6), r(6), r(6), r(6)],
    ),
    "batch_norm training": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), [r(4, 6), r(6), r(6)]),
    "gru": (lambda x, h, a, b: T.gru.input(x, h, [a, b], False, 1, 0.0, True, False, False)[0], GRU),
    "gru batch first": (
        lambda x, h, a, b: T.gru.input(x.mT, h, [a, b], False, 1, 0.0, True, False, True)[0],
        GRU_FIRST,
    ),
    "lstm": (
        lambda x, h, c, a, b: T.lstm.input(x, [h, c], [a, b], False, 1, 0.0, True, False, False)[0],
        [r(3, 4, 6), r(1, 4, 2), r(1, 4, 2), r(8, 6), r(8, 2)],
    ),
    "rnn tanh": (
        lambda x, h, a, b: T.rnn_tanh.input(x, h, [a, b], False, 1, 0.0, True, False, False)[0],
        RNN,
    ),
    "rnn relu": (
        lambda x, h, a, b: T.rnn_relu.input(x, h, [a, b], False, 1, 0.0, True, False, False)[1],
        RNN,
    ),
    "view as integers": (lambda x: (x.view(torch.int64) > 0) * x, [r(4, 6)]),
    "view as shorter integers": (lambda x: x.view(torch.int32) > 0, [r(4, 6)]),
    "rsub of tensors": (torch.rsub, [r(4, 6), r(4, 6)]),
    "parts of complex numbers": (lambda x, y: torch.complex(x, y).resolve_conj().imag, [r(4, 6), r(4, 6)]),
    "conjugate": (lambda x, y: torch.polar(x.exp(), y).conj().real, [r(4, 6), r(4, 6)]),
    "margin_ranking_loss": (lambda x, y: F.margin_ranking_loss(x, y, y.sign(), 0.5), [r(4, 6), -r(4, 6)]),
    "hinge_embedding_loss": (lambda x, y: F.hinge_embedding_loss(x, y.sign()), [r(4, 6), r(4, 6)]),
    "poisson_nll_loss": (lambda x, y: F.poisson_nll_loss(x, y.exp(), full=True), [r(4, 6), r(4, 6)]),
    "cosine_embedding_loss": (
        lambda x, y, z: F.cosine_embedding_loss(x, y, z.sign()),
        [r(4, 6), r(4, 6), r(4)],
    ),
    "triplet_margin_loss": (F.triplet_margin_loss, [r(4, 6), r(4, 6) + 1, r(4, 6) + 2]),
    "multi_margin_loss": (
        lambda x, i, w: F.multi_margin_loss(x, i, weight=w.exp()),
        [r(4, 6), ids(6, 4), r(6)],
    ),
    "multilabel_margin_loss": (F.multilabel_margin_loss, [r(4, 6), labels(6, 4, 6).clamp(min=-1)]),
    **{f"fft {name}": (fourier(name), [r(4, 6, 2)]) for name in FOURIER},
    "fft of chosen dims": (lambda x: torch.fft.fftn(x, dim=(0, 2)).abs(), [r(4, 6, 2)]),
    "fft of another length": (lambda x: torch.fft.rfft(x, n=12, dim=1).abs(), [r(4, 6, 2)]),
    "linear folded": (lambda x, w, b: F.linear(x, w, b).view(2, 3, 2, 6), [r(2, 3, 6), r(12, 6), r(12)]),
    "addmm": (torch.addmm, [r(6), r(4, 12), r(12, 6)]),
    "addmm 2D": (torch.addmm, [r(4, 6), r(4, 12), r(12, 6)]),
    "addmm scaled": (
        lambda a, b, c: torch.addmm(a, b, c, beta=2.0, alpha=0.5),
        [r(1, 6), r(4, 12), r(12, 6)],
    ),
    "matmul 2D": (torch.matmul, [r(4, 6), r(6, 12)]),
    "matmul 3D 2D": (torch.matmul, [r(2, 4, 6), r(6, 12)]),
    "matmul 4D": (torch.matmul, [r(2, 6, 4, 6), r(2, 6, 6, 4)]),
    "matmul broadcast": (torch.matmul, [r(2, 6, 4, 6), r(2, 1, 6, 4)]),
    "matmul broadcast left": (torch.matmul, [r(4, 6), r(2, 6, 6, 4)]),
    "matmul by a vector": (torch.matmul, [r(2, 4, 6), r(6)]),
    "matmul square by a vector": (torch.matmul, [r(6, 6), r(6)]),
    "matmul of a vector": (torch.matmul, [r(6), r(6, 4)]),
    "dot": (torch.matmul, [r(6), r(6)]),
    "matmul of itself": (lambda x: x @ x, [r(6, 6)]),
    "mm": (torch.mm, [r(4, 6), r(6, 12)]),
    "bmm": (torch.bmm, [r(6, 4, 2), r(6, 2, 12)]),
    "baddbmm": (torch.baddbmm, [r(6, 4, 12), r(6, 4, 2), r(6, 2, 12)]),
    "baddbmm broadcast": (torch.baddbmm, [r(1, 4, 12), r(6, 4, 2), r(6, 2, 12)]),
    "expert_mm": (torch.ops.autoptd.expert_mm, [r(12, 6), r(4, 6, 2), ids(4, 12)]),
    "embedding": (F.embedding, [ids(12, 2, 6), r(12, 6)]),
    "embedding padded": (lambda i, w: F.embedding(i, w, padding_idx=7), [ids(12, 2, 6), r(12, 6)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), [r(2, 4, 6), r(6), r(6)]),
    "layer_norm plain": (lambda x: F.layer_norm(x, (4, 6)), [r(2, 4, 6)]),
    "layer_norm 2D": (lambda x, w: F.layer_norm(x, (4, 6), w), [r(6, 4, 6), r(4, 6)]),
    "weight norm by rows": (lambda v, g: torch._weight_norm(v, g, 0), [r(4, 6), r(4, 1)]),
    "weight norm by columns": (lambda v, g: torch._weight_norm(v, g, 1), [r(4, 6), r(1, 6)]),
    "rms_norm": (lambda x, w: F.rms_norm(x, (6,), w), [r(2, 4, 6), r(6)]),
    "sdpa": (sdpa, [r(2, 6, 4, 2), r(2, 6, 4, 2), r(2, 6, 4, 2)]),
    "sdpa causal": (
        lambda q, k, v: sdpa(q, k, v, is_causal=True),
        [r(2, 6, 4, 2), r(2, 6, 4, 2), r(2, 6, 4, 6)],
    ),
    "sdpa causal, fewer queries": (
        lambda q, k, v: sdpa(q, k, v, is_causal=True),
        [r(2, 6, 4, 2), r(2, 6, 8, 2), r(2, 6, 8, 2)],
    ),
    "sdpa causal, more queries": (
        lambda q, k, v: sdpa(q, k, v, is_causal=True),
        [r(2, 6, 8, 2), r(2, 6, 4, 2), r(2, 6, 4, 2)],
    ),
    "sdpa cross": (sdpa, [r(2, 6, 4, 2), r(2, 6, 8, 2), r(2, 6, 8, 2)]),
    "sdpa scaled": (lambda q, k, v: sdpa(q, k, v, scale=0.3), [r(2, 6, 4, 2), r(2, 6, 4, 2), r(2, 6, 4, 2)]),
    "sdpa 3D": (sdpa, [r(6, 4, 2), r(6, 4, 2), r(6, 4, 2)]),
    "sdpa mask": (sdpa, [r(2, 6, 4, 2), r(2, 6, 4, 2), r(2, 6, 4, 2), CAUSAL]),
    "sdpa bias per head": (sdpa, [r(2, 6, 4, 2), r(2, 6, 4, 2), r(2, 6, 4, 2), r(6, 4, 4)]),
    "sdpa mask per row": (sdpa, [r(2, 6, 4, 2), r(2, 6, 4, 2), r(2, 6, 4, 2), r(2, 1, 1, 4)]),
    "sdpa grouped": (
        lambda q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True),
        [r(2, 12, 4, 2), r(2, 6, 4, 2), r(2, 6, 4, 2)],
    ),
    "sdpa grouped mask": (
        lambda q, k, v, m: sdpa(q, k, v, m, enable_gqa=True),
        [r(2, 12, 4, 2), r(2, 2, 4, 2), r(2, 2, 4, 2), r(2, 1, 4, 4)],
    ),
    "sdpa grouped bias per head": (
        lambda q, k, v, m: sdpa(q, k, v, m, enable_gqa=True),
        [r(2, 12, 4, 2), r(2, 6, 4, 2), r(2, 6, 4, 2), r(2, 12, 4, 4)],
    ),
    "sdpa one key head": (sdpa, [r(2, 6, 4, 2), r(2, 1, 4, 2), r(2, 1, 4, 2)]),
    "sdpa one query": (sdpa, [r(1, 6, 4, 2), r(2, 6, 4, 2), r(2, 6, 4, 2)]),
    "sdpa of itself": (lambda x: sdpa(x, x, x), [r(2, 6, 4, 2)]),
    "cross_entropy": (F.cross_entropy, [r(6, 12), labels(12, 6)]),
    "cross_entropy sum": (lambda x, y: F.cross_entropy(x, y, reduction="sum"), [r(6, 12), labels(12, 6)]),
    "cross_entropy none": (lambda x, y: F.cross_entropy(x, y, reduction="none"), [r(6, 12), labels(12, 6)]),
    "cross_entropy ignore": (lambda x, y: F.cross_entropy(x, y, ignore_index=2), [r(6, 12), ids(4, 6)]),
    "cross_entropy smooth": (
        lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
        [r(6, 12), labels(12, 6)],
    ),
    "cross_entropy weight": (
        lambda x, y, w: F.cross_entropy(x, y, w.abs()),
        [r(6, 12), labels(12, 6), r(12)],
    ),
    "cross_entropy weight none": (
        lambda x, y, w: F.cross_entropy(x, y, w.abs(), reduction="none", label_smoothing=0.1),
        [r(6, 12), labels(12, 6), r(12)],
    ),
    "cross_entropy 3D": (F.cross_entropy, [r(2, 12, 6), labels(12, 2, 6)]),
    "cross_entropy of probabilities": (lambda x, y: F.cross_entropy(x, y.softmax(-1)), [r(6, 12), r(6, 12)]),
    "softmax": (lambda x: x.softmax(-1), [r(2, 4, 6)]),
    "softmax middle": (lambda x: torch.softmax(x, 1), [r(2, 4, 6)]),
    "_softmax": (lambda x: T._softmax(x, 0, False), [r(2, 4, 6)]),
    "log_softmax": (lambda x: x.log_softmax(-1), [r(2, 4, 6)]),
    "cumsum": (lambda x: x.cumsum(1), [r(2, 4, 6)]),
    "flip": (lambda x: x.flip(0, -1), [r(2, 4, 6)]),
    "roll": (lambda x: x.roll(1, 1), [r(2, 4, 6)]),
    "diff": (lambda x: x.diff(dim=1), [r(2, 4, 6)]),
    "diff behind others": (lambda x, y: x.diff(prepend=y, dim=-1), [r(2, 4, 6), r(2, 4, 3)]),
    "roll two": (lambda x: x.roll((1, 2), (0, 2)), [r(2, 4, 6)]),
    "roll flat": (lambda x: x.roll(1), [r(2, 4, 6)]),
    "triu": (lambda x: x.triu(1), [r(6, 4, 4)]),
    "tril": (lambda x: x.tril(), [r(6, 4, 4)]),
    "sum all": (lambda x: x.sum(), [r(2, 4, 6)]),
    "sum dims": (lambda x: x.sum((0, -1)), [r(2, 4, 6)]),
    "sum keep": (lambda x: x.sum(1, keepdim=True), [r(2, 4, 6)]),
    "sum over one": (lambda x: x.sum(1, keepdim=True), [r(2, 1, 6)]),
    "mean all": (lambda x: x.mean(), [r(2, 4, 6)]),
    "mean dims": (lambda x: x.mean((1, 2)), [r(2, 4, 6)]),
    "mean keep": (lambda x: x.mean(-1, keepdim=True), [r(2, 4, 6)]),
    "mean folded": (lambda x: x.mean(-1).sum() + x.view(2, 4, 6).sum(), [r(2, 24)]),
    "amax": (lambda x: x.amax(-1), [r(2, 4, 6)]),
    "amin of rows": (lambda x: x.amin((1, 2)), [r(2, 4, 6)]),
    "argmax": (lambda x: x.argmax(-1), [r(2, 4, 6)]),
    "argmin all": (lambda x: x.argmin(), [r(2, 4, 6)]),
    "logsumexp": (lambda x: x.logsumexp(1, keepdim=True), [r(2, 4, 6)]),
    "any": (lambda x: (x > 1).any(1), [r(2, 4, 6)]),
    "all": (lambda x: (x > -1).all(2), [r(2, 4, 6)]),
    "view folds": (lambda x: x.view(2, 4, 3, 2), [r(2, 4, 6)]),
    "view joins": (lambda x: x.view(8, 6), [r(2, 4, 6)]),
    "view of both": (lambda x: x.view(2, 2, 12), [r(2, 4, 6)]),
    "view that disagrees": (lambda x: x.view(6, 8), [r(8, 6)]),
    "view ones": (lambda x: x.view(1, 2, 1, 24, 1), [r(2, 4, 6)]),
    "reshape": (lambda x: x.transpose(0, 1).reshape(4, 12), [r(2, 4, 6)]),
    "_unsafe_view": (lambda x: T._unsafe_view(x, [8, 6]), [r(2, 4, 6)]),
    "flatten": (lambda x: x.flatten(1), [r(2, 4, 6)]),
    "flatten start": (lambda x: x.flatten(0, 1), [r(2, 4, 6)]),
    "unflatten": (lambda x: x.unflatten(-1, (3, -1)), [r(2, 12)]),
    "squeeze": (lambda x: x.squeeze(1), [r(2, 1, 6)]),
    "unsqueeze": (lambda x: x.unsqueeze(-2), [r(4, 6)]),
    "transpose": (lambda x: x.transpose(0, 2), [r(2, 4, 6)]),
    "t": (lambda x: x.t(), [r(4, 6)]),
    "t of a vector": (lambda x: x.t(), [r(6)]),
    "permute": (lambda x: x.permute(2, 0, -2), [r(2, 4, 6)]),
    "expand": (lambda x: x.expand(2, 4, 6), [r(4, 1)]),
    "expand minus": (lambda x: x.expand(3, -1, 2, -1), [r(4, 1, 6)]),
    "expand_as": (lambda x, y: x.expand_as(y) * y, [r(4, 1), r(2, 4, 6)]),
    "slice thirds": (lambda x: x[..., 4:8], [r(2, 4, 12)]),
    "slice last third": (lambda x: x[..., -4:], [r(2, 4, 12)]),
    "slice uneven": (lambda x: x[:, 1:], [r(2, 4, 6)]),
    "slice step": (lambda x: x[:, ::2], [r(2, 4, 6)]),
    "slice odd": (lambda x: x[..., 1::2], [r(2, 4, 12)]),
    "slice every third": (lambda x: x[..., 2::3] * x[..., 1::3], [r(2, 4, 18)]),
    "slice some steps": (lambda x: x[:, 1:5:2], [r(2, 6, 6)]),
    "slice all": (lambda x: T.slice(x, 1, 0, 99), [r(2, 4, 6)]),
    "narrow": (lambda x: x.narrow(1, 2, 2), [r(2, 4, 6)]),
    "split": (lambda x: x.split(4, -1), [r(2, 4, 12)]),
    "split first": (lambda x: x.split(6, 0), [r(12, 4)]),
    "split taken": (lambda x: [one * 2 for one in x.split(4, -1)], [r(2, 4, 12)]),
    "split unequal": (lambda x: x.split([6, 3, 3], -1), [r(2, 4, 12)]),
    "split rest": (lambda x: x.split(8, -1), [r(2, 4, 12)]),
    "chunk": (lambda x: x.chunk(2, 2), [r(2, 4, 12)]),
    "chunk rest": (lambda x: x.chunk(3, 1), [r(2, 4, 12)]),
    "select": (lambda x: x[:, 1], [r(2, 4, 6)]),
    "select folded": (lambda x: x.view(2, 3, 4)[:, 1], [r(2, 12)]),
    "unbind": (lambda x: x.unbind(1), [r(2, 3, 6)]),
    "cat": (lambda x, y: torch.cat([x, y], -1), [r(2, 4, 6), r(2, 4, 6)]),
    "cat unequal": (lambda x, y: torch.cat([x, y], 1), [r(2, 4, 6), r(2, 3, 6)]),
    "cat with nothing": (lambda x: torch.cat([torch.tensor([]), x, x], -1), [r(2, 4, 6)]),
    "cat with nothing else": (lambda x: torch.cat([torch.tensor([]), x], -2), [r(2, 4, 6)]),
    "cat of one": (lambda x: torch.cat([x, x], -1), [r(2, 4, 6)]),
    "rotate half": (lambda x: torch.cat([-x[..., 6:], x[..., :6]], -1), [r(2, 4, 12)]),
    "stack": (lambda x, y: torch.stack([x, y], 1), [r(4, 6), r(4, 6)]),
    "stack last": (lambda x, y: torch.stack([x, y], -1), [r(4, 6), r(4, 6)]),
    "pad": (lambda x: F.pad(x, (0, 1)), [r(2, 4, 6)]),
    "pad middle": (lambda x: F.pad(x, (0, 0, 2, 1), value=3.0), [r(2, 4, 6)]),
    "constant_pad_nd": (lambda x: T.constant_pad_nd(x, [1, 1, 0, 0], 2.0), [r(4, 6)]),
    "add broadcast": (torch.add, [r(2, 4, 6), r(4, 1)]),
    "add row": (torch.add, [r(2, 4, 6), r(6)]),
    "add number": (lambda x: x + 1, [r(4, 6)]),
    "add itself": (lambda x: x + x, [r(4, 6)]),
    "add scaled": (lambda x, y: torch.add(x, y, alpha=2), [r(4, 6), r(4, 6)]),
    "add number and tensor": (lambda x: 1 + x.sum(), [r(4, 6)]),
    "sub": (torch.sub, [r(2, 4, 6), r(2, 4, 6)]),
    "rsub of a number": (lambda x: 1 - x, [r(4, 6)]),
    "mul": (torch.mul, [r(2, 4, 6), r(2, 1, 6)]),
    "mul number": (lambda x: x * 3.0, [r(4, 6)]),
    "mul itself": (lambda x: x * x, [r(4, 6)]),
    "div": (torch.div, [r(2, 4, 6), r(6)]),
    "div itself": (lambda x: x / x, [r(4, 6)]),
    "div by number": (lambda x: x / 3, [r(4, 6)]),
    "div floor": (lambda x: torch.div(x, 3, rounding_mode="floor"), [r(4, 6)]),
    "number over": (lambda x: 2 / x, [r(4, 6)]),
    "other transposes": (lambda x: x.T @ x.mT.transpose(0, 1).swapaxes(0, 1).mT, [r(4, 6)]),
    "mT swapdims": (lambda x: x.mT.swapdims(0, -1) * 2, [r(2, 4, 6)]),
    "einsum": (lambda x, y: torch.einsum("bhid,bhjd->bhij", x, y), [r(2, 6, 4, 2), r(2, 6, 3, 2)]),
    "einsum dots": (lambda x, y: torch.einsum("...i, ij -> ...j", x, y), [r(2, 4, 6), r(6, 12)]),
    "einsum outer": (lambda x, y, z: torch.einsum("i,j,k->ik", x, y, z), [r(4), r(6), r(2)]),
    "einsum square": (lambda x: torch.einsum("ij,ij->i", x, x), [r(4, 6)]),
    "einsum implicit": (lambda x, y: torch.einsum("ij,jk", x, y), [r(4, 6), r(6, 2)]),
    "einsum trace": (lambda x: torch.einsum("ii->i", x), [r(6, 6)]),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 1), [r(2, 6, 4)]),
    "repeat_interleave flat": (lambda x: x.repeat_interleave(2), [r(2, 6)]),
    "norms": (lambda x: [x.norm(dim=-1), x.norm(), torch.linalg.vector_norm(x, 1, 1, True)], [r(2, 4, 6)]),
    "normalize": (lambda x: F.normalize(x, dim=1), [r(2, 4, 6)]),
    "var std": (lambda x: [x.var(-1, keepdim=True), x.std(1, unbiased=False), x.var()], [r(2, 4, 6)]),
    "prod": (lambda x: x.prod(1, keepdim=True), [r(2, 4, 6)]),
    "mse_loss": (F.mse_loss, [r(4, 6), r(4, 6)]),
    "mse_loss sum": (lambda x, y: F.mse_loss(x, y, reduction="sum"), [r(4, 6), r(4, 6)]),
    "mse_loss none": (lambda x, y: F.mse_loss(x, y, reduction="none"), [r(4, 6), r(4, 6)]),
    "l1_loss broadcast": (F.l1_loss, [r(4, 6), r(6)]),
    "smooth_l1_loss": (lambda x, y: F.smooth_l1_loss(x, y, beta=0.3), [r(4, 6), r(4, 6)]),
    "huber_loss": (lambda x, y: F.huber_loss(x, y, delta=0.3), [r(4, 6), r(4, 6)]),
    "kl_div": (lambda x, y: F.kl_div(x, y.softmax(-1), reduction="sum"), [r(4, 6), r(4, 6)]),
    "soft_margin_loss": (lambda x, y: F.soft_margin_loss(x, y.sign()), [r(4, 6), r(4, 6)]),
    "binary_cross_entropy": (
        lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
        [r(4, 6), r(4, 6)],
    ),
    "with logits": (
        lambda x, y, w: F.binary_cross_entropy_with_logits(x, y.sigmoid(), pos_weight=w.exp()),
        [r(4, 6), r(4, 6), r(6)],
    ),
    "untagged pointwise": (lambda x: F.hardswish(F.logsigmoid(x)), [r(4, 6)]),
    "dropout": (lambda x: F.dropout(x.view(2, 4, 12), 0.3), [r(2, 4, 6, 2)]),
    "dropout of a folded dim": (lambda x: F.dropout(x.view(6, 12), 0.3), [r(2, 3, 6, 2)]),
    "noise": (lambda x: torch.rand_like(x.view(2, 4, 12)) * torch.randn(2, 4, 12), [r(2, 4, 6, 2)]),
    "exponential noise": (lambda x: x + torch.empty_like(x).exponential_(), [r(4, 6)]),
    "attention with dropout": (lambda q, k, v: sdpa(q, k, v, CAUSAL, 0.3), [r(2, 6, 4, 8)] * 3),
    "neg clone": (lambda x: (-x).clone(), [r(4, 6)]),
    "contiguous": (lambda x: x.t().contiguous(), [r(4, 6)]),
    "detach": (lambda x: x.detach() * x, [r(4, 6)]),
    "to": (lambda x: x.to(torch.float32).to(torch.float64), [r(4, 6)]),
    "where": (lambda c, x, y: torch.where(c > 0, x, y), [r(4, 1), r(2, 4, 6), r(6)]),
    "where number": (lambda x: torch.where(x > 0, x, 0.0), [r(4, 6)]),
    "masked_fill": (lambda x, m: x.masked_fill(m > 0, -1e9), [r(2, 4, 6), r(4, 6)]),
    "causal by hand": (lambda x: x.masked_fill(CAUSAL.logical_not(), -1e9).softmax(-1), [r(2, 6, 4, 4)]),
    "masked_fill by a tensor": (lambda x, m: x.masked_fill(m > 0, torch.tensor(-9.0)), [r(2, 4, 6), r(4, 6)]),
    "finite": (lambda x: x.isfinite() | x.isnan() | x.isinf() | ((x > 0).long() // 2 > 0), [r(4, 6)]),
    "repeat": (lambda x: x.repeat(1, 3, 2), [r(2, 4, 6)]),
    "repeat new": (lambda x: x.repeat(6, 4, 2, 1), [r(1, 2, 6)]),
    "glu": (lambda x: F.glu(x, 1), [r(2, 12, 4)]),
    "gather": (lambda x, y: x.gather(1, (y > 0).long()), [r(4, 6, 2), r(4, 3, 2)]),
    "scatter": (lambda x, y: x.scatter(1, (y > 0).long(), 2.0), [r(4, 6, 2), r(4, 3, 2)]),
    "scatter all": (lambda x, y, z: x.scatter(-1, z.argsort(-1), y), [r(4, 6), r(4, 6), r(4, 6)]),
    "scatter_add": (lambda x, y: x.scatter_add(1, (y > 0).long(), y), [r(4, 6), r(4, 6)]),
    "scatter_add fewer": (lambda x, y: x.scatter_add(-1, (y > 0).long(), y), [r(4, 6), r(2, 4)]),
    "concat": (lambda x, y: torch.concat((x, y), -1), [r(4, 6), r(4, 3)]),
    "gather fewer": (lambda x, y: x.gather(-1, (y > 0).long()), [r(4, 6), r(2, 4)]),
    "take_along_dim": (lambda x, y: torch.take_along_dim(x, (y > 0).long(), -1), [r(4, 6), r(4, 2)]),
    "index": (lambda x, y: x[:, (y > 0).long()], [r(4, 6, 2), r(2, 3)]),
    "index first": (lambda x, y: x[(y > 0).long()], [r(4, 6), r(2, 4)]),
    "index twice": (lambda x, y: x[(y > 0).long(), (y < 0).long()], [r(4, 6), r(2, 4)]),
    "index_select": (lambda x, y: x.index_select(1, (y > 0).long()), [r(4, 6), r(4)]),
    "one_hot": (lambda x: F.one_hot((x > 0).long(), 6) * 1.5, [r(4, 6)]),
    "extremes": (lambda x, y: [x.max(), x.min(1).values, torch.max(x, y), torch.min(x, y)], [r(4, 6), r(6)]),
    "topk sort": (lambda x: [x.topk(2, 1).values, x.sort(0).values], [r(4, 6)]),
    "complex": (lambda x: torch.view_as_real(torch.view_as_complex(x) * 2.0), [r(4, 6, 2)]),
    "conv1d": (F.conv1d, [r(4, 6, 5), r(6, 6, 2), r(6)]),
    "conv1d depthwise": (
        lambda x, w, b: F.conv1d(x, w, b, padding=1, groups=6),
        [r(4, 6, 5), r(6, 1, 2), r(6)],
    ),
    "conv1d grouped": (lambda x, w, b: F.conv1d(x, w, b, groups=6), [r(4, 12, 5), r(24, 2, 2), r(24)]),
    "conv1d of one sample": (lambda x, w: F.conv1d(x, w, groups=3), [r(6, 5), r(12, 2, 2)]),
    "conv2d": (lambda x, w: F.group_norm(F.conv2d(x, w), 2), [r(2, 6, 4, 3), r(4, 6, 2, 2)]),
    "moved and squeezed": (lambda x: x.movedim(0, -1).unsqueeze(1).squeeze().squeeze(0), [r(4, 6, 2)]),
    "tensor_split": (lambda x: torch.tensor_split(x, 3, -1), [r(4, 6)]),
    "nll": (lambda x: F.nll_loss(x.log_softmax(-1), torch.tensor([1, 0, 3, 2])), [r(4, 6)]),
    "gelu": (lambda x: F.gelu(x, approximate="tanh"), [r(4, 6)]),
    "pointwise": (
        lambda x: (F.silu(x).tanh() + x.relu().exp().sigmoid()).pow(2).rsqrt().clamp(max=2),
        [r(4, 6)],
    ),
    "maximum": (torch.maximum, [r(4, 6), r(6)]),
    "lerp": (torch.lerp, [r(4, 6), r(6), r(4, 1)]),
    "addcmul": (torch.addcmul, [r(4, 6), r(6), r(4, 1)]),
    "per_microbatch": (lambda x: autoptd.per_microbatch(x.mean()), [r(4, 6)]),
    "compare": (lambda x, y: (x > y) & (x != 0), [r(4, 6), r(6)]),
    "or xor": (lambda x, y: (x > y) | (x != 0) ^ (y < 1), [r(4, 6), r(6)]),
    "full": (lambda x: x + torch.full((4, 6), 2.0), [r(4, 6)]),
    "zeros ones": (lambda x: x * torch.zeros(4, 6) + torch.ones(6), [r(4, 6)]),
    "new": (lambda x: x.new_zeros(3, 6) + x.new_ones(6) + x.new_full((3, 6), 4.0), [r(4, 6)]),
    "like": (lambda x: torch.zeros_like(x) + torch.ones_like(x) + torch.full_like(x, 3.0), [r(4, 6)]),
    "arange": (lambda x: x + torch.arange(6) + torch.eye(6)[0] + torch.scalar_tensor(2.0), [r(4, 6)]),
}


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@cache
def traced(name: str) -> Any:
    """The trace of an example, its values and axes: with a default dtype of float64, whichever file asks first."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        graph, env = trace_call(*EXAMPLES[name])
        return graph, env, Axes(graph)
    finally:
        torch.set_default_dtype(before)


def claims_of(graph: Any, env: Any, axes: Axes, most: int = 1) -> list[str]:
    """Hold every claim of every operator of a graph, each over so many numbers of ranks; returns what is false."""
    torch.manual_seed(0)
    findings = []
    for node in ops(graph):
        for letter in axes.letters(node):
            degrees = [t for t in (2, 3) if letter.size % t == 0][:most]
            for t in degrees:
                where = f"{op_name(node)}, letter {letter.name} over {t}"
                findings += [f"{where}: {text}" for text in check_letter(node, env, letter, t, "tp")]
                is_rows = not letter.form.startswith(TOGETHER) and takes_whole_dims(node, letter)
                if t == degrees[0] and is_rows:
                    findings += [
                        f"{where} (batch): {text}" for text in check_letter(node, env, letter, t, "batch")
                    ]
        for group in linear_groups(node):
            if all(env[one].is_floating_point() for one in group if isinstance(env[one], torch.Tensor)):
                names = ", ".join(one.name for one in group)
                findings += [
                    f"{op_name(node)}, linear in {names}: {text}"
                    for text in check_linear(node, env, group, 2)
                ]
    return findings


def padded_claims_of(graph: Any, env: Any, axes: Axes) -> list[str]:
    """Hold every letter that may be split in padded shards, over the first number of ranks that does not divide it."""
    torch.manual_seed(0)
    findings = []
    for node in ops(graph):
        for letter in axes.letters(node):
            if takes_whole_dims(node, letter) and is_exact(node, letter):
                t = next(t for t in (2, 3, 4, 5) if letter.size % t)
                where = f"{op_name(node)}, letter {letter.name} of {letter.size} over {t}"
                findings += [f"{where}: {text}" for text in check_letter(node, env, letter, t, "tp")]
    return findings


def takes_whole_dims(node: Any, letter: Any) -> bool:
    """The batch splits whole dims only."""
    places = [*letter.places.items(), *([(node, letter.out)] if letter.out is not None else [])]
    return all(len(one.meta["autoptd"].dims[place[0]]) == 1 for one, place in places)


@pytest.mark.parametrize("most", [1, pytest.param(2, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", EXAMPLES)
def test_row(name: str, most: int) -> None:
    assert claims_of(*traced(name), most) == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_padded_row(name: str) -> None:
    assert padded_claims_of(*traced(name)) == []


def test_an_operator_that_padding_may_not_go_through_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its derivative at zero is infinite: a cotangent of zero becomes NaN."""
    graph, env = trace_call(lambda x: x.abs().rsqrt(), [r(4, 6)])
    assert padded_claims_of(graph, env, Axes(graph)) == []
    monkeypatch.setitem(TABLE, "aten.rsqrt", dataclasses.replace(TABLE["aten.rsqrt"], is_finite=True))
    assert padded_claims_of(graph, env, Axes(graph)) != []


def test_every_row_has_an_example() -> None:
    nodes = [node for name in EXAMPLES for node in ops(traced(name)[0])]
    seen = {op_name(node) for node in nodes} | {str(node.target) for node in nodes}
    rows = {name for name, record in TABLE.items() if record.is_split}
    # An example has nothing to detach from, and no buffers.
    assert rows - seen == {"aten.detach", "autoptd.update_buffer", "autoptd.keep_part", "autoptd.keep_output"}


def small_gpt() -> torch.nn.Module:
    return GPT(GPTConfig(vocab_size=12, block_size=4, n_layer=2, n_head=6, n_embd=12))


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "gpt": small_gpt,
    "einsum": Einsum,
    "unequal": UnequalFused,
}


@pytest.mark.one_in(9)
@pytest.mark.parametrize("which", MODELS)
def test_every_claim_of_a_model(which: str) -> None:
    """Operators whose axes are refined by all others of the model."""
    torch.manual_seed(0)
    size = (2, 4) if which == "gpt" else (2, 8)
    graph, env = trace_model(
        MODELS[which](), [ids(12, *size), labels(12, *size) if which == "gpt" else ids(12, *size)]
    )
    assert claims_of(graph, env, Axes(graph)) == []


# What must be found: (example, operator) -> letters. Without this, a row that claims nothing would pass.
LETTERS = {
    ("linear", "aten.linear"): {".0", ".1", "i", "o"},
    ("addmm", "aten.addmm"): {"m", "n", "k"},
    ("matmul 4D", "aten.matmul"): {".0", ".1", "m", "k", "n"},
    ("matmul by a vector", "aten.matmul"): {".0", ".1", "k"},
    ("embedding", "aten.embedding"): {"vocabulary", "h", "n0", "n1"},
    ("layer_norm", "aten.layer_norm"): {"d0", "d1"},
    ("layer_norm 2D", "aten.layer_norm"): {"d0"},
    ("sdpa causal", "aten.scaled_dot_product_attention"): {"b0", "b1", "e", "l"},
    ("sdpa grouped", "aten.scaled_dot_product_attention"): {"b0", "kv", "repeat", "e", "l"},
    ("sdpa grouped bias per head", "aten.scaled_dot_product_attention"): {"b0", "e", "l"},
    ("sdpa bias per head", "aten.scaled_dot_product_attention"): {"b0", "b1", "e", "l"},
    ("cross_entropy", "aten.cross_entropy_loss"): {"vocabulary", "n0"},
    ("softmax", "aten.softmax"): {"d0", "d1", "d2"},
    ("softmax middle", "aten.softmax"): {"d0", "d1", "d2"},
    ("cumsum", "aten.cumsum"): {"d0", "d2"},
    ("flip", "aten.flip"): {"d1"},
    ("roll flat", "aten.roll"): set(),
    ("triu", "aten.triu"): {"d0"},
    ("sum dims", "aten.sum"): {"d0", "d1", "d2"},
    ("amax", "aten.amax"): {"d0", "d1"},
    ("amin of rows", "aten.amin"): {"d0"},
    ("logsumexp", "aten.logsumexp"): {"d0", "d1", "d2"},
    ("view that disagrees", "aten.view"): set(),
    ("slice thirds", "aten.slice"): {"d0", "d1", "d2"},
    ("slice uneven", "aten.slice"): {"d0", "d2"},
    ("slice step", "aten.slice"): {"d0", "d1", "d2"},
    ("slice some steps", "aten.slice"): {"d0", "d2"},
    ("split", "aten.split"): {"d0", "d1", "d2"},
    ("split unequal", "aten.slice"): {"d0", "d1"},
    ("chunk", "aten.chunk"): {"d0", "d1", "d2"},
    ("unbind", "aten.unbind"): {"d0", "d2"},
    ("cat", "aten.cat"): {"d0", "d1", "d2"},
    ("cat unequal", "aten.cat"): {"d0", "d2"},
    ("stack", "aten.stack"): {"d0", "d2"},
    ("pad", "aten.pad"): {"d0", "d1"},
    ("where", "aten.where"): {"d0", "d1", "d2"},
    ("expand", "aten.expand"): {"d0", "d1", "d2"},
    ("conv1d", "aten.conv1d"): {"d0", "i", "o"},
    ("conv1d depthwise", "aten.conv1d"): {"d0", "group"},
    ("conv1d grouped", "aten.conv1d"): {"d0", "group", "o"},
    ("linear by a vector", "aten.linear"): {".0", ".1", "i"},
    ("linear by a vector, square", "aten.linear"): {".0", ".1", "i"},
    ("linear of vectors", "aten.linear"): {"i"},
    ("mv", "aten.mv"): {"m", "k"},
    ("torch.dot", "aten.dot"): {"k"},
    ("einsum without an arrow", "aten.einsum"): {"b", "s", "i"},
    ("einsum of a trace", "aten.einsum"): set(),
    ("batch_norm", "aten.batch_norm"): {"c", "d0", "d2"},
    ("gru", "aten.gru"): {"b"},
    ("gru batch first", "aten.gru"): {"b"},
    ("lstm", "aten.lstm"): {"b"},
    ("view as shorter integers", "aten.view"): {"d0"},
    ("cosine_embedding_loss", "aten.cosine_embedding_loss"): {".0"},
    ("multi_margin_loss", "aten.multi_margin_loss"): {"b"},
    ("fft rfft", "aten.fft_rfft"): {"d0", "d1"},
    ("fft fft2", "aten.fft_fft2"): {"d0"},
    ("fft of chosen dims", "aten.fft_fftn"): {"d1"},
    ("conv1d of one sample", "aten.conv1d"): {"group", "o"},
}


@pytest.mark.parametrize(("name", "op"), LETTERS)
def test_letters_that_are_found(name: str, op: str) -> None:
    graph, _, axes = traced(name)
    node = next(node for node in ops(graph) if op_name(node) == op)
    assert {letter.name for letter in axes.letters(node)} == LETTERS[name, op]


WRONG = {
    "softmax split along its dim": ("softmax", Operator("aten.softmax", links=links.pointwise_links)),
    "cumsum split along its dim": ("cumsum", Operator("aten.cumsum", links=links.pointwise_links)),
    "the maximum as a sum": ("amax", Operator("aten.amax", links=links.reduction(""))),
    "a local mean as a sum": ("mean dims", Operator("aten.mean", links=links.reduction(""))),
    "softmax linear": ("softmax", dataclasses.replace(TABLE["aten.softmax"], linear=FIRST)),
    "linear by a factor that is not split": (
        "einsum outer",
        Operator("aten.einsum", links=links.einsum_links, linear=((0, 1, 2),)),
    ),
    "linear, but for its bias": ("linear", dataclasses.replace(TABLE["aten.linear"], linear=((0,),))),
    "linear in input and weight": ("linear", dataclasses.replace(TABLE["aten.linear"], linear=((0, 1),))),
    "letters in another order": ("linear square", Operator("aten.linear", "... i, i o, o -> ... o")),
    "keys of attention free": (
        "sdpa",
        Operator("aten.scaled_dot_product_attention", "b h l k, b h m k, b h m e -> b h l e"),
    ),
    "norm of a slice": ("layer_norm", Operator("aten.layer_norm", "... h, h, h -> ... h")),
    "flip of a slice": ("flip", Operator("aten.flip", links=links.pointwise_links)),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_row_is_rejected(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, row = WRONG[what]
    monkeypatch.setitem(TABLE, row.name, row)
    function, tensors = EXAMPLES[name]
    graph, env = trace_call(function, tensors)
    findings = []
    try:
        findings = claims_of(graph, env, Axes(graph))
    except Exception as error:  # the slices do not even fit
        findings = [str(error)]
    assert findings, "the wrong row passed"


def test_a_condition_alone_is_no_pointwise_operator() -> None:
    """`torch.where(c)` gives indices: it must have no row."""
    assert torch.Tag.pointwise not in torch.ops.aten.where.default.tags
