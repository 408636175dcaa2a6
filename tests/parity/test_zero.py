"""ZeRO's first stage and hybrid sharding: the bits of zero=0, the bytes of the formula, and what must show if it breaks.

That it trains like one device, in all combinations: `covering.py`. Here is what has a number of its own.
"""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.errors import PlanError
from autoptd.program import buckets
from autoptd.program.buckets import ALIGNMENT, BucketPlan
from autoptd.runtime.params import gradient_buckets, parameters, storage
from autoptd.runtime.params.guard import GuardedParameter
from autoptd.runtime.params.parameters import RankParameters
from tests.parity.late import Late, usual_gather
from tests.parity.models import batch, gpt

STEPS = 3


def train(
    model: nn.Module, max_norm: float = 0.5, steps: int = STEPS, **keywords: Any
) -> tuple[autoptd.ParallelModel, torch.optim.Optimizer]:
    """Train some steps, with clipping; the running model and its optimizer."""
    data = batch(8)
    pm = autoptd.parallelize(model, **keywords, backend="local", timeout=30, example_inputs=data)
    optimizer = pm.optimizer(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
    for step in range(steps):
        pm.step(*(x.roll(step, 0) for x in data))
        pm.clip_grad_norm_(max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return pm, optimizer


def one_device(max_norm: float = 0.5, steps: int = STEPS) -> dict[str, Tensor]:
    model, data = gpt(2).double(), batch(8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(steps):
        model(*(x.roll(step, 0) for x in data))[-1].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def largest_difference(pm: autoptd.ParallelModel, expected: dict[str, Tensor]) -> float:
    found = pm.state_dict()
    return max(float((found[name] - x).abs().max()) for name, x in expected.items())


@pytest.mark.parametrize(
    "mesh",
    [{"d": 2, "zero": 1}, {"t": 2, "p": 2, "num_microbatches": 2}, {"c": 2, "d": 2, "zero": 1}],
    ids=str,
)
@pytest.mark.parametrize("p", [inf, 1, None], ids=["inf", "1", "value"])
def test_clipping_by_another_norm_or_by_value(mesh: dict[str, Any], p: float | None) -> None:
    """A tied weight, a frozen one, and one of which the mesh leaves a rank no entry."""
    data, norms, gradients, states = batch(8), [], [], []
    for is_parallel in (False, True):
        model = gpt(2).double()
        model.transformer.h[0].ln_1.weight.requires_grad_(False)
        run = (
            autoptd.parallelize(model, **mesh, backend="local", example_inputs=data) if is_parallel else None
        )
        if run is None:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            model(*data)[-1].backward()
            if p is None:
                torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
            else:
                norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3, p))
            gradients.append({name: x.grad for name, x in model.named_parameters() if x.grad is not None})
        else:
            optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
            run.step(*data)
            if p is None:
                run.clip_grad_value_(1e-3)
            else:
                norms.append(run.clip_grad_norm_(1e-3, norm_type=p))
            gradients.append(run.gradients())
        optimizer.step()
        states.append(dict((run or model).state_dict()))
        if run is not None:
            run.close()
    torch.testing.assert_close(norms[1:], norms[:1], rtol=1e-12, atol=0)
    for name, x in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], x, rtol=1e-9, atol=1e-15)
    for name, x in states[0].items():
        torch.testing.assert_close(states[1][name], x, rtol=0, atol=1e-9)


MESHES = [
    {"d": 2},
    {"t": 2, "d": 2, "sequence_parallel": True},
    {"c": 2, "d": 2},
    {"p": 2, "d": 3, "v": 2, "num_microbatches": 2},
]


@pytest.mark.parametrize("mesh", MESHES[:3], ids=str)
def test_the_bits_are_those_of_zero_0(mesh: dict[str, Any]) -> None:
    """Each sum is of the same two numbers, and the factor of clipping is rounded so that cutting the norm does not show."""
    states = []
    for zero in (0, 1):
        pm, _ = train(gpt(2), zero=zero, **mesh)
        states.append(pm.state_dict())
        pm.close()
    for name, x in states[0].items():
        assert torch.equal(states[1][name], x), name


SHARED: list[tuple[dict[str, Any], int | None, set[str]]] = [
    ({"p": 2, "d": 4}, 2, {"dp:(2)2"}),
    ({"p": 2, "d": 4}, 1, set()),
    ({"p": 2, "d": 4}, 4, {"dp"}),
    ({"c": 2}, None, {"cp"}),
    ({"c": 2, "d": 2}, None, {"dp x cp"}),
    ({"c": 2, "d": 2, "p": 2, "order": "tp-dp-cp-pp"}, None, {"cp x dp"}),
    ({"c": 2, "d": 2, "t": 2}, 2, {"cp"}),
    ({"c": 2, "d": 4}, 4, {"dp:(2)2 x cp"}),
    ({"c": 4, "d": 2}, 2, {"cp:(2)2"}),
]


@pytest.mark.parametrize(("mesh", "dp_shard", "axes"), SHARED, ids=str)
def test_some_ranks_share(mesh: dict[str, Any], dp_shard: int | None, axes: set[str]) -> None:
    """Of those with other samples or other tokens."""
    pm, optimizer = train(gpt(2).double(), dp_shard=dp_shard, zero=1, **mesh)
    assert largest_difference(pm, one_device()) < 1e-9
    # All ranks' tensors: each of the other ranks' copies is divided by `dp_shard`.
    stored = sum(x.numel() for group in optimizer.param_groups for x in group["params"])
    replicas = mesh.get("c", 1) * mesh.get("d", 1)
    held = sum(x.numel() for rank in range(pm.program.mesh.size) for x in pm.rank_parameters(rank).values())
    assert stored * (dp_shard or replicas) == held
    assert {call.axis for call in pm.program.collectives if call.backward == "reduce-scatter"} == axes
    state = optimizer.state_dict()["state"]
    assert all(x["exp_avg"].shape == pm.state_dict()[name].shape for name, x in state.items())
    pm.close()


@pytest.mark.parametrize("d", range(1, 9))
def test_every_element_is_stored_once_and_ranges_are_equal(d: int) -> None:
    """Sizes that d does not divide, and parameters smaller than d: N / d, but for the padding of the formula."""
    sizes = [3, 100, 64, 1, 7, 1000]
    model = nn.ModuleList(nn.Linear(size, 1, bias=False) for size in sizes).double()

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([layer(x[:, : layer.in_features]).mean() for layer in self.layers]).mean()

    x = torch.randn(8 * d, 1000, dtype=torch.float64)
    pm = autoptd.parallelize(Sum(), d=d, zero=1, num_microbatches=1, backend="local", example_inputs=(x,))
    ranks = [pm.rank_parameters(rank) for rank in range(d)]
    assert [sum(p.numel() for p in rank.values()) for rank in ranks] == [sum(sizes)] * d
    optimizer = pm.optimizer(torch.optim.SGD, lr=1.0)
    stored = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    assert stored == sum(sizes)
    [held] = {params.shared[0].end - params.shared[0].start for params in params_of(pm)} if d > 1 else {0}
    if d > 1:
        aligned = sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes[:-1]) + sizes[-1]
        assert held == -(-aligned // (d * ALIGNMENT)) * ALIGNMENT
    pm.close()


def params_of(pm: autoptd.ParallelModel) -> list[RankParameters]:
    return [rank.params for rank in pm.run.started("test").here]


def test_emitted_files_say_what_is_summed_how() -> None:
    program = autoptd.compile(
        gpt(2),
        t=2,
        p=2,
        d=4,
        zero=1,
        dp_shard=2,
        precision="bf16",
        num_microbatches=1,
        example_inputs=batch(8),
    )
    [shared, tied] = [line for line in program.sources["stage_0.py"].split("# - ") if "bucket of" in line]
    said = " ".join(shared.replace("#", " ").split())
    assert said.startswith("reduce-scatter 1 bucket of") and "; all-reduce its range over dp:(1)2" in said
    assert "what it updates of them is gathered" in said
    assert "then over pipeline ranks 0, 1, which share it" in " ".join(tied.replace("#", " ").split())
    assert "cast from the optimizer's float32 copy" in program.sources["stage_0.py"]


@pytest.mark.parametrize("zero", [0, 1])
def test_traffic_is_that_of_the_formula(zero: int) -> None:
    """Per rank and step: 2gN(k-1)/k of an all-reduce, or (g+e)N(k-1)/k of a reduce-scatter and a gather."""
    d = 4
    pm, optimizer = train(gpt(2), steps=1, d=d, zero=zero, num_microbatches=1)
    elements = sum(plan.numel(pm.program.mesh) for plan in plans_of(pm))
    with pm.record() as record:
        pm.step(*batch(8))
        optimizer.step()
    sums = [call for call in record.of(0) if call.payload_bytes > 1000]
    sent = sum(call.wire_bytes for call in sums)
    assert sent == pytest.approx(2 * 4 * elements * (d - 1) / d)
    kinds = {call.kind for call in sums}
    assert kinds == ({"reduce-scatter", "all-gather"} if zero else {"all-reduce"})
    assert all(call.why for call in sums)
    pm.close()


@pytest.mark.parametrize("mesh", [{"d": 4}, {"t": 2, "d": 4, "dp_shard": 2}], ids=str)
def test_gradients_travel_in_16_bits(mesh: dict[str, Any]) -> None:
    """Half the bytes of the scatter alone; each replica's part is rounded once, and they add up in float32."""
    sent, found = {}, {}
    for reduce_dtype in ("fp32", "bf16"):
        keywords = {**mesh, "zero": 1, "precision": "bf16", "reduce_dtype": reduce_dtype}
        pm, optimizer = train(gpt(2), steps=0, **keywords, num_microbatches=1)
        with pm.record() as record:
            pm.step(*batch(8))
            found[reduce_dtype] = pm.gradients()
            optimizer.step()
        calls = [call for call in record.of(0) if "gradients" in call.site]
        sent[reduce_dtype] = {
            kind: sum(call.payload_bytes for call in calls if call.kind == kind)
            for kind in ("reduce-scatter", "all-reduce")
        }
        planned = [one for one in pm.program.collectives if one.backward == "reduce-scatter"]
        assert sum(one.payload_bytes for one in planned) == sent[reduce_dtype]["reduce-scatter"]
        pm.close()
    assert sent["fp32"]["reduce-scatter"] == 2 * sent["bf16"]["reduce-scatter"] > 0
    assert sent["fp32"]["all-reduce"] == sent["bf16"]["all-reduce"]
    # The parts of 4 replicas are rounded to 8 bits each, and may be larger than their sum.
    for name, x in found["fp32"].items():
        y = found["bf16"][name]
        assert y.dtype == torch.float32
        assert float((y - x).norm() / x.norm()) < 2.0**-8, name
    assert any(not torch.equal(x, found["bf16"][name]) for name, x in found["fp32"].items())
    assert any(not torch.equal(x, x.bfloat16().float()) for x in found["bf16"].values())


def plans_of(pm: autoptd.ParallelModel) -> list[BucketPlan]:
    return params_of(pm)[0]._plans()


def test_what_a_user_sees_of_parameters_and_gradients() -> None:
    pm, optimizer = train(gpt(2).double(), steps=1, d=2, zero=1)
    name, parameter = next(iter(pm.named_parameters()))
    assert parameter.shape == gpt(2).state_dict()[name].shape
    pm.step(*batch(8))
    assert hasattr(parameter, "grad") and type(copy.deepcopy(parameter)) is type(parameter)
    for use in (lambda: parameter.grad, lambda: getattr(parameter, "grad", None)):
        with pytest.raises(PlanError, match="of the tensors in optimizer"):
            use()
    assert pm.gradients()[name].shape == parameter.shape
    # An edit on all ranks is there in the next step, and is not taken back by it.
    with torch.no_grad():
        for _, x in pm.named_parameters():
            x.mul_(0.5)
    before = pm.state_dict()[name]
    assert torch.equal(before, parameter.detach())
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(pm.state_dict()[name], before)
    with pytest.raises(PlanError, match="norm"):
        parameter.norm()
    pm.close()


def test_two_updates_in_a_row_and_a_parameter_that_is_saved() -> None:
    """The second update waits for what the first one gathers; what is saved is a tensor, without the ranks."""
    pm, optimizer = train(gpt(2).double(), steps=1, d=2, zero=1)
    pm.step(*batch(8))
    optimizer.step()
    optimizer.step()
    state, stream = pm.state_dict(), io.BytesIO()
    torch.save(dict(pm.rank_parameters(1)), stream)
    stream.seek(0)
    for name, x in torch.load(stream).items():
        assert type(x) is nn.Parameter and torch.equal(x, state[name])
    pm.close()


def never(*_: Any) -> None:
    return None


def keeps_its_part(group: Any, flat: Tensor, site: str) -> Any:
    width = flat.numel() // group.size
    return storage_done(flat[group.index * width :][:width].clone())


def storage_done(x: Tensor) -> Any:
    from autoptd.runtime.world.world import Done

    return Done(x)


def is_dropped_after_the_first(real: Callable[..., Any]) -> Callable[..., Any]:
    def split(self: storage.SharedBucket, range_: Tensor) -> dict[str, Tensor]:
        return dict(list(real(self, range_).items())[:1])

    return split


@pytest.mark.thorough
@pytest.mark.parametrize("broken", ["sum", "gather", "piece", "factor of one rank", "owners"])
def test_a_broken_part_shows(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    if broken == "sum":
        monkeypatch.setitem(gradient_buckets.START, "reduce-scatter", keeps_its_part)
    elif broken == "gather":
        monkeypatch.setattr(parameters.RankParameters, "publish", never)
    elif broken == "piece":
        real = storage.SharedBucket.split
        monkeypatch.setattr(storage.SharedBucket, "split", is_dropped_after_the_first(real))
    elif broken == "factor of one rank":
        monkeypatch.setattr("autoptd.runtime.world.world.World.everyone", lambda self: self._solo)
    elif broken == "owners":
        monkeypatch.setattr("autoptd.runtime.world.threads.ThreadRank.owners", lambda self, _: self._solo)
    try:
        pm, _ = train(gpt(2).double(), p=2, d=2, zero=1)
    except (autoptd.AutoptdError, AssertionError):
        return
    assert largest_difference(pm, one_device()) > 1e-6
    pm.close()


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"d": 4, "dp_shard": 2}, "without zero=1"),
        ({"d": 4, "zero": 1, "dp_shard": 3}, "does not divide d=4"),
        (
            {"d": 3, "c": 4, "zero": 1, "dp_shard": 3},
            r"does not divide d\*c=12 into groups of neighbours.*such as 2, 4, 12",
        ),
        ({"d": 2, "zero": 4}, "one of 0, 1, 2, 3|no such choice|0, 1, 2, 3"),
        ({"d": 2, "reduce_dtype": "bf16"}, "without zero=1 an all-reduce"),
        ({"d": 2, "zero": 1, "reduce_dtype": "fp8"}, "no such choice"),
        ({"d": 2, "zero": 1, "dp_shard": 0}, "at least 1"),
    ],
)
def test_what_cannot_be_is_refused(keywords: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        autoptd.parallelize(gpt(2), **keywords, backend="local", example_inputs=batch(8))


@pytest.mark.parametrize("zero", [0, 1])
def test_a_0d_parameter_goes_on_with_its_state(zero: int) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(8, 4), nn.Parameter(torch.tensor(1.5))

        def forward(self, x: Tensor) -> Tensor:
            return (self.layer(x) * self.scale).square().mean()

    x = torch.randn(8, 8)
    pm = autoptd.parallelize(Scaled(), d=2, zero=zero, backend="local", example_inputs=(x,))
    optimizer = pm.optimizer(torch.optim.AdamW, foreach=True)
    pm.step(x)
    optimizer.step()
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert saved["state"]["scale"]["exp_avg"].shape == ()
    assert float(optimizer.state_dict()["state"]["scale"]["step"]) == 2
    pm.close()


def test_a_gradient_is_not_set_where_it_is_not_kept() -> None:
    pm, _ = train(gpt(2), steps=1, d=2, zero=1)
    parameter = next(iter(pm.parameters()))
    for gradient in (None, torch.ones_like(parameter)):
        with pytest.raises(PlanError, match="each rank keeps only the gradients of its stored pieces"):
            parameter.grad = gradient
    pm.close()


def test_lists_of_parameters_wait_for_the_last_update() -> None:
    pm, _ = train(gpt(2), steps=1, d=2, zero=1)
    parameters = list(pm.parameters())
    waited: list[GuardedParameter] = []
    for x in parameters:
        assert isinstance(x, GuardedParameter)
        x.arrival = partial(waited.append, x)
    torch._foreach_add(parameters, 1.0)
    assert {id(x) for x in waited} == {id(x) for x in parameters}
    pm.close()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Gathers that are done when they are waited for, of small buckets; the waits, by thread and site."""
    monkeypatch.setattr(buckets, "usual_bytes", lambda *_: 3000)
    monkeypatch.setattr(storage, "start_gather", Late)
    monkeypatch.setattr(Late, "log", [])
    return Late.log


@pytest.mark.one_in(1)
@pytest.mark.parametrize(
    "asked",
    [
        {"p": 2, "d": 2, "v": 2, "num_microbatches": 2},
        {"p": 2, "d": 2, "v": 2, "num_microbatches": 2, "precision": "bf16-mixed"},
        {"d": 2, "precision": "bf16-mixed"},
        {"d": 2},
        {"d": 2, "zero": 3, "recompute": "full", "num_microbatches": 2},
        {"p": 2, "d": 2, "v": 2, "num_microbatches": 2, "zero": autoptd.Zero(3, reshard_after_forward=True)},
        {"p": 2, "d": 2, "num_microbatches": 2, "zero": 3, "precision": "bf16"},
    ],
)
def test_what_is_gathered_is_not_read_before(late: list[tuple[int, str]], asked: dict[str, Any]) -> None:
    kept = {"zero": 1, **asked}
    pm, optimizer = train(gpt(2), steps=4, **kept)
    assert len({site for _, site in late}) > 4
    optimizer.step()
    assert pm.eval_step(*batch(8)).isfinite()
    found = pm.state_dict()
    pm.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "start_gather", usual_gather)
        usual, _ = train(gpt(2), steps=4, **kept)
        for name, x in usual.state_dict().items():
            assert torch.equal(x, found[name]), name
        usual.close()


def test_a_layer_does_not_wait_for_the_parameters_of_later_ones(
    late: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pm, _ = train(gpt(2), steps=3, d=2, zero=1, fuse=False)
    real = nn.functional.layer_norm

    def layer_norm(*args: Any, **keywords: Any) -> Tensor:
        late.append((threading.get_ident(), "norm"))
        return real(*args, **keywords)

    monkeypatch.setattr(nn.functional, "layer_norm", layer_norm)
    late.clear()
    pm.step(*batch(8))
    for thread in {thread for thread, _ in late}:
        sites = [site for one, site in late if one == thread]
        waits = [site for site in sites if site != "norm"]
        behind = sites[sites.index("norm") :]
        assert len(waits) == len(set(waits)) > 4
        assert sum(site != "norm" for site in behind) > 2, (
            "nothing was left to wait for behind the first norm"
        )
    pm.close()


@pytest.mark.thorough
def test_what_is_read_too_early_shows(late: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.Withheld, "withhold", never)
    with pytest.raises(autoptd.AutoptdError, match="NaN"):
        train(gpt(2), steps=4, d=2, zero=1)
