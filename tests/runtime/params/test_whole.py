"""Optimizers of whole matrices: the update of one device, whatever ranks store; state at one home, and in any checkpoint."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.compiler import compiler
from autoptd.errors import PlanError
from autoptd.model.parallel_model import ParallelModel
from autoptd.runtime.params.whole import place_homes
from tests.forks import told
from tests.parity.models import batch, gpt
from tests.parity.test_sharing import grouped
from tests.runtime.checkpoint.models import compiled_once, data, tied_gpt
from tests.runtime.checkpoint.test_layouts import conv1d

MATRICES = ["*attn*.weight", "*mlp*.weight"]
Optimizers = list[torch.optim.Optimizer]
STEPS = 3


class Lamb(torch.optim.Optimizer):
    """Adam with a trust ratio: norms of whole tensors (You et al. 2020)."""

    whole = True

    def __init__(self, params: Any, lr: float = 1e-2, decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["step"] = count = state.get("step", 0) + 1
                first = state.setdefault("exp_avg", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                second = state.setdefault("exp_avg_sq", torch.zeros_like(p)).lerp_(p.grad**2, 0.01)
                update = first / (1 - 0.9**count) / ((second / (1 - 0.99**count)).sqrt() + 1e-3)
                update += group["decay"] * p
                p.sub_(update * (p.norm() / update.norm().clamp(min=1e-9)), alpha=group["lr"])


class Shampoo(torch.optim.Optimizer):
    """Preconditions rows and columns of matrices (Gupta et al. 2018)."""

    whole = True

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.preconditioned(p), alpha=group["lr"])

    def preconditioned(self, p: Tensor) -> Tensor:
        update: Tensor = p.grad  # type: ignore[assignment]
        for dim in range(p.dim() if p.dim() == 2 else 0):
            rows = p.grad if dim == 0 else p.grad.T  # type: ignore[union-attr]
            start = 0.1 * torch.eye(len(rows), dtype=p.dtype)
            side = self.state[p].setdefault(f"side_{dim}", start).addmm_(rows, rows.T)
            values, vectors = torch.linalg.eigh(side)
            root = vectors * values**-0.25 @ vectors.T
            update = root @ update if dim == 0 else update @ root
        return update


def mixed(source: Any) -> Optimizers:
    """Muon for matrices within layers, AdamW for all else."""
    if isinstance(source, ParallelModel):
        shapes = {spec.name: spec.shape for spec in source.program.params}
        matrices = [name for name, shape in shapes.items() if is_matrix(name, shape)]
        rest = [name for name in shapes if name not in matrices]
        muon = source.optimizer(torch.optim.Muon, matrices, lr=0.02)
        return [muon, source.optimizer(torch.optim.AdamW, rest, lr=0.01)]
    named = dict(source.named_parameters())
    parts: list[list[Tensor]] = [[], []]
    for name, x in named.items():
        parts[not is_matrix(name, x.shape)].append(x)
    return [torch.optim.Muon(parts[0], lr=0.02), torch.optim.AdamW(parts[1], lr=0.01)]


def is_matrix(name: str, shape: Any = (1, 1)) -> bool:
    is_outside = any(part in name for part in ("wte", "wpe", "lm_head", "emb", "bias", "ln_"))
    return len(shape) == 2 and not is_outside


def only(cls: Any, **settings: Any) -> Callable[[Any], Optimizers]:
    def make(source: Any) -> Optimizers:
        if isinstance(source, ParallelModel):
            return [source.optimizer(cls, **settings)]
        return [cls(source.parameters(), **settings)]

    return make


KINDS: dict[str, Callable[[Any], Optimizers]] = {
    "Muon and AdamW": mixed,
    # The gradients of key biases are rounding errors, which an Adafactor without this bound would scale up.
    "Adafactor": only(torch.optim.Adafactor, lr=0.02, eps=(1e-4, 1e-3)),
    "LAMB": only(Lamb),
    "Shampoo": only(Shampoo),
}


def parallel(model: nn.Module, call: Any = None, **keywords: Any) -> ParallelModel:
    settings = {"backend": "local", "example_inputs": data(0) if call is None else call, **keywords}
    with mock.patch.object(compiler, "compile_program", compiled_once):
        return autoptd.parallelize(model, **settings)


def train(model: Any, optimizers: Optimizers, seeds: Iterable[int], call: Any = None) -> None:
    for seed in seeds:
        given = data(seed) if call is None else call
        if isinstance(model, ParallelModel):
            model.step(*given)
        else:
            output = model(*given)
            (output if isinstance(output, Tensor) else output[1]).backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


def assert_same(pm: ParallelModel, found: Optimizers, model: nn.Module, expected: Optimizers) -> None:
    """Parameters and all of the optimizers' state are those of one device."""
    values = pm.state_dict()
    for name, x in model.named_parameters():
        assert torch.allclose(values[name], x, rtol=0, atol=1e-9), name
    named = {x: name for name, x in model.named_parameters()}
    for one, other in zip(found, expected, strict=True):
        state = one.state_dict()["state"]
        assert state.keys() == {named[x] for x in other.state}
        for x, record in other.state.items():
            assert state[named[x]].keys() == record.keys()
            for key, value in record.items():
                own = state[named[x]][key]
                assert torch.allclose(torch.as_tensor(own), torch.as_tensor(value), rtol=0, atol=1e-9), key


MESHES = [
    ({"t": t, "p": p, "d": d, "zero": zero, "num_microbatches": m})
    for t, p, d, zero, m in product((1, 2), (1, 2), (1, 2), (0, 1, 2, 3), (1, 4))
    if t * p * d > 1 and (not zero or d > 1)
]
# Each pair of a kind and a mesh that differ in what they store.
DEFAULT = {
    "Muon and AdamW": [(2, 2, 2, 1, 4), (2, 1, 1, 0, 1), (1, 2, 1, 0, 4)],
    "Adafactor": [(2, 1, 2, 0, 4), (1, 2, 2, 1, 1)],
    "LAMB": [(2, 2, 2, 0, 1), (2, 1, 2, 2, 4)],
    "Shampoo": [(2, 1, 2, 1, 4), (1, 1, 2, 3, 1)],
}


@pytest.mark.parametrize(
    "kind, mesh",
    [
        pytest.param(kind, mesh, marks=() if tuple(mesh.values()) in DEFAULT[kind] else pytest.mark.thorough)
        for kind in KINDS
        for mesh in MESHES
    ],
    ids=str,
)
def test_the_update_of_one_device(kind: str, mesh: dict[str, int]) -> None:
    """A fused projection, tied embeddings of 61 rows, which no t divides, and a frozen parameter."""
    model, make = tied_gpt(), KINDS[kind]
    pm = parallel(tied_gpt(), **mesh)
    found, expected = make(pm), make(model)
    train(pm, found, range(STEPS))
    train(model, expected, range(STEPS))
    assert_same(pm, found, model, expected)
    pm.close()


class Stepping(torch.optim.SGD):
    """Changes values in its own step, calls torch's, and reads the gradient after it."""

    whole = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - 0.1 * p.norm())
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / (1 + p.grad.norm()), alpha=0.01)


class Conv1D(nn.Module):
    """GPT-2 of transformers, whose weights are transposed, with a loss that is not in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.model = conv1d()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(ids).logits.flatten(0, 1), labels.flatten())


LAYOUTS: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any]]] = {
    "two key heads of four ranks": (grouped, batch(), {"t": 4}),
    "two key heads of four ranks, replicas": (grouped, batch(), {"t": 4, "d": 2, "zero": 1}),
    "transposed by GPT-2": (Conv1D, batch(), {"t": 2, "d": 2, "zero": 1}),
    "padded by three": (lambda: gpt(2, vocab=61, heads=3, width=33), batch(8, 61), {"t": 3}),
    "replicas of shards": (tied_gpt, data(0), {"d": 4, "zero": 1, "dp_shard": 2, "t": 2}),
    "context parallel": (tied_gpt, data(0), {"c": 2, "t": 2, "zero": 1}),
    "another order of ranks": (tied_gpt, data(0), {"t": 2, "d": 2, "p": 2, "order": "dp-pp-tp", "zero": 1}),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout(name: str) -> None:
    make_model, call, mesh = LAYOUTS[name]
    model = make_model().double()
    pm = parallel(make_model().double(), call, **mesh)
    found, expected = mixed(pm), mixed(model)
    train(pm, found, range(STEPS), call)
    train(model, expected, range(STEPS), call)
    assert_same(pm, found, model, expected)
    pm.close()


def test_a_step_within_a_step() -> None:
    """torch runs hooks around its own class's `step` too, from its first instance on."""
    torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    model, make = tied_gpt(), only(Stepping, lr=0.01, momentum=0.9)
    pm = parallel(tied_gpt(), t=2, d=2)
    found, expected = make(pm), make(model)
    train(pm, found, range(STEPS))
    train(model, expected, range(STEPS))
    assert_same(pm, found, model, expected)
    assert found[0].updates == STEPS  # type: ignore[attr-defined]
    pm.close()


MOVES = [
    ("Muon and AdamW", {"t": 2}, {"p": 2, "d": 2, "zero": 1}),
    ("Muon and AdamW", {"t": 2, "d": 2, "zero": 1}, {"d": 2}),
    ("Adafactor", {"d": 2, "zero": 1}, {"t": 2, "p": 2}),
    ("Adafactor", {"p": 2}, {"d": 2, "zero": 3}),
    ("LAMB", {"t": 2, "d": 2}, {"p": 2}),
    ("Shampoo", {"t": 2, "p": 2}, {"d": 2, "zero": 1}),
]


@pytest.mark.parametrize("kind, first, second", MOVES, ids=str)
def test_any_state_moves_to_any_mesh(kind: str, first: Any, second: Any, tmp_path: Path) -> None:
    model, make = tied_gpt(), KINDS[kind]
    expected = make(model)
    train(model, expected, range(STEPS))
    pm = parallel(tied_gpt(), **first)
    found = make(pm)
    train(pm, found, range(STEPS))
    pm.save(tmp_path / "c", found if len(found) > 1 else found[0])
    states = [copy.deepcopy(one.state_dict()) for one in found]
    pm.close()
    pm = parallel(tied_gpt(), **second)
    found = make(pm)
    pm.load(tmp_path / "c", found if len(found) > 1 else found[0])
    assert_same(pm, found, model, expected)
    train(model, expected, range(STEPS, STEPS + 2))
    train(pm, found, range(STEPS, STEPS + 2))
    assert_same(pm, found, model, expected)
    # From state dicts: of this optimizer, and of torch's own over the model.
    for one, state, other in zip(found, states, expected, strict=True):
        one.load_state_dict(other.state_dict())
        assert_same(pm, [one], model, [other])
        one.load_state_dict(state)
        again = one.state_dict()
        assert str(again["param_groups"]) == str(state["param_groups"])
        for name, record in state["state"].items():
            for key, value in record.items():
                assert torch.equal(torch.as_tensor(again["state"][name][key]), torch.as_tensor(value)), key
    pm.close()


@pytest.mark.parametrize("mesh", [{"t": 2, "d": 2}, {"d": 2, "zero": 1}], ids=str)
def test_masters_and_clipping(mesh: dict[str, int]) -> None:
    """The update that the class makes on one device of the same gradients, to the bit, at learning rates of a scheduler."""
    pm = parallel(tied_gpt(torch.float32), precision="bf16-mixed", **mesh)
    found = pm.optimizer(torch.optim.Muon, MATRICES, lr=torch.tensor(0.02))
    values = {name: nn.Parameter(x) for name, x in pm.state_dict().items() if is_matrix(name)}
    one = torch.optim.Muon(values.values(), lr=torch.tensor(0.02))
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in (found, one)]
    for seed in range(STEPS):
        pm.step(*data(seed))
        pm.clip_grad_norm_(0.1)
        for name, x in pm.gradients().items():
            if name in values:
                values[name].grad = x
        for optimizer, scheduler in zip((found, one), schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        trained = pm.state_dict()
        assert all(torch.equal(trained[name], x) for name, x in values.items())
    pm.close()


def test_the_momentum_lives_at_home() -> None:
    """No matrix is stepped twice, and ranks have about as much to compute."""
    pm = parallel(tied_gpt(), t=2, d=2)
    muon = pm.optimizer(torch.optim.Muon, MATRICES, lr=0.02)
    pm.step(*data(0))
    muon.step()
    names = [spec.name for spec in pm.program.params if is_matrix(spec.name)]
    held = [list(homes.stored) for homes in muon.binding.homes.values()]  # type: ignore[attr-defined]
    assert sorted(name for some in held for name in some) == sorted(names)
    assert len(muon.state) == len(names) and min(map(len, held)) >= 1
    memory = pm.memory()
    own = [homes.stored.values() for homes in muon.binding.homes.values()]  # type: ignore[attr-defined]
    # A matrix and its momentum.
    assert [entry.moments for entry in memory.values()] == [sum(2 * x.nbytes for x in some) for some in own]
    pm.close()


@pytest.mark.parametrize(
    "mesh, there, back",
    [
        ({"d": 2}, [], ["dp"]),
        ({"t": 2}, ["tp"], ["tp"]),
        ({"t": 2, "d": 2}, ["tp"], ["tp", "dp"]),
        ({"t": 2, "d": 2, "zero": 1}, ["tp", "dp"], ["tp", "dp"]),
    ],
    ids=str,
)
def test_one_call_for_each_axis(mesh: dict[str, int], there: list[str], back: list[str]) -> None:
    """Replicas have a gradient already, so it need not travel over dp."""
    pm = parallel(tied_gpt(), **mesh)
    found = mixed(pm)
    train(pm, found, range(1))
    with pm.record() as record:
        train(pm, found, range(1, 2))
    for site, axes in (("optimizer: pieces to homes", there), ("optimizer: updates from homes", back)):
        calls = [call for call in record.collectives if call.site == site]
        assert [call.axis for call in calls if call.rank == 0] == axes
        assert {call.kind for call in calls} <= {"all-to-all"}
    pm.close()


def test_homes_are_balanced() -> None:
    pm = parallel(gpt(4), batch(), t=2)
    matrices = [spec for spec in pm.program.params if is_matrix(spec.name, spec.shape)]
    for count in (2, 3, 8):
        loads = dict.fromkeys(range(count), 0)
        for name, home in place_homes(matrices, range(count)).items():
            loads[home] += math.prod(next(spec for spec in matrices if spec.name == name).shape)
        assert max(loads.values()) <= 1.4 * sum(loads.values()) / count
    pm.close()


def test_values_that_change_between_steps() -> None:
    """Loaded values, edits of parameters, and what a hook writes after a step; gradients that there are not."""
    model = tied_gpt()
    pm = parallel(tied_gpt(), t=2, d=2, zero=1)
    expected, found = mixed(model), mixed(pm)
    train(model, expected, range(1))
    train(pm, found, range(1))
    state = {name: x * 1.5 for name, x in model.state_dict().items()}
    pm.load_state_dict(state)
    model.load_state_dict(state)
    with torch.no_grad():
        for source in (pm, model):
            for x in source.parameters():
                x.mul_(0.9)

    def shrink(optimizer: Any, *_: Any) -> None:
        with torch.no_grad():
            for x in optimizer.param_groups[0]["params"]:
                x.mul_(0.5)

    for optimizer in (found[0], expected[0]):
        optimizer.register_step_post_hook(shrink)
    train(model, expected, range(1, 3))
    train(pm, found, range(1, 3))
    # Without gradients nothing is updated.
    found[0].step()
    expected[0].step()
    assert_same(pm, found, model, expected)
    pm.close()


def test_an_overflow_skips_the_step() -> None:
    pm = parallel(tied_gpt(torch.float32), t=2, d=2, precision="fp16-mixed", loss_scale=2.0**40)
    found = mixed(pm)
    before = pm.state_dict()
    train(pm, found, range(2))
    assert [one.skipped for one in found] == [2, 2]  # type: ignore[attr-defined]
    assert not found[0].state and all(torch.equal(x, before[name]) for name, x in pm.state_dict().items())
    pm.close()


class NormOfAll(torch.optim.SGD):
    whole = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in every]).norm()  # type: ignore[union-attr]
        for p in every:
            p.grad.div_(norm)  # type: ignore[union-attr]
        super().step()


class Plain(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})


@pytest.mark.parametrize(
    "cls, why",
    [
        (
            torch.optim.Muon,
            r"does not take these .* \(ValueError: Muon only supports 2D parameters .* another pm.optimizer",
        ),
        (
            NormOfAll,
            "whole = True, but its update of a tensor depends on which other tensors are in the group",
        ),
        (Plain, r"set elementwise = True on the class if it is, else whole = True"),
    ],
)
def test_what_is_refused(cls: Any, why: str) -> None:
    pm = parallel(tied_gpt(), t=2)
    with pytest.raises(PlanError, match=why):
        pm.optimizer(cls, lr=0.1)
    pm.close()


def test_what_a_loop_may_not_do() -> None:
    pm = parallel(tied_gpt(), t=2, d=2)
    muon, _ = mixed(pm)
    pm.step(*data(0))
    x = muon.param_groups[0]["params"][0]
    with pytest.raises(PlanError, match=r"gradients are brought to whole tensors within optimizer.step"):
        x.grad.mul_(2)
    with pytest.raises(PlanError, match=r"gradients are brought to whole tensors within optimizer.step"):
        x.grad = None
    with pytest.raises(PlanError, match=r"does not take a closure .* or whole matrices"):
        muon.step(lambda: 0.0)
    with pytest.raises(PlanError, match="groups are fixed"):
        muon.add_param_group({"params": [x]})
    with pytest.raises(PlanError, match="clip"):
        torch.nn.utils.clip_grad_norm_(muon.param_groups[0]["params"], 1.0)
    with pytest.raises(PlanError, match="share parameters"):
        pm.save("nowhere", [muon, muon])
    muon.step()
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(PlanError, match=r"was changed through optimizer.param_groups between two steps"):
        muon.step()
    pm.close()


def test_a_gradient_of_some_ranks() -> None:
    pm = parallel(tied_gpt(), t=2)
    muon, _ = mixed(pm)
    pm.step(*data(0))
    parameters = pm.run.ranks.here[1].params.local  # type: ignore[union-attr]
    parameters["transformer.h.0.mlp.c_fc.weight"].grad = None
    with pytest.raises(PlanError, match=r"mlp.c_fc.weight: has a gradient on some ranks only"):
        muon.step()
    pm.close()


def test_other_lists_of_optimizers(tmp_path: Path) -> None:
    pm = parallel(tied_gpt(), t=2, d=2)
    muon, adamw = mixed(pm)
    train(pm, [muon, adamw], range(1))
    pm.save(tmp_path / "both", [muon, adamw])
    with pytest.raises(PlanError, match=r"state of a Muon, AdamW, not of an AdamW, Muon. .*in this order"):
        pm.load(tmp_path / "both", [adamw, muon])
    with pytest.raises(PlanError, match="state of a Muon, AdamW, not of a Muon"):
        pm.load(tmp_path / "both", muon)
    with pytest.warns(UserWarning, match="another AdamW over other parameters is not saved"):
        pm.save(tmp_path / "one", muon)
    state = {name: dict(record) for name, record in adamw.state_dict()["state"].items()}
    pm.save(tmp_path / "extra", muon, extra={"adamw": adamw})
    train(pm, [muon, adamw], range(1, 2))
    pm.load(tmp_path / "extra", muon, extra={"adamw": adamw})
    for name, record in adamw.state_dict()["state"].items():
        assert all(torch.equal(value, state[name][key]) for key, value in record.items())
    with pm.checkpointer(tmp_path / "run", [muon, adamw], every=1) as ckpt:
        train(pm, [muon, adamw], range(2))
        assert ckpt.step()
    values = pm.state_dict()
    with pm.checkpointer(tmp_path / "run", [muon, adamw], every=1) as ckpt:
        ckpt.resume()
    assert all(torch.equal(x, values[name]) for name, x in pm.state_dict().items())
    pm.close()


class Positional(torch.optim.SGD):
    """Makes a group of each parameter; on a rank of several, of those whose home it is."""

    whole = True

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__([{"params": [p], "lr": lr * 0.9**i} for i, p in enumerate(params)], lr=lr)


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_processes(tmp_path: Path, ranks: int) -> None:
    found = told(Path(__file__).parent / "whole_processes.py", ranks, str(tmp_path))
    assert found[0]["error"] <= 1e-9 and found[0]["resumed"] <= 1e-9
    assert all(one["refused"] for one in found)


def test_the_page_is_run() -> None:
    page = Path(__file__).parents[3] / "docs/howto/optimizers.md"
    found: dict[str, Any] = {}
    for block in re.findall(r"<!-- run: python -->\n```python\n(.*?)```", page.read_text(), re.S):
        exec(compile(block, str(page), "exec"), found)
    assert found["muon"].updates == found["adamw"].updates == 3
    assert {name for homes in found["muon"].binding.homes.values() for name in homes.stored} == {
        *found["inner"]
    }
    found["pm"].close()
