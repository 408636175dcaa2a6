"""Numbers of a program: they add up to the cut's, and to what is known of each parameter and call."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import autoptd
from autoptd.ir.mesh import Mesh
from autoptd.program.calls import expected_calls
from autoptd.wings.reports.report import report_html
from autoptd.wings.reports.summary import _is_between_nodes, summarize
from autoptd.wings.words import seconds_text
from tests.wings.viz.programs import full, gpt


def test_memory_is_that_of_the_cut() -> None:
    """Without buffers: parameter, gradient, two moments, and the activations of the fullest moment."""
    for program in (full(), gpt(4, rows=8, p=2), gpt(2)):
        held = [one.total_bytes for one in summarize(program).ranks]
        assert held == pytest.approx(program.costs.cut.rank_bytes, rel=1e-6)


def test_every_rank_has_its_parameters_and_their_state() -> None:
    program = gpt(4, rows=8, p=2, t=2)
    for one in summarize(program).ranks:
        mine = [spec for spec in program.params if one.pipeline_rank in spec.owners(program.ranks)]
        assert one.parameters == sum(math.prod(spec.local_shape(program.mesh)) for spec in mine)
        assert (one.parameter_bytes, one.gradient_bytes, one.optimizer_bytes) == tuple(
            4 * k * one.parameters for k in (1, 1, 2)
        )


def test_gradients_in_float32_take_room_beside_their_own() -> None:
    """2 and 4 bytes of a bf16 parameter; of a float32 parameter, the sum is the gradient."""
    for dtype, times in ((torch.bfloat16, 3), (torch.float32, 1)):
        plain, main = (
            summarize(gpt(2, dtype=dtype, accumulate_allreduce_grads_in_fp32=on)) for on in (False, True)
        )
        assert main.ranks[0].gradient_bytes == times * plain.ranks[0].gradient_bytes


def test_traffic_is_that_of_the_busiest_rank() -> None:
    program = full()
    traffic = {one.axis: one for one in summarize(program).traffic}
    assert set(traffic) == {"tp", "dp", "pp"}
    for axis, one in traffic.items():
        sent = []
        for pp in range(2):
            calls = expected_calls(program, 4 * pp)
            sent.append(
                sum(times * call.wire_bytes for call, times in calls.items() if _axis(call.axis) == axis)
            )
        assert one.sent_bytes == round(max(sent)) > 0 and one.seconds > 0


def _axis(text: str) -> str:
    return next(axis for axis in ("dp", "pp", "tp") if axis in text)


def test_work_is_three_times_the_forward_of_the_whole_batch() -> None:
    """Whatever the mesh: the matrix products of the model itself, and attention."""
    assert summarize(gpt(4, rows=8)).model_flops == summarize(full()).model_flops
    one = summarize(gpt(1, rows=4))
    s, h, vocab = 8, 8, 32
    assert one.model_flops == 3 * 4 * s * (2 * 12 * h * h + 4 * s * h + 2 * h * vocab)


@pytest.mark.parametrize(
    ("mesh", "between"),
    [
        (Mesh(t=8, p=2, d=2), {"tp": False, "dp": True, "pp": True}),
        (Mesh(t=2, p=2, d=2), {"tp": False, "dp": False, "pp": False}),
        (Mesh(t=3, p=1, d=4), {"tp": True, "dp": True, "pp": False}),
        (Mesh(t=16, p=1, d=1), {"tp": True, "dp": False, "pp": False}),
    ],
)
def test_which_links_leave_a_node_of_eight(mesh: Mesh, between: dict[str, bool]) -> None:
    assert {axis: _is_between_nodes(mesh, axis, 8) for axis in between} == between


def test_bubble_and_words() -> None:
    one = summarize(gpt(4, rows=8, p=2))
    assert one.idle_seconds == pytest.approx(one.step_seconds - max(rank.seconds for rank in one.ranks))
    assert one.record()["idle_seconds"] == one.idle_seconds
    assert [seconds_text(x) for x in (2.5, 0.0123, 4.56e-6, 0.0)] == ["2.5 s", "12.3 ms", "4.56 us", "0 us"]
    assert "Bubble" in str(one) and "nothing" in str(summarize(gpt(1)))


class Narrow(nn.Module):
    """A frozen layer, whose parameters are in `dtype`, and one that is trained, in `trained`."""

    def __init__(self, dtype: torch.dtype, trained: torch.dtype) -> None:
        super().__init__()
        self.frozen, self.trained = (
            nn.Linear(4, 4, dtype=dtype).requires_grad_(False),
            nn.Linear(4, 4, dtype=trained),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained(self.frozen(x).to(self.trained.weight.dtype)).float().square().mean()


@pytest.mark.parametrize(("dtype", "lost"), [(torch.bfloat16, 512), (torch.float16, 4096)])
def test_training_in_16_bits_is_told_what_it_loses(dtype: torch.dtype, lost: int) -> None:
    """With the remedy, and only of parameters that are trained; a smaller update really is lost."""
    x = torch.randn(2, 4).to(dtype)
    program = autoptd.compile(Narrow(dtype, dtype), example_inputs=(x,))
    (told,) = summarize(program).remarks
    assert str(dtype).removeprefix("torch.") in told and f"1/{lost} of a weight" in told and "float32" in told
    assert told in str(summarize(program)) and told in report_html(program)
    weights = torch.linspace(1.0, 2.0, 7).to(dtype)
    assert torch.equal(weights + 0.99 * weights / lost, weights)
    assert not torch.equal(weights + 2.1 * weights / lost, weights)
    assert not summarize(autoptd.compile(Narrow(dtype, torch.float32), example_inputs=(x,))).remarks
