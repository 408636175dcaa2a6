"""The same model of transformers, trained by AutoPTD and by what else runs without a GPU.

GPT-2 (tied, fused attention weights), a Llama (grouped queries) and a Llama with tied embeddings, all small and with random
weights, train on 2 or 4 processes of one thread over gloo, in all forms of a mesh in the same processes, in turns. A step is
the whole loop: forward, backward, SGD's update, gradients to None.

- ours: `autoptd.parallelize`, without fused operators.
- torch: DTensor's parallelize_module, pipelining's tracer and stages written by hand, DistributedDataParallel, FSDP2.
- transformers' DistributedConfig; DeepSpeed's AutoTP and NeMo Automodel's parallelize_model, where they are installed.

Error: of the losses of three steps, and of all parameters after them, the largest absolute difference to one device in
float64. Everything is in float64 for it, except for what transformers computes in float32 always (norms, the loss), and
DeepSpeed, which takes float32 at most. A form that does not run has the reason instead of numbers.

Ratios above 1: ours is faster. The median over turns of their time / our time, of wall time (the slowest rank's) and of CPU
time (all ranks'), with its 95% interval, in float32. Memory: the most that a rank allocates during a step. Lines: code beyond
the loop for one device (`lib/hf_forms.py`).

    python benchmarks/compare.py               # one table, benchmarks/results/compare.json and compare.svg
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import logging
import os
import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from matplotlib.figure import Figure
from torch import Tensor
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.lib.hf_forms import FORMS, Case, Form, lines_of, one_device
from benchmarks.lib.memory import peak_bytes
from benchmarks.lib.pairs import Interval, of_all_ranks, ratio_of, take_turns
from benchmarks.lib.processes import spawn
from benchmarks.lib.report import ratio_bars, save, save_picture

Row = dict[str, Any]
Size = dict[str, int]
SIZE = {"h": 128, "layers": 4, "vocabulary": 2048, "rows": 8, "tokens": 64}
CASES = [Case(t=2), Case(p=2, m=4), Case(d=2), Case(t=2, p=2, m=4)]
MODELS = {"GPT-2, tied": CASES, "Llama": CASES, "Llama, tied": CASES[:2]}
OURS, STEPS = "AutoPTD", 3
FLOAT32_ONLY = {"DeepSpeed AutoTP"}
PACKAGES = ("torch", "transformers", "deepspeed", "nemo-automodel", "torchtitan")


def make(name: str, size: Size, dtype: torch.dtype) -> Any:
    """A model with the same weights in every process."""
    torch.manual_seed(0)
    common = {"vocab_size": size["vocabulary"], "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
    if name.startswith("GPT-2"):
        no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        shape = {"n_embd": size["h"], "n_layer": size["layers"], "n_head": 4, "n_positions": size["tokens"]}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **common, **no_dropout)).to(
            dtype
        )
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    widths = {"hidden_size": size["h"], "intermediate_size": 3 * size["h"]}
    depth = {"num_hidden_layers": size["layers"], "max_position_embeddings": size["tokens"]}
    tied = name.endswith("tied")
    config = transformers.LlamaConfig(**widths, **depth, **heads, **common, tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config).to(dtype)


def measure(name: str, size: Size, case: Case, seconds: float) -> dict[str, Row]:
    """Errors, turns and peaks of all forms of a mesh, on one of its processes."""
    _be_quiet()
    found = _measured(name, size, Case(*case), seconds)
    # Python's last collection, at the exit, crashed in 3 of 10 runs of d=2, in one of them in spite of this: run again.
    gc.collect()
    return found


def _measured(name: str, size: Size, case: Case, seconds: float) -> dict[str, Row]:
    ids = torch.randint(
        size["vocabulary"], (size["rows"], size["tokens"]), generator=torch.Generator().manual_seed(1)
    )
    mine = ids.chunk(case.d)[dist.get_rank() // case.t % case.d]
    found: dict[str, Row] = {}
    runs: dict[str, Callable[[], object]] = {}
    wanted = reference(name, size, ids)
    for who, form in FORMS[str(case)].items():
        dtype = torch.float32 if who in FLOAT32_ONLY else torch.float64
        try:
            found[who] = errors(form(make(name, size, dtype), case, ids), mine, wanted, case)
            made = form(make(name, size, torch.float32), case, ids)
            runs[who] = lambda made=made: made.step(mine)  # type: ignore[misc]
            found[who] |= {"lines": lines_of(form, make(name, size, torch.float32), case)}
        except Exception as error:
            found[who] = {"reason": reason_of(error)}
    turns = of_all_ranks(take_turns(runs, 2000, seconds=seconds))
    for who, run in runs.items():
        found[who] |= turns[who]._asdict() | {"peak bytes": _largest(peak_bytes(run))}
    return found


def reference(name: str, size: Size, ids: Tensor) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of three steps on one device in float64, and the weights after them."""
    model = make(name, size, torch.float64)
    form = one_device(model, Case(), ids)
    losses = [form.step(ids).item() for _ in range(STEPS)]  # type: ignore[union-attr]
    return losses, {key: x.detach() for key, x in model.named_parameters(remove_duplicate=False)}


def errors(form: Form, ids: Tensor, wanted: tuple[list[float], dict[str, Tensor]], case: Case) -> Row:
    """The largest difference of a loss, and of an entry of any copy of a parameter on any rank."""
    losses, weights = wanted
    of_loss = 0.0
    for right in losses:
        loss = form.step(ids)
        if loss is None:
            continue
        if case.d > 1 and not form.is_mean:
            dist.all_reduce(loss)
            loss /= case.d
        of_loss = max(of_loss, abs(loss.item() - right))
    worst, seen = 0.0, set()
    for name, x in form.weights().items():
        name = name.removeprefix("module.")
        seen.add(name)
        worst = max(worst, (_whole(x, weights[name]) - weights[name]).abs().max().item())
    names: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(names, seen)
    seen = set().union(*names)
    assert {x.data_ptr() for x in weights.values()} == {weights[name].data_ptr() for name in seen}
    return {"loss error": _largest(of_loss), "weight error": _largest(worst)}


def _whole(x: Tensor, like: Tensor) -> Tensor:
    """A sharded tensor put together: a DTensor, or a shard in one dimension of all ranks."""
    x = x.detach()
    if isinstance(x, DTensor):
        return x.full_tensor()
    for dim, size in enumerate(like.shape):
        if x.shape[dim] != size:
            parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, x.contiguous())
            return torch.cat(parts, dim)
    return x


def _largest(value: float) -> float:
    everyone: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return max(everyone)


def reason_of(error: Exception) -> str:
    """The first line of a message, shortened."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}".rstrip(": ")


def torchtitan_mesh() -> str:
    """What torchtitan's first step, its device mesh, says on a machine without a GPU."""
    _be_quiet()
    try:
        from torchtitan.distributed import ParallelDims
        from torchtitan.tools.utils import device_type

        sizes = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "world_size"), 1)
        ParallelDims(**sizes).build_mesh()
    except Exception as error:
        return reason_of(error)
    return f"a mesh on {device_type}"


def _be_quiet() -> None:
    warnings.filterwarnings("ignore")
    os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "DS_ACCELERATOR": "cpu"}
    logging.disable(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()


def rows_of(name: str, case: Case, drawn: dict[str, Row]) -> list[Row]:
    rows: list[Row] = []
    for who, one in drawn.items():
        row = {"model": name, "mesh": str(case), "who": who}
        if "reason" in one:
            rows.append(row | one)
            continue
        row |= {key: one[key] for key in ("lines", "loss error", "weight error", "peak bytes")}
        row |= {"turns": len(one["wall"]), "ms": 1e3 * statistics.median(one["wall"])}
        for which in ("wall", "cpu") if who != OURS else ():
            row[which] = ratio_of(one[which], drawn[OURS][which])._asdict()
        rows.append(row)
    return rows


def show(rows: list[Row]) -> None:
    for row in rows:
        what = f"{row['model']:<12}{row['mesh']:<8} {row['who']:<24}"
        if "reason" in row:
            print(f"{what}{row['reason']}", flush=True)
            continue
        ratios = [str(Interval(**row[which])) if which in row else "" for which in ("wall", "cpu")]
        print(
            f"{what}{row['lines']:>4}{row['turns']:>5}{row['ms']:>8.1f} ms{ratios[0]:>24}{ratios[1]:>24}"
            f"{row['peak bytes'] / 1e6:>7.1f} MB{row['loss error']:>9.0e}{row['weight error']:>9.0e}",
            flush=True,
        )


def picture(rows: list[Row]) -> Figure:
    compared = [row for row in rows if "wall" in row]
    figure = Figure(figsize=(8, 1 + 0.28 * len(compared)), layout="constrained")
    for axes, which in zip(figure.subplots(1, 2, sharey=True), ("wall", "cpu"), strict=True):
        bars = [(f"{row['model']}, {row['mesh']}: {row['who']}", *row[which].values()) for row in compared]
        ratio_bars(axes, bars, f"{'wall' if which == 'wall' else 'CPU'} time, theirs / ours")
        axes.tick_params(labelsize=8)
    return figure


def versions() -> dict[str, str]:
    """The packages that were there."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="of turns per model and mesh, 15 rounds at least"
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="these models only")
    parser.add_argument(
        "--meshes", nargs="+", default=[str(case) for case in CASES], help="these meshes only"
    )
    args = parser.parse_args()
    rows: list[Row] = []
    content: Row = {"size": SIZE, "versions": versions(), "rows": rows}
    content["elsewhere"] = {"torchtitan": spawn(torchtitan_mesh, 1)}
    print(
        *(f"{who} {text}" for part in ("versions", "elsewhere") for who, text in content[part].items()),
        sep="\n",
    )
    for name, case in ((model, case) for model in args.models for case in MODELS[model]):
        if str(case) in args.meshes:
            drawn = spawn(measure, case.t * case.p * case.d, name, SIZE, case, args.seconds)
            rows += (found := rows_of(name, case, drawn))
            show(found)
            save("compare", content)  # a run that is cut short leaves what it has
    save_picture("compare", picture(rows))


if __name__ == "__main__":
    main()
