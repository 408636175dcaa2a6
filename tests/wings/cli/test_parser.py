"""What may be asked: help without torch, settings from files, words for wrong requests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autoptd.errors import PlanError
from autoptd.ir.quantities import parse_bytes
from autoptd.wings.cli import main
from autoptd.wings.cli.commands import COMMANDS, script
from autoptd.wings.cli.parser import EXAMPLES, make_parser, parse
from autoptd.wings.cli.request import read_pairs

ROOT = Path(__file__).parents[3]
NO_TORCH = """
import sys
from autoptd.wings.cli import main
try:
    main({words})
except SystemExit as end:
    assert not end.code, end.code
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["train", "--help"],
        ["simulate", "--p", "2"],
        ["completion", "bash"],
        ["show", "--list"],
        ["plan", *"--layers 4 --hidden 64 --heads 4 --seq 64 --gpus 2 --batch 4".split()],
    ],
    ids=str,
)
def test_what_needs_no_torch_does_not_load_it(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH.format(words=words)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert any(word in done.stdout for word in ("autoptd", "bubble", "gpt3-175b"))


def test_every_command_has_a_function_and_an_example() -> None:
    _, commands = make_parser()
    assert set(commands) == set(COMMANDS)
    assert set(EXAMPLES) - {""} == set(commands)
    for name, text in EXAMPLES.items():
        assert f"autoptd {name}" in text, name


def test_examples_are_accepted() -> None:
    for line in "\n".join(EXAMPLES.values()).splitlines():
        words = line.partition("#")[0].partition(">")[0].split()
        if "autoptd" in words and "eval" not in words and "--config" not in words:
            asked = parse(words[words.index("autoptd") + 1 :])
            assert asked.command in COMMANDS


def test_flags_are_the_keywords_of_parallelize() -> None:
    asked = parse(
        "show gpt2 --t 4 --num-microbatches 8 --sequence-parallel --memory 80GB --set n_layer=2".split()
    )
    assert (asked.t, asked.num_microbatches, asked.sequence_parallel, asked.memory) == (4, 8, True, 80e9)
    assert parse("show gpt2 --sequence-parallel auto".split()).sequence_parallel == "auto"
    asked = parse(
        "plan gpt2 --gpus 8 --batch 64 --t 1,2 --sequence-parallel any --zero 1 --memory 80GB".split()
    )
    assert (asked.t, asked.p, asked.sequence_parallel, asked.zero, asked.memory) == (
        (1, 2),
        None,
        "any",
        1,
        80e9,
    )
    assert parse("show gpt2 --fuse false --fuse-only gelu,rotary".split()).fuse_only == ["gelu", "rotary"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.toml", 'model = "gpt2"\nt = 4\nnum-microbatches = 8\nset = { n_layer = 2 }\n'),
        ("run.yaml", "model: gpt2\nt: 4\nnum_microbatches: 8\nset: {n_layer: 2}\n"),
        ("run.json", json.dumps({"model": "gpt2", "t": 4, "num_microbatches": 8, "set": {"n_layer": 2}})),
    ],
)
def test_settings_from_a_file_and_flags_before_them(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    asked = parse(["show", "--config", str(tmp_path / name), "--t", "2"])
    assert (asked.model, asked.t, asked.num_microbatches) == ("gpt2", 2, 8)
    assert read_pairs("set", asked.set) == {"n_layer": 2}
    more = parse(["show", "--config", str(tmp_path / name), *"--set n_embd=8 --set n_layer=4".split()])
    assert read_pairs("set", more.set) == {"n_layer": 4, "n_embd": 8}
    assert parse(["show", f"--config={tmp_path / name}", "llama-3-8b"]).model == "llama-3-8b"


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.toml", "nummicrobatches = 2", "num_microbatches"),
        ("a.toml", "t = ", "cannot be read"),
        ("a.json", "[1]", "list"),
        ("a.toml", "seq = 0", "--seq 0: is below 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, name: str, text: str, told: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(PlanError, match=told):
        parse(["show", "gpt2", "--config", str(tmp_path / name)])


def test_a_file_may_say_where_a_program_goes(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('model = "gpt2"\nout = "somewhere"\n')
    assert parse(["compile", "--config", str(tmp_path / "run.toml")]).out == "somewhere"


def test_pairs_and_bytes() -> None:
    assert read_pairs("set", ["a=1", "b=true", "c=x y", "d-e=0.5", "f=None"]) == {
        **{"a": 1, "b": True, "c": "x y"},
        **{"d_e": 0.5, "f": None},
    }
    with pytest.raises(PlanError, match="NAME=VALUE"):
        read_pairs("set", ["n_layer"])
    assert [parse_bytes(text) for text in ("1e3", "2KiB", "3GB")] == [1000, 2048, 3e9]


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (["show"], 2, "MODEL: is missing"),
        (["diff", "none", "none"], 2, "none"),
        (["simulate", "--p", "2", "--schedule", "1f1bb"], 2, "no such schedule"),
        (["simulate", "--p", "2", "--forward", "0"], 2, "positive"),
        (["plan", "--gpus", "8"], 2, ""),
        (["simulate", "--p", "4", "--num-microbatches", "0"], 2, "--num-microbatches 0: is below 1"),
        (["show", "gpt2", "--batch", "0"], 2, "--batch 0: is below 1"),
        (["show", "gpt2", "--seq", "-1"], 2, "--seq -1: is below 1"),
        (["show", "gpt2", "--rows", "0"], 2, "--rows 0: is below 1"),
        (["train", "gpt2", "--steps", "0"], 2, "--steps 0: is below 1"),
        (
            ["show", "gpt2", "--conf", "run.toml"],
            2,
            "PlanError: --conf: is not a flag of autoptd show. Remedy: one of --conf",
        ),
        (
            ["show", "gpt2", "--tp", "2"],
            2,
            "--tp: is not a flag of autoptd show. Remedy: it is called t here",
        ),
        (["show", "gpt2", "gpt3"], 2, "gpt3: not an argument of autoptd show"),
        (["show", "gpt2", "--t"], 2, "--t: expected one argument"),
        (["show", "gpt2", "--t", "two"], 2, "--t: invalid int value: 'two'"),
        (["shwo", "gpt2"], 2, "COMMAND: invalid choice: 'shwo'"),
        ([], 2, "COMMAND"),
        (["show", "gpt2", "--memory", "80G"], 2, "'80G' is not a size in bytes, such as 80e9, 80GB or 80GiB"),
        (["plan", "gpt2", "--t", "x"], 2, "'x' is not a number or a comma-separated list"),
        (
            ["simulate", "--p", "2", "--forward", "nan"],
            2,
            "PlanError: --forward, --backward and --link: must be finite",
        ),
        (["simulate", "--p", "2", "--out", "/proc/none/x.svg"], 2, "PlanError: --out /proc/none/x.svg"),
        (["compile", "gpt2"], 2, "PlanError: --out: is missing"),
    ],
)
def test_wrong_requests_end_with_2_and_one_line(
    words: list[str], status: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == status
    error = capsys.readouterr().err
    assert told in error and error.startswith("PlanError: ") and error.count("\n") == 1


def test_debug_shows_where(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--p", "2", "--forward", "0", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_simulate_prints_the_bubble_of_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    """(p-1)/m for 1F1B, (p-1)/(v m) interleaved: SC'21, section 2.2."""
    assert main("simulate --p 4 --num-microbatches 8".split()) == 0
    assert "bubble 37.5% of busy time" in capsys.readouterr().out
    assert main("simulate --p 4 --v 2 --num-microbatches 8".split()) == 0
    assert "bubble 18.8% of busy time" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "last", "wanted"),
    [
        ("autoptd", "ve", {"verify"}),
        ("autoptd train", "--tens", {"--tensorboard"}),
        ("autoptd show", "gpt3-1", {"gpt3-175b"}),
        ("autoptd show --t 4", "gpt3-1", {"gpt3-175b"}),
        ("autoptd show", "pyproj", {"pyproject.toml"}),
        ("autoptd show gpt2 --p2p", "sc", {"scatter_gather"}),
        ("autoptd show gpt2 --sequence-parallel --p2p", "sc", {"scatter_gather"}),
        ("autoptd show gpt2 --schedule", "zb_h", {"zb_h1"}),
        ("autoptd show gpt2 --plan", "pyproj", {"pyproject.toml"}),
        ("autoptd show gpt2 --out", "exam", {"examples"}),
        ("autoptd completion", "", {"bash", "zsh"}),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_completion(words: str, last: str, wanted: set[str]) -> None:
    """Commands, flags, models, files and values, as bash would offer them."""
    text = script("bash")
    asked = f'COMP_WORDS=({words} "{last}"); COMP_CWORD={len(words.split())}; _shtab_autoptd; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", f"{text}\n{asked}"], capture_output=True, text=True, cwd=ROOT)
    assert set(done.stdout.split()) == wanted and not done.stderr, done.stderr


def test_completion_of_zsh_knows_models() -> None:
    assert "compadd -- gpt2 " in script("zsh")
