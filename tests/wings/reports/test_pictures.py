"""What the charts are drawn from: the simulated step, and a recorded one beside it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import autoptd
from autoptd.ir.actions import COMPUTES, Kind
from autoptd.ir.mesh import Coordinate
from autoptd.options import make_options
from autoptd.runtime.step.timeline import Span
from autoptd.wings.reports.pictures import executed_run, simulated_run
from autoptd.wings.viz import schedule_svg
from examples.gpt import GPT, GPTConfig
from tests.wings.viz.programs import deep, full, gpt


def test_the_simulated_step_takes_the_stages_seconds_and_holds_their_bytes() -> None:
    program = full()
    run = simulated_run(program)
    cut = program.costs.cut
    for rank, row in enumerate(run.spans):
        for action, start, end in row:
            share = 1 if action.kind is Kind.F else 2
            assert end - start == pytest.approx(share * cut.seconds[action.stage] / 3)
        assert run.memory[rank][-1][1] == pytest.approx(0.0, abs=1e-6)
    first = next(amount for _, amount in run.memory[1])
    assert run.in_seconds and run.in_bytes and first == cut.saved_bytes[1] > 0


def test_what_a_backward_makes_again_is_hatched() -> None:
    program = gpt(2, p=2, recompute="full")
    run, cut = simulated_run(program), program.costs.cut
    for row in run.spans:
        for action, start, end in row:
            more = 0.0 if action.kind is Kind.F else cut.again_seconds[action.stage]
            share = 1 if action.kind is Kind.F else 2
            assert end - start == pytest.approx(share * cut.seconds[action.stage] / 3 + more)
    text = schedule_svg([run], program.orders)
    backwards = sum(action.kind is Kind.B for row in run.spans for action, _, _ in row)
    # One of them in the legend.
    assert min(cut.again_seconds) > 0 and text.count('fill="url(#again)"') == backwards + 1
    assert "#again" not in schedule_svg([simulated_run(gpt(2, p=2))])


def test_bytes_saved_are_those_of_a_microbatch_and_shrink_with_t() -> None:
    one, two = (sum(gpt(2, t=t).costs.cut.saved_bytes) for t in (1, 2))
    assert one / 2 < two < one


def test_weight_gradients_hold_until_they_run() -> None:
    run = simulated_run(gpt(4, rows=8, p=2, schedule="zb_h1"))
    ends = {end for action, _, end in run.spans[0] if action.kind is Kind.W}
    falls = [
        time
        for (_, before), (time, after) in zip(run.memory[0], run.memory[0][1:], strict=False)
        if after < before
    ]
    assert falls and set(falls) <= ends


def test_show_draws_what_was_executed_beside_what_was_simulated(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=32, block_size=8, n_layer=2, n_head=2, n_embd=8))
    x = torch.randint(0, 32, (4, 8))
    pm = autoptd.parallelize(model, t=2, p=2, backend="local", example_inputs=(x, x))
    with pm.record() as record:
        pm.step(x, x)
    picture = pm.show(tmp_path, record)
    pm.close()
    chart = (tmp_path / "schedule.svg").read_text()
    assert re.search(r">simulated: .*>executed: ", chart, re.S)
    names = {
        one["args"]["name"]
        for one in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        if one["ph"] == "M" and one["name"] == "process_name"
    }
    assert names == {"simulated", "executed"}
    assert picture.svg == (tmp_path / "graph.svg").read_text()
    run = executed_run(pm.program, record.spans)
    for row, order in zip(run.spans, pm.program.orders, strict=True):  # of tensor rank 0 only
        assert [action for action, _, _ in row if action.kind in COMPUTES] == [
            a for a in order if a.kind in COMPUTES
        ]


def test_only_ranks_that_were_recorded_are_named() -> None:
    """Under torchrun a process has the spans of its own rank alone: no bubble can be told from them."""
    program = full()
    simulated = simulated_run(program)
    first = [Span(0, *one) for one in simulated.spans[0]]
    run = executed_run(program, first)
    assert run.remark == "recorded on rank 0; recording takes time as well" and not run.is_whole
    chart = schedule_svg([run], program.orders)
    assert "bubble" not in chart and "not recorded" in chart and "100 % idle" not in chart
    ranks = [program.mesh.rank(Coordinate(pp=pp)) for pp in range(program.mesh.p)]
    everyone = [Span(rank, *one) for rank, row in zip(ranks, simulated.spans, strict=True) for one in row]
    whole = executed_run(program, everyone)
    assert f"ranks {', '.join(map(str, ranks))};" in whole.remark and "bubble" in schedule_svg([whole])


def test_show_without_a_folder_returns_the_picture() -> None:
    assert deep().graph("layer").dot == deep().graph().dot
    assert deep().graph("layer")._repr_svg_() == deep().graph().svg


def test_a_model_of_a_loaded_program_shows_itself(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=32, block_size=8, n_layer=2, n_head=2, n_embd=8))
    x = torch.randint(0, 32, (4, 8))
    autoptd.compile(model, p=2, example_inputs=(x, x)).save(tmp_path)
    options = make_options(p=2, backend="local")
    pm = autoptd.ParallelModel(autoptd.Program.load(tmp_path), options, model.state_dict())
    assert "stage 1" in pm.show(tmp_path / "out").dot and (tmp_path / "out" / "schedule.svg").exists()
    pm.close()
