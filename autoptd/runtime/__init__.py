"""What emitted stage files import (`from autoptd import runtime as rt`), and what runs them."""

from autoptd.ir.types import Zigzag
from autoptd.runtime.again import as_in_forward
from autoptd.runtime.attention import causal_attention
from autoptd.runtime.buffer_updates import BufferUpdates
from autoptd.runtime.classes import (
    classes_argmax,
    classes_gather,
    classes_log_softmax,
    classes_logsumexp,
    classes_softmax,
)
from autoptd.runtime.conversions import (
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
from autoptd.runtime.dropout import dropout
from autoptd.runtime.experts import by_expert, expert_rows, grouped_mm, put_rows, take_rows
from autoptd.runtime.functions import apply_function
from autoptd.runtime.linear import linear
from autoptd.runtime.losses import count_labels
from autoptd.runtime.noise import exponential, normal, uniform
from autoptd.runtime.regather import all_gather_again
from autoptd.runtime.shards import join_shards, pad_shard, take_shard
from autoptd.runtime.stage import Largest, Stage
from autoptd.runtime.standalone import main
from autoptd.runtime.vocab import cross_entropy, vocab_parallel_cross_entropy, vocab_parallel_embedding
from autoptd.runtime.world.world import Communicators, Group, World

__all__ = [
    "BufferUpdates",
    "Communicators",
    "Group",
    "Largest",
    "Stage",
    "World",
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
