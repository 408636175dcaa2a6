"""Section 1, Right: every check that wants the device. A row holds, or it says what differs, and where.

In the order of value: the tests marked `gpu`; each fused operator against its plain form; whole models against one
device, with their ranks as threads on the one GPU; waits and memory (`right_steps.py`); NCCL with one process
(`right_nccl.py`).
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import autoptd
from autoptd.ir.actions import SCHEDULES
from benchmarks.gpu import right_nccl, right_steps, right_training
from benchmarks.gpu.models import batch, build, small_family, toy
from benchmarks.gpu.operators import OPERATORS, TOY, Operator, Sizes, maker, run
from benchmarks.gpu.right_models import small_gpt, verified
from benchmarks.gpu.rows import Found, Row, Setting

ROOT = Path(__file__).parents[2]
SINGLE = 1e-5  # of the largest entry, in float32
SLACK = 1.05  # of the error of torch's own operators, in bf16
SLACK_OF_INTERPRETER = 4.0  # it cuts bf16 off, where a GPU rounds
ODD = (Sizes("odd", 3, 37, 1007, 3, 64, 1365, 50257), Sizes("wide", 1, 16, 12288, 2, 128, 6144, 5003))
LAYOUTS = ("as it is", "sliced", "transposed", "expanded")
HOOKS: dict[str, Any] = {
    "hooks": autoptd.LinearHooks(async_allreduce=True, fp32_gradients=True, delay_wgrad="after_b"),
}


# the tests that are marked


def marked_tests(setting: Setting) -> Iterator[Found]:
    """pytest -m gpu on the files that have such tests, but for the one that runs these very rows."""
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    chosen = [str(path.relative_to(ROOT)) for path in files if path.parent.name != "benchmarks"]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rs", "-p", "no:cacheprovider", *chosen]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=max(1.0, setting.left()))
    yield {
        "ok": done.returncode == 0,
        **read_summary(done.stdout),
        "files": chosen,
        "tail": done.stdout[-3000:],
    }


def read_summary(text: str) -> dict[str, int]:
    """How many tests passed, failed, were skipped: of pytest's last line."""
    found = re.findall(
        r"(\d+) (passed|failed|skipped|error)", text.strip().splitlines()[-1] if text.strip() else ""
    )
    return {word: int(count) for count, word in found}


# fused operators


def check_operator(operator: Operator, setting: Setting) -> Iterator[Found]:
    """In float32 against float64, and in bf16 beside torch's own operators; sizes odd and wide, in memory in four ways.

    In bf16 the errors of all cases count together: in one alone chance decides which form rounds better.
    """
    found: Found = {"ok": True, "float32, worst": 0.0, "bf16, worst over torch's": 0.0, "cases": 0}
    slack = SLACK_OF_INTERPRETER if setting.is_toy else SLACK
    single = SINGLE if operator.is_ours else 10 * SINGLE  # torch's attention has products of its own choice
    squares: dict[int, list[float]] = {}  # of each result and gradient in bf16: ours, torch's
    for sizes in TOY if setting.is_toy else ODD:
        for layout in LAYOUTS[:2] if setting.is_toy else LAYOUTS:
            where = f"{sizes.name}, {layout}"
            errors = errors_of(
                operator, operator.inputs(sizes, maker(setting.where, torch.float32, layout=layout))
            )
            found["float32, worst"] = max([found["float32, worst"], *(_number(mine) for mine, _ in errors)])
            _complain(found, f"{where}, float32", errors, [max(single, 2 * other) for _, other in errors])
            errors = errors_of(
                operator, operator.inputs(sizes, maker(setting.where, torch.bfloat16, layout=layout))
            )
            for number, pair in enumerate(errors):
                sums = squares.setdefault(number, [0.0, 0.0])
                squares[number] = [a + x * x for a, x in zip(sums, pair, strict=True)]
            found["cases"] += 2
            yield found
    pooled = [(mine**0.5, other**0.5) for mine, other in squares.values()]
    found["bf16, worst over torch's"] = max(_number(mine) / max(other, 1e-6) for mine, other in pooled)
    _complain(found, "bfloat16", pooled, [slack * other + 1e-6 for _, other in pooled])
    yield found


def _complain(found: Found, where: str, errors: list[tuple[float, float]], allowed: list[float]) -> None:
    bad = [i for i, (mine, _) in enumerate(errors) if not mine <= allowed[i]]
    if bad:
        told = [f"tensor {i}: {errors[i][0]:.2e}, torch's {errors[i][1]:.2e}" for i in bad]
        found |= {"ok": False, "why": f"{where}: {'; '.join(told)}"}


def _number(x: float) -> float:
    """NaN counts as the largest error."""
    return float("inf") if x != x else x


def errors_of(operator: Operator, inputs: list[torch.Tensor | None]) -> list[tuple[float, float]]:
    """Of every result and gradient: the error of the fused form and of torch's plain one, against float64.

    In float32 that of the largest entry; in bf16 of norms, and of a single number at least its rounding.
    """
    wide = [x.double() if x is not None and x.is_floating_point() else x for x in inputs]
    exact = run(operator.plain, wide, operator.grads)
    is_single = inputs[0].dtype == torch.float32  # type: ignore[union-attr]
    measure = _of_largest if is_single else _of_norms
    mine, other = (run(form, inputs, operator.grads) for form in (operator.fused, operator.plain))
    return [(measure(x, true), measure(y, true)) for x, y, true in zip(mine, other, exact, strict=True)]


def _of_largest(found: torch.Tensor, true: torch.Tensor) -> float:
    return float((found.double() - true).abs().max() / true.abs().max().clamp(min=1e-30))


def _of_norms(found: torch.Tensor, true: torch.Tensor) -> float:
    error = float((found.double() - true).norm() / true.norm().clamp(min=1e-30))
    is_rounding = true.numel() == 1 and error <= torch.finfo(found.dtype).eps / 2
    return torch.finfo(found.dtype).eps / 2 if is_rounding else error


# whole models


def parity(asked: dict[str, Any], setting: Setting, dropout: float = 0.1) -> Iterator[Found]:
    """`verify`: loss, gradients, parameters in float64 at 1e-9, and the first losses in the model's own dtype."""
    model, (args, _) = small_gpt(setting, dropout, asked.get("p", 1) * asked.get("v", 1))
    yield verified(
        model,
        args,
        {"num_microbatches": 4 // asked.get("d", 1), "steps": 1 if setting.is_toy else 2, **asked},
    )


def family(name: str, fuse: str, setting: Setting) -> Iterator[Found]:
    """A model of transformers, its operators fused, over two tensor ranks."""
    model, (_, kwargs) = small_family(name)
    example = {key: x.to(setting.where) for key, x in kwargs.items()}
    used = "eager" if setting.is_toy else fuse
    asked = {"t": 2, "num_microbatches": 2, "fuse": used, "steps": 2}
    yield verified(model.to(setting.where), example, asked) | {"fuse": used}


def compile_again(setting: Setting) -> Iterator[Found]:
    """A bf16 model compiles every time: model and trace differ by the rounding of two runs of one thing, not more."""
    from benchmarks.gpu.models import NANOGPT, replace

    shape = toy(NANOGPT) if setting.is_toy else replace(NANOGPT, layers=4, b=2)
    model = build(shape, setting.where, torch.bfloat16)
    args, _ = batch(shape, setting.where)
    size, before = sum(x.nbytes for x in model.parameters()), setting.device.allocated()
    refused: list[str] = []
    for number in range(2 if setting.is_toy else 10):
        try:
            autoptd.parallelize(model, backend="local", example_inputs=args).close()
        except autoptd.TraceError as exc:
            refused.append(str(exc)[:300])
        yield {
            "ok": not refused,
            "times": number + 1,
            "TraceErrors": len(refused),
            "why": "; ".join(refused[:1]),
        }
        if setting.left() <= 5.0:
            break
    more = setting.device.peak(
        lambda: autoptd.parallelize(model, backend="local", example_inputs=args).close()
    )
    found = {
        "peak over the model's bytes": more / size,
        "left behind, bytes": setting.device.allocated() - before,
    }
    yield {
        "ok": not refused,
        "times": number + 1,
        "TraceErrors": len(refused),
        "why": "; ".join(refused[:1]),
        **found,
    }


MESHES: dict[str, dict[str, Any]] = {
    "t=2 p=2": {"t": 2, "p": 2},
    "t=2 p=2, sequence parallel": {"t": 2, "p": 2, "sequence_parallel": True},
    "t=2 d=2": {"t": 2, "d": 2},
    "p=2 v=2": {"p": 2, "v": 2},
    "t=2 d=2, sequence parallel": {"t": 2, "d": 2, "sequence_parallel": True},
    "t=2 p=2, all hooks": {"t": 2, "p": 2, **HOOKS},
    "t=2 p=2 d=2 v=2, sequence parallel, all hooks": {
        "t": 2,
        "p": 2,
        "d": 2,
        "v": 2,
        "sequence_parallel": True,
        **HOOKS,
    },
}
IN_SHORT = ("t=2 p=2, sequence parallel", "swiglu", "bias_dropout_add")
FAMILIES = ("GPT-2", "Llama", "NeoX")


def _parity_rows(names: Sequence[str]) -> list[Row]:
    return [Row(f"parity: {name}", partial(parity, MESHES[name]), 40, 2, name in IN_SHORT) for name in names]


def _fused_rows(fuse: str) -> list[Row]:
    return [Row(f"fused: {name}, {fuse}", partial(family, name, fuse), 60, 2, False) for name in FAMILIES]


FIRST = list(MESHES)[:4]
ROWS = [
    Row("tests marked gpu", marked_tests, seconds=170, gigabytes=2, is_short=False),
    *_parity_rows(FIRST),
    *right_steps.ROWS,
    *right_nccl.ROWS[:2],
    *(
        Row(f"operator: {one.name}", partial(check_operator, one), 30, 6, one.name in IN_SHORT)
        for one in OPERATORS
    ),
    *_fused_rows("triton"),
    *right_training.ROWS,
    *_parity_rows(list(MESHES)[4:]),
    *right_nccl.ROWS[2:],
    *(
        Row(
            f"parity: p=2 {name}", partial(parity, {"p": 2, "v": chunks or 2, "schedule": name}), 30, 2, False
        )
        for name, chunks in SCHEDULES.items()
    ),
    Row("a bf16 model compiles again and again", compile_again, seconds=60, gigabytes=8, is_short=False),
    *_fused_rows("inductor"),
]
