"""Figures 1 to 5 of Subramanian et al. (arXiv:2410.00273), by `benchmarks/lib/subramanian`: their published code's counting.

Of the paper's text we had the abstract, beside it the README and the notebooks of the authors' repository (transformer-perf-
estimates, plots/). What a figure sweeps is that of a notebook where one says it, else assumed: each note tells which. No number
of theirs stands here: that the optima are theirs is what planner_problems.py shows.

A batch has 4096 sequences; the machine is B200 with fast domains of 8, and b = 1, where nothing else is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from autoptd.wings.planner.search import Columns, search, take
from benchmarks.lib.figures import Column, Figure, Rows, Series, verdict
from benchmarks.lib.subramanian import GPT3_1T, SYSTEMS, VIT_64K, SubramanianModel, Transformer

BATCH, GPUS, DOMAIN, SECONDS = 4096, 16384, 8, "seconds an iteration"
SCALES = tuple(2**i for i in range(7, 15))
MACHINES = [(name, domain) for name in ("A100", "H200", "B200") for domain in (4, 8, 64)]
# 1e12 tokens; 80 epochs of 350,000 samples (their run_configs.py)
SAMPLES = {GPT3_1T: 1e12 / 2048, VIT_64K: 80 * 350_000}
NAMES = {GPT3_1T: "GPT3-1T", VIT_64K: "ViT-64K"}
TERMS = {
    "compute": "compute",
    "exposed_memory": "memory",
    "tp_comm": "TP",
    "bubble": "bubble",
    "dp_comm": "DP",
}
TERMS |= {"pp_comm": "PP"}


def model_of(
    shape: Transformer, tensor: str = "1D", name: str = "B200", domain: int = DOMAIN, gpus: int = GPUS
) -> SubramanianModel:
    return SubramanianModel(shape, SYSTEMS[name].with_domain(domain), gpus, BATCH, tensor)


def placed(model: SubramanianModel, configs: Sequence[tuple[int, int, int]]) -> dict[str, np.ndarray]:
    """Configs (t1, t2, p) with b = 1, each with its fastest placement, whether they fit in memory or not."""
    t1, t2, p = np.array(configs, dtype=np.int64).T
    columns = {"t1": t1, "t2": t2, "p": p, "d": model.gpus // (t1 * t2 * p), "b": np.ones_like(t1)}
    where, added = model.variants(columns)
    candidates = {**take(columns, where), **added}
    seconds = model.seconds(candidates)
    rows = [np.flatnonzero(where == i) for i in range(len(configs))]
    return take(candidates, np.array([mine[np.argmin(seconds[mine])] for mine in rows]))


def describe(model: SubramanianModel, candidates: Columns) -> Rows:
    """Per candidate its degrees, what shares a fast domain, GB, seconds, and the share of every term."""
    terms, held = model.seconds_terms(candidates), model.memory_bytes(candidates)
    seconds = np.sum(list(terms.values()), axis=0)
    is_1d = model.tensor == "1D"
    rows = []
    for i in range(len(seconds)):
        one = {name: int(values[i]) for name, values in candidates.items()}
        row: dict[str, Any] = {"t": one["t1"] if is_1d else f"{one['t1']} x {one['t2']}"}
        row |= {name: one[name] for name in ("p", "d", "b")} | {"m": BATCH // (one["d"] * one["b"])}
        inside = ("in_t1", "in_d", "in_p") if is_1d else ("in_t1", "in_t2", "in_d", "in_p")
        row |= {f"in a domain: {', '.join(x[3:] for x in inside)}": ", ".join(str(one[x]) for x in inside)}
        full = "" if held[i] <= model.capacity_bytes else ", does not fit"
        row |= {"GB": f"{held[i] / 1e9:.1f}{full}", "seconds": f"{seconds[i]:.4g}"}
        rows.append(
            row | {f"{label} %": f"{100 * terms[name][i] / seconds[i]:.0f}" for name, label in TERMS.items()}
        )
    return rows


def seconds_of(model: SubramanianModel, candidates: Columns) -> list[float]:
    return [float(one) for one in model.seconds(candidates)]


def quickest(column: Column) -> float:
    """The x of the smallest y."""
    return min((y, x) for x, y in column.items() if y is not None)[1]


def pipeline_against_data() -> Figure:
    model = model_of(GPT3_1T)
    found = placed(model, [(8, 1, 2**i) for i in range(8)])
    column: Column = {float(p): s for p, s in zip(found["p"], seconds_of(model, found), strict=True)}
    held = model.memory_bytes(found)
    fits: Column = {p: s for (p, s), x in zip(column.items(), held, strict=True) if x <= model.capacity_bytes}
    return Figure(
        "subramanian1",
        "GPT3-1T on 16384 B200: pipeline against data ranks, t = 8",
        "p",
        SECONDS,
        {"1D, t = 8": column},
        "nothing that we have states a number of it",
        f"p = {quickest(column):g} is fastest, of what fits p = {quickest(fits):g}",
        "",
        "that it is figure 1, B200, domains of 8, b = 1; 1D, t, p, d and the number of GPUs are the notebook's",
        describe(model, found),
    )


def tensor_ranks_and_domains() -> Figure:
    series: Series = {}
    rows: Rows = []
    for domain in (4, 8, 64):
        model = model_of(GPT3_1T, domain=domain)
        found = placed(model, [(2**i, 1, 64) for i in range(6)])
        seconds = seconds_of(model, found)
        series[f"domains of {domain}"] = {float(t): s for t, s in zip(found["t1"], seconds, strict=True)}
        rows += [{"domain": domain} | row for row in describe(model, found)]
    here = ", ".join(f"t = {quickest(column):g} with {label}" for label, column in series.items())
    return Figure(
        "subramanian2",
        "GPT3-1T on 16384 B200: tensor ranks, p = 64",
        "t",
        SECONDS,
        series,
        "nothing that we have states a number of it",
        f"fastest is {here}",
        "",
        "all of it: 1D, p = 64, t from 1 to 32, domains of 4, 8 and 64, b = 1",
        rows,
    )


def long_sequences() -> Figure:
    model = model_of(VIT_64K, "2D")
    configs = [(16 // 2**i, 2**i, 1) for i in range(5)] + [(16 // 2**i, 2**i, 16) for i in range(4)]
    found = placed(model, configs)
    seconds = seconds_of(model, found)
    series: Series = {
        f"p = {p}": {float(t2): s for (_, t2, at), s in zip(configs, seconds, strict=True) if at == p}
        for p in (1, 16)
    }
    without = [not len(search(model_of(VIT_64K, "1D", gpus=gpus), keep=1)) for gpus in SCALES]
    return Figure(
        "subramanian3",
        "ViT-64K on 16384 B200: t1 x t2 = 16",
        "t2",
        SECONDS,
        series,
        "long sequences need a fourth dimension, here t2 (abstract); 2D is needed for the ViT (authors' README)",
        f"1D does not fit on {sum(without)} of {len(without)} numbers of GPUs from {SCALES[0]} to {SCALES[-1]}",
        verdict(*without),
        "that it is figure 3; 2D, (t1, t2), p, the number of GPUs, B200, domains of 8 and b = 1 are the notebook's",
        describe(model, found),
    )


def optimal_configurations(shape: Transformer, tensor: str, name: str) -> Figure:
    series: Series = {label: {} for label in TERMS.values()}
    rows: Rows = []
    for gpus in SCALES:
        model = model_of(shape, tensor, gpus=gpus)
        found = search(model, keep=1)
        if not len(found):
            continue
        terms = model.seconds_terms(found.columns)
        for term, label in TERMS.items():
            series[label][gpus] = 100 * float(terms[term][0]) / float(found.seconds[0])
        rows += [{"GPUs": gpus} | row for row in describe(model, found.columns)]
    where = [
        f"{row['GPUs']} GPUs: {row['seconds']} s, t = {row['t']}, p = {row['p']}, d = {row['d']}"
        for row in rows
    ]
    return Figure(
        name,
        f"{NAMES[shape]}, {tensor}, on B200: the fastest configuration",
        "GPUs",
        "% of the time",
        series,
        "nothing that we have states a number of it; the optima are those of the published code (planner_problems.py)",
        f"from {where[0]}, the fewest of these that fit, to {where[-1]}",
        "",
        "that it is figure 4, and 128 to 16384 GPUs; B200 with domains of 8 and a batch of 4096 are the notebook's",
        rows,
    )


def days_of(shape: Transformer, tensor: str, machine: tuple[str, int], gpus: int) -> float | None:
    """Days of training, of the fastest configuration; None where none fits."""
    found = search(model_of(shape, tensor, *machine, gpus=gpus), keep=1)
    return float(found.seconds[0]) * SAMPLES[shape] / BATCH / 86400 if len(found) else None


def days_of_training(shape: Transformer, tensor: str) -> tuple[Series, str, dict[int, float]]:
    """A series per machine, and what a domain of 64 gains over one of 4 on B200: in words, and by number of GPUs."""
    series: Series = {
        f"{name}-NVS{domain}": {gpus: days_of(shape, tensor, (name, domain), gpus) for gpus in SCALES}
        for name, domain in MACHINES
    }
    small, large = series["B200-NVS4"], series["B200-NVS64"]
    gains = {n: (small[n] or 0) / (large[n] or 1) - 1 for n in SCALES if small[n] and large[n]}
    first = min(gains)
    words = f"on B200 domains of 64 are {gains[first]:.0%} faster than of 4 on {first} GPUs, {gains[GPUS]:.0%} on {GPUS}"
    return series, words, gains


def days_of_gpt() -> Figure:
    series, words, gains = days_of_training(GPT3_1T, "1D")
    rows: Rows = [
        {"machine": label}
        | {f"{gpus} GPUs": f"{column[gpus]:.3g}" if column[gpus] else "does not fit" for gpus in SCALES}
        for label, column in series.items()
    ]
    return Figure(
        "subramanian5a",
        "GPT3-1T, 1D: days of training on 1e12 tokens",
        "GPUs",
        "days",
        series,
        "networks matter at the scale of pre-training (abstract)",
        words,
        verdict(gains[GPUS] > gains[min(gains)]),
        "that it is figure 5, 128 to 16384 GPUs; tokens, batch, machines are the notebook's, older than the code",
        rows,
        is_log=True,
    )


def days_of_vit() -> Figure:
    series, words, _ = days_of_training(VIT_64K, "2D")
    return Figure(
        "subramanian5b",
        "ViT-64K, 2D: days of training for 80 epochs of 350,000 samples",
        "GPUs",
        "days",
        series,
        "it depends on network and capacity alike (abstract); nothing that we have states a number of it",
        words,
        "",
        "that it is figure 5, and 128 to 16384 GPUs; samples, batch and machines are the notebook's",
        is_log=True,
    )


FIGURES = (
    pipeline_against_data,
    tensor_ranks_and_domains,
    long_sequences,
    lambda: optimal_configurations(GPT3_1T, "1D", "subramanian4a"),
    lambda: optimal_configurations(VIT_64K, "2D", "subramanian4b"),
    days_of_gpt,
    days_of_vit,
)
