"""Commands from end to end, on small models."""

from __future__ import annotations

import json
import runpy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autoptd
from autoptd.runtime.step import standalone
from autoptd.runtime.step.standalone import check_stage
from autoptd.runtime.world import rendezvous
from autoptd.wings.cli import main
from autoptd.wings.cli.programs import _fallbacks
from autoptd.wings.cli.train import batches, load_tokens
from examples.gpt import make_gpt
from tests.forks import finish, start
from tests.waits import LONG
from tests.wings.viz.programs import deep

GPT = "examples/gpt.py:make_gpt --set n_layer=2 --set n_embd=16 --set n_head=2 --seq 8".split()


def test_show_prints_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = "--t 2 --p 2 --d 2 --num-microbatches 4".split()
    assert main(["show", *GPT, *mesh]) == 0
    text = capsys.readouterr().out
    for words in (
        "on 8 ranks: t=2 p=2 d=2 v=1, 1f1b, 4 microbatches of size 1",
        "Memory of a rank",
        "tp (tensor)",
        "Bubble: ",
    ):
        assert words in text
    assert main(["show", *GPT, *mesh, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (
        record["bubble"] > 0
        and len(record["ranks"]) == 2
        and {one["axis"] for one in record["traffic"]} == {"tp", "dp", "pp"}
    )


def test_json_is_json_whatever_else_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--t 2 --json --out {tmp_path} --explain transformer.h.0.mlp.c_fc"
    assert main(["show", *GPT, *words.split()]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["model"] and "wrote " in told.err and "column" in told.err


def test_more_fallbacks_are_where_they_can_be_read(tmp_path: Path) -> None:
    program = deep()
    found = {"op": "aten.linear", "site": "up", "fact": "8 does not divide", "remedy": "t=2", "flops": 1}
    program = replace(program, plan={**program.plan, "fallbacks": [found, found]})
    (alone,), (written,) = _fallbacks(program, None), _fallbacks(program, "out")
    assert alone.endswith("and 1 more: --out DIR writes a report that lists all of them")
    assert written.endswith("and 1 more: see out/report.html")


def test_show_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", *GPT, "--t", "2", "--explain", "transformer.h.0.mlp.c_fc"]) == 0
    assert "column" in capsys.readouterr().out
    assert main(["show", *GPT, "--t", "2", "--batch", "4", "--rows", "2"]) == 2
    assert main(["show", *GPT, "--t", "2", "--option", "colour=1"]) == 2
    assert "colour" in capsys.readouterr().err
    assert main(["show", "--list"]) == 0 and "gpt3-175b" in capsys.readouterr().out


def test_compile_writes_a_program_whose_stages_run_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mesh = "--t 2 --p 2 --num-microbatches 2 --delay-wgrad-compute after_b".split()
    assert main(["compile", *GPT, *mesh, "--out", str(tmp_path)]) == 0
    assert {"stage_0.py", "plan.json", "report.html", "graph.dot"} <= {
        path.name for path in tmp_path.iterdir()
    }
    ((code, said, error),) = finish(start(tmp_path / "stage_1.py", 1, "--check"), LONG)
    assert code == 0, error
    assert "Stage1 on 2 tensor ranks" in said and "returns    loss  [] float32 = 5.5" in said
    assert "goes back  gradient of x_from_0  [1, 8, 16] float32" in said
    made, given = next(line for line in said.splitlines() if "parameters have" in line).split()[1:4:2]
    assert made == given, said


def test_a_stage_with_nan_or_without_gradients_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", *GPT, "--p", "2", "--num-microbatches", "2", "--out", str(tmp_path)]) == 0
    stage = runpy.run_path(str(tmp_path / "stage_0.py"))["Stage0"]
    assert check_stage(stage, tmp_path).wrong == []
    with monkeypatch.context() as patch:
        patch.setattr(
            "autoptd.runtime.step.standalone._random",
            lambda size, dtype, made, scale=1.0: infinite(size, dtype),
        )
        with pytest.raises(SystemExit) as end:
            standalone.main(stage, str(tmp_path / "stage_0.py"), ["--check"])
        assert str(end.value.code).startswith("Stage0: NaN or infinite: ") and "the gradient of" in str(
            end.value.code
        )
    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd, "backward", lambda *args: None)
        found = check_stage(stage, tmp_path)
    assert "0 of " in found.lines[-2] and found.wrong[0].startswith("no gradient: transformer.wte.weight")
    assert "something is wrong" in capsys.readouterr().out


def infinite(size: Sequence[int], dtype: str) -> torch.Tensor:
    found = getattr(torch, dtype)
    return torch.full(tuple(size), float("inf") if found.is_floating_point else 1, dtype=found)


def test_a_stage_without_its_program_says_so(tmp_path: Path) -> None:
    from autoptd.errors import PlanError
    from autoptd.runtime import Stage

    class Stage0(Stage):
        pass

    with pytest.raises(PlanError, match=r"program\.json: is missing"):
        check_stage(Stage0, tmp_path)


def test_verify_and_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *GPT, "--t", "2", "--batch", "2", "--steps", "1", "--num-microbatches", "1"]) == 0
    assert "equal to 1e-09 over 1 step\n" in capsys.readouterr().out


def test_train_learns_logs_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, out = tmp_path / "run.jsonl", tmp_path / "out"
    run = f"--t 2 --backend local --steps 4 --batch 4 --num-microbatches 2 --lr 0.01 --log {log} --out {out} --peak 1e12"
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question " * 9)
    assert main(["train", *GPT, *run.split(), "--data", str(tmp_path / "text.txt")]) == 0
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [one["step"] for one in records] == [1, 2, 3, 4] and records[-1]["loss"] < records[0]["loss"]
    assert all(one["mfu"] > 0 and one["grad_norm"] > 0 and one["lr"] == 0.01 for one in records)
    assert sum(records[1][name] for name in ("compute", "communication", "waiting")) == pytest.approx(
        1, abs=0.01
    )
    page = (out / "report.html").read_text()
    assert "Equal: the ranks executed the compiled program." in page
    assert "a step without recording" in page and "gives them on laptop-cpu" in page  # the device of this run
    assert "step 4/4  loss" in capsys.readouterr().err


def test_train_takes_the_weights_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first loss is the model's own, and it is said where the weights come from."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, vocab_size=256, initializer_range=0.5)
    )
    model.save_pretrained(tmp_path)
    x, _ = next(batches(load_tokens(None), 4, 8, 1, 0))
    with torch.no_grad():
        wanted = float(model(input_ids=x, labels=x).loss)

    def first_loss(*words: str) -> float:
        log = tmp_path / "run.jsonl"
        log.unlink(missing_ok=True)
        run = f"train {tmp_path} --t 2 --backend local --steps 1 --batch 4 --num-microbatches 2 --seq 8 --log {log}"
        assert main([*run.split(), *words]) == 0
        return float(json.loads(log.read_text().splitlines()[0])["loss"])

    assert first_loss() == pytest.approx(wanted, rel=1e-5)
    assert f"weights: loaded from {tmp_path}" in capsys.readouterr().err
    assert abs(first_loss("--random") - wanted) > 0.1
    assert "weights: random, seed 0" in capsys.readouterr().err
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert main(["train", str(tmp_path), "--backend", "local", "--steps", "1", "--seq", "8"]) == 2
    assert "holds pickled weights (pytorch_model.bin)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--t 2 --steps 1", "torchrun"),
        ("--backend local --steps 1 --data none.txt", "none.txt"),
        ("--backend local --steps 1 --set vocab_size=64", "too small for 256 bytes"),
    ],
)
def test_what_cannot_be_trained(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *GPT, *words.split()]) == 2
    assert told in capsys.readouterr().err


def test_ctrl_c_is_one_line_and_leaves_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("autoptd.Progress.add", interrupted)
    run = f"--t 2 --backend local --steps 4 --batch 4 --num-microbatches 2 --out {tmp_path}"
    assert main(["train", *GPT, *run.split()]) == 130
    assert (
        capsys.readouterr().err.splitlines()[-1]
        == f"interrupted after 0 of 4 steps; wrote {tmp_path}/report.html"
    )
    assert "Summary" in (tmp_path / "report.html").read_text()


def test_what_all_ranks_would_say_is_said_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(rendezvous, "is_served", lambda _: True)
    monkeypatch.setattr(rendezvous, "store_from_env", lambda _: store)
    said = []
    for rank in ("1", "0"):
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
        assert main(["train", *GPT, "--t", "4", "--steps", "1"]) == 2
        said.append(capsys.readouterr().err)
    assert said[0].startswith("PlanError: world size 2") and not said[1]


def test_train_of_a_deferred_model_begins_with_its_weights(tmp_path: Path) -> None:
    with autoptd.deferred(3):
        model = make_gpt(n_layer=2)
    x, y = next(batches(load_tokens(None), 4, 8, 1, 3))
    with torch.no_grad():
        wanted = float(autoptd.materialize(model)(x, y)[1])
    run = "train examples/gpt.py:make_gpt --set n_layer=2 --t 2 --backend local --steps 1 --batch 4 --seq 8 --seed 3"
    assert main([*run.split(), "--deferred", "--log", str(tmp_path / "run.jsonl")]) == 0
    log = json.loads((tmp_path / "run.jsonl").read_text().splitlines()[0])
    assert log["loss"] == pytest.approx(wanted, rel=1e-5)
