"""Texts of emitted files beside their code: the plan, the words, what is summed once a step.

In: options, batch, parameters and orders. Out: an `About` per stage, which codegen writes at the head and
the end of the stage's file.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoptd.codegen import About
from autoptd.compiler.batch import Batch
from autoptd.ir.actions import Orders, ranks_of_stages
from autoptd.ir.mesh import AXES
from autoptd.options import PRECISIONS, Options
from autoptd.program.buckets import plan_buckets
from autoptd.program.specs import ParamSpec
from autoptd.program.stage_sums import stage_sums

ABOUT_TYPES = "I invariant, R replicated with a partial gradient, P partial sum, S sharded; p_to_i: P to I."
ABOUT_COLLECTIVES = (
    "AR all-reduce, AG all-gather, RS reduce-scatter, A2A all-to-all, fwd in forward, bwd in backward, "
    "with the",
    "bytes of the whole value. A sum with owned=True is made in place: nobody else reads what is summed.",
)


def about_stages(
    options: Options, batch: Batch, params: tuple[ParamSpec, ...], orders: Orders, wgrad_sink: str
) -> list[About]:
    """Return the texts of every stage's file; `wgrad_sink` is what takes weight gradients (see `Context`)."""
    ranks = ranks_of_stages(orders)
    mesh = options.mesh
    buckets = [plan_buckets(params, orders, ranks, mesh, rank) for rank in range(mesh.pipeline_ranks)]
    stages = []
    for stage, rank in enumerate(ranks):
        header = about(options, batch, ranks, stage, wgrad_sink)
        sums = stage_sums(buckets[rank], stage, mesh)
        stages.append(About(header, ABOUT_COLLECTIVES, ranks, sums))
    return stages


def about(options: Options, batch: Batch, ranks: Sequence[int], stage: int, wgrad_sink: str) -> list[str]:
    """Return the header of a stage file; `ranks` are the pipeline ranks of all stages."""
    rank, m, mesh = ranks[stage], batch.num_microbatches, options.mesh
    # Chunks of a rank are counted in the order of its stages.
    chunk = ranks[:stage].count(rank)
    microbatches = f"{m} microbatch{'es' if m > 1 else ''}"
    rows = f"{batch.rows} row{'s' if batch.rows > 1 else ''}"
    alike = [AXES[axis].word for axis in (*mesh.value_axes, *mesh.batch_axes)]
    read = (*mesh.value_axes, *(mesh.batch_axes if batch.mixes else ()))
    groups = [f"`{axis}`: the {AXES[axis].word}-parallel group" for axis in read]
    lines = [
        f"Stage {stage} of {options.num_stages}: model chunk {chunk} of pipeline rank {rank}.",
        "Written by AutoPTD, to be read, stepped through and run again. "
        f"All {', '.join(alike[:-1])} and {alike[-1]} ranks have the same file.",
        f"plan: {mesh}, v={options.v}, {microbatches} of {rows} per replica, "
        f"schedule {options.schedule_name}.",
        f"Shapes are a rank's, of one microbatch. `w`: parameters, `b`: buffers, {', '.join(groups)}.",
    ]
    if mesh.value_ranks > 1:
        lines.append(f"Types over {', '.join(mesh.value_axes)}: {ABOUT_TYPES}")
    return [*lines, *_about_hooks(options, wgrad_sink), *_about_dtypes(options)]


def _about_hooks(options: Options, wgrad_sink: str) -> list[str]:
    """Explain `rt.linear`, where the file has any."""
    hooks = []
    if options.hooks.async_allreduce:
        groups = " or ".join(f"overlap={axis}" for axis in options.mesh.value_axes)
        hooks.append(f"{groups} all-reduces the gradient of the input while the weight's is computed")
    if wgrad_sink == "main_grads":
        hooks.append("wgrad=self.main_grads adds the weight's gradient to the sum from within the GEMM")
    if wgrad_sink == "deferred":
        hooks.append("wgrad=self.deferred leaves the weight's gradient to action W")
    return [f"rt.linear is F.linear with hooks on its backward: {'; '.join(hooks)}."] if hooks else []


def _about_dtypes(options: Options) -> list[str]:
    """Explain in what parameters are read and gradients add up."""
    lines = []
    if options.precision:
        dtype = PRECISIONS[options.precision]
        which = f"Of `w`, what is read in {dtype} alone" if options.is_mixed else "`w`"
        lines.append(
            f"{which} is in {dtype}, cast from the float32 storage that the optimizer steps. "
            "Gradients add up in float32."
        )
    if options.hooks.fp32_gradients:
        lines.append("All gradients add up in float32 (float64 for float64): parameter.main_grad.")
    return lines
