"""How values are kept, pinned by a plan: to the bit as without, the bytes that were told, and errors for what cannot be."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch

import autoptd
from autoptd.compiler.saved import FindSaved
from autoptd.errors import PlanError
from autoptd.ir.kept import KeepPin
from autoptd.ir.mesh import Mesh
from autoptd.ir.notes import note
from autoptd.passes.kept.requested import find_pinned
from autoptd.program.calls import expected_calls
from tests.hostile.test_recompute import Model
from tests.parity.kept import kept_by_stage
from tests.parity.test_recompute import Found, batch, differing, gpt, trained

LAYERS = 2
# Collectives start at once: with a latency, values as small as these stay whole.
MACHINE = autoptd.Machine(latency=1e-9)


def plan(*pins: tuple[str, str]) -> dict[str, Any]:
    return {"keep": [{"pattern": pattern, "way": way} for pattern, way in pins]}


SETTINGS: tuple[dict[str, Any], ...] = (
    {"t": 2, "num_microbatches": 2},
    {"t": 2, "p": 2, "num_microbatches": 2, "sequence_parallel": True},
    {"p": 2, "schedule": "zb_h1", "num_microbatches": 4},
    {
        **{"t": 2, "num_microbatches": 2, "sequence_parallel": True},
        "async_tensor_model_parallel_allreduce": True,
        "accumulate_allreduce_grads_in_fp32": True,
    },
    {"t": 2, "p": 2, "num_microbatches": 2, "precision": "bf16-mixed", "sequence_parallel": True},
)
# Pins, `recompute`, and the settings in which backward needs what they name.
ASKED: tuple[tuple[tuple[tuple[str, str], ...], dict[str, Any], tuple[int, ...]], ...] = (
    ((("*.mlp.gelu", "again"),), {}, (0, 1, 2, 3, 4)),
    ((("*.h.?", "again"),), {}, (0, 1, 2, 3, 4)),
    ((("*.ln_2", "again"),), {"recompute": "auto"}, (0, 1, 2, 3)),
    ((("*.mlp:gelu", "whole"), ("*.attn:masked_softmax", "whole")), {"recompute": "full"}, (0, 1, 2, 3, 4)),
    ((("*.h.1", "whole"),), {"recompute": "full", "recompute_num_layers": 2}, (0, 1, 2, 3, 4)),
    ((("*.ln_1", "whole"), ("*.mlp.c_fc", "again")), {"recompute": ["*.h.*"]}, (0, 1, 2, 3)),
    ((("*.h.0.mlp", "whole"),), {"recompute": "auto", "memory_price": 1e-6}, (0, 1, 2, 3, 4)),
    ((("*.ln_2", "again"),), {}, (1, 3)),
    ((("*.mlp.c_fc", "shard"),), {"recompute": "full"}, (1, 3, 4)),
    ((("*.c_fc", "whole"), ("*.c_attn", "whole")), {}, (1, 3, 4)),
    ((("*.c_fc", "whole"), ("*.gelu", "again")), {"recompute": "full:1/2"}, (1, 3, 4)),
    ((("*.c_attn", "shard"),), {"recompute": "auto", "memory_price": 1e-11}, (1, 3)),
)
CASES = [(number, pins, asked) for pins, asked, numbers in ASKED for number in numbers]


@cache
def kept(number: int, price: float | None) -> Found:
    return trained(gpt(LAYERS, dropout=0.2), machine=MACHINE, memory_price=price, **SETTINGS[number])


@pytest.mark.one_in(99)
@pytest.mark.parametrize(("number", "pins", "asked"), CASES, ids=map(str, CASES))
def test_the_same_bits(number: int, pins: Any, asked: dict[str, Any]) -> None:
    found = trained(gpt(LAYERS, dropout=0.2), machine=MACHINE, plan=plan(*pins), **asked, **SETTINGS[number])
    assert differing(found, kept(number, asked.get("memory_price"))) == []


BYTES = [case for case in CASES if "precision" not in SETTINGS[case[0]]]


@pytest.mark.one_in(36)
@pytest.mark.parametrize(("number", "pins", "asked"), BYTES, ids=map(str, BYTES))
def test_kept_bytes_and_calls_are_those_that_were_told(number: int, pins: Any, asked: dict[str, Any]) -> None:
    call = batch()
    setting = {**SETTINGS[number], "num_microbatches": 1}
    pm = autoptd.parallelize(
        gpt(LAYERS, dropout=0.2),
        backend="local",
        machine=MACHINE,
        example_inputs=call,
        plan=plan(*pins),
        **asked,
        **setting,
    )
    told = pm.program.costs.cut.saved_bytes
    pm.step(*call)
    with pm.record() as record:
        pm.step(*call)
    found = kept_by_stage(pm, call)
    pm.close()
    assert found == {stage: told[stage] for stage in found} and min(found.values()) > 0
    assert Counter(record.of(0)) == expected_calls(pm.program, 0)


def compiled(*pins: tuple[str, str], **asked: Any) -> autoptd.Program:
    asked = {"t": 2, "sequence_parallel": True, "machine": MACHINE, "num_microbatches": 2, **asked}
    return autoptd.compile(gpt(LAYERS), plan=plan(*pins), example_inputs=batch(), **asked)


def saved(*pins: tuple[str, str], **asked: Any) -> int:
    return int(sum(compiled(*pins, **asked).costs.cut.saved_bytes))


@pytest.mark.thorough
def test_a_pin_is_about_the_bytes_that_it_names() -> None:
    """Of 4 samples of 8 tokens, 16 wide, in float32 on 2 tensor ranks, in every layer."""
    half = LAYERS * 4 * (4 * 8 * 16) // 2
    none, full = saved(), saved(recompute="full")
    assert none - saved(("*.mlp.gelu", "again")) == 4 * half
    assert none - saved(("*.ln_2", "again")) == none - saved(recompute=["*.ln_2"]) == half
    assert saved(("*.c_fc:s_to_r", "whole")) - none == half
    assert saved(("*.mlp.gelu", "whole"), recompute="full") - full == 4 * half
    assert saved(("*.mlp.c_fc", "shard"), recompute="full") - full == half
    assert saved(("*.c_fc:s_to_r", "whole"), recompute="full") - full == 2 * half
    # The shard of a norm's result is kept, and what a recipe gathers.
    assert saved(("*.ln_2", "whole"), recompute="full") - full == half
    again = [
        compiled(*pins, recompute="full").costs.cut.again_seconds[0] for pins in ((), (("*.ln_2", "whole"),))
    ]
    assert again[0] > again[1]
    dear = {"recompute": "auto", "memory_price": 1e-6}
    # Of the two cheapest choices, one has what the other makes again.
    assert saved(("*.mlp.gelu", "whole"), **dear) - saved(**dear) == 4 * half
    assert saved(("*.mlp.gelu", "again"), recompute="auto") == none - 4 * half


def test_a_plan_has_its_pins_beside_what_ranks_pay() -> None:
    first = compiled(("*.mlp.gelu", "whole"), recompute="auto", memory_price=1e-6)
    rate, pin = first.plan["keep"]
    assert rate["price"] == 1e-6 and pin == {"pattern": "*.mlp.gelu", "way": "whole"}
    assert "gelu: aten.gelu" in first.explain("transformer.h.0.mlp")
    again = autoptd.compile(gpt(LAYERS), plan=first.plan, example_inputs=batch())
    assert again.fingerprint() == first.fingerprint() and again.plan == first.plan
    only = compiled(("*.mlp.gelu", "again"))
    assert only.plan["keep"] == [{"pattern": "*.mlp.gelu", "way": "again"}]


def test_an_evaluation_has_no_pins() -> None:
    call = batch()
    pm = autoptd.parallelize(
        gpt(LAYERS, dropout=0.2), p=2, plan=plan(("*.gelu", "again")), backend="local", example_inputs=call
    )
    losses = [pm.eval_step(*call)]
    pm.step(*call)
    losses.append(pm.eval_step(*call))
    pm.close()
    assert torch.equal(*losses)


@pytest.mark.parametrize(
    ("pins", "asked", "words"),
    [
        ([("*.mlp.glu", "again")], {}, r"no module is called \*.mlp.glu.*transformer.h.\*.mlp.gelu"),
        ([("*.mlp:glu", "again")], {}, r"transformer.h.\*.mlp.gelu:gelu"),
        ([("*.mlp.gelu", "agan")], {}, "invalid entry.*whole"),
        ([("*.mlp.c_proj", "again")], {}, "backward needs no value that is computed there"),
        ([("*.mlp.gelu", "shard")], {}, "no value there is gathered"),
        ([("*.mlp.c_fc", "shard")], {"sequence_parallel": False}, "sequence_parallel=True"),
        ([("*.mlp", "whole"), ("*.mlp.c_fc", "again")], {}, r"\*.mlp kept whole, and \*.mlp.c_fc made again"),
        ([("*.mlp.c_fc", "shard"), ("*.ln_2", "again")], {}, r"c_fc kept as a shard, and \*.ln_2 made again"),
        ([("*.gelu", "again")], {"recompute": False}, "keep, and recompute=False"),
        ([("*.gelu", "again")], {"fuse": "inductor"}, "keep, and fuse='inductor'"),
    ],
)
def test_bad_pins(pins: Any, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        compiled(*pins, **asked)


def test_an_operator_that_runs_once() -> None:
    """One of the user's may have effects."""
    ids, labels = torch.randint(32, (2, 4, 8))
    request = {"example_inputs": (ids, labels), "plan": plan(("layers.*", "again"))}
    assert autoptd.compile(Model("folded"), **request).costs.cut.again_seconds[0] > 0
    with pytest.raises(PlanError, match=r"layers.0: recompute.half_more may have effects"):
        autoptd.compile(Model("of_users"), **request)


def test_what_several_stages_compute_is_kept() -> None:
    graph = compiled(num_microbatches=1, sequence_parallel=False).graphs["LOCAL"]
    saved = FindSaved(Mesh(t=2), rows=8)(graph)
    pin = KeepPin("transformer.h.0.mlp:gelu", "again")
    found = find_pinned(graph, saved, [pin])
    (gelu,) = found.again
    assert found.error is None and gelu.node.name == "gelu"
    note(gelu.node).stages = (0, 1)
    found = find_pinned(graph, saved, [pin])
    assert not found.again and "is computed by stages 0, 1" in str(found.error)
