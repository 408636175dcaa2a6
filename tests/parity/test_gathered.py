"""Context parallelism by keys and values that are gathered: queries, mask rows and results are split by tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.ir.machine import Machine
from autoptd.program.calls import expected_calls
from autoptd.program.program import Program
from benchmarks.lib.subramanian.operators import Local, layer
from benchmarks.lib.subramanian.system import VIT_64K, Quirks
from tests.parity.kept import kept_bytes
from tests.parity.kinds import KINDS, smoothed
from tests.parity.models import LENGTH, VOCAB, batch, gpt, uneven
from tests.parity.rotary import llama
from tests.parity.test_context import CASES, GPT_MESHES, LONG, MODELS
from tests.parity.test_mutations import check_is_found

IDS, TARGETS = batch()
CHUNKS: dict[str, Any] = {"context": "all_gather", "token_order": "contiguous"}
# Nothing is saved by fewer, larger collectives: what sends the fewest bytes is chosen, as at the sizes of large models.
NO_LATENCY = replace(Machine(), latency=0.0)


@pytest.mark.parametrize("mesh", GPT_MESHES, ids=map(str, GPT_MESHES))
def test_gpt(mesh: dict[str, Any]) -> None:
    autoptd.verify(
        gpt(2 * mesh.get("p", 1)),
        **mesh,
        context="all_gather",
        example_inputs=(IDS, uneven(TARGETS)),
        steps=2,
    )


@pytest.mark.thorough
@pytest.mark.one_in(96)
@pytest.mark.parametrize(("name", "mesh"), CASES, ids=map(str, CASES))
def test_models(name: str, mesh: dict[str, Any]) -> None:
    make, labels, _ = MODELS[name]
    autoptd.verify(make(), **mesh, context="all_gather", example_inputs=(IDS, labels), steps=2)


@pytest.mark.one_in(96)
@pytest.mark.parametrize("kind", KINDS)
def test_heads_need_not_divide(kind: str) -> None:
    """Three ranks, and six, three or two heads; of a source of four tokens they take none."""
    given = KINDS[kind]
    mesh = {"c": 2 if given.has_source else 3, "t": 2, "sequence_parallel": True}
    autoptd.verify(
        given.make(0.2),
        **mesh,
        context="all_gather",
        loss_fn=given.loss_fn,
        example_inputs=given.batch(6, 1),
        steps=1,
    )


EDITS = {
    "keys are counted from a rank's first query": (
        "rt.causal_attention(q, k_whole, v_whole, cp)",
        "F.scaled_dot_product_attention(q, k_whole, v_whole, is_causal=True)",
    ),
    "keys of other ranks first": ("rt.s_to_r(k, cp, dim=2,", "rt.s_to_r(k.flip(2), cp, dim=2,"),
    "the gradient of a rank's own queries alone": ("rt.s_to_r(v, cp, dim=2,", "rt.s_to_i(v, cp, dim=2,"),
    "all keys are seen": (
        "rt.causal_attention(q, k_whole, v_whole, cp)",
        "F.scaled_dot_product_attention(q, k_whole, v_whole)",
    ),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_one_mistake_is_found(monkeypatch: pytest.MonkeyPatch, edit: tuple[str, str]) -> None:
    check_is_found(monkeypatch, edit, gpt(2), c=2, **CHUNKS, example_inputs=batch())


@pytest.mark.parametrize(
    ("model", "heads", "kv", "c"),
    [
        (lambda: gpt(3), 32, 32, 2),
        (lambda: gpt(3), 32, 32, 4),
        (lambda: llama(3), 16, 8, 2),
        (lambda: llama(3), 16, 8, 4),
        (lambda: llama(3, kv=1), 16, 4, 4),
    ],
    ids=["gpt, c=2", "gpt, c=4", "grouped, c=2", "grouped, c=4", "one KV head, c=4"],
)
def test_traffic_of_a_layer_is_the_closed_form(
    model: Callable[[], nn.Module], heads: int, kv: int, c: int
) -> None:
    """2 b s h_kv (c - 1) / c elements a rank, layer and direction, to the byte: KV heads before they are repeated."""
    pm = autoptd.parallelize(model(), c=c, context="all_gather", backend="local", example_inputs=batch())
    pm.step(*batch())
    with pm.record() as record:
        pm.step(*batch())
    for rank in range(c):
        assert Counter(record.of(rank)) == expected_calls(pm.program, rank)
        for phase, kind in (("forward", "all-gather"), ("backward", "reduce-scatter")):
            sent = [call.wire_bytes for call in record.of(rank) if call.kind == kind and call.phase == phase]
            each = Fraction(4 * 2 * pm.program.rows * LENGTH * kv * (c - 1), c)
            assert sum(map(Fraction, sent)) == 3 * pm.program.num_microbatches * each
        assert not any(call.kind == "all-to-all" for call in record.of(rank))
    pm.close()


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.post = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.post(x))))


class Encoder(nn.Module):
    """A vision transformer's layers."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def two_dims(layers: int, length: int, width: int, heads: int, t: int, c: int) -> Program:
    """2D tensor parallelism of Subramanian et al. 2024: t = n1, c = n2, keys and values gathered over n2."""
    with torch.device("meta"):
        model, ids = Encoder(layers, width, heads), torch.zeros(2, length, dtype=torch.int64)
    how: dict[str, Any] = {"sequence_parallel": True, "context": "all_gather", "machine": NO_LATENCY}
    return autoptd.compile(model, t=t, c=c, example_inputs=(ids, ids), num_microbatches=1, **how)


@pytest.mark.thorough
@pytest.mark.parametrize(("t", "c"), [(4, 4), pytest.param(2, 4, marks=pytest.mark.thorough)])
def test_traffic_is_that_of_two_dimensional_tensor_parallelism(t: int, c: int) -> None:
    """Table II of Subramanian et al. at their ViT-64K: what a rank sends for a layer, over n1 and over n2."""
    vit = VIT_64K
    sent: dict[tuple[str, str], Fraction] = {}
    for sign, layers in ((1, 4), (-1, 2)):
        program = two_dims(layers, vit.seq, vit.hidden, vit.heads, t, c)
        for call, times in expected_calls(program, 0).items():
            if call.phase in ("forward", "backward"):
                key = call.axis, call.phase
                sent[key] = sent.get(key, Fraction(0)) + sign * times * Fraction(call.wire_bytes) / 2 / 4
    ones = np.ones(1)
    operators = layer(Local(vit, 2 * ones, t * ones, c * ones), "2D", 1.0, Quirks())
    paper: Counter[tuple[str, str, str]] = Counter()
    for operator in operators:
        for phase in ("forward", "backward"):
            for one in getattr(operator, phase).collectives:
                axis, n = ("tp", t) if one.axis == "t1" else ("cp", c)
                paper[axis, phase, one.kind] += Fraction(float(one.size[0])) / 2 * (n - 1) / n
    of_paper = {key: sum(n for each, n in paper.items() if each[:2] == key) for key in sent}
    again = Fraction(2 * 2 * vit.seq * vit.hidden * (t - 1), c * t)
    assert sent["tp", "forward"] == of_paper["tp", "forward"]
    # Both inputs of column-split layers are kept as shards, and gathered again: the paper's table keeps them whole.
    assert sent["tp", "backward"] == of_paper["tp", "backward"] + again
    assert sent["cp", "forward"] == of_paper["cp", "forward"]
    # Keys and values are kept whole, where the paper gathers them again.
    assert sent["cp", "backward"] == paper["cp", "backward", "reduce_scatter"]


def test_two_dimensional_tensor_parallelism_sends_what_is_expected() -> None:
    pm = autoptd.parallelize(
        gpt(2),
        t=2,
        c=2,
        sequence_parallel=True,
        context="all_gather",
        machine=NO_LATENCY,
        backend="local",
        example_inputs=batch(),
    )
    with pm.record() as record:
        pm.step(*batch())
    for rank in range(4):
        assert Counter(record.of(rank)) == expected_calls(pm.program, rank)
    pm.close()
    how: dict[str, Any] = {"context": "all_gather", "machine": NO_LATENCY, "sequence_parallel": True}
    autoptd.verify(gpt(2), t=2, c=2, **how, example_inputs=batch(), steps=1)


def test_a_rank_keeps_its_queries_and_all_keys() -> None:
    """A layer keeps 1/c of what one device does, and its keys and values whole besides."""
    kept = {}
    for c in (1, 4):
        more = CHUNKS if c > 1 else {}
        sizes = [kept_bytes(gpt(layers), batch(4), 1, c=c, **more) for layers in (1, 2)]
        kept[c] = sizes[1] - sizes[0]
    whole = 2 * 4 * 4 * LENGTH * 32
    assert kept[1] == 4 * (kept[4] - whole)


@pytest.mark.thorough
def test_six_heads_over_four_ranks() -> None:
    """With "auto" nothing runs whole; "ulysses" says what would divide."""
    keywords: dict[str, Any] = {"loss_fn": smoothed, "example_inputs": LONG}
    program = autoptd.compile(KINDS["loss_fn"].make(0.0), c=4, **keywords)
    assert not program.fallbacks
    with pytest.raises(autoptd.PlanError, match=r"6 heads.*c in \{1, 2, 3, 6\}, or context='all_gather'"):
        autoptd.compile(KINDS["loss_fn"].make(0.0), c=4, context="ulysses", **keywords)
    autoptd.verify(KINDS["loss_fn"].make(0.2), c=4, **keywords, steps=1)


class Pair(nn.Module):
    """Twelve tokens, and a source of ten that attends to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(VOCAB, 12), Block(12, 3), nn.Linear(12, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor, source: Tensor) -> Tensor:
        x = self.embed(ids) + self.block(self.embed(source)).mean(1, keepdim=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def test_queries_that_do_not_divide_are_one_error() -> None:
    ids, source = torch.randint(VOCAB, (4, 12)), torch.randint(VOCAB, (4, 10))
    with pytest.raises(
        autoptd.PlanError, match=r"attention by queries, and 10 queries do not.*context='auto'"
    ):
        autoptd.compile(Pair(), c=3, context="all_gather", example_inputs=(ids, ids, source))


class Segments(nn.Module):
    """Tokens in segments, of which each sees all segments before its own."""

    def __init__(self, width: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(VOCAB, width), nn.Linear(width, 3 * width)
        self.head, self.heads = nn.Linear(width, VOCAB), heads

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.qkv(self.embed(ids)).flatten(1, 2)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in x.chunk(3, -1))
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.cross_entropy(self.head(z.transpose(1, 2).flatten(2)).flatten(0, 1), labels.flatten())


def test_queries_in_several_blocks_are_no_chunk() -> None:
    """Two segments are one for each of two ranks; four ranks would have a part of each, and count places wrongly."""
    ids, labels = torch.randint(VOCAB, (4, 2, 8)), torch.randint(VOCAB, (4, 16))
    given: dict[str, Any] = {"example_inputs": (ids, labels)}
    autoptd.verify(Segments(), c=2, context="all_gather", **given, steps=1)
    autoptd.verify(Segments(), c=4, **given, steps=1)
    with pytest.raises(autoptd.PlanError, match=r"attention by queries, and 2 queries do not.*c in \{1, 2\}"):
        autoptd.compile(Segments(), c=4, context="all_gather", **given)
