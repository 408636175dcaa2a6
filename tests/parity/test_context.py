"""Context parallelism: every rank has a part of the tokens, and the numbers of one device (Jacobs et al. 2023)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.ir.machine import Machine
from autoptd.passes.solve.tokens import TokenSplitter
from autoptd.program.calls import expected_calls
from autoptd.program.program import Program
from autoptd.wings.reports.collectives import collectives_markdown
from benchmarks.lib.subramanian.operators import Local, layer
from benchmarks.lib.subramanian.system import VIT_64K, Quirks
from tests.parity.checks import as_planned
from tests.parity.kept import kept_bytes
from tests.parity.kinds import KINDS, smoothed
from tests.parity.models import LENGTH, VOCAB, Separate, batch, dropping_gpt, gpt, separate, skipping, uneven
from tests.parity.rotary import llama, neox

# Labels of which the first half of every row, all that the first of two ranks has, is ignored.
IDS, TARGETS = batch()
HALVES = TARGETS.clone()
HALVES[:, : LENGTH // 2] = -100
# One label in the first half of every row.
UNEQUAL = HALVES.clone()
UNEQUAL[:, 0] = TARGETS[:, 0]
ALL_FIVE: dict[str, Any] = {"t": 2, "c": 2, "p": 2, "d": 2, "v": 2}

GPT_MESHES: list[dict[str, Any]] = [
    {"c": 2},
    {"c": 4},
    {"c": 2, "t": 2},
    {"c": 2, "t": 2, "sequence_parallel": True},
    {"c": 4, "t": 2, "sequence_parallel": "auto"},
    {"c": 2, "p": 2, "v": 2},
    {"c": 2, "d": 2, "order": "cp-dp-tp-pp"},
    ALL_FIVE,
    {**ALL_FIVE, "sequence_parallel": True, "order": "pp-cp-dp-tp"},
]


GATHERED: dict[str, Any] = {"context": "all_gather"}
ZIGZAG: dict[str, Any] = {**GATHERED, "token_order": "zigzag"}
CHUNKS: dict[str, Any] = {**GATHERED, "token_order": "contiguous"}
# Zigzag order without keys that are gathered: by heads, where they divide.
WAYS: dict[str, dict[str, Any]] = {
    "auto": {},
    "gathered": GATHERED,
    "zigzag": ZIGZAG,
    "in order": {"token_order": "zigzag"},
}


@pytest.mark.parametrize("mesh", GPT_MESHES, ids=map(str, GPT_MESHES))
@pytest.mark.parametrize("way", list(WAYS)[:3])
def test_gpt(way: str, mesh: dict[str, Any]) -> None:
    labels = (IDS, uneven(TARGETS))
    autoptd.verify(gpt(2 * mesh.get("p", 1)), **mesh, **WAYS[way], example_inputs=labels, steps=2)


class Shifted(nn.Module):
    """Labels that the model shifts itself, two kinds of masks, and no causal order."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.head, self.heads = nn.Linear(width, VOCAB), heads

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        # Documents end at token 0; a window of three tokens.
        documents = (ids == 0).cumsum(-1)
        places = torch.arange(ids.shape[1], device=ids.device)
        near = (places[:, None] - places).abs() < 3
        mask = (documents[:, None, :, None] == documents[:, None, None]) & near
        for _ in range(2):
            q, k, v = (
                y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1)
            )
            z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = x + self.out(z.transpose(1, 2).flatten(2))
        logits = self.head(x)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def shifted() -> Shifted:
    torch.manual_seed(0)
    return Shifted()


class Biased(nn.Module):
    """A learned bias for every distance and head, handed to torch's attention as its mask (T5, Swin)."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.embed, self.heads = nn.Embedding(VOCAB, width), heads
        self.far = nn.Parameter(torch.randn(heads, 64))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        places = torch.arange(ids.shape[1], device=ids.device)
        bias = self.far[:, places[:, None] - places + 32]
        for _ in range(2):
            q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
            z = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
            x = x + self.out(z.transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def biased() -> Biased:
    torch.manual_seed(0)
    return Biased()


class Pooled(nn.Module):
    """A label for every row, from its first token."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(VOCAB, width), nn.Linear(width, width)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(F.gelu(self.up(self.embed(ids)))[:, 0]), labels[:, 0])


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor, list[dict[str, Any]]]] = {
    "written out, learned positions, a mask in a buffer": (separate, uneven(TARGETS), [{"c": 2, "t": 2}, {"c": 4}]),
    "written out, odd heads": (lambda: Separate(2, width=24, heads=3), uneven(TARGETS), [{"c": 2}, {"c": 4, "t": 2}]),
    "rotary, grouped queries": (lambda: llama(3), uneven(TARGETS), [{"c": 2, "p": 2}, {"c": 4}, {"c": 2, "t": 2}]),
    "one KV head": (lambda: llama(2, kv=1), TARGETS, [{"c": 2}, {"c": 4}, {"c": 2, "t": 2}]),
    "KV heads that tensor ranks share": (
        lambda: llama(3, width=32, heads=8),
        uneven(TARGETS),
        [{"c": 2, "t": 4}, {"c": 2, "t": 4, "sequence_parallel": True}],
    ),
    "rotary, q, k and v of a head side by side": (lambda: neox(3), TARGETS, [{"c": 2, "t": 2}]),
    "labels are shifted, documents, windows": (shifted, uneven(TARGETS), [{"c": 2}, {"c": 2, "t": 2}, {"c": 4}]),
    "a rank without labels": (lambda: gpt(2), HALVES, [{"c": 2}, {"c": 2, "d": 2}]),
    "labels are an input of the model": (skipping, TARGETS, [{"c": 2}, {"c": 4, "p": 2}]),
    "dropout everywhere": (
        dropping_gpt,
        uneven(TARGETS),
        [{"c": 2}, {"c": 2, "t": 2}, {"c": 2, "t": 2, "sequence_parallel": True}, ALL_FIVE],
    ),
}  # fmt: skip
CASES = [(name, mesh) for name, (_, _, meshes) in MODELS.items() for mesh in meshes]


@pytest.mark.parametrize(("name", "mesh"), CASES, ids=map(str, CASES))
@pytest.mark.parametrize("way", WAYS)
def test_models(way: str, name: str, mesh: dict[str, Any]) -> None:
    """Positions, rotary tables, masks and labels are sliced as the tokens are, whatever attention does."""
    make, labels, _ = MODELS[name]
    autoptd.verify(make(), **mesh, **WAYS[way], example_inputs=(IDS, labels), steps=2)


@pytest.mark.one_in(96)
@pytest.mark.parametrize("mesh", [{"c": 3}, {"c": 3, "t": 2, "sequence_parallel": True}], ids=str)
@pytest.mark.parametrize("way", list(WAYS)[:3])
@pytest.mark.parametrize("kind", KINDS)
def test_three_ranks(kind: str, way: str, mesh: dict[str, Any]) -> None:
    """And six, three or two heads; of the encoder's four tokens three ranks take none."""
    given = KINDS[kind]
    mesh = {**mesh, "c": 2 if given.has_source else 3, **WAYS[way]}
    autoptd.verify(given.make(0.2), **mesh, loss_fn=given.loss_fn, example_inputs=given.batch(6, 1), steps=1)


@pytest.mark.parametrize("mesh", [{"c": 2, "t": 2}, {"c": 2}, {"c": 4, "p": 2}], ids=str)
def test_a_learned_bias_of_attention(mesh: dict[str, Any]) -> None:
    """Its dims are tokens, though it is made of parameters alone: it is added to a product, no factor of it."""
    autoptd.verify(biased(), **mesh, example_inputs=(IDS, uneven(TARGETS)), steps=2)


# By heads: not two KV heads over four ranks, whose keys and values are gathered.
TRAFFIC: dict[
    str, tuple[Callable[[], nn.Module], dict[str, Any], int, int]
] = {  # model, keywords, width and KV width
    "by heads, gpt, c=2": (lambda: gpt(3), {"c": 2}, 32, 32),
    "by heads, gpt, c=4": (lambda: gpt(3), {"c": 4}, 32, 32),
    "by heads, grouped, c=2": (lambda: llama(3), {"c": 2}, 16, 8),
    "gathered, gpt, c=2": (lambda: gpt(3), {"c": 2, **GATHERED}, 32, 32),
    "gathered, gpt, c=4": (lambda: gpt(3), {"c": 4, **GATHERED}, 32, 32),
    "gathered, grouped, c=2": (lambda: llama(3), {"c": 2, **GATHERED}, 16, 8),
    "gathered, grouped, c=4": (lambda: llama(3), {"c": 4, **GATHERED}, 16, 8),
    "gathered, one KV head, c=4": (lambda: llama(3, kv=1), {"c": 4, **GATHERED}, 16, 4),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", TRAFFIC)
def test_traffic_of_a_layer_is_the_closed_form(name: str) -> None:
    """By heads b s (2 h_q + 2 h_kv) (c - 1) / c^2 elements a rank, layer and direction, to the byte; with keys and values
    that are gathered, before they are repeated, 2 b s h_kv (c - 1) / c.
    """
    make, asked, width, kv = TRAFFIC[name]
    program, record = as_planned(make(), batch(), **asked)
    c, is_gathered = asked["c"], name.startswith("gathered")
    each = Fraction(2 * kv * (c - 1), c) if is_gathered else Fraction((2 * width + 2 * kv) * (c - 1), c**2)
    kinds = {"forward": "all-gather", "backward": "reduce-scatter"} if is_gathered else {}
    for rank in range(c):
        for phase in ("forward", "backward"):
            calls = [call for call in record.of(rank) if call.phase == phase]
            sent = [
                Fraction(call.wire_bytes) for call in calls if call.kind == kinds.get(phase, "all-to-all")
            ]
            assert sum(sent) == 3 * program.num_microbatches * 4 * program.rows * LENGTH * each
            assert not (is_gathered and any(call.kind == "all-to-all" for call in calls))


NO_TOKENS = {"input": torch.randn(4, 8), "targets": torch.randn(4, 4)}
# Of twelve tokens, which four ranks divide, and six heads, which they do not.
LONG = {name: x.repeat(1, 2) for name, x in KINDS["loss_fn"].batch(4, 0).items()}


TWELVE = torch.randint(VOCAB, (4, 12), generator=torch.manual_seed(0))
SEGMENTS = torch.randint(VOCAB, (4, 2, 8)), torch.randint(VOCAB, (4, 16))


class Pair(nn.Module):
    """Twelve tokens, and a source of ten that attends to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(VOCAB, 12), Block(12, 3), nn.Linear(12, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor, source: Tensor) -> Tensor:
        x = self.embed(ids) + self.block(self.embed(source)).mean(1, keepdim=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


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


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "tokens": (gpt, {"c": 3}, r"c=3: 8 tokens do not divide over c=3.*c in \{1, 2, 4, 8\}"),
    "tokens over both": (
        gpt,
        {"c": 4, "t": 4, "sequence_parallel": True},
        r"8 tokens do not divide over t\*c=16",
    ),
    "no tokens": (
        lambda: nn.Linear(8, 4),
        {"c": 2, "loss_fn": F.mse_loss, "example_inputs": NO_TOKENS},
        "c=2: the model has no tokens",
    ),
    "heads": (
        lambda: KINDS["loss_fn"].make(0.0),
        {"c": 4, "context": "ulysses", "loss_fn": smoothed, "example_inputs": LONG},
        r"6 heads do not divide over c=4.*c in \{1, 2, 3, 6\}, or context='all_gather'",
    ),
    "another way": (gpt, {"c": 2, "context": "ring"}, "context='ring'.*is not implemented"),
    "a way without ranks": (gpt, {"context": "ulysses"}, "with c=1 every rank has all tokens"),
    "an order without them": (gpt, {"c": 2, "order": "tp-dp-pp"}, "leaves out cp"),
    "heads of a tensor rank": (
        lambda: gpt(2),
        {"c": 4, "t": 2, "context": "ulysses"},
        r"2 heads of a tensor rank.*c in \{1, 2\}, or context='all_gather'",
    ),
    # All of its heads are on every rank; that four heads do not divide over two ranks would be no reason.
    "a learned bias by heads": (
        lambda: biased(),
        {"c": 2, "context": "ulysses"},
        "splits attention by heads, and cannot split this one by them. Remedy: context='all_gather'",
    ),
    # On the machine of the tests t=8 has nothing to split.
    "tokens of the queries of tensor ranks": (
        lambda: llama(2, width=24, heads=6, kv=3),
        {
            "c": 4,
            "t": 8,
            "context": "ulysses",
            "machine": Machine(),
            "example_inputs": tuple(x.repeat(1, 3) for x in batch()),
        },
        r"24 tokens do not divide over t\*c=32. Remedy: a multiple of 32 tokens, or c in \{1, 3\}",
    ),
    "queries": (
        lambda: Pair(),
        {"c": 3, **GATHERED, "example_inputs": (TWELVE, TWELVE, TWELVE[:, :10])},
        "attention by queries, and 10 queries do not.*context='auto'",
    ),
    "queries in several blocks": (
        lambda: Segments(),
        {"c": 4, **GATHERED, "example_inputs": SEGMENTS},
        r"attention by queries, and 2 queries do not.*c in \{1, 2\}",
    ),
    "tokens without pieces": (
        lambda: gpt(2),
        {"c": 2, "token_order": "zigzag", "example_inputs": (IDS[:, :6], IDS[:, :6])},
        r"token_order='zigzag': 6 tokens do not divide over 2\*c=4.*a multiple of 4 tokens",
    ),
    "an order of all tokens": (
        gpt,
        {"token_order": "zigzag"},
        "token_order='zigzag': with c=1 every rank has all tokens",
    ),
    "another order": (gpt, {"c": 2, "token_order": "striped"}, "token_order='striped': no such choice"),
}


@pytest.mark.parametrize(("make", "keywords", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_one_error(make: Any, keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(autoptd.PlanError, match=words):
        autoptd.compile(make(), **{"example_inputs": batch(), **keywords})


def test_a_plan_has_the_axis_where_it_has_ranks() -> None:
    one, two = (autoptd.compile(gpt(2), c=c, example_inputs=batch()) for c in (1, 2))
    assert one.plan["mesh"] == {"t": 1, "p": 1, "d": 1, "v": 1} and "context" not in one.plan["options"]
    assert (
        two.plan["mesh"] == {"t": 1, "p": 1, "d": 1, "c": 2, "v": 1}
        and two.plan["options"]["context"] == "auto"
    )
    assert autoptd.compile(gpt(2), plan=two.plan, example_inputs=batch()).sources == two.sources


@pytest.mark.parametrize("way", [{"context": "auto"}, CHUNKS, ZIGZAG], ids=str)
def test_a_rank_keeps_its_part_of_the_tokens(way: dict[str, Any]) -> None:
    """A layer keeps 1/c of what one device does, and attention's result once more (before its all-to-all, and after), or its
    keys and values whole, of two pieces as of one.
    """
    kept = {}
    for c in (1, 4):
        asked = way if c > 1 else {}
        sizes = [kept_bytes(gpt(layers), batch(4), 1, c=c, **asked) for layers in (1, 2)]
        kept[c] = sizes[1] - sizes[0]
    result = 4 * 4 * LENGTH * 32
    assert kept[1] + (8 * result if GATHERED.items() <= way.items() else result) == 4 * kept[4]


@pytest.mark.thorough
def test_gradients_that_are_equal_are_not_summed() -> None:
    """A pooled head runs whole on every rank: its weight is I, and to sum its gradient would double it."""
    torch.manual_seed(0)
    program = autoptd.compile(Pooled(), c=2, example_inputs=batch())
    kinds = {spec.name: spec.use.layout["cp"].kind for spec in program.params}
    assert kinds["head.weight"] == "I" and kinds["embed.weight"] == "R"
    autoptd.verify(Pooled(), c=2, example_inputs=batch(), steps=1)


class Cut(Shifted):
    """A loss of the last five of eight tokens."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.embed(ids))[:, 3:]
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 3:].flatten())


def test_what_gathers_tokens_is_told() -> None:
    """Logits that are cut; but where labels are shifted all are read."""
    cut, moved = (autoptd.compile(make(), c=2, example_inputs=batch()).fallbacks for make in (Cut, shifted))
    assert [(fallback.op, fallback.remedy[:6]) for fallback in cut] == [("aten.slice", "labels")]
    assert moved == ()


def test_explain_is_honest() -> None:
    program = autoptd.compile(gpt(2), c=2, t=2, sequence_parallel=True, example_inputs=batch())
    text = program.explain("transformer.h.0.attn")
    assert re.search(r"over tp and cp together [\d.]+ us: exact.*; tp first \+[\d.]+%, cp first", text)
    assert "all-to-all forward, all-to-all backward" in text and "1/c of them" in text
    assert "could split counts 1,000 us more" in text
    assert "over cp split by tokens: 8 = 2 x 4" in "".join(program.sources.values())
    alone = autoptd.compile(gpt(2), c=2, example_inputs=batch()).explain("transformer.h.0.attn")
    assert "together" not in alone


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mesh", [{"c": 2, "t": 2, "p": 2, "sequence_parallel": True}, {"c": 2, "t": 4}], ids=str
)
def test_a_program_is_saved_and_drawn(mesh: dict[str, Any], tmp_path: Path) -> None:
    program = autoptd.compile(llama(2, width=32, heads=8), **mesh, example_inputs=batch())
    program.save(tmp_path)
    loaded = Program.load(tmp_path)
    assert (loaded.mesh, loaded.params, loaded.sources) == (program.mesh, program.params, program.sources)
    assert (
        all(program.graph(level).dot for level in ("model", "layer"))
        and "S(cp, dim 1" in program.graph("full").dot
    )
    table = collectives_markdown(program)
    assert "## Over cp, in every microbatch" in table and "all-to-all" in table


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [{"c": 2, "t": 2, "sequence_parallel": True}, {"c": 2, "t": 2}], ids=str)
def test_an_outer_part_that_is_moved_is_found(monkeypatch: pytest.MonkeyPatch, mesh: dict[str, Any]) -> None:
    """Of tokens cp has the outer part, of heads tp: the check knows what the solver must not choose."""
    autoptd.compile(gpt(2), **mesh, example_inputs=batch())
    monkeypatch.setattr(TokenSplitter, "inner_of", lambda self, node, kind: "neither")
    with pytest.raises(autoptd.InternalError, match=r"a dim that is cut over (tp|cp) within"):
        autoptd.compile(gpt(2), **mesh, example_inputs=batch())


# Keys and values that are gathered.

# Nothing is saved by fewer, larger collectives: what sends the fewest bytes is chosen, as at the sizes of large models.
NO_LATENCY = replace(Machine(), latency=0.0)


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
    how: dict[str, Any] = {**GATHERED, "machine": NO_LATENCY, "sequence_parallel": True, "t": 2, "c": 2}
    as_planned(gpt(2), batch(), **how)
    autoptd.verify(gpt(2), **how, example_inputs=batch(), steps=1)


@pytest.mark.thorough
def test_six_heads_over_four_ranks() -> None:
    """With "auto" nothing runs whole."""
    keywords: dict[str, Any] = {"loss_fn": smoothed, "example_inputs": LONG}
    program = autoptd.compile(KINDS["loss_fn"].make(0.0), c=4, **keywords)
    assert not program.fallbacks
    autoptd.verify(KINDS["loss_fn"].make(0.2), c=4, **keywords, steps=1)


def test_queries_in_several_blocks_are_no_chunk() -> None:
    """Two segments are one for each of two ranks; four ranks would have a part of each, and count places wrongly."""
    autoptd.verify(Segments(), c=2, **GATHERED, example_inputs=SEGMENTS, steps=1)
    autoptd.verify(Segments(), c=4, example_inputs=SEGMENTS, steps=1)


# Tokens in zigzag order: rank i of c has the pieces i and 2c - 1 - i, so that each has as much of a causal triangle.


@pytest.mark.parametrize("mesh", [{"c": 2, "t": 2, "sequence_parallel": True}, {"c": 4}], ids=str)
def test_heads_see_their_tokens_in_order(mesh: dict[str, Any]) -> None:
    """Ulysses' all-to-alls put pieces from both ends into their places, and back."""
    how: dict[str, Any] = {"context": "ulysses", "token_order": "zigzag", "example_inputs": (IDS, UNEQUAL)}
    autoptd.verify(gpt(2), **mesh, **how, steps=2)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mesh",
    [{"c": 2}, {"c": 2, "t": 2, "sequence_parallel": True}, {"c": 4, "t": 2}, ALL_FIVE],
    ids=str,
)
def test_masks_of_dropout_are_those_of_one_device(mesh: dict[str, Any]) -> None:
    autoptd.verify(dropping_gpt(2 * mesh.get("p", 1)), **mesh, **ZIGZAG, example_inputs=batch(), steps=1)


@pytest.mark.one_in(96)
@pytest.mark.parametrize("c", [4, 2])
@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
def test_every_rank_multiplies_as_many_keys(order: str, c: int) -> None:
    """Of the executed FLOPs: with zigzag the busiest rank has the mean, with chunks 2c / (c + 1) of it."""
    how: dict[str, Any] = {"context": "all_gather", "token_order": order}
    _, record = as_planned(gpt(2), batch(), c=c, **how)
    flops: Counter[int] = Counter()
    for work in record.flops:
        if "attention" in work.operator:
            flops[work.rank] += work.flops
    busiest = Fraction(max(flops.values()) * c, sum(flops.values()))
    assert busiest == (1 if order == "zigzag" else Fraction(2 * c, c + 1))


@pytest.mark.parametrize(
    ("keywords", "is_zigzag"),
    [
        ({"context": "all_gather"}, True),
        ({"context": "ulysses"}, False),
        ({"context": "all_gather", "token_order": "contiguous"}, False),
        ({"context": "ulysses", "token_order": "zigzag"}, True),
    ],
    ids=str,
)
def test_the_order_is_chosen_by_what_is_causal(keywords: dict[str, Any], is_zigzag: bool) -> None:
    program = autoptd.compile(gpt(2), c=2, **keywords, example_inputs=batch())
    said = "tokens in zigzag order: of 4 pieces, rank i of 2 has pieces i and 3 - i"
    assert (said in program.explain("transformer.h.0.attn")) == is_zigzag
    assert ("rt.Zigzag" in "".join(program.sources.values())) == is_zigzag
    assert autoptd.compile(gpt(2), plan=program.plan, example_inputs=batch()).sources == program.sources


def test_tokens_that_have_no_pieces_stay_in_chunks() -> None:
    """Six tokens are two chunks, and no four pieces."""
    ids = torch.randint(20, (8, 6))
    program = autoptd.compile(gpt(2), c=2, context="all_gather", example_inputs=(ids, ids))
    assert "rt.Zigzag" not in "".join(program.sources.values())


@pytest.mark.thorough
def test_batches_are_padded_to_lengths_that_have_pieces() -> None:
    """Of eight tokens and their halves; chunks would go down to two."""
    losses = {}
    for order in ("zigzag", "contiguous"):
        how: dict[str, Any] = {"context": "all_gather", "token_order": order, "shapes": "bucket"}
        pm = autoptd.parallelize(gpt(2), c=2, **how, backend="local", example_inputs=(IDS, TARGETS))
        losses[order] = [float(pm.step(IDS[:, :length], TARGETS[:, :length])) for length in (8, 3, 2)]
        found = [program.inputs[0].shape[1] for program in pm.programs]
        assert found == ([8, 4] if order == "zigzag" else [8, 4, 2])
        pm.close()
    assert losses["zigzag"] == pytest.approx(losses["contiguous"], rel=1e-5)
