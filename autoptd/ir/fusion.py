"""The operators of a program that are fused, and those that are not with the reason: one record for all
layers.

Fusion("rms_norm", "model.layers.*.input_layernorm", times=12) Fusion("attention", "h.*.attn", times=12,
why="its mask needs a gradient")          # not fused, and why Fusion("rms_norm", "norm", form="by torch's
operators: ...")                        # fused, but not by a kernel of its own
"""

from __future__ import annotations

from dataclasses import dataclass

# Bytes of logits that a chunked loss holds at a time. A GPU needs few chunks: each one reads and writes the
# weight's gradient again, and launches some thirty kernels.
CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
# The minimum rows of a chunk: fewer make slow matrix products.
CHUNK_ROWS = 128
# Operators with kernels in autoptd/kernels.
OURS = "masked_softmax bias_gelu swiglu geglu rms_norm layer_norm rotary".split()
OURS += ["bias_dropout_add", "linear_cross_entropy"]
# Elements of a row that a Triton program keeps in registers; wider rows spill (benchmarks/registers.py).
WIDEST = {"rms_norm": 1 << 14, "layer_norm": 1 << 14, "masked_softmax": 1 << 15}
# The first three, and a layer_norm without a sum, are operators of torch.
FUSED = ("attention", "gelu", "silu", *OURS)


@dataclass(frozen=True)
class Fusion:
    """`times` operators at `site` (with a star for the layer) are fused to `op`, or are not because of `why`.

    `form` is the reason why a fused operator does not use its backend's kernel, else "".
    """

    op: str
    site: str
    times: int = 1
    why: str = ""
    form: str = ""


def counts(fusions: tuple[Fusion, ...]) -> str:
    """Format what was fused, in the order of first use: `rms_norm x 9, swiglu x 4`; "" for nothing."""
    times_of: dict[str, int] = {}
    for fusion in fusions:
        if not fusion.why:
            times_of[fusion.op] = times_of.get(fusion.op, 0) + fusion.times
    return ", ".join(f"{op} x {times}" for op, times in times_of.items())
