"""What fused operators stand for in a program: one record for all layers alike.

Fusion("rms_norm", "model.layers.*.input_layernorm", times=12)
Fusion("attention", "h.*.attn", times=12, why="its mask needs a gradient")          # not fused, and why
Fusion("rms_norm", "norm", form="by torch's operators: ...")                        # fused, but not by a kernel of its own
"""

from __future__ import annotations

from dataclasses import dataclass

# Of the logits that a loss in chunks holds at a time. On a GPU few chunks: each reads and writes the weight's gradient once
# more, and is some thirty kernels.
CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
CHUNK_ROWS = 128  # but of these rows at least: fewer make slow matrix products
OURS = "masked_softmax bias_gelu swiglu geglu rms_norm layer_norm rotary bias_dropout_add linear_cross_entropy".split()
# Elements of a row that a Triton program holds in its registers; wider rows spill (benchmarks/registers.py).
WIDEST = {"rms_norm": 1 << 14, "layer_norm": 1 << 14, "masked_softmax": 1 << 15}
FUSED = (
    "attention",
    "gelu",
    "silu",
    *OURS,
)  # the first three, and a layer_norm without a sum, are operators of torch


@dataclass(frozen=True)
class Fusion:
    """`times` operators of `site` (its layers as a star) are the fused `op`; or are not, because of `why`.

    `form` tells why a fused one does not run by the kernel that its backend has for it; "" where it does.
    """

    op: str
    site: str
    times: int = 1
    why: str = ""
    form: str = ""


def counts(fusions: tuple[Fusion, ...]) -> str:
    """`rms_norm x 9, swiglu x 4`: what was fused, in the order of first use; "" for nothing."""
    found: dict[str, int] = {}
    for one in fusions:
        if not one.why:
            found[one.op] = found.get(one.op, 0) + one.times
    return ", ".join(f"{op} x {times}" for op, times in found.items())
