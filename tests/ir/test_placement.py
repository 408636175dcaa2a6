"""What turns a parameter's storage into its use, and so what its gradient is summed over."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest

from autoptd.errors import InternalError
from autoptd.ir.layout import BATCH, Layout
from autoptd.ir.mesh import Mesh
from autoptd.ir.placement import Placement, conversions, placements
from autoptd.ir.types import I, R, S, ValueType
from autoptd.program.buckets import BucketPlan, plan_buckets, usual_bytes
from autoptd.program.specs import ParamSpec
from autoptd.runtime.params.storage import check_use
from autoptd.schedule import build_orders

DP, TP, PP = ("dp", "all-reduce"), ("tp", "all-reduce"), ("pp", "all-reduce")
# Types over tp in the graph, stages, what the gradient goes through.
CASES: dict[str, tuple[dict[str, ValueType], tuple[int, ...], list[tuple[str, str]]]] = {
    "I": ({}, (0,), [DP]),
    "R": ({"tp": R}, (0,), [DP, TP]),
    "S": ({"tp": S(0, 0)}, (1,), [DP]),
    "S over a sub-axis, R over the other": (
        {"tp:(1)4": S(0, 0), "tp:(4)2": R},
        (0,),
        [DP, ("tp:(4)2", "all-reduce")],
    ),
    "S over both sub-axes": ({"tp:(1)4": S(0, 0), "tp:(4)2": S(1, 0)}, (0,), [DP]),
    "tied": ({}, (0, 3), [DP, PP]),
    "tied R": ({"tp": R}, (0, 3), [DP, TP, PP]),
    "tied S": ({"tp": S(0, 0)}, (0, 3), [DP, PP]),
}


def spec_of(
    kind: ValueType = I, stages: tuple[int, ...] = (0,), dtype: str = "float32", grad_dtype: str = ""
) -> ParamSpec:
    return typed_spec({"tp": kind}, stages, dtype, grad_dtype)


def typed_spec(
    types: dict[str, ValueType], stages: tuple[int, ...], dtype: str = "float32", grad_dtype: str = ""
) -> ParamSpec:
    storage, use = placements(Layout({**types, BATCH: R}), dtype, stages, grad_dtype)
    return ParamSpec("w", ("w",), (8, 4), ((8,), (4,)), True, stages, storage, use)


@pytest.mark.parametrize("case", CASES)
def test_a_gradient_is_summed_where_use_is_replicated_and_storage_is_not(case: str) -> None:
    types, stages, wanted = CASES[case]
    spec = typed_spec(types, stages)
    assert [(step.axis, step.row.backward) for step in spec.sums] == wanted
    assert spec.conversions == spec.sums and {step.row.forward for step in spec.sums} == {"none"}
    check_use(spec)


def test_replicas_and_owners_store_what_a_tensor_rank_does() -> None:
    split, summed = spec_of(S(0, 0), (0, 3)), spec_of(R, (0, 3))
    assert split.storage.layout == Layout({"tp": S(0, 0)})
    assert split.use.layout == Layout({"tp": S(0, 0), "dp": R, "pp": R})
    assert summed.storage.layout == Layout() and summed.use.layout == Layout({"tp": R, "dp": R, "pp": R})
    assert (split.kind, summed.kind, spec_of(I, (0, 3)).kind) == ("S", "R", "I")
    assert (split.type_text(), summed.type_text(), spec_of().type_text()) == ("S(tp, dim 0: [8])", "R", "I")
    assert split.local_shape(Mesh(t=2, p=4, d=2)) == (4, 4) and split.local_bytes(Mesh(t=2, d=2)) == 64


def test_only_i_and_s_can_be_stored() -> None:
    with pytest.raises(InternalError, match="w: is stored as R over dp"):
        replace(spec_of(), storage=Placement(Layout({"dp": R}), "float32"))


def test_gradients_add_up_in_the_dtype_of_the_storage() -> None:
    """A main gradient is the storage's; float32 storage of bfloat16 parameters has one without being asked."""
    main = spec_of(dtype="bfloat16", grad_dtype="float32")
    assert (main.storage.dtype, main.storage.sum_dtype, main.use.dtype) == ("bfloat16", "float32", "bfloat16")
    assert main.grad_bytes(Mesh()) == 128 and main.local_bytes(Mesh()) == 64
    mixed = replace(spec_of(), use=replace(spec_of().use, dtype="bfloat16"))
    assert mixed.storage.sum_dtype == "float32" and mixed.sums == spec_of().sums
    with pytest.raises(InternalError, match="float32 to bfloat16 once per update"):
        check_use(mixed)


def buckets(*specs: ParamSpec, mesh: Mesh, pp: int = 0) -> list[BucketPlan]:
    orders = build_orders("1f1b", mesh.p, 1, 4)
    return plan_buckets(specs, orders, tuple(range(mesh.p)), mesh, pp)


def test_buckets_have_the_sums_of_several_ranks_only() -> None:
    tied = spec_of(R, (0, 3))
    for mesh, axes in [
        (Mesh(t=2, p=4, d=2), ["dp", "tp", "pp"]),
        (Mesh(p=4, d=2), ["dp", "pp"]),
        (Mesh(t=2, p=4), ["tp", "pp"]),
    ]:
        [plan] = buckets(tied, mesh=mesh)
        assert [step.axis for step in plan.sums] == axes and plan.owners == (0, 3)
        assert (*plan.early, *plan.late, *plan.tied) == plan.sums
    assert buckets(tied, mesh=Mesh(t=2, p=4), pp=1) == []


def test_buckets_are_of_one_dtype_and_equal_sums() -> None:
    names = iter("abcdefg")
    specs = [spec_of(), spec_of(S(0, 0)), spec_of(R), spec_of(R), spec_of(grad_dtype="float64")]
    plans = buckets(*(replace(spec, name=next(names)) for spec in specs), mesh=Mesh(t=2, d=2))
    assert sorted("".join(spec.name for spec in plan.params) for plan in plans) == ["ab", "cd", "e"]


def test_buckets_are_a_quarter_of_what_a_rank_has() -> None:
    """Within bounds; and of one size on all ranks, whatever each has, for owners of a tied parameter share its bucket."""
    names = iter(range(100))

    def many(count: int, rows: int, stages: tuple[int, ...]) -> list[ParamSpec]:
        made = replace(spec_of(R, stages), shape=(rows, 2**18))
        return [replace(made, name=f"w{next(names)}") for _ in range(count)]

    mesh = Mesh(p=2, d=2)
    for rows, nbytes in ((1, 8 * 2**20), (16, 40 * 2**20), (400, 100 * 2**20)):
        specs = [*many(4, rows, (0, 1)), *many(16, rows, (0,))]
        assert usual_bytes(specs, mesh) == nbytes
        found = [buckets(*specs, mesh=mesh, pp=pp) for pp in (0, 1)]
        tied = [[plan.params for plan in plans if len(plan.owners) == 2] for plans in found]
        assert tied[0] == tied[1]
        held = [[sum(spec.grad_bytes(mesh) for spec in plan.params) for plan in plans] for plans in found]
        assert all(one <= nbytes or one == rows * 2**20 for one in chain(*held))
        assert sum(held[0]) == 20 * rows * 2**20 and (rows == 1 or len(held[0]) > 4)


@pytest.mark.parametrize("scope", ["step", "microbatch"])
def test_storage_that_replicas_divide_is_a_row_of_the_table(scope: str) -> None:
    """ZeRO, as data: an all-gather before the use, a reduce-scatter of the gradient, then the sums of the shard."""
    whole = spec_of(R, (0, 3))
    sharded = replace(whole, storage=Placement(Layout({"dp": S(0, 0)}), "float32"), scope=scope)  # type: ignore[arg-type]
    found = [(step.axis, step.row.forward, step.row.backward) for step in sharded.sums]
    assert found == [
        ("dp", "all-gather", "reduce-scatter"),
        ("tp", "none", "all-reduce"),
        ("pp", "none", "all-reduce"),
    ]
    with pytest.raises(InternalError, match="all-gather over dp"):
        check_use(sharded)


def test_where_replicas_use_the_same_samples_a_shard_is_only_cut() -> None:
    """S -> I: gradients are equal on all ranks, and a slice of one is the storage's."""
    [step] = conversions(Layout({"dp": S(0, 0)}), Layout())
    assert (step.axis, step.row.name, step.is_sum) == ("dp", "s_to_i", False)
