"""What the Triton kernels become on a GPU, without one: registers, spills and instructions of a thread, its widest access.

Every fused operator is called as a program calls it, on bfloat16 tensors of the meta device at the sizes of models; its kernels
are compiled for these calls and read back by the tools that come with Triton. Threads of a multiprocessor share 65,536
registers: at 128 of them a thread, 16 warps fit. What spills goes to memory and back. A thread should read 128 bits at once.

    python benchmarks/registers.py            # a table, benchmarks/results/registers.json
    python benchmarks/registers.py --arch 100 --only norm
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

Tensor = torch.Tensor
ROWS = 2048


@dataclass(frozen=True)
class Call:
    """`run` launches kernels; those named in `wide` are to read and write at least `widest` bits at a time."""

    name: str
    run: Callable[[], Any]
    wide: tuple[str, ...] = ()
    widest: int = 128


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def rms_norm(width: int) -> None:
    from autoptd.kernels import norms_triton

    x, weight, factor = meta(ROWS, width), meta(width), meta(ROWS, 1, dtype=torch.float32)
    norms_triton.rms_norm_forward(x, weight, x, 1e-6, 0.0, x.dtype)
    norms_triton.rms_norm_backward(x, x, x, factor, weight, 0.0)


def layer_norm(width: int) -> None:
    from autoptd.kernels import norms_triton

    x, weight, row = meta(ROWS, width), meta(width), meta(ROWS, 1, dtype=torch.float32)
    norms_triton.layer_norm_forward(x, weight, weight, x, 1e-6)
    norms_triton.layer_norm_backward(x, x, x, row, row, weight, weight)


def softmax(keys: int) -> None:
    from autoptd.kernels import softmax_triton

    scores = meta(2, 4, 16, keys)
    out = softmax_triton.softmax_forward(scores, meta(16, keys), 0.3, True, None)
    softmax_triton.softmax_backward(scores, out, 0.3, scores.dtype)


def loss(classes: int) -> None:
    from autoptd.kernels import cross_entropy_triton
    from autoptd.kernels.cross_entropy import Labels, Loss

    logits, row = meta(ROWS, -(-classes // 64) * 64)[:, :classes], partial(meta, ROWS)
    labels = Labels(row(dtype=torch.int64), row(dtype=torch.bool), row(dtype=torch.bool))
    which = Loss(0.0, classes, classes, lambda numbers, op: numbers)
    terms = cross_entropy_triton.terms(which, logits, labels)
    cross_entropy_triton.gradients_(which, logits, terms, labels, row(dtype=torch.float32))
    number = torch.empty((), dtype=torch.float32, device="meta")
    cross_entropy_triton.whole_rows_(which, logits, labels, row(dtype=torch.float32)[None], (number, number))


def dropout(shape: tuple[int, int, int], **shard: int) -> None:
    from autoptd.kernels import dropout_triton
    from autoptd.kernels.dropout_mask import Places

    x, bias = meta(*shape), meta(4096)
    dropout_triton.bias_dropout_add_forward(x, bias, x, 0.1, Places(1, 2, **shard), shape)


def rotary(interleaved: bool, head_size: int = 128) -> None:
    from autoptd.kernels import rotary_triton

    x, angles = meta(2, 1024, 16, head_size).transpose(1, 2), meta(1024, head_size)
    rotary_triton.turned(x, angles, angles, x.dtype, False, interleaved)


def activations(width: int) -> None:
    from autoptd.kernels import activations_triton

    x, bias = meta(ROWS, width), meta(width)
    activations_triton.bias_gelu_forward(x, bias, "tanh")
    activations_triton.bias_gelu_backward(x, x, bias, "tanh")
    activations_triton.gated_forward(x, x, "silu")
    activations_triton.gated_backward(x, x, x, "silu")


BOTH = ("_forward", "_backward")
WIDTHS = (768, 4096, 8192, 12288)
CALLS = (
    *(Call(f"RMS norm of {width:,}", partial(rms_norm, width), BOTH) for width in WIDTHS),
    *(Call(f"layer norm of {width:,}", partial(layer_norm, width), BOTH) for width in WIDTHS),
    *(Call(f"softmax of {keys:,}", partial(softmax, keys), BOTH) for keys in (2048, 32768)),
    Call("loss of 50,304", partial(loss, 50304), ("_terms", "_gradients", "_whole_rows")),
    Call("loss of 50,257", partial(loss, 50257)),  # an odd number of columns: two bytes at a time
    Call("dropout", partial(dropout, (1, 2, 1 << 21)), ("_drop",)),
    Call("dropout of a shard", partial(dropout, (1024, 2, 4096), block=1024, degree=4), ("_drop",)),
    Call("rotary, halves", partial(rotary, False), ("_turn",)),
    Call("rotary, neighbours", partial(rotary, True), ("_turn",)),
    Call("activations of 12,288", partial(activations, 12288), ("_gated", "_gated_backward", "_bias_gelu")),
)
SPILLS = {  # instructions that are known to, of a thousand and more
    ("layer norm of 12,288", "_backward"): 30,  # two sums of 16,384 elements leave half of the registers
    ("softmax of 32,768", "_backward"): 30,
}


def measure(call: Call, architecture: int) -> list[dict[str, Any]]:
    from benchmarks.lib.gpu_code import compiled, launches

    with launches() as found:
        call.run()
    rows = []
    for launch in found:
        told = asdict(compiled(launch, architecture))
        rows.append({"call": call.name, "kernel": launch.name, "warps": launch.warps, **told})
        rows[-1].pop("sass")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", type=int, default=90, help="compute capability, 90 for an H100")
    parser.add_argument("--only", default="", help="calls whose name has this in it")
    given = parser.parse_args()
    if importlib.util.find_spec("triton") is None:
        return print("Triton is not installed: nothing to compile")
    from benchmarks.lib.gpu_code import has_tools

    if not has_tools():
        return print("this build of Triton comes without its assembler's tools: nothing to read")
    columns = ("call", "kernel", "warps", "registers", "spills", "instructions", "widest", "shared")
    print(("{:24}{:18}" + "{:>14}" * 6).format(*columns))
    rows: list[dict[str, Any]] = []
    for call in CALLS:
        for row in measure(call, given.arch) if given.only in call.name else ():
            print(("{:24}{:18}" + "{:>14}" * 6).format(*(row[name] for name in columns)), flush=True)
            rows.append(row)
    if not given.only:
        import triton

        from benchmarks.lib.report import save

        save("registers", {"triton": triton.__version__, "architecture": given.arch, "rows": rows})
    return None


if __name__ == "__main__":
    main()
