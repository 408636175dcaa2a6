"""KV heads that context-parallel ranks do not divide are copied before their all-to-all (Ulysses, Jacobs et al. 2023)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.errors import PlanError
from autoptd.program.program import Program
from tests.parity.checks import as_planned
from tests.parity.models import LENGTH, VOCAB, batch, uneven

IDS, TARGETS = batch()
LABELS = uneven(TARGETS)
ULYSSES = {"context": "ulysses", "num_microbatches": 2}


def by_flag(x: Tensor, times: int) -> Tensor:
    """Attention itself repeats them."""
    return x


def interleaved(x: Tensor, times: int) -> Tensor:
    return x.repeat_interleave(times, 1)


def expanded(x: Tensor, times: int) -> Tensor:
    """As models of transformers write it."""
    b, heads, s, size = x.shape
    return x[:, :, None].expand(b, heads, times, s, size).reshape(b, heads * times, s, size)


def broadcast(x: Tensor, times: int) -> Tensor:
    """Attention broadcasts the only one."""
    return x


class Grouped(nn.Module):
    """Two layers of attention with fewer KV heads than heads: causal, with a mask of documents, or a slope for each head."""

    def __init__(
        self,
        heads: int,
        kv: int,
        repeats: Callable[[Tensor, int], Tensor] = by_flag,
        *,
        masked: bool = False,
        biased: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.kv, self.repeats, self.masked, self.biased = heads, kv, repeats, masked, biased
        width = 4 * heads
        self.embed, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)
        for name, out in (("q", width), ("k", 4 * kv), ("v", 4 * kv), ("o", width)):
            setattr(self, name, nn.ModuleList(nn.Linear(width, out) for _ in range(2)))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, mask = self.embed(ids), None
        if self.masked:
            documents = (ids == 0).cumsum(-1)
            mask = documents[:, None, :, None] == documents[:, None, None]
        if self.biased:
            places = torch.arange(ids.shape[1], device=ids.device)
            far = (places[:, None] - places).abs()
            mask = -far / 2.0 ** torch.arange(self.heads, device=ids.device)[:, None, None]
            mask = mask.to(x.dtype)
        for layers in zip(self.q, self.k, self.v, strict=True):  # type: ignore[arg-type]
            q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in layers)
            k, v = (self.repeats(one, self.heads // self.kv) for one in (k, v))
            z = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=mask is None, enable_gqa=self.repeats is by_flag
            )
            x = x + self.o[0](z.transpose(1, 2).flatten(2))  # type: ignore[index]
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def grouped(heads: int, kv: int, repeats: Callable[[Tensor, int], Tensor] = by_flag, **how: bool) -> Grouped:
    torch.manual_seed(0)
    return Grouped(heads, kv, repeats, **how)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "2 of 8": lambda: grouped(8, 2),
    "2 of 8, interleaved": lambda: grouped(8, 2, interleaved),
    "2 of 8, expanded, documents": lambda: grouped(8, 2, expanded, masked=True),
    "2 of 4: a head a rank": lambda: grouped(4, 2, expanded),
    "2 of 4, a slope for each head": lambda: grouped(4, 2, expanded, biased=True),
    "6 of 12": lambda: grouped(12, 6),
    "3 of 6": lambda: grouped(6, 3, expanded),
    "4 of 16": lambda: grouped(16, 4, interleaved),
    "2 of 16": lambda: grouped(16, 2, expanded, masked=True),
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("2 of 8", {"c": 4}),
    ("2 of 8", {"c": 4, "recompute": "full", "p": 2}),
    ("2 of 8, interleaved", {"c": 4, "d": 2, "zero": 1}),
    ("2 of 8, expanded, documents", {"c": 4}),
    ("2 of 8, expanded, documents", {"c": 4, "precision": "bf16"}),
    ("2 of 4: a head a rank", {"c": 4, "fuse": "eager"}),
    ("2 of 4, a slope for each head", {"c": 4}),
    ("6 of 12", {"c": 4}),
    ("3 of 6", {"c": 2}),
    ("4 of 16", {"c": 4, "t": 2}),
    ("4 of 16", {"c": 4, "t": 2, "sequence_parallel": True}),
    ("2 of 16", {"c": 8}),
]


@pytest.mark.parametrize(("name", "mesh"), CASES, ids=map(str, CASES))
def test_models(name: str, mesh: dict[str, Any]) -> None:
    make = MODELS[name]
    program = autoptd.compile(make(), **{**mesh, **ULYSSES}, example_inputs=batch())
    text = "".join(map(str, program.sources.values()))
    assert text.count("_copies = rt.s_to_s(") >= 2 and "rt.s_to_r(k" not in text
    autoptd.verify(make(), **{**mesh, **ULYSSES}, example_inputs=(IDS, LABELS), steps=2)


@pytest.mark.parametrize(
    ("name", "mesh", "queries", "outer"),
    [
        ("2 of 8", {"c": 4}, 8, 1),
        ("2 of 8, expanded, documents", {"c": 4}, 8, 1),
        ("4 of 16", {"c": 4, "t": 2}, 16, 2),
        ("2 of 16", {"c": 8}, 16, 1),
    ],
    ids=str,
)
def test_traffic_of_a_layer_is_the_closed_form(
    name: str, mesh: dict[str, Any], queries: int, outer: int
) -> None:
    """2 b s h_q (c-1)/c^2 of queries and results, 2 b s k (c-1)/c of keys and values: k is one head's size. Both ways."""
    c = mesh["c"]
    program, record = as_planned(MODELS[name](), batch(), **mesh, **ULYSSES)
    for rank in range(c * mesh.get("t", 1)):
        for phase in ("forward", "backward"):
            sent = [
                Fraction(call.wire_bytes)
                for call in record.of(rank)
                if call.kind == "all-to-all" and call.phase == phase
            ]
            each = program.rows * LENGTH * (2 * Fraction(4 * queries, outer * c) + 2 * 4) * (c - 1) / c
            assert sum(sent) == 2 * program.num_microbatches * 4 * each


AUTO = [
    # 8 + 8 heads' elements over c are fewer than 4 gathered.
    (lambda: grouped(8, 4), {"c": 8}, True),
    (lambda: grouped(16, 2), {"c": 8}, False),
    (lambda: grouped(8, 2), {"c": 2, "context": "ulysses"}, False),
    (lambda: grouped(8, 1, expanded), {"c": 4, "context": "ulysses"}, False),
    (lambda: grouped(8, 2, expanded), {"c": 2, "t": 4, "context": "ulysses"}, False),
    (lambda: grouped(8, 4), {"c": 8, "context": "all_gather"}, False),
]


@pytest.mark.parametrize(
    ("make", "mesh", "is_copied"), AUTO, ids=lambda x: str(x) if isinstance(x, dict) else ""
)
def test_heads_are_copied_where_it_pays(
    make: Callable[[], nn.Module], mesh: dict[str, Any], is_copied: bool
) -> None:
    """Not where ranks divide them, not one head, and with "auto" not where gathering sends less."""
    program = autoptd.compile(make(), **mesh, num_microbatches=2, example_inputs=batch())
    assert ("k_copies" in "".join(map(str, program.sources.values()))) == is_copied


def test_the_remedy_names_the_degrees_that_fit() -> None:
    """Those that divide heads, and those for which heads are copied."""
    given = {**ULYSSES, "example_inputs": (IDS.repeat(1, 3), TARGETS.repeat(1, 3))}
    with pytest.raises(PlanError, match=r"2 and 3 heads .* over c=4. Remedy: c in \{1, 2, 3, 6\}, or"):
        autoptd.compile(grouped(6, 2, expanded), c=4, **given)
    for c in (2, 3, 6):
        autoptd.compile(grouped(6, 2, expanded), c=c, **given)
    with pytest.raises(PlanError, match=r"7 heads do not divide over c=2. Remedy: c in \{1, 7\}, or"):
        autoptd.compile(grouped(7, 7), c=2, **given)


@pytest.mark.parametrize("mesh", [{"c": 4}, {"c": 2, "t": 2, "sequence_parallel": True}], ids=str)
@pytest.mark.parametrize("repeats", [by_flag, broadcast, expanded])
def test_one_kv_head_is_sent_to_all_ranks(
    repeats: Callable[[Tensor, int], Tensor], mesh: dict[str, Any]
) -> None:
    make = functools.partial(grouped, 8, 1, repeats)
    program = autoptd.compile(make(), **mesh, **ULYSSES, example_inputs=batch())
    assert "s_to_s(" in "".join(map(str, program.sources.values()))
    autoptd.verify(make(), **mesh, **ULYSSES, example_inputs=(IDS, LABELS), steps=2)


class Odd(nn.Module):
    """Attention that looks grouped, and is not: `attend` gets queries of 8 heads, 2 KV heads, and a learned memory."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend, self.embed, self.q = attend, nn.Embedding(VOCAB, 32), nn.Linear(32, 32)
        self.kv, self.out = nn.Linear(32, 16), nn.Linear(32, VOCAB)
        self.memory = nn.Parameter(torch.randn(8, 2, 4))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        q = self.q(x).unflatten(-1, (8, 4)).transpose(1, 2)
        k, v = (z.unflatten(-1, (2, 4)).transpose(1, 2) for z in self.kv(x).chunk(2, -1))
        z = self.attend(q, k, v, self.memory)
        return F.cross_entropy(self.out(z.transpose(1, 2).flatten(2)).flatten(0, 1), labels.flatten())


def uneven_repeats(q: Tensor, k: Tensor, v: Tensor, memory: Tensor) -> Tensor:
    k, v = (z.repeat_interleave(torch.tensor([2, 6]), 1, output_size=8) for z in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def memory_of_heads(q: Tensor, k: Tensor, v: Tensor, memory: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, memory, memory * 2, is_causal=True)


def masked_memory(q: Tensor, k: Tensor, v: Tensor, memory: Tensor) -> Tensor:
    mask = (torch.arange(q.shape[-2])[:, None] % 3 != 0) | (torch.arange(2) == 0)
    return F.scaled_dot_product_attention(q, memory, memory * 2, mask)


def one_query_head(q: Tensor, k: Tensor, v: Tensor, memory: Tensor) -> Tensor:
    k, v = (z.repeat_interleave(4, 1) for z in (k, v))
    return F.scaled_dot_product_attention(q[:, :1], k, v, is_causal=True)


def no_gradient_of_keys(q: Tensor, k: Tensor, v: Tensor, memory: Tensor) -> Tensor:
    k, v = expanded(k, 4).detach(), expanded(v, 4)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def values_under_no_grad(q: Tensor, k: Tensor, v: Tensor, memory: Tensor) -> Tensor:
    with torch.no_grad():
        v = expanded(v, 4)
    return F.scaled_dot_product_attention(q, expanded(k, 4), v, is_causal=True)


ODD = [
    uneven_repeats,
    memory_of_heads,
    masked_memory,
    one_query_head,
    no_gradient_of_keys,
    values_under_no_grad,
]


@pytest.mark.parametrize("attend", ODD)
def test_what_is_not_grouped_is_not_copied(attend: Callable[..., Tensor]) -> None:
    """Heads that are repeated unevenly, without samples, or without a gradient; heads of queries that are broadcast."""
    mesh = {**ULYSSES, "num_microbatches": 1}
    autoptd.verify(Odd(attend), c=4, **mesh, example_inputs=(IDS, LABELS), steps=1)


def test_a_program_that_was_written_down_says_the_same(tmp_path: Path) -> None:
    program = autoptd.compile(MODELS["2 of 8"](), c=4, **ULYSSES, example_inputs=batch())
    assert any(spec.model_dims for spec in program.params)
    program.save(tmp_path)
    assert Program.load(tmp_path).params == program.params
