"""examples/pretrain.toml: its settings are flags, the small run of its comment trains, and it resumes."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from autoptd.wings.cli import main
from autoptd.wings.cli.parser import parse
from tests.examples.running import ROOT

FILE = ROOT / "examples/pretrain.toml"


def commands() -> list[list[str]]:
    """The words of the commands in its comments, without torchrun."""
    text = FILE.read_text().replace("\\\n#", "")
    lines = re.findall(r"^#  .*?(autoptd train .*)", text, re.M)
    return [shlex.split(line, comments=True)[1:] for line in lines]


def test_its_settings_are_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    asked = [parse(words) for words in commands()]
    settings = {key.replace("-", "_"): value for key, value in tomllib.loads(FILE.read_text()).items()}
    assert all(getattr(asked[0], key) == value for key, value in settings.items())
    assert [args.steps for args in asked] == [10000, 20000, 10]


def test_the_small_run_trains_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    small = [*commands()[-1], "--set", "n_embd=16", *"--seq 16 --save-every 2 -q".split()]
    for steps in ("2", "4"):
        assert main([*small, "--steps", steps]) == 0
    lines = [json.loads(line) for line in Path("out/pretrain.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
