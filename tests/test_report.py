"""The report: one file with everything, and what a browser makes of it."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import autoptd
from autoptd.ir.program import Program
from autoptd.report import report_html, write_report
from examples.gpt import GPT, GPTConfig
from tests.viz.programs import deep, full, gpt
from tests.viz.test_page import check_page

CHROME = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
TABS = ["summary", "stages", "layers", "schedule", "communication", "decisions", "files"]


def test_it_has_everything_and_fetches_nothing() -> None:
    program = full()
    text = report_html(program, "a <GPT>")
    assert check_page(text).ids == [f"tab-{name}" for name in TABS]
    assert "a &lt;GPT&gt; on 8 ranks" in text and text.count("shadowrootmode") >= 3
    for name in program.sources:
        assert f"<summary>{name} " in text
    for words in ("transformer.h.*.mlp.c_fc", "matrix products of a step", "cut behind", "Where the model is cut"):
        assert words in text, words
    assert not re.search(r'(src|href)="(?!#|data:)', text)


def test_what_fell_back_and_what_was_fused_is_told() -> None:
    program = deep()
    found = {"op": "aten.linear", "site": "h.*.up", "fact": "8 does not divide", "remedy": "t=2", "flops": 5000}

    class Fused(Program):
        fusions = (
            SimpleNamespace(op="gelu", site="h.*", times=7, why=""),
            SimpleNamespace(op="x", site="", times=1, why="no"),
        )

    values: dict[str, Any] = {name: getattr(program, name) for name in Program.__dataclass_fields__}
    told = report_html(Fused(**values | {"plan": {**program.plan, "fallbacks": [found]}}))
    for cells in (("h.*.up", "8 does not divide", "t=2"), ("gelu", "h.*"), ("x", "the model")):
        assert "</td><td>".join(cells) in told
    assert "7</td><td>fused" in told and "1</td><td>no" in told
    assert "What was fused" not in report_html(program)


def test_a_loaded_program_has_a_report(tmp_path: Path) -> None:
    gpt(2).save(tmp_path)
    write_report(Program.load(tmp_path), tmp_path / "report.html")
    check_page((tmp_path / "report.html").read_text())


def test_predicted_beside_measured() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=32, block_size=8, n_layer=2, n_head=2, n_embd=8))
    x = torch.randint(0, 32, (4, 8))
    pm = autoptd.parallelize(model, t=2, p=2, backend="local", example_inputs=(x, x))
    with pm.record() as record:
        pm.step(x, x)
    text = report_html(pm.program, record=record)
    other = replace(pm.program, num_microbatches=pm.program.num_microbatches * 2)
    pm.close()
    check_page(text)
    assert "tab-measured" in text and "stage 1, backward of a microbatch" in text
    assert "Equal: what ran is what was compiled." in text
    assert "They DIFFER" in report_html(other, record=record)


@pytest.mark.skipif(CHROME is None, reason="no Chromium here")
@pytest.mark.parametrize("tab", ["", "#files"])
def test_a_browser_shows_the_tab_and_has_no_complaint(tmp_path: Path, tab: str) -> None:
    write_report(full(), tmp_path / "report.html")
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        f"--user-data-dir={tmp_path}",
    ]
    command = [str(CHROME), *flags, "--dump-dom", f"file://{tmp_path}/report.html{tab}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    shown = dict(re.findall(r'<section id="tab-(\w+)" role="tabpanel"( hidden="")?', done.stdout))
    assert list(shown) == TABS
    assert [name for name, hidden in shown.items() if not hidden] == [tab.lstrip("#") or "summary"]
    assert re.search(r'aria-selected="true">(Files|Summary)<', done.stdout)
    assert "CONSOLE" not in done.stderr, done.stderr
