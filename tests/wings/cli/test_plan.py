"""`autoptd plan`: sizes from flags, files and models; what it prints is what `autoptd.plan` finds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import autoptd
from autoptd.ir.machine import FOLDER
from autoptd.ir.plan import load_plan
from autoptd.wings.cli import main
from autoptd.wings.cli.known import KNOWN
from autoptd.wings.cli.parser import EXAMPLES, parse
from autoptd.wings.cli.plan import read_shape, stated_sizes
from autoptd.wings.planner.plan import cases_text, which_when
from autoptd.wings.planner.shape import Shape, find_shape

SMALL = {"layers": 12, "hidden": 1024, "heads": 16, "seq": 1024}
FLAGS = "plan --layers 12 --hidden 1024 --heads 16 --seq 1024 --batch 64".split()


def test_flags_are_the_keywords_of_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "shape.json").write_text(json.dumps(SMALL | {"seq": 4096}))
    flags = ["--shape", str(tmp_path / "shape.json"), "--gpus", "16", "--t", "1,2", "--p", "2"]
    more = ["--out", str(tmp_path / "plan.json"), "--explain", "--sequence-parallel", "false"]
    assert main([*FLAGS, *flags, *more]) == 0
    printed = capsys.readouterr().out
    found = autoptd.plan(SMALL, gpus=16, batch=64, t=(1, 2), p=2, sequence_parallel=False)
    assert printed.startswith(f"{found}\n\n{found.explain()}\n")
    assert load_plan(tmp_path / "plan.json") == found.record()
    assert main([*FLAGS, "--gpus", "16", "--when"]) == 0
    assert capsys.readouterr().out == cases_text(which_when(SMALL, gpus=16, batch=64)) + "\n"


def test_the_plan_of_a_model_is_one_that_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = "examples/gpt.py:make_gpt --set n_layer=4 --set n_embd=32 --set n_head=4 --seq 16".split()
    where = f"--gpus 4 --batch 8 --cluster laptop-cpu --p 2 --out {tmp_path}/plan.json".split()
    assert main(["plan", *model, *where]) == 0
    assert main(["show", *model, "--plan", f"{tmp_path}/plan.json", "--batch", "8"]) == 0
    mesh = load_plan(tmp_path / "plan.json")["mesh"]
    assert f"on 4 ranks: t={mesh['t']} p=2 d={mesh['d']}" in capsys.readouterr().out


def test_examples_of_the_help_end_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that plan; mine.toml is the laptop's, as `autoptd measure` would write it."""
    lines = [line.partition("#")[0].split() for text in EXAMPLES.values() for line in text.splitlines()]
    examples = [words[1:] for words in lines if words[:2] == ["autoptd", "plan"]]
    assert len(examples) == 4
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text((FOLDER / "laptop-cpu.toml").read_text())
    for words in examples:
        assert main(words) == 0, " ".join(words)
    assert load_plan(tmp_path / "plan.json")["mesh"]


def test_what_follows_from_a_models_sizes_follows_from_the_new_ones() -> None:
    asked = parse("plan examples/gpt.py:make_gpt --set n_embd=32 --hidden 64 --gpus 8 --batch 8".split())
    shape = find_shape(read_shape(asked))
    assert (shape.hidden, shape.ffn, shape.heads, shape.head_dim, shape.kv_heads) == (64, 256, 4, 16, 4)
    asked = parse(
        "plan examples/gpt.py:make_gpt --set n_embd=32 --heads 8 --ffn 100 --gpus 8 --batch 8".split()
    )
    shape = find_shape(read_shape(asked))
    assert (shape.hidden, shape.ffn, shape.heads, shape.head_dim, shape.kv_heads) == (32, 100, 8, 4, 8)
    llama = Shape(32, 4096, 32, 8192, vocab=128256, ffn=14336, kv_heads=8, mlp_matrices=3)
    assert find_shape(stated_sizes(llama)) == llama
    assert find_shape(stated_sizes(llama) | {"hidden": 2048}).head_dim == 64


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b", "mistral-7b", "qwen2.5-7b"])
def test_a_well_known_size_is_read_off_its_config_as_off_its_model(name: str) -> None:
    """Every kind: with `--set` the model is built, and its parameters counted."""
    flags = f"plan {name} --gpus 8 --batch 8".split()
    layers = ["--set", "n_layer=1" if name == "gpt2" else "num_hidden_layers=1"]
    quick, built = (find_shape(read_shape(parse(words))) for words in (flags, [*flags, *layers]))
    assert replace(quick, layers=1) == built
    assert {one.kind for one in KNOWN.values()} == {"gpt2", "llama", "mistral", "qwen2"}


@pytest.mark.parametrize(
    ("flags", "fact"),
    [
        (["--gpus", "7", "--p", "5"], "there is no such plan"),
        (["--gpus", "8", "--shape", "nowhere.json"], "cannot be read"),
        (["--gpus", "8", "--cluster", "nowhere"], "no such cluster"),
        ([], "--gpus: is missing"),
        (
            ["--gpus", "8", "--when", "--explain", "--out", "F"],
            "compares several cases, but --explain, --out applies to a single plan",
        ),
        (["--gpus", "8", "--out", "/nowhere/at/all.json"], "there is no directory /nowhere/at"),
        (["--gpus", "8", "--schedule", "all"], "no such schedule"),
    ],
)
def test_refusals(flags: list[str], fact: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, *flags]) == 2
    assert fact in capsys.readouterr().err


def test_show_and_plan_take_the_same_words(capsys: pytest.CaptureFixture[str]) -> None:
    """And say with the same ones for what recipe and machine their numbers are."""
    words = ["examples/gpt.py:make_gpt", "--t", "2", "--machine", "h100", "--precision", "bf16"]
    assert main(["show", *words, "--set", "n_layer=1"]) == 0
    shown = capsys.readouterr().out
    assert main(["plan", *words, "--gpus", "2", "--batch", "4", "--software", "autoptd"]) == 0
    recipe = "18 bytes a parameter (weight 2, gradient 4, float32 copy and moments 12). Machine: dgx-h100"
    assert f"Recipe: AdamW in bfloat16, {recipe}\n" in shown and "cost model for dgx-h100: " in shown
    assert f"Recipe: AdamW in bf16, {recipe}, 2 GPUs\n" in capsys.readouterr().out
    assert main(["plan", *words, "--gpus", "2", "--batch", "4"]) == 0
    assert (
        "16 bytes a parameter (weight 2, gradient 2, float32 copy and moments 12)" in capsys.readouterr().out
    )
