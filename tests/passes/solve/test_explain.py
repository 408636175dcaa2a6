"""What `explain` says is what the solver compared: prices hold when the alternative is forced."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from tests.parity.models import batch, gpt
from tests.passes.graphs import annotate, find


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))).sum()


def test_prices_are_differences_of_whole_plans() -> None:
    graph, _, assignment = annotate(Mlp(), torch.randn(512, 64), t=4)
    problem = assignment.problem
    assert problem is not None
    for node in problem.variable:
        first, *rest = problem.alternatives(node)
        assert first.is_chosen and first.seconds == 0.0 and first.strategy is assignment.strategies[node]
        assert all(one.seconds >= 0.0 for one in rest)
    down = problem.alternatives(find(graph, "linear", 1))
    assert down[0].strategy.why.startswith("row") and any(
        one.strategy.why.startswith("column") for one in down
    )


def test_layers_that_repeat_are_priced_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what is paid once for all of them."""
    monkeypatch.setattr("autoptd.passes.ops.costs.PER_ODD_LAYER", 0.0)
    prices = []
    for layers in (4, 6):
        program = autoptd.compile(gpt(layers), t=2, example_inputs=batch())
        text = program.explain("transformer.h.2.mlp.c_fc")
        assert "chosen" in text and "column: 128 = 2 x 64" in text
        prices.append([line.split()[0] for line in text.splitlines()])
    assert prices[0] == prices[1]


def test_a_parameter_a_norm_and_a_name_that_does_not_exist() -> None:
    program = autoptd.compile(gpt(2), t=2, example_inputs=batch())
    assert program.explain("transformer.h.0.mlp.c_fc.weight").count("parameter") == 1
    assert "impossible" in program.explain("transformer.h.0.ln_1")
    with pytest.raises(autoptd.PlanError, match=r"transformer\.h\.0\.mlp"):
        program.explain("transformer.h.0.mpl")
    assert "t=1" in autoptd.compile(gpt(2), example_inputs=batch()).explain("transformer")


def test_values_that_backward_needs() -> None:
    program = autoptd.compile(
        gpt(1), p=1, example_inputs=batch(4), recompute=["*.mlp"], num_microbatches=2, memory=1e12
    )
    rows: dict[str, tuple[int, str]] = {}
    total = 0
    for line in program.explain("").split("recomputation\n")[1].splitlines():
        name, nbytes, now, _ = re.split(r"  +", line.strip())
        rows[name] = int(nbytes.replace(",", "")), now
        total += rows[name][0] if now.startswith("kept, of ") else 0
    hidden = 4 * 2 * 8 * 32  # bytes: float32, 2 rows of 8 tokens, 32 wide
    assert rows["transformer.h.0.mlp.c_fc: aten.linear"] == (4 * hidden, "recomputed")
    assert rows["transformer.h.0.mlp.gelu: aten.gelu"] == (4 * hidden, "recomputed")
    assert rows["transformer.h.0.attn.c_attn: aten.linear"] == (3 * hidden, "kept, of at most 1 microbatch")
    assert total == program.costs.cut.saved_bytes[0]
