"""What a plan of Subramanian et al. is made for: a transformer, a machine, and the quirks of their published code.

Units: FLOP/s, bytes/s, bytes, seconds. Sources: arXiv:2410.00273, Table A3 (machines), section 4 (models), and the code at
commit 54278b0 of the authors' repository for what the paper leaves open.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoptd.errors import PlanError

TENSOR_MODES = ("1D", "2D", "SUMMA")


@dataclass(frozen=True)
class Transformer:
    """A stack of equal layers: `layers` of width `hidden`, `heads` heads, an MLP of width `ffn`, `seq` tokens.

    Embedding, head and loss are not part of this model.
    """

    layers: int
    hidden: int
    heads: int
    seq: int
    ffn: int

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "seq", "ffn"):
            if getattr(self, name) < 1:
                raise PlanError(f"shape: {name}", f"is {getattr(self, name)}", "a whole number of at least 1")
        if self.hidden % self.heads:
            raise PlanError(
                "shape: heads", f"hidden={self.hidden} does not divide over {self.heads}", "a divisor"
            )


@dataclass(frozen=True)
class System:
    """One GPU and its two networks: the fast one joins `domain` GPUs, the slow one everything."""

    matrix_flops: float  # FLOP/s of matrix products, fp16, peak
    vector_flops: float  # FLOP/s of everything else, fp16, peak
    memory_bandwidth: float  # bytes/s
    memory_bytes: float
    fast_bandwidth: float  # bytes/s per GPU and direction, peak
    fast_latency: float  # seconds per hop
    slow_bandwidth: float
    slow_latency: float
    domain: int  # GPUs that share the fast network
    nics_per_gpu: float = 1.0

    def with_domain(self, gpus: int) -> System:
        """The same machine with `gpus` GPUs on a fast network."""
        return replace(self, domain=gpus)


def _system(matrix: float, vector: float, hbm: float, gigabytes: float, nvlink: float, ib: float) -> System:
    """A row of Table A3: TFLOP/s, TFLOP/s, GB/s, GB, GB/s, GB/s; latencies are the same for all."""
    return System(
        matrix_flops=matrix * 1e12,
        vector_flops=vector * 1e12,
        memory_bandwidth=hbm * 1e9,
        memory_bytes=gigabytes * 1e9,
        fast_bandwidth=nvlink * 1e9,
        fast_latency=2.5e-6,
        slow_bandwidth=ib * 1e9,
        slow_latency=5e-6,
        domain=8,
    )


SYSTEMS = {
    "A100": _system(312, 78, 1555, 80, 300, 25),
    "H200": _system(989.4, 133.8, 4800, 141, 450, 50),
    "B200": _system(2500, 339, 8000, 192, 900, 100),
}
GPT3_1T = Transformer(layers=128, hidden=25600, heads=160, seq=2048, ffn=102400)
VIT_64K = Transformer(layers=48, hidden=12288, heads=64, seq=64800, ffn=49152)


@dataclass(frozen=True)
class Quirks:
    """Where the published code differs from what it models, and its global factors. `CORRECTED` has none of the former.

    - `free_crossing_p2p`: where a pipeline has several ranks in a fast domain, sends that leave the domain take no time.
    - `allreduce_once_in_a_network`: an all-reduce costs as much as an all-gather (half) unless its group spans fast domains.
    - `summa_norm_is_seq_wide`: under SUMMA a LayerNorm is as wide as the sequence is long, so its work, its parameters and
      the bytes sent between stages are too large or too small by seq/hidden.
    - `whole_biases_in_1d`: under 1D the biases behind row-split products are added to all tokens on every rank, although the
      tokens are split there.
    - `efficiency`: the share of peak FLOP/s that every operator reaches. `launch_seconds`: what each adds, twice per layer
      and microbatch (forward, backward). `network_efficiency`: the share of the networks' peak.
    """

    free_crossing_p2p: bool = True
    allreduce_once_in_a_network: bool = True
    summa_norm_is_seq_wide: bool = True
    whole_biases_in_1d: bool = True
    efficiency: float = 0.8
    launch_seconds: float = 20e-6
    network_efficiency: float = 0.7


PUBLISHED = Quirks()
CORRECTED = Quirks(
    free_crossing_p2p=False,
    allreduce_once_in_a_network=False,
    summa_norm_is_seq_wide=False,
    whole_biases_in_1d=False,
)
