"""docs/getting-started.md is walked: its files are written, its commands run in order in an empty folder, its mistakes made.

What only a fresh machine can do (clone, pip, make) is held as text.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import autoptd
from autoptd.wings.cli import main
from autoptd.wings.cli.parser import parse

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGE = (ROOT / "docs/getting-started.md").read_text()
# (name of a file, or "" for commands; its text; the output that is shown right behind it, or "")
STEP = re.compile(r"<!-- walk(?:: (\S+))? -->\n```\w+\n(.*?)```\n(?:\n```text\n(.*?)```)?", re.S)
STEPS = STEP.findall(PAGE)


def commands() -> list[tuple[list[str], str]]:
    """The words of each walked command, and the error that it is to end with."""
    found = []
    for name, text, shown in STEPS:
        if not name:
            found += [(shlex.split(line), " ".join(shown.split())) for line in text.splitlines()]
    return found


def write_files(folder: Path) -> None:
    for name, text, _ in STEPS:
        if name:
            (folder / name).write_text(text)


def run_here(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command in this process; return its error as the user sees it, "" where it ends well."""
    if words[0] == "autoptd":
        status = main(words[1:])
        return "" if status == 0 else capsys.readouterr().err.strip()
    assert words[0] == "python"
    monkeypatch.setattr(sys, "argv", words[1:])
    try:
        runpy.run_path(words[1], run_name="__main__")
    except autoptd.AutoptdError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_the_lines_of_the_readme_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (script,) = re.findall(r"<!-- readme: train -->\n```python\n(.*?)```", README, re.S)
    (tmp_path / "train.py").write_text(script)
    monkeypatch.syspath_prepend(str(ROOT))
    assert run_here(["python", str(tmp_path / "train.py")], monkeypatch, capsys) == ""
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 10 and losses[-1] < 0.9 * losses[0]
    assert len(README.splitlines()) <= 130


@pytest.mark.thorough
@pytest.mark.processes
def test_processes_of_the_readme(tmp_path: Path) -> None:
    """Without `backend=`, as it says, the losses are the same."""
    (script,) = re.findall(r"<!-- readme: train -->\n```python\n(.*?)```", README, re.S)
    (tmp_path / "local.py").write_text(script)
    (tmp_path / "train.py").write_text(script.replace('backend="local", ', ""))
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "8", "train.py"]
    where = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
    found = []
    for call in (["local.py"], launch):
        done = subprocess.run([sys.executable, *call], capture_output=True, text=True, timeout=500, **where)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append([float(line.split()[-1]) for line in done.stdout.splitlines()])
    assert torch.allclose(*(torch.tensor(losses) for losses in found), atol=2e-3) and len(found[0]) == 10


def test_the_page_is_walked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    seen = []
    for words, shown in commands():
        if words[0] != "torchrun":
            assert run_here(words, monkeypatch, capsys) == shown, words
            seen.append(capsys.readouterr().out)
    assert (tmp_path / "out/report.html").exists() and (tmp_path / "tuned/model.safetensors").exists()
    trained = next(text for text in seen if "step 20: loss" in text)
    losses = [float(line.split()[-1]) for line in trained.splitlines()]
    assert losses[-1] < losses[0]
    tuned = next(text for text in seen if "evaluation:" in text).split()
    assert tuned[-5:-3] == ["10,", "evaluation:"]
    assert float(tuned[-1]) < float(tuned[-3])
    assert sum(bool(shown) for _, shown in commands()) == 3


@pytest.mark.thorough
@pytest.mark.processes
def test_torchrun_of_the_page(tmp_path: Path) -> None:
    """The losses are those of one device."""
    write_files(tmp_path)
    words, tune = (words for words, _ in commands() if words[0] == "torchrun")
    found = []
    for call in ([sys.executable, "-m", "torch.distributed.run", *words[1:]], [sys.executable, "train.py"]):
        done = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append([float(line.split()[-1]) for line in done.stdout.splitlines() if "loss" in line])
    assert torch.allclose(*(torch.tensor(losses) for losses in found), atol=2e-3) and len(found[0]) == 4
    # It resumes what threads have saved.
    for call in (
        ["make_base.py"],
        ["finetune.py", "--backend", "local"],
        ["-m", "torch.distributed.run", *tune[1:]],
    ):
        done = subprocess.run(
            [sys.executable, *call], cwd=tmp_path, capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("step 20, evaluation:") and len(done.stdout.splitlines()) == 1


def test_commands_of_a_fresh_machine_are_there() -> None:
    (block,) = re.findall(r"```sh\n(git clone.*?)```", PAGE, re.S)
    clone, environment, install = block.splitlines()
    assert clone == "git clone URL autoptd && cd autoptd", "no address is public yet"
    assert environment == "python -m venv .venv && source .venv/bin/activate"
    extras = re.fullmatch(r"pip install -e '\.\[(.*)\]'", install)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extras and set(extras[1].split(",")) <= set(project["optional-dependencies"])
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make (\w+)", PAGE + README):
        assert f"\n{target}:" in makefile, target
    (check,) = re.findall(r"\nautoptd (verify .*)\n", PAGE)
    assert parse(shlex.split(check)).model == "model.py:GPT"
