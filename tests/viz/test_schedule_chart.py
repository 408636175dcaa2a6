import re
import xml.etree.ElementTree as ET

import pytest

from autoptd.ir.actions import Action, Kind, parse
from autoptd.viz import schedule_svg

SVG = "{http://www.w3.org/2000/svg}"
ONE_F_ONE_B = [
    [(parse("F0.0"), 0.0, 1.0), (parse("F0.1"), 1.0, 2.0), (parse("B0.0"), 4.0, 6.0), (parse("B0.1"), 7.0, 9.0)],
    [(parse("F1.0"), 1.0, 2.0), (parse("B1.0"), 2.0, 4.0), (parse("F1.1"), 4.0, 5.0), (parse("B1.1"), 5.0, 7.0)],
]


def boxes(text: str) -> dict[str, tuple[dict[str, str], str]]:
    """Per action: the attributes of its box and its label."""
    found = {}
    for group in ET.fromstring(text).iter(f"{SVG}g"):
        hint, rect, label = group.find(f"{SVG}title"), group.find(f"{SVG}rect"), group.find(f"{SVG}text")
        found[hint.text.split(":")[0]] = (rect.attrib, "" if label is None else label.text)
    return found


def test_every_computation_has_a_box_in_its_row_with_its_microbatch():
    drawn = boxes(schedule_svg(ONE_F_ONE_B))
    assert set(drawn) == {str(action) for row in ONE_F_ONE_B for action, _, _ in row}
    for rank, row in enumerate(ONE_F_ONE_B):
        (y,) = {drawn[str(action)][0]["y"] for action, _, _ in row}
        assert int(y) == min(int(box["y"]) for box, _ in drawn.values()) + 36 * rank
        assert all(drawn[str(action)][1] == str(action.microbatch) for action, _, _ in row)


def test_place_and_width_are_the_time():
    drawn = boxes(schedule_svg(ONE_F_ONE_B))
    unit = float(drawn["F0.0"][0]["width"])
    origin = float(drawn["F0.0"][0]["x"])
    for row in ONE_F_ONE_B:
        for action, start, end in row:
            box = drawn[str(action)][0]
            assert float(box["x"]) == pytest.approx(origin + start * unit, abs=0.1)
            assert float(box["width"]) == pytest.approx((end - start) * unit, abs=0.1)


def test_colour_is_kind_and_chunk():
    row = [
        (Action(kind, stage, 0), float(2 * i + j), 2.0 * i + j + 1)
        for i, kind in enumerate((Kind.F, Kind.B))
        for j, stage in enumerate((0, 1))
    ]
    drawn = boxes(schedule_svg([row]))
    colours = [drawn[str(action)][0]["fill"] for action, _, _ in row]
    assert len(set(colours)) == 4
    luma = [sum(int(colour[i : i + 2], 16) for i in (1, 3, 5)) for colour in colours]
    assert luma[0] < luma[1]
    assert luma[2] < luma[3]


def test_title_bubble_live_and_unit_are_shown_and_escaped():
    text = schedule_svg(ONE_F_ONE_B, title="a < b & c", bubble=0.0625, peak_live=(7, 5), unit="ms")
    words = [element.text for element in ET.fromstring(text).iter(f"{SVG}text")]
    assert "a < b & c, bubble 6.25 %" in words
    assert {"peak live", "7", "5", "ms", "pp rank 0", "pp rank 1"} <= set(words)


def test_same_input_same_bytes():
    assert schedule_svg(ONE_F_ONE_B, title="x") == schedule_svg([list(row) for row in ONE_F_ONE_B], title="x")


def test_labels_are_left_out_where_they_cannot_be_read_and_the_width_is_bounded():
    row = [(Action(Kind.F, 0, j), float(j), j + 1.0) for j in range(2000)]
    text = schedule_svg([row])
    assert float(ET.fromstring(text).attrib["width"]) < 3000
    assert all(label == "" for _, label in boxes(text).values())


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_the_axis_has_a_few_round_ticks(scale: float):
    spans = [[(action, start * scale, end * scale) for action, start, end in row] for row in ONE_F_ONE_B]
    ticks = re.findall(r'<text class="tick" x="[\d.]+" y="\d+">([^<]+)</text>', schedule_svg(spans, unit="unit"))
    numbers = [float(tick) for tick in ticks if tick != "unit"]
    assert 3 <= len(numbers) <= 15
    assert numbers[0] == 0
    assert numbers[-1] <= 9 * scale * 1.001


def test_nothing_to_draw_is_still_a_picture():
    assert ET.fromstring(schedule_svg([[], []])).tag == f"{SVG}svg"


def test_weight_gradients_have_a_colour_and_a_word_of_their_own():
    row = [(parse("F0.0"), 0.0, 1.0), (parse("B0.0"), 1.0, 2.0), (parse("W0.0"), 2.0, 3.0)]
    text = schedule_svg([row])
    assert len({box["fill"] for box, _ in boxes(text).values()}) == 3
    assert "weight gradient" in text
    assert "weight gradient" not in schedule_svg(ONE_F_ONE_B)
