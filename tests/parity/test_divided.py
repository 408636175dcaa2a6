"""ZeRO's stages 2 and 3: the bits of stage 0, the bytes and calls of the formula, models whose layers are read in odd ways.

That they train like one device, in all combinations: `covering.py`. Here is what has a number of its own.
"""

from __future__ import annotations

import copy
import io
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
from autoptd import Zero
from autoptd.errors import PlanError, RuntimeFault
from autoptd.program.buckets import ALIGNMENT
from autoptd.program.calls import expected_calls
from tests.parity.models import batch, dropping_gpt, gpt
from tests.parity.test_zero import train

ALWAYS, NEVER = Zero(3, reshard_after_forward=True), Zero(3, reshard_after_forward=False)
# Each stage has one run, so that gradients are reduced once.
ONE_RUN: list[dict[str, Any]] = [
    {"d": 2, "num_microbatches": 1},
    {"d": 2, "p": 2, "num_microbatches": 4},
    {"d": 2, "t": 2, "num_microbatches": 1, "precision": "bf16", "recompute": "full"},
]


@pytest.mark.parametrize("mesh", ONE_RUN, ids=str)
def test_the_bits_are_those_of_zero_0(mesh: dict[str, Any]) -> None:
    states = []
    for zero in (0, 2, 3, NEVER):
        pm, _ = train(dropping_gpt(2), zero=zero, **mesh)
        states.append(pm.state_dict())
        pm.close()
    for state in states[1:]:
        for name, x in states[0].items():
            assert torch.equal(state[name], x), name


class Layers(nn.Module):
    """Four layers between an embedding and a head; a child says in which order they are read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4)
        )

    def read(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = x + layer(x)
        return x

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.read(self.embed(ids))).flatten(0, 1), targets.flatten())


class Again(Layers):
    """Layers are read several times, among others."""

    def read(self, x: Tensor) -> Tensor:
        for number in (0, 1, 0, 2, 1, 3, 0):
            x = x + self.layers[number](x)
        return x


class Views(Layers):
    """Views of a layer's weights are used after all others."""

    def read(self, x: Tensor) -> Tensor:
        first, some = self.layers[0][1].weight.t(), self.layers[3][3].weight[:, ::2]
        for layer in self.layers:
            x = x + layer(x)
        return x + (x @ first) @ first.t() + x @ some.t()


class Crossed(Layers):
    """An operator reads weights of two layers."""

    def read(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            following = self.layers[(number + 1) % 4]
            x = x + layer(x) + F.linear(x, following[1].weight, layer[1].bias)[..., :8]
        return x + (self.layers[0][3].weight @ self.layers[1][1].weight).sum() * x


class Shared(Layers):
    """Layers share a weight, or all of them; the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2][1].weight = self.layers[0][1].weight
        self.layers[3] = self.layers[1]
        self.head.weight = self.embed.weight


class Unread(Layers):
    """One layer is not read; before another one, gradients end."""

    def read(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        return x.detach() + self.layers[2](x.detach()) + self.layers[3](x)


MESHES: list[dict[str, Any]] = [
    {"d": 2, "zero": 2},
    {"d": 2, "zero": 3},
    {"d": 2, "p": 2, "zero": ALWAYS},
    {"t": 2, "d": 2, "zero": 3, "recompute": "full"},
]
FROZEN: list[tuple[str, ...]] = [(), ("layers.0", "layers.2.1"), ("embed", "layers")]
MODELS: list[type[Layers]] = [Again, Layers, Crossed, Shared, Views, Unread]
# Of each model one by default.
PAIRS = [
    pytest.param(make, frozen, marks=() if (i + k) % 3 == 2 else pytest.mark.thorough)
    for i, make in enumerate(MODELS)
    for k, frozen in enumerate(FROZEN)
]


@pytest.mark.one_in(1)
@pytest.mark.parametrize(("make", "frozen"), PAIRS)
def test_layers_may_be_read_in_any_order(make: type[Layers], frozen: tuple[str, ...]) -> None:
    ids, targets = (x % 32 for x in batch(8))
    model = make().double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
    theirs, losses = copy.deepcopy(model), []
    optimizer = torch.optim.Adam([p for p in theirs.parameters() if p.requires_grad], lr=1e-2)
    for step in range(2):
        losses.append(theirs(ids.roll(step, 0), targets))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    for mesh in MESHES:
        pm = autoptd.parallelize(
            copy.deepcopy(model), **mesh, num_microbatches=2, backend="local", example_inputs=(ids, targets)
        )
        ours = pm.optimizer(torch.optim.Adam, lr=1e-2)
        for step, loss in enumerate(losses):
            assert abs(float(pm.step(ids.roll(step, 0), targets) - loss.detach())) < 1e-12, mesh
            ours.step()
            ours.zero_grad()
        for name, x in pm.state_dict().items():
            torch.testing.assert_close(
                x, theirs.state_dict()[name], rtol=0, atol=1e-10, msg=str((mesh, name))
            )
        pm.close()


@pytest.mark.one_in(1)
@pytest.mark.parametrize(
    ("make", "layers"),
    [(Layers, "0 1 2 3"), (Again, "2 3"), (Crossed, "0 1 2 3"), (Unread, "0 2 3")],
)
def test_parameters_that_are_read_beside_other_layers_are_no_layers(make: type[Layers], layers: str) -> None:
    ids, targets = (x % 32 for x in batch(8))
    program = autoptd.compile(make(), d=2, zero=3, num_microbatches=1, example_inputs=(ids, targets))
    assert {spec.unit for spec in program.params} - {""} == {f"layers.{number}" for number in layers.split()}
    unit_of = {spec.name: spec.unit for spec in program.params}
    assert (unit_of["layers.3.1.weight"] == "") == (make is Crossed)


class Conjugated(Layers):
    """Autograd saves conjugates and imaginary parts of a layer's weights, which are views with a bit of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.phases = nn.ParameterList(nn.Parameter(torch.randn(8, 8, 2) / 4) for _ in range(2))

    def read(self, x: Tensor) -> Tensor:
        for phase in self.phases:
            turn = torch.view_as_complex(phase).conj()
            x = super().read(x) + torch.view_as_real(x.to(turn.dtype) @ turn).sum(-1) + turn.imag[0] * x
        return x


def test_conjugates_of_weights_are_saved() -> None:
    ids, targets = (x % 32 for x in batch(8))
    gradients = []
    for zero in (0, ALWAYS):
        pm = autoptd.parallelize(
            Conjugated().double(), d=2, zero=zero, backend="local", example_inputs=(ids, targets)
        )
        pm.step(ids, targets)
        gradients.append(pm.gradients())
        pm.close()
    for name, x in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], x, rtol=0, atol=1e-10, msg=name)


CALLS: list[dict[str, Any]] = [
    {"d": 2, "zero": 3, "num_microbatches": 2},
    {"d": 2, "p": 2, "zero": 3},
    {"d": 2, "p": 2, "zero": ALWAYS, "schedule": "zb_h1"},
    {"d": 2, "p": 2, "v": 2, "zero": 3, "schedule": "interleaved"},
    {"d": 2, "p": 2, "v": 2, "zero": ALWAYS, "schedule": "zbv"},
    {"d": 2, "p": 2, "v": 2, "zero": 2, "schedule": "looped_bfs"},
    {"d": 4, "zero": Zero(3, shard=2), "recompute": "full"},
    {"d": 2, "c": 2, "zero": 3},
]


@pytest.mark.parametrize("mesh", CALLS, ids=str)
def test_calls_and_bytes_are_those_of_the_program(mesh: dict[str, Any]) -> None:
    data = batch(16)
    pm = autoptd.parallelize(gpt(4), **{"num_microbatches": 4, **mesh}, backend="local", example_inputs=data)
    optimizer = pm.optimizer(torch.optim.AdamW, lr=1e-2)
    for _ in range(2):
        with pm.record() as record:
            pm.step(*data)
            optimizer.step()
        optimizer.zero_grad()
        for rank in range(pm.program.mesh.size):
            executed = Counter(call for call in record.of(rank) if call.kind != "objects")
            assert executed == expected_calls(pm.program, rank, updating=True)
    with pm.record() as record:
        pm.eval_step(*data)
    for rank in range(pm.program.mesh.size):
        assert Counter(record.of(rank)) == expected_calls(pm.program, rank, training=False)
    for rank, held in pm.memory().items():
        assert held == pm.program.memory(rank)
    pm.close()


@pytest.mark.parametrize("d", [2, 3, 4])
def test_a_rank_holds_its_share(d: int) -> None:
    """Of float32 sums, masters and moments: 16 / d bytes per parameter, and while they run, two layers of bf16."""
    data = batch(4 * d)
    pm = autoptd.parallelize(
        gpt(4), d=d, zero=3, precision="bf16", num_microbatches=1, backend="local", example_inputs=data
    )
    optimizer = pm.optimizer(torch.optim.AdamW, lr=1e-2)
    pm.step(*data)
    optimizer.step()
    layer = elements(gpt(4).transformer.h[0], d)
    others = [p for name, p in gpt(4).named_parameters() if ".h." not in name]
    count = 4 * layer + padded(others, d)
    moments = 0
    for held in pm.memory().values():
        assert (held.parameters, held.masters) == (0, 4 * count // d)
        # Besides its range: the gradients of one layer, before they are reduced.
        assert held.gradients == 4 * count // d + 4 * layer
        moments += held.moments
    assert moments == 8 * sum(x.numel() for x in gpt(4).parameters())
    pm.close()


def elements(layer: nn.Module, d: int) -> int:
    return padded(list(layer.parameters()), d)


def padded(parameters: list[nn.Parameter], d: int) -> int:
    """The elements of a flat buffer: each parameter begins at a multiple of 64, and ranges are equal."""
    *before, last = parameters
    end = sum(-(-x.numel() // ALIGNMENT) * ALIGNMENT for x in before) + last.numel()
    return -(-end // (d * ALIGNMENT)) * d * ALIGNMENT


def test_gathers_in_a_step_follow_the_formula() -> None:
    """Of n layers and m microbatches: all in each forward and backward, but for the layer at which one follows the other."""
    n, m = 4, 2
    pm, _ = train(gpt(n), steps=1, d=2, zero=3, num_microbatches=m)
    with pm.record() as record:
        pm.step(*batch(8))
    gathers = [call for call in record.of(0) if call.kind == "all-gather" and ".h.*" in call.site]
    assert len(gathers) == n + (2 * m - 1) * (n - 1)
    assert {call.payload_bytes for call in gathers} == {4 * elements(gpt(n).transformer.h[0], 2)}
    reduced = [call for call in record.of(0) if call.kind == "reduce-scatter" and ".h.*" in call.site]
    assert len(reduced) == n * m
    pm.close()


READS: list[Callable[[Tensor], Any]] = [
    torch.sum,
    repr,
    copy.deepcopy,
    lambda x: x.data,
    lambda x: x.detach(),
    lambda x: x.tolist(),
    lambda x: x.mul_(2),
    lambda x: x[0],
    lambda x: x.numpy(),
    lambda x: torch.save(x, io.BytesIO()),
    lambda x: x.data_ptr(),
]


def test_absent_values_are_not_read() -> None:
    pm, optimizer = train(gpt(2), steps=1, d=2, zero=3)
    parameter = pm.rank_parameters(0)["transformer.h.0.mlp.c_fc.weight"]
    assert parameter.shape == (128, 32) and parameter.numel() == 4096 and parameter.requires_grad
    for read in READS:
        with pytest.raises(PlanError, match=r"zero=3 .*pm.state_dict\(\)"):
            read(parameter)
    parameter.requires_grad_(False)
    with pytest.raises(PlanError, match="requires_grad was changed"):
        pm.step(*batch(8))
    parameter.requires_grad_(True)
    # Where they are stored, they may be changed.
    with torch.no_grad():
        for group in optimizer.param_groups:
            for piece in group["params"]:
                piece.mul_(0.5)
    model = gpt(2)
    model.load_state_dict(pm.state_dict())
    data = batch(8)
    assert float(pm.step(*data)) == pytest.approx(float(model(*data)[1]), abs=1e-6)
    pm.close()


@pytest.mark.parametrize("zero", [2, 3, NEVER], ids=str)
def test_a_nan_leaves_a_run_that_goes_on(zero: Any) -> None:
    pm, _ = train(gpt(2).double(), steps=1, d=2, p=2, zero=zero, num_microbatches=2)
    data, right = batch(8), pm.state_dict()
    loss = float(pm.eval_step(*data))
    wrong = {name: x.clone() for name, x in right.items()}
    wrong["transformer.h.1.ln_1.weight"][0] = torch.nan
    pm.load_state_dict(wrong)
    with pytest.raises(RuntimeFault, match="NaN"):
        pm.step(*data)
    pm.load_state_dict(right)
    assert float(pm.step(*data)) == pytest.approx(loss, abs=1e-12)
    pm.close()


@pytest.mark.parametrize("mesh", [{"zero": ALWAYS}, {"p": 2, "zero": 3}], ids=str)
def test_replicas_without_rows_gather_for_the_others(mesh: dict[str, Any]) -> None:
    """The last batch of an evaluation: its loss divides by the number of labels, and its outputs are only those of its rows."""

    class Scored(Layers):
        def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.head(self.read(self.embed(ids)))
            return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=3)

    data, model = tuple(x % 32 for x in batch(18)), Scored().double()
    pm = autoptd.parallelize(
        copy.deepcopy(model), d=3, **mesh, num_microbatches=2, backend="local", example_inputs=data
    )
    for rows in (1, 2, 5, 18):
        part = [x[:rows] for x in data]
        loss, ours = pm.eval_step(*part, outputs=lambda output, ids, targets: output[0])
        logits, expected = model(*part)
        torch.testing.assert_close(float(loss), float(expected), rtol=0, atol=1e-12)
        torch.testing.assert_close(ours, logits.detach(), rtol=0, atol=1e-12)
    pm.close()


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"zero": 1, "reshard_after_forward": True}, "with zero=3 only"),
        ({"zero": ALWAYS, "fuse": "inductor"}, "torch's compiler reads"),
        ({"zero": 4}, "0, 1, 2, 3"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(keywords: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        autoptd.parallelize(gpt(2), d=2, **keywords, backend="local", example_inputs=batch(8))


def test_memory_chooses_the_lowest_stage_that_fits() -> None:
    asked: dict[str, Any] = {"d": 4, "num_microbatches": 1, "recompute": False, "example_inputs": batch(4)}
    peaks = []
    for zero in (0, 1, 2, 3):
        (peak,) = autoptd.peak_memory(autoptd.compile(gpt(8, width=64), zero=zero, **asked))
        peaks.append(peak.nbytes)
    assert peaks == sorted(peaks, reverse=True)
    for zero, most in enumerate(peaks):
        program = autoptd.compile(gpt(8, width=64), memory=int(1.01 * most), **asked)
        assert program.plan["options"]["zero"] == zero, peaks
        (peak,) = autoptd.peak_memory(program)
        assert peak.nbytes <= 1.01 * most


PAGE = (Path(__file__).parents[2] / "docs/howto/zero.md").read_text()


def test_the_page_runs_and_shows_a_file() -> None:
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    ids, targets = batch(8)
    known: dict[str, Any] = {
        "autoptd": autoptd,
        "torch": torch,
        "ids": ids,
        "targets": targets,
        "model": gpt(2),
    }
    exec(script, known)
    assert float(known["loss"]) < 4.2 and known["weights"].keys() == gpt(2).state_dict().keys()
    known["pm"].close()
    (text,) = re.findall(r"```text\n(.*?)```", PAGE, re.S)
    asked: dict[str, Any] = {"d": 2, "p": 2, "num_microbatches": 2, "example_inputs": batch(8)}
    assert text in autoptd.compile(gpt(4), zero=ALWAYS, **asked).sources["stage_0.py"]


def test_emitted_files_say_when() -> None:
    asked: dict[str, Any] = {"d": 2, "p": 2, "num_microbatches": 2, "example_inputs": batch(8)}
    source = autoptd.compile(gpt(4), zero=ALWAYS, **asked).sources["stage_0.py"]
    size = 4 * elements(gpt(4).transformer.h[0], 2)
    assert f"            # AG over dp fwd and bwd, {size:,} B: its parameters, a layer ahead" in source
    assert "# After each backward, for the parameters of this stage" in source
    assert f"layers): all-gather of {size:,} B each over dp, for every forward and backward" in source
    source = autoptd.compile(gpt(4), zero=3, **asked).sources["stage_0.py"]
    assert "all-gather of" in source and "whenever the rank turns to this stage" in source
