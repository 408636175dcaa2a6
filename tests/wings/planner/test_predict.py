"""Predictions: parts add up, the closed form agrees with the simulated schedule, memory is that of published
formulas.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoptd.errors import PlanError
from autoptd.ir.machine import FOLDER, machine_names
from autoptd.wings.planner.cluster import Cluster, Software, find_cluster, find_software, read_cluster
from autoptd.wings.planner.counts import State, count_activations, split_layers, state_bytes
from autoptd.wings.planner.estimate import estimate
from autoptd.wings.planner.predict import Prediction, predict
from autoptd.wings.planner.setting import Setting
from autoptd.wings.planner.shape import Shape
from autoptd.wings.planner.terms import Clock, Network, count_terms

GPT3 = Shape(layers=96, hidden=12288, heads=96, seq=2048)
TRILLION = Shape(layers=128, hidden=25600, heads=160, seq=2048)
BASE: dict[str, Any] = {"t": 8, "p": 8, "d": 2, "batch": 64, "recompute": "full"}
WAYS: list[dict[str, Any]] = [
    BASE,
    BASE | {"v": 3},
    BASE | {"p": 1, "microbatch": 2},
    BASE | {"p": 7},
    BASE | {"sequence_parallel": True, "recompute": "selective"},
    BASE | {"zero": 1, "t": 4, "c": 2},
    BASE | {"recompute": "full:1/2"},
    BASE | {"zero": 3, "p": 1, "t": 1, "d": 16},
    BASE | {"schedule": "gpipe"},
    BASE | {"precision": "fp32", "d": 1},
]


def ids(way: dict[str, Any]) -> str:
    return "-".join(f"{name}{value}" for name, value in way.items() if BASE.get(name) != value) or "base"


@pytest.mark.parametrize("way", WAYS, ids=ids)
def test_parts_add_up_and_the_closed_form_agrees_with_the_simulation(way: dict[str, Any]) -> None:
    found = predict(GPT3, "dgx-a100", **way)
    assert found.step_seconds == pytest.approx(sum(found.breakdown.values()))
    assert min(found.breakdown.values()) >= 0
    assert found.memory == pytest.approx(
        [sum(row) for row in zip(*found.memory_breakdown.values(), strict=True)]
    )
    assert len(found.memory) == way["p"]
    closed = estimate(GPT3, "dgx-a100", Setting(**way))
    assert closed.step_seconds == pytest.approx(found.step_seconds, rel=0.01)
    assert closed.memory_bytes == pytest.approx(max(found.memory), rel=0.03)
    for name, seconds in found.breakdown.items():
        assert closed.breakdown[name] == pytest.approx(seconds, abs=0.01 * found.step_seconds), name


@pytest.mark.parametrize("cluster", ["dgx-a100", "dgx-h100"])
@pytest.mark.parametrize("m", [1, 3, 7, 8, 9, 15, 16, 17, 41])
@pytest.mark.parametrize("schedule", ["interleaved", "looped_bfs"])
def test_the_closed_form_knows_microbatches_that_p_does_not_divide(
    schedule: str, m: int, cluster: str
) -> None:
    """Fewer than p wait for the way around the ranks, chunk by chunk.

    More go in groups that are larger than p.
    """
    way: dict[str, Any] = {"t": 8, "p": 8, "v": 3, "batch": m, "schedule": schedule}
    found, closed = predict(GPT3, cluster, **way), estimate(GPT3, cluster, Setting(**way))
    assert closed.step_seconds == pytest.approx(found.step_seconds, rel=0.01)
    assert closed.memory_bytes == pytest.approx(max(found.memory), rel=0.03)


@pytest.mark.parametrize("m", [4, 12, 18])
def test_stages_that_share_a_node_have_shorter_ways(m: int) -> None:
    way: dict[str, Any] = {"p": 12, "v": 4, "batch": m, "precision": "bf16"}
    shape = Shape(layers=48, hidden=6144, heads=64, seq=2048)
    found, closed = predict(shape, "dgx-h100", **way), estimate(shape, "dgx-h100", Setting(**way))
    assert closed.step_seconds == pytest.approx(found.step_seconds, rel=0.02)


@pytest.mark.parametrize("m", [1, 7, 8, 9, 20, 64])
def test_messages_beside_computation_hold_up_rounds_of_1f1b(m: int) -> None:
    """With p microbatches in flight each round waits for the messages there and back, where no stage is much
    the longest.
    """
    slow = find_cluster("dgx-h100")
    slow = replace(slow, network=replace(slow.network, message=2e-2))
    way: dict[str, Any] = {"t": 8, "p": 8, "batch": m}
    found, closed = predict(GPT3, slow, **way), estimate(GPT3, slow, Setting(**way))
    assert closed.step_seconds == pytest.approx(found.step_seconds, rel=0.02)


@pytest.mark.parametrize("way", [{"p": 5, "v": 2}, {"p": 8, "v": 5, "recompute": "none"}, {"p": 13}], ids=ids)
def test_layers_that_do_not_divide_are_estimated_less_closely(way: dict[str, Any]) -> None:
    way = {**BASE, "batch": 16 * way["p"], **way}
    found, closed = predict(GPT3, "dgx-a100", **way), estimate(GPT3, "dgx-a100", Setting(**way))
    assert closed.step_seconds == pytest.approx(found.step_seconds, rel=0.07)
    assert closed.memory_bytes == pytest.approx(max(found.memory), rel=0.1)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "looped_bfs", "zb_h1", "zb_2p"])
def test_every_schedule_has_its_closed_form(schedule: str) -> None:
    v = 3 if schedule in ("interleaved", "looped_bfs") else 1
    way = {**BASE, "schedule": schedule, "v": v, "recompute": "none"}
    found, closed = predict(GPT3, "dgx-a100", **way), estimate(GPT3, "dgx-a100", Setting(**way))
    assert closed.step_seconds == pytest.approx(found.step_seconds, rel=0.05 if schedule == "zb_2p" else 0.02)
    assert closed.memory_bytes == pytest.approx(max(found.memory), rel=0.02)
    zbv = {**BASE, "schedule": "zbv", "v": 2}
    assert (
        estimate(GPT3, "dgx-a100", Setting(**zbv)).step_seconds
        < predict(GPT3, "dgx-a100", **zbv).step_seconds
    )


def test_arrays_of_candidates_give_what_each_alone_gives() -> None:
    ways = [(8, 8, 2, 1, 1), (8, 12, 1, 2, 1), (4, 4, 4, 1, 2), (1, 96, 1, 1, 1), (16, 2, 2, 2, 4)]
    t, p, d, v, b = (np.array(column) for column in zip(*ways, strict=True))
    together = estimate(GPT3, "dgx-a100", Setting(t, p, d, v=v, microbatch=b, batch=128))
    for i, way in enumerate(ways):
        alone = estimate(GPT3, "dgx-a100", Setting(*way[:3], v=way[3], microbatch=way[4], batch=128))
        assert together.step_seconds[i] == pytest.approx(float(alone.step_seconds), rel=1e-12)
        assert together.memory_bytes[i] == pytest.approx(float(alone.memory_bytes), rel=1e-12)


def test_a_long_schedule_is_not_simulated_whole_and_takes_as_long() -> None:
    way = {**BASE, "v": 3, "batch": 512}
    whole = predict(GPT3, "dgx-a100", **way, max_actions=10**6)
    short = predict(GPT3, "dgx-a100", **way, max_actions=2000)
    assert short.step_seconds == pytest.approx(whole.step_seconds, rel=1e-9)
    assert short.memory == pytest.approx(whole.memory)


def activations(found: Prediction) -> float:
    """GB of the second pipeline rank, which has no embedding, as if it were the first: one more microbatch in
    flight.
    """
    return found.memory_breakdown["activations"][1] / 1e9 * 64 / 63


def test_memory_of_the_trillion_parameter_model_is_that_of_the_formulas() -> None:
    """SC'21's largest: 1.97e9 parameters a GPU, 39 GB at 20 bytes.

    Activations of the first stage by Korthikanti et al.
    """
    way: dict[str, Any] = {"t": 8, "p": 64, "d": 6, "batch": 3072, "precision": "fp16"}
    full = predict(TRILLION, "dgx-a100", **way, recompute="full")
    held = [full.memory_breakdown[name][1] for name in ("parameters", "gradients", "optimizer")]
    assert sum(held) / 20 == pytest.approx(1.97e9, rel=2e-3)
    assert activations(full) == pytest.approx(13.4, rel=0.01)  # 128 layers' inputs of 105 MB
    assert activations(predict(TRILLION, "dgx-a100", **way)) == pytest.approx(141, rel=0.01)
    less = predict(TRILLION, "dgx-a100", **way, recompute="selective", sequence_parallel=True)
    assert activations(less) == pytest.approx(28.5, rel=0.01)
    assert full.fits and not predict(TRILLION, "dgx-a100", **way).fits


def test_a_mix_of_recomputed_layers_lies_between_the_two() -> None:
    """Seconds of what is computed again, and bytes of layers: in proportion to the share."""
    way: dict[str, Any] = {"t": 8, "p": 8, "d": 1, "batch": 32}
    none, half, full = (
        predict(GPT3, "dgx-a100", **way, recompute=mode) for mode in ("none", "full:1/2", "full")
    )
    assert half.breakdown["recompute"] == pytest.approx(full.breakdown["recompute"] / 2)
    middle = (none.memory_breakdown["activations"][3] + full.memory_breakdown["activations"][3]) / 2
    assert half.memory_breakdown["activations"][3] == pytest.approx(middle)
    assert (
        half.memory_breakdown["buffers"] == full.memory_breakdown["buffers"]
    )  # a layer that is computed again is one
    assert none.flops_per_gpu > half.flops_per_gpu > full.flops_per_gpu
    again = [one.hardware_flops_per_gpu / one.flops_per_gpu - 1 for one in (half, full)]
    assert again[1] == pytest.approx(2 * again[0])


def test_bytes_per_parameter() -> None:
    def held(precision: str, zero: int, d: int) -> float:
        one = predict(
            GPT3, "perlmutter", d=d, batch=d, zero=zero, precision=precision, recompute="full"
        ).memory_breakdown
        return float(sum(one[name][0] for name in ("parameters", "gradients", "optimizer"))) / GPT3.parameters

    assert held("bf16", 0, 4) == pytest.approx(18)
    assert held("bf16", 1, 4) == pytest.approx(6 + 12 / 4)
    assert held("fp16", 0, 4) == pytest.approx(20)
    assert held("fp16", 1, 4) == pytest.approx(4 + 16 / 4)
    assert held("fp32", 1, 4) == pytest.approx(8 + 8 / 4)
    assert held("bf16", 3, 4) == pytest.approx(18 / 4)
    # Of this project's runtime: the gradient is there once, in float32.
    assert state_bytes(Setting(precision="fp16"), find_software("autoptd")) == State(2, 4, 12)


def test_what_helps_helps() -> None:
    base = predict(GPT3, "dgx-a100", **BASE)
    assert predict(GPT3, "dgx-a100", **BASE | {"v": 3}).breakdown["bubble"] < base.breakdown["bubble"] / 2
    assert predict(GPT3, "dgx-a100", **BASE | {"recompute": "none"}).step_seconds < base.step_seconds
    within = predict(GPT3, "dgx-a100", **BASE | {"batch": 1536}).step_seconds
    across = predict(GPT3, "dgx-a100", **BASE | {"batch": 1536, "t": 16, "p": 4}).step_seconds
    assert across > 1.3 * within  # SC'21, takeaway 1: tensor parallelism up to the node
    assert base.flops_per_gpu * 4 / 3 == pytest.approx(base.hardware_flops_per_gpu, rel=0.01)


# The last: 16 copies of 8 KV heads of 128 elements.
@pytest.mark.parametrize(
    "kv_heads, c, elements",
    [
        (8, 8, (2 * 4096 + 2 * 1024) / 8),
        (4, 8, 2 * 512),
        (2, 8, 2 * 256),
        (8, 16, (2 * 4096 + 2 * 2048) / 16),
    ],
)
def test_ranks_with_other_tokens_attend_as_the_solver_has_it(kv_heads: int, c: int, elements: float) -> None:
    """Heads are exchanged where c divides them, a c-th of each value, or copies of them; else keys and values are gathered."""
    seq, speed = 8192, 1e9
    shape = Shape(layers=4, hidden=4096, heads=32, kv_heads=kv_heads, seq=seq)
    base = replace(find_cluster("dgx-h100"), gpus_per_node=c)
    fast = replace(base.fast, latency=0.0, small_latency=0.0, bandwidth=speed, fraction=1.0)
    exposed = {}
    for context in ("ring", "solved"):
        software = replace(base.software, context=context)
        layer = count_terms(
            shape, replace(base, fast=fast, software=software), Setting(c=c, precision="bf16")
        ).layer
        exposed[context] = layer.exposed_forward, layer.exposed_backward
    each_way = 2 * seq * elements * (c - 1) / c / speed
    assert exposed["solved"] == pytest.approx((each_way, each_way))
    # Keys and values of all others are kept, a ring keeps its own.
    kept = [
        count_activations(
            shape, replace(base, software=replace(base.software, context=context)), Setting(c=c)
        ).layer
        for context in ("ring", "solved")
    ]
    assert kept[1] - kept[0] == (2 * seq * elements * (c - 1) / c if kv_heads < 8 else 0)
    # A ring moves keys and values, and both ways as much as it can beside attention.
    whole = 2 * seq * 2 * 128 * kv_heads * (c - 1) / c / speed
    assert exposed["ring"][0] < whole and exposed["ring"][1] < 2 * whole


def test_placement_on_a_node_is_by_rank_order_unless_given() -> None:
    assert [Setting(t=4, c=2, d=4, p=8).local(axis, 16) for axis in ("tp", "cp", "dp", "pp")] == [4, 2, 2, 1]
    assert [Setting(t=16, d=2).local(axis, 8) for axis in ("tp", "dp")] == [8, 1]
    slow = predict(GPT3, "dgx-a100", **BASE, placement={"tp": 1, "dp": 2, "pp": 4})
    assert slow.breakdown["tp_comm"] > 3 * predict(GPT3, "dgx-a100", **BASE).breakdown["tp_comm"]


def test_ranks_that_do_not_divide_a_node_are_spread_over_two() -> None:
    """The fewest that a group has on one of its nodes, against going through all groups."""
    assert [Setting(t=t, p=8).local("tp", 8) for t in (2, 3, 6, 8, 12, 16)] == [2, 1, 2, 8, 4, 8]
    assert Setting(t=6).local("tp", 8) == 6  # all ranks on one node
    for t, d, p, node in itertools.product((1, 2, 3, 4, 6, 12), (1, 2, 3, 8), (1, 4, 9), (4, 8)):
        setting = Setting(t=t, d=d, p=p)
        for axis, degree, stride in (("tp", t, 1), ("dp", d, t)):
            firsts = [rank for rank in range(t * d * p) if rank // stride % degree == 0]
            groups = [[(first + i * stride) // node for i in range(degree)] for first in firsts]
            assert setting.local(axis, node) <= min(nodes.count(one) for nodes in groups for one in nodes)
        rows, of_stage = setting.local("pp", node), t * d
        for stage in range(p - 1):
            is_local = all(
                (stage * of_stage + i) // node == ((stage + 1) * of_stage + i) // node
                for i in range(of_stage)
            )
            assert is_local or stage // rows != (stage + 1) // rows
    way: dict[str, Any] = {"batch": 96, "recompute": "full", "precision": "fp16"}
    six, eight = (predict(GPT3, "dgx-a100", t=t, p=48 // t, **way) for t in (6, 8))
    assert six.breakdown["tp_comm"] > 2 * eight.breakdown["tp_comm"]
    spread = predict(GPT3, "dgx-a100", t=6, p=8, **way, placement={"tp": 2, "pp": 1})
    assert six.step_seconds == pytest.approx(spread.step_seconds)


def test_zbv_has_both_ends_on_its_first_rank() -> None:
    llama = Shape(
        layers=32, hidden=4096, heads=32, seq=8192, vocab=128256, ffn=14336, kv_heads=8, mlp_matrices=3
    )
    way: dict[str, Any] = {"p": 4, "v": 2, "batch": 16, "schedule": "zbv"}
    found = predict(llama, "dgx-h100", **way)
    held = found.memory_breakdown["parameters"]
    ends = 2 * llama.vocab * llama.hidden + llama.norm_parameters
    assert held[0] - held[1] == pytest.approx(2 * ends) and held[1] == held[2] == held[3]
    logits = found.memory_breakdown["buffers"]
    assert logits[0] > logits[1] == logits[3]
    closed = estimate(llama, "dgx-h100", Setting(**way))
    assert closed.memory_bytes == pytest.approx(max(found.memory), rel=0.1)
    assert closed.step_seconds <= found.step_seconds
    tied = replace(llama, tied=True)
    once = predict(tied, "dgx-h100", **way)
    assert held[0] - once.memory_breakdown["parameters"][0] == pytest.approx(2 * llama.vocab * llama.hidden)
    assert once.breakdown["dp_comm"] == 0  # no copies to sum


def test_zero_pays_for_what_it_cuts() -> None:
    """Stage 2 sums gradients in every microbatch, stage 3 fetches the ends of the model as well as its
    layers.
    """
    small = Shape(layers=4, hidden=4096, heads=32, seq=2048)

    def once(zero: int, m: int, vocab: int = 1024) -> float:
        shape = replace(small, vocab=vocab)
        return predict(shape, "dgx-a100", d=64, batch=64 * m, zero=zero, recompute="full").breakdown[
            "dp_comm"
        ]

    assert once(1, 8) == pytest.approx(once(1, 1)) and once(2, 1) == pytest.approx(once(1, 1), rel=0.2)
    assert once(2, 8) > 4 * once(2, 1)
    assert once(3, 1, 128000) - once(3, 1) > 2 * (once(1, 1, 128000) - once(1, 1)) / 3
    held = [
        predict(small, "dgx-a100", d=64, batch=64, zero=zero).memory_breakdown["buffers"][0]
        for zero in (0, 1, 2, 3)
    ]
    assert held[0] == held[1] < held[2] < held[3]


def test_a_vocabulary_that_does_not_divide() -> None:
    """Padded over tensor ranks.

    Single products of odd sizes are slower in 16 bits only, and not as much as attention's.
    """
    odd, even = (Shape(layers=12, hidden=768, heads=12, seq=1024, vocab=vocab) for vocab in (50257, 50304))

    def apart(**way: Any) -> float:
        one, other = (predict(shape, "dgx-a100", batch=64, **way).step_seconds for shape in (odd, even))
        return one / other - 1

    assert 0.03 < apart(microbatch=16, software="autoptd") < 0.4
    assert abs(apart(microbatch=16, software="autoptd", precision="fp32")) < 0.01
    part = predict(odd, "dgx-a100", t=4, batch=4).memory_breakdown["parameters"][0]
    whole = predict(replace(odd, vocab=4 * 12608), "dgx-a100", t=4, batch=4).memory_breakdown["parameters"][0]
    assert part == whole


def test_collectives_on_two_levels() -> None:
    network = Network(find_cluster("dgx-a100"))
    cluster = network.cluster
    large, fast = 1e10, cluster.fast.bandwidth * cluster.fast.fraction
    cards = cluster.network.bandwidth * cluster.network.fraction
    assert float(network.all_gather(large, 8, 8)) == pytest.approx(large * 7 / 8 / fast, rel=0.01)
    assert float(network.all_reduce(large, 8, 8)) == pytest.approx(2 * large * 7 / 8 / fast, rel=0.01)
    assert float(network.all_gather(large, 32, 8)) == pytest.approx(large * 31 / 32 / (8 * cards), rel=0.01)
    assert float(network.all_gather(large, 4, 1)) == pytest.approx(large * 3 / 4 / cards, rel=0.01)
    assert float(network.all_gather(large, 1, 1)) == 0.0
    small, many = float(network.all_reduce(1e3, 512, 8)), float(network.all_reduce(1e3, 64, 8))
    assert cluster.network.small_latency < many < small  # hops count where bytes do not
    meshed = replace(cluster, switched=False)
    assert Network(meshed).bandwidth(2, 1) == pytest.approx(fast / 7)


def test_products_have_a_roof_that_knows_their_shape() -> None:
    clock = Clock(find_cluster("dgx-a100"))
    peak = clock.cluster.gpu.matrix_flops

    def rate(m: int, n: int, k: int, batch: int = 1) -> float:
        return 2 * batch * m * n * k / float(clock.product(batch, m, n, k)) / peak

    assert 0.75 < rate(8192, 8192, 8192) < 0.87
    assert rate(8192, 8192, 128) < rate(8192, 8192, 1024) < rate(8192, 8192, 8192)
    assert rate(256, 256, 8192) < rate(2048, 2048, 8192) < rate(8192, 8192, 8192)
    assert rate(2048, 2048, 150, batch=8) < 0.2 * rate(2048, 2048, 152, batch=8)
    assert 0.4 < rate(8192, 8192, 8190) / rate(8192, 8192, 8192) < 0.6


def test_layers_that_do_not_divide_leave_the_ends_fewer() -> None:
    assert split_layers(106, 12, 1, 1, 1) == [8, *[9] * 10, 8]
    assert split_layers(96, 12, 1, 9, 1) == [8] * 12
    assert sum(split_layers(97, 13, 0, 0, 1)) == 97


@pytest.mark.parametrize("name", machine_names())
def test_every_cluster_file_can_be_read_and_names_its_source(name: str) -> None:
    cluster = find_cluster(name)
    assert cluster.source and cluster.name == name
    small = Shape(layers=2, hidden=128, heads=4, seq=128, vocab=512)
    precision = "fp32" if "cpu" in name else "fp16"
    assert predict(small, cluster, batch=4, precision=precision).step_seconds > 0


def test_an_edited_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    for rate in ("39e9", "78e9"):
        file.write_text(
            (FOLDER / "laptop-cpu.toml").read_text().replace("matrix_flops = 39e9", f"matrix_flops = {rate}")
        )
        assert find_cluster(file).gpu.matrix_flops == float(rate)


def test_wrong_files_and_requests_are_refused() -> None:
    gpu = {"matrix_flops": 1e12, "float32_flops": 1e12, "memory_bytes": 1e9, "memory_bandwidth": 1e9}
    record = {"gpus_per_node": 1, "gpu": gpu, "fast": {"bandwidth": 1e9}, "network": {"bandwidth": 1e9}}
    assert isinstance(read_cluster(record, "mine"), Cluster)
    assert (
        read_cluster(record | {"software": {"base": "nemo-2024", "factor": 2.0}}, "mine").software.tp_overlap
        == 0.7
    )
    wrong: list[tuple[dict[str, Any], str]] = [
        (record | {"gpu": {**gpu, "speed": 1}}, "speed"),
        (record | {"gpu": {}}, "matrix_flops"),
        ({name: value for name, value in record.items() if name != "fast"}, "fast"),
        (record | {"software": "megatron-1999"}, "megatron-1999"),
        (record | {"software": 3}, "neither a name nor a table"),
        (record | {"software": {"causal": 2.0}}, "causal=2.0"),
        (record | {"software": {"attention": "none"}}, "attention"),
        (record | {"gpu": 3}, "not a table"),
        (record | {"gpu": "h1000"}, "no such GPU.*h100"),
        (record | {"gpus_per_node": 0}, "gpus_per_node=0"),
        (record | {"gpus_per_node": 1.5}, "not an integer"),
        (record | {"fast": {"bandwidth": 0}}, "bandwidth=0"),
        (record | {"network": {"bandwidth": -1e9}}, "bandwidth=-1"),
        (record | {"gpu": {**gpu, "memory_bandwidth": "15e9"}}, "not a number"),
        (record | {"gpu": {**gpu, "matrix_fraction": 87}}, "0 to 1"),
        (record | {"gpu": {**gpu, "memory_bytes": float("nan")}}, "not a number"),
        (record | {"gpu": {**gpu, "bf16": 1}}, "not a bool"),
        (record | {"source": 1}, "not a str"),
    ]
    for one, told in wrong:
        with pytest.raises(PlanError, match=told):
            read_cluster(one, "mine")
    for cluster in ("dgx-a101", "no/such/file.toml"):
        with pytest.raises(PlanError, match="no such"):
            find_cluster(cluster)
    assert isinstance(find_software("megatron-2022"), Software)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"t": 0}, "t=0"),
        ({"batch": 63}, "batch=63"),
        ({"p": 97}, "p=97"),
        ({"t": 97}, "t=97"),
        ({"recompute": "some"}, "recompute"),
        ({"zero": 4}, "zero"),
        ({"precision": "fp8"}, "precision"),
        ({"v": 2, "schedule": "1f1b"}, "v=2"),
        ({"v": 2, "p": 1}, "v=2"),
        ({"placement": {"tp": 9}}, "placement"),
        ({"placement": {"ep": 1}}, "ep"),
        ({"placement": {"tp": 8, "dp": 2}}, "placement"),
        ({"placement": {"dp": 4}}, "placement"),
        ({"placement": {"dp": True}}, "placement"),
        ({"placement": {"dp": "2"}}, "placement"),
        ({"t": 5}, "t=5"),
        ({"t": 9, "p": 4}, "t=9"),
        ({"c": 3}, "c=3"),
        ({"sequence_parallel": True, "t": 96}, "sequence_parallel"),
    ],
)
def test_requests_that_make_no_sense_are_refused(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        predict(GPT3, "dgx-a100", **BASE | changed)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"hidden": "8"}, "hidden='8'"),
        ({"hidden": None}, "hidden missing"),
        ({"heads": 16.0}, "heads=16.0"),
        ({"hidden": 100, "heads": 3}, "hidden=100"),
        ({"ffn": -1}, "ffn=-1"),
        ({"tied": "yes"}, "tied='yes'"),
    ],
)
def test_shapes_that_make_no_sense_are_refused(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        predict({"layers": 2, "hidden": 64, "heads": 4, "seq": 8, **changed}, "dgx-a100", batch=1)


def test_a_gpu_without_bf16_is_not_asked_for_it() -> None:
    with pytest.raises(PlanError, match="no such products"):
        predict(GPT3, "dgx2h-v100", **BASE)
    assert predict(GPT3, "dgx2h-v100", **BASE, precision="fp16").step_seconds > 0
