"""Proof of the proof: take one thing away from a right program, or let a rank do one thing else, and `verify` must fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autoptd
from autoptd.ir.actions import parse
from autoptd.ir.operators.record import Operator
from autoptd.ir.operators.table import TABLE
from autoptd.ir.types import I, R
from autoptd.program import transfers
from autoptd.program.program import Program
from autoptd.program.specs import TransferBuffer
from autoptd.runtime.ops.linear import Deferred, WeightGemm
from autoptd.runtime.params import gradient_buckets
from autoptd.runtime.params.gradients import Gradients
from autoptd.runtime.step import executor, messages
from autoptd.runtime.step.executor import Executor
from autoptd.runtime.step.microbatches import part_of_rows
from autoptd.runtime.step.stage import Stage
from autoptd.runtime.world.threads import ThreadGroup, ThreadRank
from autoptd.runtime.world.world import Done, Group, Pending
from benchmarks.lib.loss_cases import CASES as LOSSES
from benchmarks.losses import MACHINE
from tests.parity.checks import check_is_found, edit_programs, sum_only_over
from tests.parity.covering import SLOW_PRODUCTS
from tests.parity.models import batch, dropping_gpt, gpt, separate, uneven
from tests.parity.rotary import llama
from tests.parity.test_context import CHUNKS as IN_CHUNKS
from tests.parity.test_context import GATHERED, IDS, UNEQUAL, ZIGZAG, Pooled
from tests.parity.test_copy_heads import ULYSSES, grouped
from tests.parity.test_hooks import BEHIND, LAST, MAIN, OVERLAP
from tests.parity.test_joint import FAST_LINKS, FOUR_CONTEXT_RANKS
from tests.parity.test_links import COLUMNS, Chain
from tests.parity.test_sharing import grouped as shared
from tests.parity.test_sharing import request
from tests.parity.test_shift import Shifting
from tests.parity.test_shift import call as shifting_call
from tests.parity.test_token_order import GIVEN, Between
from tests.parity.test_windows import windowed

Patch = pytest.MonkeyPatch
Make = Callable[[], nn.Module]
Asked = dict[str, Any]

# First of all, one of biases: they start at zero, so one step shows no difference.
TWO_STEPS: Asked = {"t": 2, "d": 2, "steps": 2}
UNEVEN = (batch()[0], uneven(batch()[1]))
HALVES: Asked = {"c": 2, "example_inputs": (IDS, UNEQUAL)}
CHUNKS: Asked = {"c": 2, **IN_CHUNKS}
SEQUENCE: Asked = {"t": 2, "sequence_parallel": True}
SHIFTED: Asked = {"c": 2, **ZIGZAG, "example_inputs": shifting_call()}
CAUSAL = 'rt.causal_attention(q, k_whole, v_whole, cp, order="zigzag")'
QUERIES = 'rt.causal_attention(q, k, v, tp, order="zigzag")'


def two_layers() -> nn.Module:
    return gpt(2)


def odd_heads() -> nn.Module:
    return gpt(2, heads=6, width=36)


def dropping() -> nn.Module:
    return dropping_gpt(2)


def kv_heads() -> nn.Module:
    return grouped(8, 2)


def loss(name: str, **mesh: Any) -> tuple[Make, Asked]:
    case = LOSSES[name]
    return case.make, {"example_inputs": case.call(), "machine": MACHINE, **mesh}


def shifting(name: str) -> tuple[Make, Asked]:
    return (lambda: Shifting(name)), SHIFTED


# What is written in place of what in a stage's file, of which model, with which keywords.
EDITS: dict[str, tuple[str, str, Make, Asked]] = {
    "one f less": ('= rt.i_to_r(ln_2, tp, inplace=True, site=w.at("mlp.c_fc"))', "= ln_2", gpt, TWO_STEPS),
    "one g less": ('= rt.p_to_i(c_proj, tp, inplace=True, site=w.at("attn.c_proj"))', "= c_proj", gpt, TWO_STEPS),
    "a row bias is added by every rank": (
        "= rt.i_to_p(w.attn.c_proj.bias, tp)", "= w.attn.c_proj.bias", gpt, TWO_STEPS,
    ),
    "the mean of microbatch means": (
        "/ self.totals[0]", "/ (8 * (labels != -100).sum().clamp(min=1))",
        separate, {"p": 2, "d": 2, "num_microbatches": 4, "example_inputs": UNEVEN},
    ),
    "every microbatch draws the mask of row 0": (
        "self.draw(site=0), batch=0)", "self.draw(site=0))", dropping, {"t": 2, "num_microbatches": 2},
    ),
    "every tensor rank draws the mask of the first": (
        "batch=0, shard=(1, 1), group=tp", "batch=0", dropping, {"t": 2, "num_microbatches": 2},
    ),
    "two dropouts of a layer draw one mask": (
        "self.draw(site=3 * i + 3)", "self.draw(site=3 * i + 2)", dropping, {"t": 2, "num_microbatches": 2},
    ),
    "one overlapped all-reduce less": ("overlap=tp, ", "", two_layers, {"t": 2, **OVERLAP}),
    "a reduce-scatter that does not sum": ("rt.p_to_s(c_proj", "rt.i_to_s(c_proj", two_layers, SEQUENCE),
    "a gather again that keeps another value": (
        "rt.all_gather_again(ln_2, tp", "rt.all_gather_again(x, tp", two_layers, SEQUENCE,
    ),
    "a sum that is no partial one": ("loss = rt.i_to_p(loss, cp)", "loss = loss * 1", lambda: pooled(), {"c": 2}),
    "an all-to-all joined along another dim": (
        "rt.s_to_s(c_attn, cp, dim=1, to_dim=2, to_blocks=3,", "rt.s_to_s(c_attn, cp, dim=1, to_dim=2, to_blocks=1,",
        two_layers, HALVES,
    ),
    "tokens of another rank": ("rt.i_to_s(idx, cp, dim=1,", "rt.i_to_s(idx.flip(1), cp, dim=1,", two_layers, HALVES),
    "labels of another rank": (
        "rt.i_to_s(targets, cp, dim=0,", "rt.i_to_s(targets.flip(0), cp, dim=0,", two_layers, HALVES,
    ),
    "the mean of the ranks' own means": (
        'F.cross_entropy(logits, targets, reduction="sum") / self.totals[0]',
        'F.cross_entropy(logits, targets, reduction="mean") / (2 * 4)',
        two_layers, HALVES,
    ),
    "labels are counted in a part of the tokens": (
        "rt.count_labels(targets, ignore_index=-100)", "rt.count_labels(targets[:4], ignore_index=-100)",
        two_layers, HALVES,
    ),
    "a mask of other tokens": (", shard=(1, 1), group=cp", "", dropping, {"c": 2}),
    "a mask of another rank's tokens": (
        "shard=((1, 1), (1, 1)), group=(cp, tp)", "shard=((1, 1), (1, 1)), group=(tp, cp)",
        dropping, {"c": 2, **SEQUENCE},
    ),
    "copies one after the other": (
        "k_copies = torch.repeat_interleave(unflatten_2, 2, 1)", "k_copies = unflatten_2.repeat(1, 2, 1, 1)",
        kv_heads, {"c": 4, **ULYSSES},
    ),
    "the gradient of one copy": (
        "v_copies = torch.repeat_interleave(unflatten_3, 2, 1)",
        "v_copies = torch.stack((unflatten_3, unflatten_3.detach()), 2).flatten(1, 2)",
        kv_heads, {"c": 4, **ULYSSES},
    ),
    "the copies of another rank": (
        "rt.s_to_s(k_copies, cp,", "rt.s_to_s(k_copies.flip(1), cp,", kv_heads, {"c": 4, **ULYSSES},
    ),
    "keys are counted from a rank's first query": (
        "rt.causal_attention(q, k_whole, v_whole, cp)",
        "F.scaled_dot_product_attention(q, k_whole, v_whole, is_causal=True)",
        two_layers, CHUNKS,
    ),
    "keys of other ranks first": ("rt.s_to_r(k, cp, dim=2,", "rt.s_to_r(k.flip(2), cp, dim=2,", two_layers, CHUNKS),
    "the gradient of a rank's own queries alone": (
        "rt.s_to_r(v, cp, dim=2,", "rt.s_to_i(v, cp, dim=2,", two_layers, CHUNKS,
    ),
    "all keys are seen": (
        "rt.causal_attention(q, k_whole, v_whole, cp)", "F.scaled_dot_product_attention(q, k_whole, v_whole)",
        two_layers, CHUNKS,
    ),
    "positions in chunks": (
        "rt.i_to_s(positions, cp, dim=0, blocks=rt.Zigzag(),", "rt.i_to_s(positions, cp, dim=0,",
        two_layers, {**HALVES, **ZIGZAG},
    ),
    "labels in chunks": (
        "rt.i_to_s(targets, cp, dim=0, blocks=rt.Zigzag(2),", "rt.i_to_s(targets, cp, dim=0, blocks=2,",
        two_layers, {**HALVES, **ZIGZAG},
    ),
    "keys in the order of ranks": (
        "rt.s_to_r(k, cp, dim=2, blocks=rt.Zigzag(),", "rt.s_to_r(k, cp, dim=2,", two_layers, {**HALVES, **ZIGZAG},
    ),
    "queries in chunks": (
        CAUSAL, "rt.causal_attention(q, k_whole, v_whole, cp)", two_layers, {**HALVES, **ZIGZAG},
    ),
    "a rotary table in chunks": (
        "rt.i_to_s(arange, cp, dim=0, blocks=rt.Zigzag(),", "rt.i_to_s(arange, cp, dim=0,",
        lambda: llama(2), {**HALVES, **ZIGZAG},
    ),
    "a mask in chunks": ("shard=(1, rt.Zigzag()), group=cp", "shard=(1, 1), group=cp", dropping, {"c": 2, **ZIGZAG}),
    "keys are counted from a tensor rank's first query": (
        QUERIES, "F.scaled_dot_product_attention(q, k, v, is_causal=True)",
        odd_heads, {"t": 4, "machine": SLOW_PRODUCTS},
    ),
    "queries are a run of tokens": (
        QUERIES, "rt.causal_attention(q, k, v, tp)", odd_heads, {"t": 4, "machine": SLOW_PRODUCTS},
    ),
    "keys have the gradient of a tensor rank's queries": (
        'k = rt.i_to_r(k, tp, site=w.at("attn"))', "k = k", odd_heads, {"t": 4, "machine": SLOW_PRODUCTS},
    ),
    "a window that is one too large": ("window=3", "window=4", windowed, {"c": 2, **GATHERED}),
    "a window that is one too small": ("window=3", "window=2", windowed, {"c": 2, **GATHERED}),
    "a window that is taken for causal": (", window=3", "", windowed, {"c": 2, **GATHERED}),
    "queries of a window are a run of tokens": (
        'order="zigzag", window=3', "window=3", windowed, {"c": 2, **GATHERED},
    ),
    "shifted labels are padded in front": ("(labels, [0, 1], -100)", "(labels, [1, 0], -100)", *shifting("mean")),
    "what pads the labels counts": ("(labels, [0, 1], -100)", "(labels, [0, 1], 1)", *shifting("sum")),
    "the first token is cut off": ("squeeze[:, :23]", "squeeze[:, 1:]", *shifting("log-probabilities")),
    "no token is cut off": ("[:, :23]", "[:, :24]", *shifting("z")),
    "a conversion that is lost": (
        'x = rt.i_to_r(x, tp, site=w.at("ln_1"))', "x = x", two_layers, {**FOUR_CONTEXT_RANKS, "machine": FAST_LINKS},
    ),
    "tokens that are not put in order": (
        "rt.s_to_s(x, cp, dim=1, blocks=rt.Zigzag(),", "rt.s_to_s(x, cp, dim=1,",
        lambda: Between("cumsum"), {"c": 2, **GATHERED, **GIVEN},
    ),
    "the mask of a microbatch alone": (
        "self.batch_sum(0, dtype=torch.float64)", "(mask.sum() * 2)", *loss("masked_mean", num_microbatches=2),
    ),
    "the gradient of a replica's own rows": ("rt.s_to_r(div, dp", "rt.s_to_i(div, dp", *loss("contrastive", d=2)),
    "a mean that counts its replicas": ("loss = loss / 2\n        return", "return", *loss("contrastive", d=2)),
    "a mean whose gradient is one replica's": (
        "mean_2 = rt.p_to_r(", "mean_2 = rt.p_to_i(", *loss("load_balancing", d=2),
    ),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(("old", "new", "make", "asked"), EDITS.values(), ids=EDITS)
def test_a_wrong_line_is_found(monkeypatch: Patch, old: str, new: str, make: Make, asked: Asked) -> None:
    check_is_found(monkeypatch, (old, new), make(), **{"example_inputs": batch(), **asked})


def pooled() -> nn.Module:
    torch.manual_seed(0)
    return Pooled()


def not_summed_over_owners(patch: Patch) -> None:
    patch.setattr(ThreadRank, "owners", lambda self, pp_ranks: self._solo)


def one_bucket_is_not_summed(patch: Patch) -> None:
    start = gradient_buckets.Bucket.start

    def changed(self: gradient_buckets.Bucket) -> None:
        start(self)
        if self.number == 0:
            self.pending = Done(self.pending.wait() / self.params.world.mesh.d)

    patch.setattr(gradient_buckets.Bucket, "start", changed)


def replicas_draw_the_same_masks(patch: Patch) -> None:
    right = Executor._choose_masks

    def of_the_first_replica(self: Executor, stage: Stage, number: int) -> None:
        self.replica = 0
        right(self, stage, number)

    patch.setattr(Executor, "_choose_masks", of_the_first_replica)


def own_piece_only(buffer: TransferBuffer, arrived: torch.Tensor, tp: Group) -> torch.Tensor:
    return arrived.repeat(buffer.parts)[: buffer.numel]


def scaled(buffer: TransferBuffer, arrived: torch.Tensor, tp: Group) -> torch.Tensor:
    whole = tp.all_gather(arrived, 0, buffer.site)[: buffer.numel] if buffer.parts > 1 else arrived
    return whole / buffer.parts


def in_another_order(buffer: TransferBuffer, arrived: torch.Tensor, tp: Group) -> torch.Tensor:
    return tp.all_gather(arrived.unsqueeze(0), 0, buffer.site).flip(0).flatten()[: buffer.numel]


def with_type(name: str, kind: Any) -> Callable[[Patch], None]:
    """One parameter has another type over cp where it is used."""

    def edit(program: Program) -> Program:
        params = []
        for spec in program.params:
            if spec.name == name:
                use = dataclasses.replace(spec.use, layout=spec.use.layout.having("cp", kind))
                spec = dataclasses.replace(spec, use=use)
            params.append(spec)
        return dataclasses.replace(program, params=tuple(params))

    return lambda patch: edit_programs(patch, edit)


def with_order(edit: Callable[[list[Any]], None]) -> Callable[[Patch], None]:
    """The first rank's order is another."""

    def edited(program: Program) -> Program:
        orders = [list(order) for order in program.orders]
        edit(orders[0])
        return dataclasses.replace(program, orders=orders)

    return lambda patch: edit_programs(patch, edited)


def not_waited_for(patch: Patch) -> None:
    start = ThreadGroup.all_reduce_start

    def early(self: ThreadGroup, flat: torch.Tensor, site: str) -> Pending:
        if "backward" not in site:
            return start(self, flat, site)
        before = flat.clone()
        start(self, flat, site)
        return Done(before)

    patch.setattr(ThreadGroup, "all_reduce_start", early)


def one_gemm_less(patch: Patch) -> None:
    take = Deferred.take
    patch.setattr(Deferred, "take", lambda self: take(self)[1:])


def only_the_last_microbatch(patch: Patch) -> None:
    add = Gradients.add

    def last(self: Gradients, gemm: WeightGemm) -> None:
        gemm.weight.grad = None
        add(self, gemm)

    patch.setattr(Gradients, "add", last)


def added_twice(patch: Patch) -> None:
    add = Gradients.add
    patch.setattr(Gradients, "add", lambda self, gemm: (add(self, gemm), add(self, gemm)))


def sum_of_one_replica(patch: Patch) -> None:
    right = executor.set_batch_sums
    alone = lambda own, op: own  # noqa: E731
    patch.setattr(executor, "set_batch_sums", lambda stage, inputs, reduce: right(stage, inputs, alone))


def halves_as_runs_of_rows(patch: Patch) -> None:
    runs = lambda x, number, parts, blocks: part_of_rows(x, number, parts)  # noqa: E731
    patch.setattr("autoptd.runtime.step.microbatches.part_of_rows", runs)


def patched(owner: Any, name: str, value: Any) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(owner, name, value)


W = parse("W0.1")
SCATTERED: Asked = {"t": 2, "p": 2, "p2p": "scatter_gather"}
CHAIN: Asked = {"t": 2, "p": 4, "v": 2, "num_microbatches": 4, "p2p": "scatter_gather", "plan": COLUMNS}
ONE_TOKEN = Operator("aten.cumsum", "... -> ...")
# What is done to the passes or to the ranks, to which model, with which keywords, and what is said.
FAULTS: dict[str, tuple[Callable[[Patch], object], Make, Asked, str]] = {
    "one tied sum less": (not_summed_over_owners, gpt, {"p": 2}, r"gradient .* at transformer\.wte\.weight"),
    "one gradient bucket less": (one_bucket_is_not_summed, gpt, {"d": 2}, "differs"),
    "replicas that draw the same masks": (
        replicas_draw_the_same_masks, lambda: dropping_gpt(1), {"d": 2, "num_microbatches": 1}, "differs",
    ),
    "a tensor rank's own piece of what it receives": (
        patched(messages, "gather", own_piece_only), two_layers, SCATTERED, "differs",
    ),
    "received pieces are scaled": (patched(messages, "gather", scaled), two_layers, SCATTERED, "differs"),
    "received pieces in another order": (
        patched(messages, "gather", in_another_order), two_layers, SCATTERED, "differs",
    ),
    "values that differ are scattered": (patched(transfers, "EQUAL_VALUE", ("I", "R", "P")), Chain, CHAIN, "differs"),
    "gradients that differ are scattered": (
        patched(transfers, "EQUAL_GRADIENT", ("I", "R", "P")), Chain, CHAIN, "differs",
    ),
    # A norm's weight is R: without a sum over cp, a rank has the gradient of its own tokens.
    "the gradient of a rank's own tokens": (with_type("transformer.ln_f.weight", I), two_layers, {"c": 2}, "differs"),
    "a sum of gradients that are equal": (with_type("head.weight", R), pooled, {"c": 2}, "differs"),
    # Replicated parameters in sharded regions: the classic silent bug of sequence parallelism.
    "a norm's gradient is not summed over tokens": (
        lambda patch: sum_only_over(patch, "dp"), two_layers, SEQUENCE, r"ln_f\.bias",
    ),
    "a sum over the ranks that share a KV head less": (
        lambda patch: sum_only_over(patch, "dp", "pp"), shared, request(4), "differs",
    ),
    "one wait less": (not_waited_for, two_layers, {"t": 2, **OVERLAP}, "differs"),
    "one W less": (
        with_order(lambda order: order.remove(W)), two_layers, {**BEHIND, "num_microbatches": 2},
        r"no W action computed the weight gradients of B0\.1",
    ),
    "a W after the reduction": (
        with_order(lambda order: order.append(order.pop(order.index(W)))), two_layers,
        {"d": 2, **LAST, "num_microbatches": 2}, "grew after its reduction had started",
    ),
    "one GEMM less": (one_gemm_less, two_layers, BEHIND, "differs"),
    "one microbatch less in the sum": (
        only_the_last_microbatch, two_layers, {**MAIN, "num_microbatches": 2}, "differs",
    ),
    "a gradient that is added twice": (
        added_twice, two_layers, {**MAIN, "d": 2, "num_microbatches": 2}, "one backward too many|grew after",
    ),
    "an operator that is wrongly taken for one of single tokens": (
        lambda patch: patch.setitem(TABLE, "aten.cumsum", ONE_TOKEN),
        lambda: Between("cumsum"), {"c": 2, **GATHERED, **GIVEN}, "differs",
    ),
    "a sum of one replica alone": (sum_of_one_replica, *loss("masked_mean", d=2), "differs"),
    "halves that are cut as runs of rows": (halves_as_runs_of_rows, *loss("dpo_halves", d=2, steps=2), "differs"),
}  # fmt: skip
DEFAULT = 3  # so many of the first run by default


@pytest.mark.one_in(1)
@pytest.mark.parametrize(
    ("plant", "make", "asked", "said"),
    [
        pytest.param(*fault, id=name, marks=[pytest.mark.thorough] if at >= DEFAULT else [])
        for at, (name, fault) in enumerate(FAULTS.items())
    ],
)
def test_a_fault_is_found(
    monkeypatch: Patch, plant: Callable[[Patch], object], make: Make, asked: Asked, said: str
) -> None:
    plant(monkeypatch)
    with pytest.raises(autoptd.InternalError, match=said):
        autoptd.verify(make(), **{"example_inputs": batch(), "steps": 1, **asked})
