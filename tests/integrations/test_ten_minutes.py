"""docs/howto/hugging-face.md is walked: its files are written, and its commands run in order in one folder.

Where the page uses torchrun, ranks are threads; the thorough test starts the processes. Clone and pip are held as text.
"""

from __future__ import annotations

import ast
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/howto/hugging-face.md").read_text()
FILES = dict(re.findall(r"<!-- walk: (\S+) -->\n```python\n(.*?)```", PAGE, re.S))
COMMANDS = [shlex.split(line) for line in re.findall(r"<!-- walk -->\n```sh\n(.*?)\n```", PAGE)]
LOCAL = ["python", "finetune.py", "--backend", "local"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def call(words: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", words[1:])
    return runpy.run_path(words[1], run_name="__main__")


def logged(text: str) -> list[dict[str, str]]:
    lines = [line for line in text.splitlines() if line.startswith("{'loss'")]
    return [ast.literal_eval(line) for line in lines]


def test_the_page_is_walked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make, train, resume, use = COMMANDS
    assert train == LOCAL and resume[:4] == ["torchrun", "--nproc-per-node", "4", "finetune.py"]
    call(make, monkeypatch)
    call(train, monkeypatch)
    # Numbers of the page: the text differs a little between versions of Python.
    for line, shown in zip(logged(capsys.readouterr().out), logged(PAGE), strict=False):
        assert line.keys() == shown.keys()
        assert float(line["loss"]) == pytest.approx(float(shown["loss"]), rel=0.02)
    assert {path.name for path in Path("out/tuned").iterdir()} >= {"checkpoint-10", "checkpoint-20", "final"}
    trainer = call([*LOCAL, *resume[4:]], monkeypatch)["trainer"]
    call(use, monkeypatch)
    assert "The following" in capsys.readouterr().out

    # The resumed run is the one that was not interrupted.
    Path("finetune.py").write_text(FILES["finetune.py"].replace("out/tuned", "out/whole"))
    whole = call([*LOCAL, *resume[4:]], monkeypatch)["trainer"]
    losses = [[log["loss"] for log in run.state.log_history if "loss" in log] for run in (trainer, whole)]
    assert losses[0] == losses[1] and len(losses[0]) == 8
    for name, values in whole.model.state_dict().items():
        assert values.equal(trainer.model.state_dict()[name]), name


def test_weights_that_ranks_read_themselves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of `from_pretrained`, and so is what they become."""
    call(COMMANDS[0], monkeypatch)
    (block,) = re.findall(r"```python\n(with torch.device\(\"meta\"\).*?)```", PAGE, re.S)
    ids = torch.arange(16 * 8).view(16, 8)
    data = {"train_dataset": [{"input_ids": row, "labels": row} for row in ids]}
    settings = transformers.TrainingArguments("out", max_steps=2, use_cpu=True, report_to="none", seed=3)
    known: dict[str, Any] = {"data": data, "settings": settings, "torch": torch}
    known |= {name: getattr(transformers, name) for name in ("AutoConfig", "AutoModelForCausalLM")}
    exec("from autoptd.integrations.transformers import Trainer", known)
    with pytest.warns(UserWarning, match="stays without weights"):
        exec(block.replace('"weights"', '"backend": "local", "weights"'), known)
    known["trainer"].ranks.close()
    model = known["AutoModelForCausalLM"].from_pretrained("base", dtype=torch.float32)
    trainer = transformers.Trainer(model, settings, **data)
    trainer.train()
    tuned = known["AutoModelForCausalLM"].from_pretrained("tuned").state_dict()
    for name, values in model.state_dict().items():
        torch.testing.assert_close(tuned[name], values, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.processes
def test_torchrun_of_the_page(folder: Path) -> None:
    """As typed; four processes continue with the losses that threads would have had."""
    for words in COMMANDS:
        command = words if words[0] == "python" else ["python", "-m", "torch.distributed.run", *words[1:]]
        done = subprocess.run(
            [sys.executable, *command[1:]], capture_output=True, text=True, timeout=500, cwd=folder
        )
        assert done.returncode == 0, done.stderr[-3000:]
        if words[0] == "torchrun":
            assert len(logged(done.stdout)) == 4
            losses = [float(line["loss"]) for line in logged(done.stdout)]
    assert (folder / "out/tuned/checkpoint-40/autoptd").is_dir()
    (folder / "out/tuned").rename(folder / "out/resumed")
    whole = [sys.executable, *LOCAL[1:], "--steps", "40"]
    done = subprocess.run(whole, capture_output=True, text=True, timeout=500, cwd=folder, check=True)
    assert losses == pytest.approx([float(line["loss"]) for line in logged(done.stdout)][4:], abs=2e-3)


def test_commands_of_a_fresh_machine_are_there() -> None:
    (block,) = re.findall(r"```sh\n(git clone.*?)```", PAGE, re.S)
    assert block.splitlines()[0] == "git clone URL autoptd && cd autoptd", "no address is public yet"
    (extra,) = re.findall(r"pip install -e '\.\[(.*)\]'", block)
    assert extra in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
