"""The chart of a step: boxes where and as long as computations are, messages, idle shares, what is held; bounded in size."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence

import pytest

from autoptd.ir.actions import Action, Kind, parse
from autoptd.schedule import add_transfers, interleaved, simulate
from autoptd.wings.viz import Run, schedule_svg

SVG = "{http://www.w3.org/2000/svg}"
ONE_F_ONE_B = [
    [
        (parse("F0.0"), 0.0, 1.0),
        (parse("F0.1"), 1.0, 2.0),
        (parse("B0.0"), 4.0, 6.0),
        (parse("B0.1"), 7.0, 9.0),
    ],
    [
        (parse("F1.0"), 1.0, 2.0),
        (parse("B1.0"), 2.0, 4.0),
        (parse("F1.1"), 4.0, 5.0),
        (parse("B1.1"), 5.0, 7.0),
    ],
]
SENDS = [
    [*map(parse, ("F0.0", "SEND_F0.0>1", "F0.1", "SEND_F0.1>1", "B0.0", "B0.1"))],
    [*map(parse, ("F1.0", "B1.0", "SEND_B1.0>0", "F1.1", "B1.1", "SEND_B1.1>0"))],
]
HELD = [[(0.0, 1.0), (1.0, 2.0), (6.0, 1.0), (9.0, 0.0)], [(1.0, 1.0), (4.0, 0.0), (4.0, 1.0), (7.0, 0.0)]]


def chart(*rows: Sequence[tuple[Action, float, float]], **keywords) -> str:
    return schedule_svg([Run("simulated", rows or ONE_F_ONE_B, **keywords)], title="x")


def boxes(text: str) -> dict[str, tuple[dict[str, str], str]]:
    """Per action: the attributes of its box and its label."""
    found = {}
    for group in ET.fromstring(text).iter(f"{SVG}g"):
        if group.get("class") == "box":
            hint, rect, label = group.find(f"{SVG}title"), group.find(f"{SVG}rect"), group.find(f"{SVG}text")
            found[hint.text.split(":")[0]] = (rect.attrib, "" if label is None else label.text)
    return found


def words(text: str) -> list[str]:
    return [one.text or "" for one in ET.fromstring(text).iter(f"{SVG}text")]


def messages(text: str) -> list[str]:
    paths = [one for one in ET.fromstring(text).iter(f"{SVG}path") if one.get("class") == "sent"]
    return [one.find(f"{SVG}title").text for one in paths if one.find(f"{SVG}title") is not None]


def test_every_computation_has_a_box_in_its_row_with_its_microbatch():
    drawn = boxes(chart())
    assert set(drawn) == {str(action) for row in ONE_F_ONE_B for action, _, _ in row}
    rows = []
    for row in ONE_F_ONE_B:
        (y,) = {drawn[str(action)][0]["y"] for action, _, _ in row}
        rows.append(float(y))
        assert all(drawn[str(action)][1] == str(action.microbatch) for action, _, _ in row)
    assert rows[1] - rows[0] > float(drawn["F0.0"][0]["height"])


def test_place_and_width_are_the_time():
    drawn = boxes(chart())
    unit, origin = float(drawn["F0.0"][0]["width"]), float(drawn["F0.0"][0]["x"])
    for row in ONE_F_ONE_B:
        for action, start, end in row:
            box = drawn[str(action)][0]
            assert float(box["x"]) == pytest.approx(origin + start * unit, abs=0.1)
            assert float(box["width"]) == pytest.approx((end - start) * unit, abs=0.1)


def test_colour_is_kind_and_chunk_whatever_stage_numbers_a_rank_has():
    row = [
        (Action(kind, stage, 0), float(2 * i + j), 2.0 * i + j + 1)
        for i, kind in enumerate((Kind.F, Kind.B))
        for j, stage in enumerate((0, 3))
    ]
    drawn = boxes(chart(row, [(Action(Kind.F, stage, 0), float(stage), stage + 1.0) for stage in (1, 2)]))
    colours = [drawn[str(action)][0]["fill"] for action, _, _ in row]
    assert len(set(colours)) == 4
    luma = [sum(int(colour[i : i + 2], 16) for i in (1, 3, 5)) for colour in colours]
    assert luma[0] < luma[1] and luma[2] < luma[3]
    assert drawn["F1.0"][0]["fill"] == drawn["F0.0"][0]["fill"]


def test_title_bubble_idle_shares_and_remarks_are_told_and_escaped():
    text = schedule_svg([Run("a < b", ONE_F_ONE_B, remark="c & d")], title="e < f")
    found = words(text)
    assert {"e < f", "a < b: bubble 50.0 %", "c & d", "pp rank 0", "pp rank 1"} <= set(found)
    assert found.count("33 % idle") == 2  # 3 of 9
    assert "time (one forward = 1)" in found


def test_seconds_are_told_in_a_unit_that_fits():
    for factor, wanted in ((1e-6, "9 us"), (1e-3, "9 ms"), (1.0, "9 s"), (1000.0, "9000 s")):
        spans = [
            [(action, factor * start, factor * end) for action, start, end in row] for row in ONE_F_ONE_B
        ]
        assert f"simulated: {wanted}, bubble 50.0 %" in words(chart(*spans, in_seconds=True))


def test_messages_go_from_the_end_of_what_makes_them_to_the_start_of_what_reads_them():
    text = schedule_svg([Run("simulated", ONE_F_ONE_B)], SENDS)
    assert messages(text) == ["SEND_F0.0>1", "SEND_F0.1>1", "SEND_B1.0>0", "SEND_B1.1>0"]
    drawn = boxes(text)
    (path,) = [
        one.get("d")
        for one in ET.fromstring(text).iter(f"{SVG}path")
        if one.get("class") == "sent" and one.find(f"{SVG}title") is not None and "F0.1" in one[0].text
    ]
    x, to_x = map(float, re.match(r"M([\d.]+) [\d.]+L([\d.]+) ", path).groups())
    made, read = drawn["F0.1"][0], drawn["F1.1"][0]
    assert x == pytest.approx(float(made["x"]) + float(made["width"]), abs=0.05)
    assert to_x == pytest.approx(float(read["x"]), abs=0.05)
    assert messages(chart()) == []


def test_what_is_held_is_an_area_with_its_peak():
    found = words(chart(memory=HELD))
    assert {"2 live", "1 live", "held for backward"} <= set(found)
    in_bytes = [[(time, 1024 * amount) for time, amount in row] for row in HELD]
    text = chart(memory=in_bytes, in_bytes=True)
    assert {"2 KiB", "1 KiB"} <= set(words(text))
    areas = [one.get("d") for one in ET.fromstring(text).iter(f"{SVG}path") if one.get("class") == "held"]
    heights = [[float(one) for one in re.findall(r"V([\d.]+)", path)] for path in areas]
    high = [max(row) - min(row) for row in heights]
    assert high[0] == pytest.approx(2 * high[1], abs=0.1)  # one scale for all ranks


def test_runs_are_panels_of_one_width():
    slower = [[(action, 3 * start, 3 * end + 0.5) for action, start, end in row] for row in ONE_F_ONE_B]
    text = schedule_svg([Run("simulated", ONE_F_ONE_B), Run("executed", slower, in_seconds=True)])
    assert {one.split(":")[0] for one in words(text)} >= {"simulated", "executed"}
    idle = [
        one
        for one in ET.fromstring(text).iter(f"{SVG}rect")
        if one.get("class") == "idle" and one.get("width") != "14"
    ]
    assert len({one.get("width") for one in idle}) == 1 and len(idle) == 4


def test_sends_of_an_executed_run_are_no_boxes_and_ranks_without_spans_are_told():
    row = [(parse("F0.0"), 0.0, 1.0), (parse("SEND_F0.0>1"), 1.0, 1.5), (parse("B0.0"), 2.0, 4.0)]
    text = chart(row, [])
    assert set(boxes(text)) == {"F0.0", "B0.0"} and "not recorded" in words(text)
    assert "25 % idle" in words(text)


def test_same_input_same_bytes():
    assert chart() == chart(*[list(row) for row in ONE_F_ONE_B])


def test_long_steps_of_many_ranks_are_cut_and_say_so():
    p, m = 20, 200
    orders = add_transfers(interleaved(p, 2, m), [(k, k + 1, True) for k in range(2 * p - 1)])
    result = simulate(orders)
    run = Run("simulated", result.spans, memory=result.memory(1).curves)
    text = schedule_svg([run], orders)
    assert len(text) < 1_000_000 and float(ET.fromstring(text).get("width")) < 2700
    found = words(text)
    assert "pp rank 7" in found and "pp rank 8" not in found and "pp rank 12" in found
    remark = next(one for one in found if "are not drawn" in one)
    assert "ranks 8 to 11 are not drawn" in remark and "of the time, from" in remark
    drawn = boxes(text)
    assert "F0.0" in drawn and f"B0.{m - 1}" in drawn and f"F0.{m // 2}" not in drawn
    share = float(re.search(r"(\d+) % of the time", remark)[1])
    kept = sum(1 for action in drawn if action[0] in "FB") / (2 * 2 * m * 16)
    assert share / 100 == pytest.approx(1 - kept, abs=0.15)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_the_axis_has_a_few_round_ticks(scale: float):
    spans = [[(action, start * scale, end * scale) for action, start, end in row] for row in ONE_F_ONE_B]
    ticks = re.findall(r'<text class="tick" x="[\d.]+" y="[\d.]+">([^<]+)</text>', chart(*spans))
    numbers = [float(tick) for tick in ticks if "time" not in tick]
    assert 3 <= len(numbers) <= 15
    assert numbers[0] == 0 and numbers[-1] <= 9 * scale * 1.001


def test_nothing_to_draw_is_still_a_picture():
    assert ET.fromstring(schedule_svg([Run("simulated", [[], []])])).tag == f"{SVG}svg"
    assert ET.fromstring(schedule_svg([])).tag == f"{SVG}svg"


def test_weight_gradients_have_a_colour_and_a_word_of_their_own():
    row = [(parse("F0.0"), 0.0, 1.0), (parse("B0.0"), 1.0, 2.0), (parse("W0.0"), 2.0, 3.0)]
    text = chart(row)
    assert len({box["fill"] for box, _ in boxes(text).values()}) == 3
    assert "weight gradients" in words(text) and "weight gradients" not in words(chart())
