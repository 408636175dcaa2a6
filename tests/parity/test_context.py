"""Context parallelism: every rank has a part of the tokens, and the numbers of one device (Jacobs et al. 2023)."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.ir import machine
from autoptd.ir.types import I, R, ValueType
from autoptd.passes.solve.tokens import TokenSplitter
from autoptd.program.calls import expected_calls
from autoptd.program.program import Program
from autoptd.wings.viz.collectives import collectives_markdown
from tests.parity.kept import kept_bytes
from tests.parity.kinds import KINDS, smoothed
from tests.parity.models import LENGTH, VOCAB, Separate, batch, gpt, separate, skipping, uneven
from tests.parity.rotary import llama, neox
from tests.parity.test_dropout import gpt as dropping_gpt
from tests.parity.test_mutations import check_is_found, edit_source, verify_module

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


@pytest.mark.parametrize("mesh", GPT_MESHES, ids=map(str, GPT_MESHES))
def test_gpt(mesh: dict[str, Any]) -> None:
    autoptd.verify(gpt(2 * mesh.get("p", 1)), **mesh, example_inputs=(IDS, uneven(TARGETS)), steps=2)


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


def edit_types(monkeypatch: pytest.MonkeyPatch, name: str, kind: ValueType) -> None:
    """Make `verify` run a program in which one parameter has another type over cp where it is used."""
    right = verify_module.compile_program

    def wrong(*args: object, **kwargs: object) -> Program:
        program = right(*args, **kwargs)
        params = []
        for spec in program.params:
            if spec.name == name:
                use = dataclasses.replace(spec.use, layout=spec.use.layout.having("cp", kind))
                spec = dataclasses.replace(spec, use=use)
            params.append(spec)
        return dataclasses.replace(program, params=tuple(params))

    monkeypatch.setattr(verify_module, "compile_program", wrong)


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
def test_models(name: str, mesh: dict[str, Any]) -> None:
    make, labels, _ = MODELS[name]
    autoptd.verify(make(), **mesh, example_inputs=(IDS, labels), steps=2)


@pytest.mark.parametrize("mesh", [{"c": 2, "t": 2}, {"c": 2}, {"c": 4, "p": 2}], ids=str)
def test_a_learned_bias_of_attention(mesh: dict[str, Any]) -> None:
    """Its dims are tokens, though it is made of parameters alone: it is added to a product, no factor of it."""
    autoptd.verify(biased(), **mesh, example_inputs=(IDS, uneven(TARGETS)), steps=2)


def test_a_learned_bias_is_not_split_by_heads() -> None:
    """All of its heads are on every rank; that four heads do not divide over two ranks would be no reason."""
    told = "context='ulysses' splits attention by heads, and cannot split this one by them. Remedy: context='all_gather'"
    with pytest.raises(autoptd.PlanError, match=re.escape(told)):
        autoptd.compile(biased(), c=2, context="ulysses", example_inputs=(IDS, TARGETS))


@pytest.mark.one_in(96)
@pytest.mark.parametrize("mesh", [{"c": 3}, {"c": 3, "t": 2, "sequence_parallel": True}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_three_ranks(kind: str, mesh: dict[str, Any]) -> None:
    given = KINDS[kind]
    if given.has_source:
        # Of the encoder's four tokens three ranks take none.
        mesh = {**mesh, "c": 2}
    autoptd.verify(given.make(0.2), **mesh, loss_fn=given.loss_fn, example_inputs=given.batch(6, 1), steps=1)


EDITS = {
    "an all-to-all joined along another dim": (
        "rt.s_to_s(c_attn, cp, dim=1, to_dim=2, to_blocks=3,",
        "rt.s_to_s(c_attn, cp, dim=1, to_dim=2, to_blocks=1,",
    ),
    "tokens of another rank": ("rt.i_to_s(idx, cp, dim=1,", "rt.i_to_s(idx.flip(1), cp, dim=1,"),
    "labels of another rank": ("rt.i_to_s(targets, cp, dim=0,", "rt.i_to_s(targets.flip(0), cp, dim=0,"),
    "the mean of the ranks' own means": (
        'F.cross_entropy(logits, targets, reduction="sum") / self.totals[0]',
        'F.cross_entropy(logits, targets, reduction="mean") / (2 * 4)',
    ),
    "labels are counted in a part of the tokens": (
        "rt.count_labels(targets, ignore_index=-100)",
        "rt.count_labels(targets[:4], ignore_index=-100)",
    ),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_one_mistake_is_found(monkeypatch: pytest.MonkeyPatch, edit: tuple[str, str]) -> None:
    check_is_found(monkeypatch, edit, gpt(2), c=2, example_inputs=(IDS, UNEQUAL))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "edit",
    [
        (", shard=(1, 1), group=cp", ""),
        ("shard=((1, 1), (1, 1)), group=(cp, tp)", "shard=((1, 1), (1, 1)), group=(tp, cp)"),
    ],
)
def test_a_mask_of_other_tokens_is_found(monkeypatch: pytest.MonkeyPatch, edit: tuple[str, str]) -> None:
    mesh: dict[str, Any] = {"c": 2} if "tp" not in edit[0] else {"c": 2, "t": 2, "sequence_parallel": True}
    check_is_found(monkeypatch, edit, dropping_gpt(2), **mesh, example_inputs=batch())


# Not two KV heads over four ranks: their keys and values are gathered.
@pytest.mark.parametrize(
    ("model", "kv", "c"),
    [(lambda: gpt(3), 32, 2), (lambda: gpt(3), 32, 4), (lambda: llama(3), 8, 2)],
    ids=["gpt, c=2", "gpt, c=4", "grouped, c=2"],
)
def test_traffic_of_a_layer_is_the_closed_form(model: Callable[[], nn.Module], kv: int, c: int) -> None:
    """b s (2 h_q + 2 h_kv) (c - 1) / c^2 elements a rank, layer and direction, to the byte."""
    pm = autoptd.parallelize(model(), c=c, backend="local", example_inputs=batch())
    pm.step(*batch())
    with pm.record() as record:
        pm.step(*batch())
    width = 32 if kv == 32 else 16
    rows, m = pm.program.rows, pm.program.num_microbatches
    for rank in range(c):
        assert Counter(record.of(rank)) == expected_calls(pm.program, rank)
        for phase in ("forward", "backward"):
            exchanged = [
                call for call in record.of(rank) if call.kind == "all-to-all" and call.phase == phase
            ]
            sent = 4 * rows * LENGTH * (2 * width + 2 * kv) * (c - 1) / c**2
            assert sum(call.wire_bytes for call in exchanged) == 3 * m * sent
    pm.close()


NO_TOKENS = {"input": torch.randn(4, 8), "targets": torch.randn(4, 4)}
# Of twelve tokens, which four ranks divide, and six heads, which they do not.
LONG = {name: x.repeat(1, 2) for name, x in KINDS["loss_fn"].batch(4, 0).items()}
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
        r"6 heads do not divide over c=4.*c in \{1, 2, 3, 6\}",
    ),
    "another way": (gpt, {"c": 2, "context": "ring"}, "context='ring'.*is not implemented"),
    "a way without ranks": (gpt, {"context": "ulysses"}, "with c=1 every rank has all tokens"),
    "an order without them": (gpt, {"c": 2, "order": "tp-dp-pp"}, "leaves out cp"),
}


@pytest.mark.parametrize(("make", "keywords", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_one_error(make: Any, keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(autoptd.PlanError, match=words):
        autoptd.compile(make(), **{"example_inputs": batch(), **keywords})


def test_a_remedy_leaves_tensor_ranks_the_tokens_of_their_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not that of the tests, on which t=8 has nothing to split.
    monkeypatch.setattr(machine, "DEFAULT", machine.Machine())
    words = r"24 tokens do not divide over t\*c=32. Remedy: a multiple of 32 tokens, or c in \{1, 3\}"
    long = tuple(x.repeat(1, 3) for x in batch())
    with pytest.raises(autoptd.PlanError, match=words):
        autoptd.compile(llama(2, width=24, heads=6, kv=3), c=4, t=8, context="ulysses", example_inputs=long)


def test_a_plan_has_the_axis_where_it_has_ranks() -> None:
    one, two = (autoptd.compile(gpt(2), c=c, example_inputs=batch()) for c in (1, 2))
    assert one.plan["mesh"] == {"t": 1, "p": 1, "d": 1, "v": 1} and "context" not in one.plan["options"]
    assert (
        two.plan["mesh"] == {"t": 1, "p": 1, "d": 1, "c": 2, "v": 1}
        and two.plan["options"]["context"] == "auto"
    )
    assert autoptd.compile(gpt(2), plan=two.plan, example_inputs=batch()).sources == two.sources


def test_a_rank_keeps_its_part_of_the_tokens() -> None:
    """A layer keeps 1/c of what one device does, and attention's result once more: before its all-to-all, and behind."""
    kept = {}
    for c in (1, 4):
        sizes = [kept_bytes(gpt(layers), batch(4), 1, c=c) for layers in (1, 2)]
        kept[c] = sizes[1] - sizes[0]
    result = 4 * 4 * LENGTH * 32
    assert kept[1] + result == 4 * kept[4]


@pytest.mark.thorough
def test_a_gradient_of_a_rank_s_own_tokens_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm's weight is R: without a sum over cp, a rank has the gradient of its own tokens."""
    edit_types(monkeypatch, "transformer.ln_f.weight", I)
    with pytest.raises(autoptd.InternalError, match="differs"):
        autoptd.verify(gpt(2), c=2, example_inputs=batch(), steps=1)


@pytest.mark.thorough
def test_a_sum_of_equal_gradients_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pooled head runs whole on every rank: its weight is I, and to sum its gradient would double it."""
    torch.manual_seed(0)
    program = autoptd.compile(Pooled(), c=2, example_inputs=batch())
    kinds = {spec.name: spec.use.layout["cp"].kind for spec in program.params}
    assert kinds["head.weight"] == "I" and kinds["embed.weight"] == "R"
    autoptd.verify(Pooled(), c=2, example_inputs=batch(), steps=1)
    with monkeypatch.context() as patch:
        edited = edit_source(patch, "loss = rt.i_to_p(loss, cp)", "loss = loss * 1")
        with pytest.raises(autoptd.InternalError, match="differs"):
            autoptd.verify(Pooled(), c=2, example_inputs=batch(), steps=1)
        assert edited
    edit_types(monkeypatch, "head.weight", R)
    with pytest.raises(autoptd.InternalError, match="differs"):
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


def test_heads_of_a_tensor_rank() -> None:
    """Four heads, two of them on a tensor rank, for four ranks with other tokens."""
    with pytest.raises(
        autoptd.PlanError, match=r"2 heads of a tensor rank.*c in \{1, 2\}, or context='all_gather'"
    ):
        autoptd.compile(gpt(2), c=4, t=2, context="ulysses", example_inputs=batch())
    autoptd.verify(gpt(2), c=4, t=2, example_inputs=batch(), steps=1)


def test_explain_is_honest() -> None:
    program = autoptd.compile(gpt(2), c=2, t=2, sequence_parallel=True, example_inputs=batch())
    text = program.explain("transformer.h.0.attn")
    assert re.search(r"over tp and cp together [\d.]+ us: exact.*; tp first \+[\d.]+%, cp first", text)
    assert "all-to-all forward, all-to-all backward" in text and "a c-th of them" in text
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
    with pytest.raises(autoptd.InternalError, match=r"what is cut over (tp|cp) within"):
        autoptd.compile(gpt(2), **mesh, example_inputs=batch())
