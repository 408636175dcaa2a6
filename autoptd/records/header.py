"""What emitted files say beside their code: of which plan they are, what their words mean, what is summed
once a step.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoptd.batch import Batch
from autoptd.codegen import About
from autoptd.ir.actions import Orders, ranks_of_stages
from autoptd.options import Options
from autoptd.program.buckets import plan_buckets
from autoptd.program.specs import ParamSpec
from autoptd.program.stage_sums import stage_sums

ABOUT_TYPES = "Types over tp: I invariant, R replicated with a partial gradient, P partial sum, S sharded; p_to_i: P to I."
ABOUT_COLLECTIVES = (
    "AR all-reduce, AG all-gather, RS reduce-scatter, A2A all-to-all, fwd in forward, bwd in backward, with the",
    "bytes of the whole value. A sum with owned=True is made in place: nobody else reads what is summed.",
)


def about_stages(
    options: Options, batch: Batch, params: tuple[ParamSpec, ...], orders: Orders, wgrad_sink: str
) -> list[About]:
    """What the compiler says of every stage."""
    ranks = ranks_of_stages(orders)
    buckets = [plan_buckets(params, orders, ranks, options.mesh, pp) for pp in range(options.p)]
    found = []
    for stage, rank in enumerate(ranks):
        header = about(options, batch, ranks, stage, wgrad_sink)
        found.append(About(header, ABOUT_COLLECTIVES, ranks, stage_sums(buckets[rank], stage, options.mesh)))
    return found


def about(options: Options, batch: Batch, ranks: Sequence[int], stage: int, wgrad: str) -> list[str]:
    """The header of a stage file; `ranks` are the pipeline ranks of all stages, `wgrad` what takes weight
    gradients.
    """
    b, m, rank = batch.rows, batch.num_microbatches, ranks[stage]
    return [
        f"Stage {stage} of {options.num_stages}: model chunk {ranks[:stage].count(rank)} of pipeline rank {rank}.",
        "Written by AutoPTD, to be read, stepped through and run again. All tensor and data ranks have the same file.",
        f"plan: {options.mesh}, v={options.v}, {m} microbatch{'es' if m > 1 else ''} of {b} row{'s'[: b > 1]} per replica, "
        f"schedule {options.schedule_name}.",
        "Shapes are a rank's, of one microbatch. `w`: parameters, `b`: buffers, `tp`: the tensor-parallel group.",
        *([ABOUT_TYPES] if options.t > 1 else []),
        *_about_hooks(options, wgrad),
    ]


def _about_hooks(options: Options, wgrad: str) -> list[str]:
    """What an `rt.linear` in the file means, where there are any."""
    said = []
    if options.async_tensor_model_parallel_allreduce:
        said.append("overlap=tp all-reduces the gradient of the input while the weight's is computed")
    if wgrad == "main_grads":
        said.append("wgrad=self.main_grads adds the weight's gradient to the sum from within the GEMM")
    if wgrad == "deferred":
        said.append("wgrad=self.deferred leaves the weight's gradient to action W")
    lines = [f"rt.linear is F.linear with hooks on its backward: {'; '.join(said)}."] if said else []
    if options.accumulate_allreduce_grads_in_fp32:
        lines.append("All gradients add up in float32 (float64 for float64): parameter.main_grad.")
    return lines
