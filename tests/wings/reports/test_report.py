"""The report: one file with everything, and what a browser makes of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
import torch

import autoptd
from autoptd.ir.fusion import Fusion
from autoptd.program.costs import ProductCosts
from autoptd.program.program import Program
from autoptd.wings.reports.report import odd_products, report_html, write_report
from examples.gpt import GPT, GPTConfig
from tests.waits import LONG
from tests.wings.viz.programs import deep, full, gpt
from tests.wings.viz.test_page import check_page

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
    for words in (
        "transformer.h.*.mlp.c_fc",
        "matrix products of a step",
        "cut after",
        "Where the model is cut",
    ):
        assert words in text, words
    assert not re.search(r'(src|href)="(?!#|data:)', text)


def test_what_fell_back_and_what_was_fused_is_told() -> None:
    program = deep()
    found = {
        "op": "aten.linear",
        "site": "h.*.up",
        "fact": "8 does not divide",
        "remedy": "t=2",
        "flops": 5000,
    }

    fusions = (Fusion("gelu", "h.*", 7), Fusion("x", "", 1, "no"))
    told = report_html(replace(program, plan={**program.plan, "fallbacks": [found]}, fusions=fusions))
    for cells in (("h.*.up", "8 does not divide", "t=2"), ("gelu", "h.*"), ("x", "the model")):
        assert "</td><td>".join(cells) in told
    slow = replace(program, fusions=(Fusion("rms_norm", "h.*", 7, form="by torch's operators: rows"),))
    assert "<td>fused, by torch" in report_html(slow)
    assert "7</td><td>fused" in told and "1</td><td>no" in told
    assert "Fused operators" not in report_html(replace(program, fusions=()))


def test_products_of_odd_sizes_are_told_what_to_pad_to() -> None:
    program = deep()
    sizes = [(1, 512, 50257, 768), (1, 511, 6336, 768), (8, 512, 512, 61), (1, 512, 50257, 768)]
    kinds = ["head with its loss", "product", "product", "head with its loss"]
    products = tuple(ProductCosts(0, one, kind, 1, 0, 0) for one, kind in zip(sizes, kinds, strict=True))
    (told,) = odd_products(replace(program, costs=replace(program.costs, products=products)))
    assert "head with its loss" in told and "50,257" in told and "50,304" in told
    assert not odd_products(program)


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
    for rank in (1, 2, 3):  # as under torchrun
        del record.timeline.watches[rank], record._ranks[rank]
    alone = report_html(pm.program, record=record)
    pm.close()
    assert "recorded on ranks 0, 2;" in text and "bubble (idle" in text
    assert "recorded on rank 0;" in alone and "bubble (idle" not in alone
    check_page(text)
    assert "tab-measured" in text and "stage 1, backward of a microbatch" in text
    assert "Equal: the ranks executed the compiled program." in text
    assert "They DIFFER" in report_html(other, record=record)


VISITOR = """<script>
const visited = [], wrong = [];
const height = one => one.getBoundingClientRect().height;
addEventListener('error', event => wrong.push(event.message));
const later = () => new Promise(done => setTimeout(done));
(async () => {
  for (const link of document.querySelectorAll('nav a')) {
    link.click();
    await later();
    const shown = [...document.querySelectorAll('main > section')].filter(one => height(one) > 0);
    const chosen = document.querySelector('nav a[aria-selected=true]').textContent;
    const tall = [];
    for (const one of shown[0].querySelectorAll('details:not([open])')) {
      const before = height(one);
      one.querySelector('summary').click();
      await later();
      tall.push(one.open && height(one) > before);
    }
    visited.push({link: link.textContent, chosen, shown: shown.map(one => one.id), details: tall});
  }
  document.body.dataset.outcome = JSON.stringify({visited, wrong});
})();
</script>"""


def browse(page: Path) -> tuple[str, str]:
    """The page as it is after its scripts, and what the browser said meanwhile."""
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--virtual-time-budget=5000",
    ]
    command = [str(CHROME), *flags, f"--user-data-dir={page.parent}/chrome", "--dump-dom", f"file://{page}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG)
    return done.stdout, done.stderr


@pytest.mark.skipif(CHROME is None, reason="no Chromium here")
def test_a_browser_switches_tabs_opens_what_is_folded_and_has_no_complaint(tmp_path: Path) -> None:
    text = report_html(full())
    (tmp_path / "report.html").write_text(text.replace("</body>", f"{VISITOR}</body>"))
    dom, said = browse(tmp_path / "report.html")
    found = re.search(r'data-outcome="([^"]*)"', dom)
    assert found, said
    outcome = json.loads(unescape(found[1]))
    assert outcome["wrong"] == [] and "CONSOLE" not in said, said
    visited = outcome["visited"]
    assert [one["link"].lower() for one in visited] == TABS
    for one in visited:
        assert one["chosen"] == one["link"] and one["shown"] == [f"tab-{one['link'].lower()}"]
        assert all(one["details"]), one
    opened = {one["link"]: len(one["details"]) for one in visited}
    assert opened["Layers"] >= 5 and opened["Files"] == len(full().sources) - 1, opened


@pytest.mark.skipif(CHROME is None, reason="no Chromium here")
def test_a_browser_opens_the_tab_of_the_address_and_tells_errors(tmp_path: Path) -> None:
    text = report_html(full()).replace("</body>", "<script>nobody.there</script></body>")
    (tmp_path / "report.html").write_text(text)
    dom, said = browse(tmp_path / "report.html#files")
    shown = dict(re.findall(r'<section id="tab-(\w+)" role="tabpanel"( hidden="")?', dom))
    assert [name for name, hidden in shown.items() if not hidden] == ["files"]
    assert "CONSOLE" in said and "nobody is not defined" in said  # errors would be seen


MOVER = """<script>
const wrong = [], seen = {};
addEventListener('error', event => wrong.push(event.message));
const later = () => new Promise(done => setTimeout(done, 50));
(async () => {
  document.querySelector('nav a[href="#layers"]').click();
  await later();
  const viewer = document.querySelector('#tab-layers .viewer'), host = viewer.querySelector('.picture');
  const svg = host.shadowRoot.querySelector('svg');
  const look = name => { seen[name] = svg.getAttribute('viewBox').split(' ').map(Number); };
  const press = value => viewer.querySelector(`button[value=${value}]`).click();
  const wheel = options => host.dispatchEvent(new WheelEvent('wheel', {deltaY: -200, cancelable: true, ...options}));
  const key = name => viewer.dispatchEvent(new KeyboardEvent('keydown', {key: name}));
  look('first');
  seen.scrolls = wheel({}); look('wheel');
  seen.zooms = !wheel({ctrlKey: true}); look('with key');
  press('fit'); look('fit');
  for (let i = 0; i < 10; i++) press('in');
  look('in');
  host.dispatchEvent(new PointerEvent('pointerdown', {bubbles: true, cancelable: true}));
  host.dispatchEvent(new PointerEvent('pointermove', {bubbles: true, buttons: 1, movementX: -40, movementY: -30}));
  host.dispatchEvent(new PointerEvent('pointerup', {bubbles: true}));
  look('dragged'); seen.focused = document.activeElement === viewer;
  host.dispatchEvent(new PointerEvent('pointermove', {bubbles: true, movementX: -40})); look('let go');
  key('ArrowRight'); look('right'); key('-'); look('out'); key('0'); look('key fit');
  dispatchEvent(new Event('beforeprint')); look('print'); dispatchEvent(new Event('afterprint')); look('after');
  document.body.dataset.outcome = JSON.stringify({seen, wrong});
})();
</script>"""


@pytest.mark.skipif(CHROME is None, reason="no Chromium here")
def test_a_picture_is_zoomed_moved_and_fitted_by_buttons_wheel_and_keys(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(report_html(full()).replace("</body>", f"{MOVER}</body>"))
    dom, said = browse(tmp_path / "report.html")
    found = re.search(r'data-outcome="([^"]*)"', dom)
    assert found, said
    outcome = json.loads(unescape(found[1]))
    assert outcome["wrong"] == [], said
    seen = outcome["seen"]
    width = {name: box[2] for name, box in seen.items() if isinstance(box, list)}
    assert seen["scrolls"] and seen["wheel"] == seen["first"]
    assert seen["zooms"] and width["with key"] < width["first"]
    svg = full().graph("layer").svg
    whole = [float(word) for word in re.search(r'viewBox="([^"]*)"', svg)[1].split()]
    x, y, wide, high = seen["fit"]
    assert x <= 0.5 and y <= 0.5 and x + wide >= whole[2] - 0.5 and y + high >= whole[3] - 0.5
    assert width["in"] == pytest.approx(width["fit"] / 1.25**10)
    assert seen["dragged"][0] > seen["in"][0] and seen["focused"] and seen["let go"] == seen["dragged"]
    assert seen["right"][0] > seen["dragged"][0] and width["out"] == pytest.approx(width["right"] / 0.8)
    assert seen["key fit"] == pytest.approx(seen["fit"]) and seen["print"] == whole
    assert seen["after"] == pytest.approx(seen["fit"])
