"""The cost model of Subramanian et al.: optima of their published code, its quirks one by one, sizes that must be refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoptd.errors import PlanError
from autoptd.wings.planner.search import search, take
from benchmarks.lib.subramanian import (
    CORRECTED,
    GPT3_1T,
    PUBLISHED,
    SYSTEMS,
    VIT_64K,
    Quirks,
    SubramanianModel,
    Transformer,
)
from benchmarks.lib.subramanian.times import Group, collective_seconds, send_seconds
from tests.wings.planner.test_search import as_rows, everything, is_bounded

# Optima of the authors' code (arXiv:2410.00273, commit 54278b0) at a batch of 4096: seconds, (t1, t2, p, d, b), how many of
# these axes share a fast domain (t1, t2, d, p), GB, and how many candidates there are; None: nothing fits.
OPTIMA: list[
    tuple[Transformer, str, int, int, str, float | None, tuple[int, ...], tuple[int, ...], float, int]
] = [
    (GPT3_1T, "A100", 4, 128, "1D", None, (), (), 0, 1281),
    (GPT3_1T, "A100", 8, 4096, "1D", 62.96902458085203, (8, 1, 32, 16, 1), (8, 1, 1, 1), 75.74442752, 2544),
    (GPT3_1T, "B200", 64, 4096, "1D", 8.847747144812418, (4, 1, 16, 64, 1), (4, 1, 8, 2), 153.15314944, 4032),
    (GPT3_1T, "A100", 4, 128, "2D", None, (), (), 0, 5863),
    (GPT3_1T, "A100", 8, 1024, "2D", 222.9785621308554, (4, 2, 64, 2, 1), (4, 2, 1, 1), 71.169093120, 18114),
    (GPT3_1T, "H200", 64, 8192, "2D", 10.722511726432339, (4, 4, 64, 8, 1), (4, 4, 2, 2), 39.02546656, 46344),
    (GPT3_1T, "A100", 64, 128, "SUMMA", None, (), (), 0, 11723),
    (
        GPT3_1T,
        "B200",
        64,
        512,
        "SUMMA",
        55.372934706590705,
        (2, 1, 64, 4, 1),
        (2, 1, 4, 8),
        177.004955648,
        44177,
    ),
    (VIT_64K, "A100", 4, 256, "1D", None, (), (), 0, 1296),
    (VIT_64K, "A100", 64, 1024, "2D", 1229.2698540603992, (4, 8, 8, 4, 1), (4, 8, 1, 2), 74.02621824, 22422),
    (VIT_64K, "A100", 64, 512, "SUMMA", 2370.37565938856, (8, 4, 2, 8, 1), (8, 4, 1, 2), 75.69703584, 26823),
    (
        VIT_64K,
        "H200",
        64,
        2048,
        "SUMMA",
        200.14532622761095,
        (4, 4, 8, 16, 1),
        (4, 4, 2, 2),
        139.66447464,
        49141,
    ),
]


def problem(
    shape: Transformer, system: str, domain: int, gpus: int, tensor: str, **keywords: Any
) -> SubramanianModel:
    return SubramanianModel(shape, SYSTEMS[system].with_domain(domain), gpus, 4096, tensor, **keywords)


@pytest.mark.parametrize("row", OPTIMA, ids=lambda row: f"{row[1]}x{row[3]}-{row[4]}-{row[0].layers}")
def test_published_optima(row: Any) -> None:
    shape, system, domain, gpus, tensor, seconds, config, inside, gigabytes, count = row
    model = problem(shape, system, domain, gpus, tensor)
    configs = model.configs()
    where, _ = model.variants(take(configs.columns, np.flatnonzero(configs.reason < 0)))
    assert len(where) == count
    found = search(model)
    if seconds is None:
        assert len(found) == 0
        assert found.least_memory > model.capacity_bytes
        return
    best = {name: int(values[0]) for name, values in found.columns.items()}
    assert found.seconds[0] == pytest.approx(seconds, rel=1e-9)
    assert tuple(best[name] for name in ("t1", "t2", "p", "d", "b")) == config
    assert tuple(best[name] for name in ("in_t1", "in_t2", "in_d", "in_p")) == inside
    assert found.memory[0] == pytest.approx(gigabytes * 1e9, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["1D", "2D", "SUMMA"]),
    st.sampled_from([1, 2, 6, 8, 16, 24, 32, 48, 64]),
    st.sampled_from([2, 4, 6, 8]),
    st.sampled_from([6, 8, 48, 96]),
    st.sampled_from([(4, 1024, 8), (6, 768, 12), (12, 4096, 32)]),
    st.sampled_from([2e8, 1e9, 1e11]),
    st.sampled_from([PUBLISHED, CORRECTED]),
)
def test_search_is_exact(tensor, gpus, domain, batch, sizes, memory, quirks) -> None:  # type: ignore[no-untyped-def]
    layers, hidden, heads = sizes
    shape = Transformer(layers, hidden, heads, 512, 4 * hidden)
    base = SYSTEMS["A100"].with_domain(domain)
    system = type(base)(**{**base.__dict__, "memory_bytes": memory})
    model = SubramanianModel(shape, system, gpus, batch, tensor, quirks)
    assert as_rows(search(model, 5, at_once=8)) == everything(model, 5)
    assert is_bounded(model)


def test_terms_add_up_and_bubble_is_a_share_of_the_rest() -> None:
    """A100, fast domains of 8, 4096 GPUs: the breakdown that their code gives."""
    model = problem(GPT3_1T, "A100", 4, 4096, "1D")
    found = search(model, keep=1)
    terms = {name: float(values[0]) for name, values in model.seconds_terms(found.columns).items()}
    published = {"compute": 50.9323274166482, "exposed_memory": 0.5185525934828857, "tp_comm": 10.90125824}
    published |= {"pp_comm": 0.38603922285714287, "dp_comm": 0.6606760628274619, "bubble": 7.597201178369669}
    assert terms == pytest.approx(published, rel=1e-9)
    held = {name: float(values[0]) / 1e9 for name, values in model.memory_terms(found.columns).items()}
    published = {
        "weights": 7.8656512,
        "gradients": 7.8656512,
        "optimizer": 2.9496192,
        "activations": 57.06350592,
    }
    assert held == pytest.approx(published, rel=1e-9)


def one_group(size: int, inside: int) -> Group:
    return Group(np.array([float(size)]), np.array([float(inside)]))


@pytest.mark.parametrize(("size", "inside", "times"), [(8, 8, 1.0), (8, 1, 1.0), (16, 8, 2.0)])
def test_quirk_allreduce(size: int, inside: int, times: float) -> None:
    """Twice an all-gather without the quirk; with it only where the group spans domains."""
    system = dataclasses.replace(SYSTEMS["A100"], fast_latency=0.0, slow_latency=0.0)
    group, bytes_ = one_group(size, inside), np.array([1e9])
    gather = collective_seconds("all_gather", bytes_, group, system, PUBLISHED)
    assert collective_seconds("all_reduce", bytes_, group, system, PUBLISHED) == pytest.approx(times * gather)
    assert collective_seconds("all_reduce", bytes_, group, system, CORRECTED) == pytest.approx(2 * gather)


def test_quirk_sends() -> None:
    """Of a pipeline of 8 with 4 ranks in a domain one boundary of 7 leaves it: free, or at the slow network's pace."""
    system, size, eight, four = SYSTEMS["A100"], np.array([1e8]), np.array([8.0]), np.array([4.0])
    fast, slow = 2.5e-6 + 1e8 / (300e9 * 0.7), 5e-6 + 1e8 / (25e9 * 0.7)
    assert send_seconds(size, eight, four, system, PUBLISHED) == pytest.approx(6 / 7 * fast)
    assert send_seconds(size, eight, four, system, CORRECTED) == pytest.approx(6 / 7 * fast + 1 / 7 * slow)
    assert send_seconds(size, eight, four / 4, system, CORRECTED) == pytest.approx(slow)
    assert send_seconds(size, eight / 8, four / 4, system, CORRECTED) == 0.0


def test_quirk_norm_and_biases() -> None:
    """A LayerNorm under SUMMA keeps seq, not hidden elements of a token; biases under 1D are larger than needed."""
    found = {}
    for name, tensor in (("summa_norm_is_seq_wide", "SUMMA"), ("whole_biases_in_1d", "1D")):
        for is_on in (True, False):
            quirks = dataclasses.replace(PUBLISHED, **{name: is_on})
            model = problem(GPT3_1T, "B200", 64, 4096, tensor, quirks=quirks)
            config = {
                "t1": 8,
                "t2": 1,
                "p": 16,
                "d": 32,
                "b": 1,
                "in_t1": 8,
                "in_t2": 1,
                "in_d": 8,
                "in_p": 1,
                "panels": 8,
            }
            columns = {key: np.array([value]) for key, value in config.items()}
            found[name, is_on] = model.memory_terms(columns), model.seconds_terms(columns)
    kept = [found["summa_norm_is_seq_wide", is_on][0]["activations"][0] for is_on in (False, True)]
    norms = (
        2 * 2.0 * 2048 * (25600 - 2048) / 8 * (128 / 16) * 16
    )  # 2 norms, 8 layers, 16 microbatches in flight
    assert kept[0] - kept[1] == pytest.approx(norms)
    compute = [found["whole_biases_in_1d", is_on][1]["compute"][0] for is_on in (True, False)]
    assert compute[0] > compute[1]


def test_correction_changes_the_answer() -> None:
    model = problem(GPT3_1T, "A100", 64, 512, "1D")
    right = problem(GPT3_1T, "A100", 64, 512, "1D", quirks=CORRECTED)
    assert search(right).seconds[0] != pytest.approx(search(model).seconds[0], rel=1e-4)
    assert Quirks(False, False, False, False) == CORRECTED


@pytest.mark.parametrize(
    ("keywords", "site"),
    [({"tensor": "3D"}, "tensor"), ({"gpus": 0}, "gpus"), ({"batch": 0}, "batch")],
)
def test_refused(keywords: dict[str, Any], site: str) -> None:
    with pytest.raises(PlanError, match=site):
        SubramanianModel(**{"shape": GPT3_1T, "system": SYSTEMS["A100"], "gpus": 8, "batch": 8, **keywords})


def test_heads_divide_the_width() -> None:
    with pytest.raises(PlanError, match="divide"):
        Transformer(2, 64, 5, 16, 256)
