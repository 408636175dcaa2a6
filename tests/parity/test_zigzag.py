"""Tokens in zigzag order: rank i of c has the pieces i and 2c - 1 - i, so that each has as much of a causal triangle."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
import torch

import autoptd
from autoptd.program.calls import expected_calls
from tests.parity.kept import kept_bytes
from tests.parity.kinds import KINDS
from tests.parity.models import batch, gpt, uneven
from tests.parity.rotary import llama
from tests.parity.test_context import ALL_FIVE, CASES, GPT_MESHES, MODELS, UNEQUAL
from tests.parity.test_dropout import gpt as dropping_gpt
from tests.parity.test_mutations import check_is_found

IDS, TARGETS = batch()
ZIGZAG: dict[str, Any] = {"context": "all_gather", "token_order": "zigzag"}


@pytest.mark.thorough  # the order that test_gathered.py chooses for causal attention
@pytest.mark.parametrize("mesh", GPT_MESHES, ids=map(str, GPT_MESHES))
def test_gpt(mesh: dict[str, Any]) -> None:
    autoptd.verify(
        gpt(2 * mesh.get("p", 1)), **mesh, **ZIGZAG, example_inputs=(IDS, uneven(TARGETS)), steps=2
    )


@pytest.mark.thorough
@pytest.mark.one_in(96)
@pytest.mark.parametrize("context", ["auto", "all_gather"])
@pytest.mark.parametrize(("name", "mesh"), CASES, ids=map(str, CASES))
def test_models(name: str, mesh: dict[str, Any], context: str) -> None:
    """Positions, rotary tables, masks and labels are sliced as the tokens are, whatever attention does."""
    make, labels, _ = MODELS[name]
    how = {"context": context, "token_order": "zigzag"}
    autoptd.verify(make(), **mesh, **how, example_inputs=(IDS, labels), steps=2)


@pytest.mark.parametrize("mesh", [{"c": 2, "t": 2, "sequence_parallel": True}, {"c": 4}], ids=str)
def test_heads_see_their_tokens_in_order(mesh: dict[str, Any]) -> None:
    """Ulysses' all-to-alls put pieces from both ends into their places, and back."""
    how: dict[str, Any] = {"context": "ulysses", "token_order": "zigzag", "example_inputs": (IDS, UNEQUAL)}
    autoptd.verify(gpt(2), **mesh, **how, steps=2)


@pytest.mark.thorough  # likewise
@pytest.mark.parametrize("kind", KINDS)
def test_three_ranks(kind: str) -> None:
    """Twelve tokens are six pieces of two; a source of ten has no four pieces, and stays in chunks."""
    given = KINDS[kind]
    mesh = {"c": 2 if given.has_source else 3, "t": 2, "sequence_parallel": True}
    how = {"loss_fn": given.loss_fn, "example_inputs": given.batch(6, 1), "steps": 1}
    autoptd.verify(given.make(0.2), **mesh, **ZIGZAG, **how)


@pytest.mark.thorough  # likewise
@pytest.mark.parametrize(
    "mesh",
    [{"c": 2}, {"c": 2, "t": 2, "sequence_parallel": True}, {"c": 4, "t": 2}, ALL_FIVE],
    ids=str,
)
def test_masks_of_dropout_are_those_of_one_device(mesh: dict[str, Any]) -> None:
    autoptd.verify(dropping_gpt(2 * mesh.get("p", 1)), **mesh, **ZIGZAG, example_inputs=batch(), steps=1)


EDITS = {
    "positions in chunks": (
        "rt.i_to_s(positions, cp, dim=0, blocks=rt.Zigzag(),",
        "rt.i_to_s(positions, cp, dim=0,",
    ),
    "labels in chunks": (
        "rt.i_to_s(targets, cp, dim=0, blocks=rt.Zigzag(2),",
        "rt.i_to_s(targets, cp, dim=0, blocks=2,",
    ),
    "keys in the order of ranks": ("rt.s_to_r(k, cp, dim=2, blocks=rt.Zigzag(),", "rt.s_to_r(k, cp, dim=2,"),
    "queries in chunks": (
        'rt.causal_attention(q, k_whole, v_whole, cp, order="zigzag")',
        "rt.causal_attention(q, k_whole, v_whole, cp)",
    ),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_one_mistake_is_found(monkeypatch: pytest.MonkeyPatch, edit: tuple[str, str]) -> None:
    check_is_found(monkeypatch, edit, gpt(2), c=2, **ZIGZAG, example_inputs=(IDS, UNEQUAL))


@pytest.mark.thorough
def test_a_rotary_table_in_chunks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    edit = "rt.i_to_s(arange, cp, dim=0, blocks=rt.Zigzag(),", "rt.i_to_s(arange, cp, dim=0,"
    check_is_found(monkeypatch, edit, llama(2), c=2, **ZIGZAG, example_inputs=(IDS, UNEQUAL))


@pytest.mark.thorough
def test_a_mask_of_other_tokens_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    edit = "shard=(1, rt.Zigzag()), group=cp", "shard=(1, 1), group=cp"
    check_is_found(monkeypatch, edit, dropping_gpt(2), c=2, **ZIGZAG, example_inputs=batch())


@pytest.mark.one_in(96)
@pytest.mark.parametrize("c", [4, 2])
@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
def test_every_rank_multiplies_as_many_keys(order: str, c: int) -> None:
    """Of the executed FLOPs: with zigzag the busiest rank has the mean, with chunks 2c / (c + 1) of it."""
    how: dict[str, Any] = {"context": "all_gather", "token_order": order, "example_inputs": batch()}
    pm = autoptd.parallelize(gpt(2), c=c, backend="local", **how)
    pm.step(*batch())
    with pm.record() as record:
        pm.step(*batch())
    flops: Counter[int] = Counter()
    for work in record.flops:
        if "attention" in work.operator:
            flops[work.rank] += work.flops
    for rank in range(c):
        assert Counter(record.of(rank)) == expected_calls(pm.program, rank)
    pm.close()
    busiest = Fraction(max(flops.values()) * c, sum(flops.values()))
    assert busiest == (1 if order == "zigzag" else Fraction(2 * c, c + 1))


@pytest.mark.parametrize("c", [2, 4])
def test_two_pieces_keep_what_one_does(c: int) -> None:
    kept: dict[str, float] = {}
    for order in ("zigzag", "contiguous"):
        how = {"context": "all_gather", "token_order": order}
        sizes = [kept_bytes(gpt(layers), batch(4), 1, c=c, **how) for layers in (1, 2)]
        kept[order] = sizes[1] - sizes[0]
    assert kept["zigzag"] == kept["contiguous"]


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
    said = "tokens in zigzag order: of 4, rank i of 2 has the pieces i and 3 - i"
    assert (said in program.explain("transformer.h.0.attn")) == is_zigzag
    assert ("rt.Zigzag" in "".join(program.sources.values())) == is_zigzag
    assert autoptd.compile(gpt(2), plan=program.plan, example_inputs=batch()).sources == program.sources


def test_tokens_that_have_no_pieces_stay_in_chunks() -> None:
    """Six tokens are two chunks, and no four pieces."""
    ids = torch.randint(20, (8, 6))
    program = autoptd.compile(gpt(2), c=2, context="all_gather", example_inputs=(ids, ids))
    assert "rt.Zigzag" not in "".join(program.sources.values())
    fact = r"token_order='zigzag': 6 tokens do not divide over 2\*c=4.*a multiple of 4 tokens"
    with pytest.raises(autoptd.PlanError, match=fact):
        autoptd.compile(gpt(2), c=2, token_order="zigzag", example_inputs=(ids, ids))


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


def test_an_order_without_ranks_is_one_error() -> None:
    with pytest.raises(autoptd.PlanError, match="token_order='zigzag': with c=1 every rank has all tokens"):
        autoptd.compile(gpt(2), token_order="zigzag", example_inputs=batch())
    with pytest.raises(autoptd.PlanError, match="token_order='striped': no such choice"):
        autoptd.compile(gpt(2), c=2, token_order="striped", example_inputs=batch())
