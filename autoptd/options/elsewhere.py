"""Keywords of other tools, and what to write instead: Megatron-LM, torchtitan, DDP, FSDP, Accelerate,
DeepSpeed.

In: the name of an unknown keyword. Out: the remedy for the error message, or None for a name that no tool
has.

    remedy_for("tensor_model_parallel_size")        # "it is called t here"
"""

from __future__ import annotations

# Remedies that several names share.
PRECISION = 'precision="bf16" or "fp16": stages compute in that, the optimizer steps float32; "bf16-mixed" as autocast'
SCALE = (
    'precision="fp16" has a dynamic loss scale; loss_scale= fixes it, LossScale(initial=) is where it starts'
)
RANKS = "leave it out: t * p * d ranks run, as many as torchrun starts (--nproc-per-node)"
ROWS = "num_microbatches=m: a replica's rows of the batch are divided by it"
ZERO = (
    "zero=1 divides the optimizer's state over the replicas, zero=2 gradients too, zero=3 parameters too; Zero(3, shard=8) "
    "over groups of 8, Zero(3, reshard_after_forward=False) gathers once a step"
)
RECOMPUTE = 'recompute="full", "selective" or "auto"; torch.utils.checkpoint in the model is followed'
CLIPPING = "leave it out: pm.clip_grad_norm_(1.0) after pm.step"
OPTIMIZER = "leave it out: pm.optimizer(torch.optim.AdamW, lr=3e-4)"
DATA = "leave it out: pm.local_batch(x, y) cuts the global batch to this replica's rows"
UNNEEDED = "leave it out: nothing here needs it"
MISSING = "leave it out: it is not available"

# Modules of other libraries in a trace.
NORMS = "LayerNorm or GroupNorm, or .eval() of the batch norm, which then keeps its statistics"
SORTS = (
    "for experts, tokens that are sorted, multiplied by torch.nn.functional.grouped_mm and put back in order, separately "
    "in between"
)
EXPERTS = (
    'for the experts of transformers, from_config(config, experts_implementation="grouped_mm"), which sorts tokens '
    "by expert"
)

_REMEDIES = {
    "it is called t here": (
        "tp tp_size tp_degree tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size"
    ),
    "it is called p here": (
        "pp pp_size pp_degree pipeline_parallel pipeline_parallel_size pipeline_parallel_degree "
        "pipeline_model_parallel_size num_stages"
    ),
    "it is called d here": (
        "dp dp_size dp_degree data_parallel data_parallel_size data_parallel_degree dp_replicate num_replicas "
        "data_parallel_replicate_degree"
    ),
    "it is called v here": (
        "vp vpp vp_size num_model_chunks virtual_pipeline_model_parallel_size virtual_pipeline_parallel_size "
        "interleave pipeline_chunks"
    ),
    "sequence_parallel=True": "sp enable_sequence_parallel sequence_parallelism",
    "loss_fn=f, and targets= in pm.step": "loss criterion loss_function",
    'schedule="1f1b", "interleaved", ...': "pipeline_schedule pp_schedule pipeline_parallel_schedule",
    'fuse="inductor"': "torch_compile use_torch_compile compile_model",
    'plan={"cut": [layers of each stage]}': "split_points pipeline_split split_spec stages cut",
    'plan={"shard": [{"pattern": ..., "dim": ..., "axis": "tp"}]}': "parallelize_plan tp_plan shard_plan shard",
    "example_inputs=(x, y)": "inputs example_input sample_inputs dummy_inputs example_args args input",
    "seed=": "random_seed rng_seed manual_seed",
    "memory=, in bytes of a rank": "max_memory memory_limit memory_budget gpu_memory",
    'ranks=RankOptions(order="tp-cp-dp-pp"), the mesh axes, fastest first': "rank_order mesh_order mesh_dim_names",
    "leave it out: torch's default process group is used where there is one": (
        "process_group group device_mesh mesh pg init_process_group"
    ),
    "device=": "device_id device_ids devices map_location device_type",
    ROWS: (
        "micro_batch_size microbatch_size microbatches n_microbatches chunks gradient_accumulation_steps "
        "grad_accumulation_steps gradient_accumulation accumulate_grad_batches train_micro_batch_size_per_gpu"
    ),
    DATA: "batch_size global_batch_size train_batch_size local_batch_size",
    PRECISION: (
        "mixed_precision bf16 fp16 amp autocast mp_policy torch_dtype dtype param_dtype "
        "mixed_precision_param use_amp half bfloat16"
    ),
    SCALE: "grad_scaler scaler use_grad_scaler dynamic_loss_scale init_scale initial_scale_power",
    RANKS: "world_size nproc nproc_per_node num_gpus n_gpus ngpus num_nodes nnodes num_processes rank local_rank",
    ZERO: (
        "zero_stage zero_optimization fsdp fsdp2 sharding_strategy use_distributed_optimizer distributed_optimizer "
        "data_parallel_shard_degree optimizer_sharding"
    ),
    RECOMPUTE: (
        "gradient_checkpointing activation_checkpointing activation_checkpoint recompute_granularity recompute_method "
        "checkpointing recomputation remat ac"
    ),
    "it is called c here": (
        "cp cp_size context_parallel context_parallel_size context_parallel_degree ulysses_degree ring_degree"
    ),
    MISSING: (
        "fp8 use_fp8 enable_fp8 offload cpu_offload offload_optimizer offload_param offload_parameters offload_policy "
        "ep ep_size ep_degree expert_parallel expert_parallel_size expert_parallel_degree expert_model_parallel_size"
    ),
    CLIPPING: "max_grad_norm clip_grad clip_grad_norm gradient_clipping max_norm",
    OPTIMIZER: "optimizer optim optimizer_cls lr learning_rate weight_decay",
    UNNEEDED: (
        "find_unused_parameters gradient_as_bucket_view bucket_cap_mb static_graph broadcast_buffers auto_wrap_policy "
        "ignored_modules use_orig_params sync_module_states overlap_grad_reduce overlap_param_gather"
    ),
}
REMEDIES = {name: remedy for remedy, names in _REMEDIES.items() for name in names.split()}


def remedy_for(name: str) -> str | None:
    """Return what to write instead of another tool's keyword; None for a name that is not listed."""
    return REMEDIES.get(name)
