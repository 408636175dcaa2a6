"""What a command can refuse at once, it does: before torch is loaded, and long before a model is built."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autoptd.errors import PlanError
from autoptd.wings.cli import main
from autoptd.wings.cli.parser import parse
from autoptd.wings.cli.request import check_request

GPT = "examples/gpt.py:make_gpt"
REFUSED = {  # the words of a command -> what is said of them
    "show none.py:make": "MODEL none.py: no such file",
    "show none.py": "MODEL none.py: no such file",
    "show gpt22": "MODEL gpt22: is not a well-known size.*gpt2",
    "show none.json": "MODEL none.json: no such file",
    f"show {GPT} --option colour=1": "colour=: no such keyword",
    f"show {GPT} --option weights=out": "weights=: no such keyword",
    f"show {GPT} --machine h10": "machine='h10': no such machine",
    f"show {GPT} --plan none.json": "plan='none.json': cannot be read",
    f"show {GPT} --set n_layer": "--set n_layer: is not NAME=VALUE",
    f"show {GPT} --batch 4 --rows 2": "--batch and --rows",
    f"show {GPT} --out README.md": "--out README.md: .* is a file",
    f"compile {GPT} --out README.md/deep": "--out README.md/deep: .*README.md is a file",
    "verify examples/gpt.py": "is a file that may define several models.*autoptd show examples/gpt.py lists",
    f"verify {GPT} --schedule none": "none",
    f"train {GPT} --t 2": "2 ranks are requested, but this process was not started by torchrun.*--nproc-per-node 2",
    f"train {GPT} --backend gloo": "1 rank is requested, but this process was not started by torchrun",
    f"train {GPT} --backend local --data none.txt": "--data none.txt: no such file",
    f"train {GPT} --backend local --data examples": "--data examples: is a directory",
    f"train {GPT} --backend local --log examples": "--log examples: is a directory",
    f"train {GPT} --backend local --log README.md/run.jsonl": "README.md is a file",
    f"train {GPT} --backend local --save README.md": "--save README.md: .* is a file",
    f"train {GPT} --backend local --resume": "--resume: needs a directory",
    f"train {GPT} --backend local --d 2 --batch 3": "--batch 3: does not divide over d=2",
    f"train {GPT} --backend local --option weights=none": "weights=none: no such directory",
    "plan none.py:make --gpus 2 --batch 2": "MODEL none.py: no such file",
}
WITHOUT_TORCH = """
import re, sys
from autoptd.wings.cli.parser import parse
from autoptd.wings.cli.commands import COMMANDS
from autoptd.errors import PlanError

class NoTorch:
    def find_spec(name, *_):
        assert name not in ("torch", "transformers"), "it was loaded"

sys.meta_path.insert(0, NoTorch)
for words, told in eval(sys.argv[1]).items():
    try:
        asked = parse(words.split())
        COMMANDS[asked.command](asked)
        print("accepted:", words)
    except PlanError as error:
        if not re.search(told, str(error)):
            print(words, error)
"""


def test_what_cannot_be_done_is_told_before_torch_is_loaded() -> None:
    """`find_spec` of a package that is asked for looks, and loads nothing."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-c", WITHOUT_TORCH, repr(REFUSED)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_what_can_be_done_is_let_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = tmp_path / "deep" / "er"
    for words in (
        "show --list",
        "show gpt2 --t 2",
        "show examples/gpt.py",
        f"compile {GPT} --t 2 --out {new}",
        f"train {GPT} --t 2 --backend local --save {new} --resume --out {new} --log {new}/run.jsonl",
        f"train {GPT} --backend local --option weights={tmp_path}",
        f"train {GPT}",
        "plan gpt2 --gpus 8 --batch 64",
        "simulate --p 2",
    ):
        check_request(parse(words.split()))
    assert not new.exists(), "looking makes nothing"
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_request(parse(["train", GPT, "--t", "2"]))
    with pytest.raises(PlanError, match=r"world size 2: .* is 4"):
        check_request(parse(["train", GPT, "--t", "4"]))


def test_packages_that_are_missing_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoptd.wings.cli.request.find_spec", lambda name: None)
    for words, told in (
        ("show gpt2", r"needs the package transformers\. Remedy: pip install 'autoptd\[hf\]'"),
        (f"train {GPT} --tensorboard runs", "--tensorboard runs: the package tensorboard is missing"),
    ):
        with pytest.raises(PlanError, match=told):
            check_request(parse(words.split()))
    # Of a well-known size the planner needs the numbers alone.
    check_request(parse("plan gpt2 --gpus 8 --batch 64".split()))


def test_a_file_without_a_name_lists_its_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from collections import namedtuple\nfrom torch import nn\nfrom torch.nn import Linear\n"
        "class Net(nn.Module):\n    def __init__(self, width, depth=2): super().__init__()\n"
        "def make(n_layer=4, *, bias: bool = True): return Net(8)\n"
        "def _helper(): pass\n"
        "def plain(): return Net(8)\n"
    )
    assert main(["show", str(file)]) == 0
    lines = [line.removeprefix(f"{file}:").split("  ") for line in capsys.readouterr().out.splitlines()]
    assert [[word.strip() for word in line if word.strip()] for line in lines] == [
        ["make", "n_layer=4, bias: bool = True"],
        ["plain"],
        ["Net", "width, depth=2", "(needs --set width=)"],
    ]
    file.write_text("import torch\n")
    assert main(["show", str(file)]) == 2
    assert "defines no function and no nn.Module class" in capsys.readouterr().err
