"""A plan fed back: a program's own gives the same program, a cut by hand is right, a contradiction names both wishes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.errors import PlanError
from autoptd.program.program import Program
from tests.parity.kept import fullest
from tests.parity.models import VOCAB, batch, gpt, separate, skipping
from tests.passes.test_cut import layers_of


def compile_gpt(layers: int = 4, **keywords: Any) -> Program:
    return autoptd.compile(gpt(layers), example_inputs=batch(), **keywords)


@pytest.mark.one_in(9)
@pytest.mark.parametrize(
    "request_",
    [
        {"t": 2, "p": 2, "d": 2, "seed": 3},
        {"p": 2, "v": 2, "memory": 1e9},
        {"p": 4, "delay_wgrad_compute": "after_b"},
    ],
)
def test_its_own_plan_gives_the_same_bytes(request_: dict[str, Any], tmp_path: Path) -> None:
    first = compile_gpt(5, **request_)
    first.save(tmp_path / "a")
    compile_gpt(5, plan=tmp_path / "a" / "plan.json").save(tmp_path / "b")
    for file in sorted((tmp_path / "a").glob("*.*")):
        if file.suffix != ".pt":
            assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name
    assert compile_gpt(5, plan=str(tmp_path / "a"), **request_).fingerprint() == first.fingerprint()


@pytest.mark.one_in(9)
@pytest.mark.parametrize("make", [separate, skipping])
@pytest.mark.parametrize("p", [2, 3, 5])
def test_cuts_inside_of_layers_have_names(make: Any, p: int) -> None:
    """Also those that no module ends at."""
    ids, labels = batch(10)
    first = autoptd.compile(make(), p=p, example_inputs=(ids, labels))
    again = autoptd.compile(make(), plan=first.plan, example_inputs=(ids, labels))
    assert again.fingerprint() == first.fingerprint()


def layers_per_stage(program: Program) -> list[int]:
    return [len(layers_of(program.graphs["CUT"], stage.index)) for stage in program.stages]


@pytest.mark.thorough
def test_layers_per_stage() -> None:
    program = compile_gpt(12, p=4, plan={"cut": [3, 4, 4, 1]})
    assert layers_per_stage(program) == [3, 4, 4, 1]
    assert program.plan["cut"] == ["transformer.h.2", "transformer.h.6", "transformer.h.10"]
    assert program.costs.cut.why.startswith("as the plan says: a step takes")
    assert layers_per_stage(compile_gpt(4, p=3, plan={"cut": [0, 4, 0]})) == [
        0,
        4,
        0,
    ]  # embedding and head alone


@pytest.mark.one_in(9)
@pytest.mark.parametrize(
    ("cut", "mesh"),
    [
        ([0, 3, 1, 0], {"p": 2, "v": 2}),
        (["transformer.h.0.attn", "transformer.h.2.mlp.c_fc"], {"t": 2, "p": 3}),
        (["transformer.wte", "transformer.h.1:add[0]", "transformer.ln_f"], {"p": 4}),
    ],
)
def test_a_cut_by_hand_is_right(cut: list[Any], mesh: dict[str, int]) -> None:
    report = autoptd.verify(gpt(), plan={"mesh": mesh, "cut": cut}, example_inputs=batch(), steps=2)
    assert report.passed
    program = compile_gpt(plan={"mesh": mesh, "cut": cut})
    assert isinstance(cut[0], int) or program.plan["cut"] == cut


def test_parallelize_takes_a_plan() -> None:
    model, (ids, targets) = gpt(), batch()
    pm = autoptd.parallelize(
        model, backend="local", plan={"mesh": {"p": 2, "t": 2}, "cut": [1, 3]}, example_inputs=(ids, targets)
    )
    try:
        assert pm.program.mesh.size == 4 and layers_per_stage(pm.program) == [1, 3]
        torch.testing.assert_close(pm.step(ids, targets), model(ids, targets)[1].detach(), rtol=1e-5, atol=0)
    finally:
        pm.close()


def sharded(pattern: str, dim: int | None) -> dict[str, Any]:
    return {"pattern": pattern, "dim": dim, "axis": "tp"}


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"mesh": {"t": 2}}, {"t": 4}, "the plan sets t=2, the keyword t=4"),
    (
        {"num_microbatches": 2},
        {"num_microbatches": 4},
        "the plan sets num_microbatches=2, the keyword num_microbatches=4",
    ),
    (
        {"schedule": "gpipe"},
        {"schedule": "1f1b", "p": 2},
        "the plan sets schedule='gpipe', the keyword schedule='1f1b'",
    ),
    ({"options": {"seed": 1}}, {"seed": 2}, "the plan sets seed=1, the keyword seed=2"),
    ({"version": 7}, {}, "has version 7"),
    ({"meshes": {"t": 2}}, {}, "unknown key 'meshes'. Remedy: one of mesh"),
    ({"mesh": {"tp": 2}}, {}, "plan: mesh: unknown key 'tp'"),
    ({"options": {"sead": 2}}, {}, "unknown key 'sead'. Remedy: "),
    ({"mesh": [2]}, {}, "plan: mesh: is"),
    ({"cut": "transformer.h.1"}, {"p": 2}, "plan: cut: is 'transformer.h.1'"),
    ({"cut": [1, "transformer.h.1"]}, {"p": 2}, "layers per stage"),
    ({"cut": [-1, 5]}, {"p": 2}, "layers per stage"),
    ({"cut": [2, 1]}, {"p": 2}, r"2 numbers that add up to 4 layers \(transformer.h.0 to transformer.h.3\)"),
    ({"cut": [4]}, {"p": 2}, "are 4 layers on 1 stages"),
    ({"cut": [2, 0, 2]}, {"p": 3}, "transformer.h.1 does not come after transformer.h.1"),
    ({"cut": ["transformer.h.1"]}, {"p": 3}, "1 places cut the model into 2 stages, p\\*v is 3"),
    (
        {"cut": ["transformer.h.2", "transformer.h.0"]},
        {"p": 3},
        "transformer.h.0 does not come after transformer.h.2",
    ),
    ({"cut": ["transformer.g.1"]}, {"p": 2}, "'transformer.g.1' is not a module .* one of transformer.h"),
    (
        {"cut": ["transformer.h.1:mul"]},
        {"p": 2},
        "'transformer.h.1:mul': transformer.h.1 itself calls mul 0 times",
    ),
    ({"cut": ["transformer.h.1:add[2]"]}, {"p": 2}, "transformer.h.1 itself calls add 2 times"),
    (
        {"cut": ["transformer.h.1.attn:split"]},
        {"p": 2},
        "ends between split and the readers .* transformer.h.1.attn:getitem",
    ),
    ({"cut": [":cross_entropy_loss"]}, {"p": 2}, "is the end of the model"),
    (
        {"shard": [sharded("transformer.wte.wait", 1)]},
        {"t": 2},
        "no parameter matches .* one of transformer.wte.weight",
    ),
    ({"shard": [sharded("transformer.wte.weight", 2)]}, {"t": 2}, "has 2 dims"),
    ({"shard": [sharded("transformer.wte.weight", 0)]}, {}, "t=1 splits nothing"),
    ({"shard": [{"pattern": 3}]}, {"t": 2}, "invalid entry .*Remedy: for example"),
    ({"shard": [{"patern": "x", "dim": 0}]}, {"t": 2}, "unknown key 'patern'"),
    (
        {"shard": [sharded("transformer.h.*.ln_1.bias", 0)]},
        {"t": 2},
        "no plan satisfies .*ln_1.bias split along dim 0. Remedy",
    ),
    ({"shard": [sharded("transformer.h.0.mlp.c_fc.bias", 0)]}, {"t": 3}, "t=3 divides no factor of 128"),
    (
        {
            "shard": [
                sharded("transformer.h.*.mlp.c_fc.weight", 1),
                sharded("transformer.h.*.mlp.c_fc.bias", 0),
            ]
        },
        {"t": 2},
        "no plan satisfies .*weight split along dim 1 and .*bias split along dim 0",
    ),
    (
        {
            "shard": [
                sharded("transformer.h.*.mlp.c_fc.weight", 1),
                sharded("transformer.h.2.mlp.c_fc.weight", None),
            ]
        },
        {"t": 2},
        "h.*.mlp.c_fc.weight split along dim 1, and transformer.h.2.mlp.c_fc.weight whole",
    ),
]


@pytest.mark.parametrize(("plan", "keywords", "told"), WRONG, ids=[str(one[0]) for one in WRONG])
def test_what_cannot_be(plan: dict[str, Any], keywords: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        compile_gpt(plan=plan, **keywords)


def test_a_file_that_is_no_plan(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read"):
        compile_gpt(plan=tmp_path / "missing.json")
    (tmp_path / "plan.json").write_text("[1, 2")
    with pytest.raises(PlanError, match="cannot be read"):
        compile_gpt(plan=tmp_path)
    (tmp_path / "plan.json").write_text(json.dumps([1, 2]))
    with pytest.raises(PlanError, match="is a list"):
        compile_gpt(plan=tmp_path)


STEERED = [
    [sharded("transformer.h.*.mlp.c_fc.weight", 1), sharded("transformer.h.*.mlp.c_proj.weight", None)],
    [sharded("transformer.wte.weight", 1), sharded("transformer.wpe.weight", None)],
    [sharded("transformer.h.2.attn.c_attn.weight", None)],
]


@pytest.mark.one_in(9)
@pytest.mark.parametrize("shard", STEERED)
def test_parameters_are_sharded_as_the_plan_says(shard: list[dict[str, Any]]) -> None:
    program = compile_gpt(plan={"shard": shard}, t=2)
    for entry in shard:
        pattern = entry["pattern"].replace("*", "1")
        kind = program.param(pattern).storage.layout["tp"]
        assert (kind.dim if kind.kind == "S" else None) == entry["dim"], pattern
    assert compile_gpt(plan=program.plan).plan == program.plan
    autoptd.verify(gpt(4), t=2, p=2, plan={"shard": shard}, example_inputs=batch(), steps=1)


def test_the_own_shard_list_passes_in_any_order() -> None:
    plan = copy.deepcopy(compile_gpt(t=2).plan)
    plan["shard"].reverse()
    assert compile_gpt(plan=plan).plan["shard"] == list(reversed(plan["shard"]))


class Between(nn.Module):
    """Two layers, and between them what a stage is to be made of."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.a, self.between, self.b = nn.Linear(16, 16), between, nn.Linear(16, VOCAB)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.b(self.between(self.a(x).bfloat16()))
        labels = labels.view(logits.shape[0], 1, -1).expand(
            -1, logits[0].numel() // labels[0].numel() // VOCAB, -1
        )
        return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())


class Cast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.expand(-1, 2, -1, -1)


def test_a_stage_of_casts_alone_casts() -> None:
    x, labels = torch.randn(4, 3, 16), torch.zeros(4, 3, dtype=torch.long)
    model, plan = Between(Cast()), {"cut": [":to[0]", "between"]}
    pm = autoptd.parallelize(
        model, p=3, plan=plan, num_microbatches=1, backend="local", example_inputs=(x, labels)
    )
    assert float(pm.step(x, labels)) == pytest.approx(float(model(x, labels).detach()), rel=1e-6)
    pm.close()


def test_a_stage_of_views_alone_is_refused() -> None:
    """The smaller value crosses, and is looked at otherwise where its reader is."""
    x, labels = torch.randn(4, 1, 3, 16), torch.zeros(4, 3, dtype=torch.long)
    model = Between(Twice())
    model.b.bfloat16()
    with pytest.raises(PlanError, match="stage 1 has nothing to compute"):
        autoptd.compile(model, p=3, plan={"cut": [":to[0]", "between"]}, example_inputs=(x, labels))


# Memory.


@pytest.mark.thorough
def test_memory_moves_the_cut_and_is_refused_where_nothing_fits() -> None:
    free = compile_gpt(8, p=4, num_microbatches=8)
    memory = 0.97 * fullest(free)
    bound = compile_gpt(8, p=4, num_microbatches=8, memory=memory, recompute=False)
    assert fullest(bound) <= memory and bound.plan["cut"] != free.plan["cut"]
    assert bound.plan["options"]["memory"] == memory
    with pytest.raises(PlanError, match=r"memory: with .* the fullest rank takes [\d,]+ bytes") as caught:
        compile_gpt(8, p=4, num_microbatches=8, memory=memory / 4)
    assert "num_microbatches" in caught.value.remedy and "larger t or p" in caught.value.remedy
    with pytest.raises(PlanError, match="memory: with the cut that the plan pins"):
        compile_gpt(
            8,
            p=4,
            num_microbatches=8,
            memory=memory,
            recompute=False,
            plan={"cut": free.plan["cut"]},
        )


def test_memory_knows_schedule_and_parameters() -> None:
    """GPipe holds all microbatches, 1F1B no more than p; a parameter is four times its bytes, once on a rank."""

    def held(**keywords: Any) -> list[float]:
        return compile_gpt(4, num_microbatches=8, **keywords).costs.cut.rank_bytes

    assert held(p=2, schedule="gpipe")[0] > held(p=2, schedule="1f1b")[0]
    # The parameters are in float32: their gradients are, too.
    assert held(p=2, accumulate_allreduce_grads_in_fp32=True)[0] == held(p=2)[0]
    program = compile_gpt(4, num_microbatches=8)
    params = sum(4 * 4 * one.numel() for one in gpt(4).parameters())
    (total,) = program.costs.cut.rank_bytes
    assert params < total < 2 * params
    two = held(p=2, plan={"cut": [2, 2]})
    tied = 4 * 4 * VOCAB * 32
    saved = total - params
    assert sum(two) == pytest.approx(
        params + tied + saved * 1.5, rel=0.3
    )  # 2 and 1 microbatches of half the layers
