"""Run emitted stage files, and provide the functions they call (`from autoptd import runtime as rt`)."""

from autoptd.ir.own_functions import apply_function
from autoptd.ir.types import Zigzag
from autoptd.runtime.ops.attention import causal_attention
from autoptd.runtime.ops.classes import (
    classes_argmax,
    classes_gather,
    classes_log_softmax,
    classes_logsumexp,
    classes_softmax,
)
from autoptd.runtime.ops.conversions import (
    i_to_p,
    i_to_r,
    i_to_s,
    p_to_i,
    p_to_r,
    p_to_s,
    r_to_i,
    r_to_p,
    r_to_s,
    s_to_i,
    s_to_p,
    s_to_r,
    s_to_s,
)
from autoptd.runtime.ops.dropout import dropout, exponential, normal, uniform
from autoptd.runtime.ops.experts import by_expert, expert_rows, grouped_mm, put_rows, take_rows
from autoptd.runtime.ops.linear import all_gather_again, linear
from autoptd.runtime.ops.recompute import as_in_forward
from autoptd.runtime.ops.shards import join_shards, pad_shard, take_shard
from autoptd.runtime.ops.vocab import (
    count_labels,
    cross_entropy,
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
)
from autoptd.runtime.step.per_step import BufferUpdates
from autoptd.runtime.step.stage import Largest, Stage
from autoptd.runtime.step.standalone import main

__all__ = [
    "BufferUpdates",
    "Largest",
    "Stage",
    "Zigzag",
    "all_gather_again",
    "apply_function",
    "as_in_forward",
    "by_expert",
    "causal_attention",
    "classes_argmax",
    "classes_gather",
    "classes_log_softmax",
    "classes_logsumexp",
    "classes_softmax",
    "count_labels",
    "cross_entropy",
    "dropout",
    "expert_rows",
    "exponential",
    "grouped_mm",
    "i_to_p",
    "i_to_r",
    "i_to_s",
    "join_shards",
    "linear",
    "main",
    "normal",
    "p_to_i",
    "p_to_r",
    "p_to_s",
    "pad_shard",
    "put_rows",
    "r_to_i",
    "r_to_p",
    "r_to_s",
    "s_to_i",
    "s_to_p",
    "s_to_r",
    "s_to_s",
    "take_rows",
    "take_shard",
    "uniform",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
]
