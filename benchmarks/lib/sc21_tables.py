"""SC'21's tables 1 and 2 and its two estimates of training time, each row with the paper's numbers and the predicted ones."""

from __future__ import annotations

from typing import Any

from autoptd.wings.planner.cluster import find_cluster
from autoptd.wings.planner.predict import predict
from benchmarks.lib.figures import Rows
from benchmarks.lib.points import DATA, load
from benchmarks.planner_accuracy import fastest

USUAL = {"recompute": "full", "precision": "fp16"}
CLUSTER = find_cluster("dgx-a100")
GPT3 = {"layers": 96, "hidden": 12288, "heads": 96, "seq": 2048}
TRILLION = {"layers": 128, "hidden": 25600, "heads": 160, "seq": 2048}


def table1() -> Rows:
    rows = []
    for row in load(DATA, "sc21.json")["table1"]["rows"]:
        shape = {**{name: row[name] for name in ("layers", "hidden", "heads")}, "seq": 2048}
        fixed = {**{name: row[name] for name in ("t", "p", "d", "batch")}, **USUAL}
        found, chosen = fastest(shape, CLUSTER, fixed, (1, 2, 4, 8, 16))
        x = found.hardware_flops_per_gpu
        rows.append(
            {"parameters, B": row["params_billion"]}
            | {name: row[name] for name in ("t", "p", "gpus", "batch")}
            | {"b": chosen["microbatch"], "v": chosen["v"]}
            | {"TFLOP/s per GPU, paper": row["tflops_per_gpu"], "here": round(x / 1e12)}
            | {"% of peak, paper": row["pct_of_peak"], "% here": round(100 * x / 312e12)}
            | {"PFLOP/s, paper": row["aggregate_pflops"], "PFLOP/s here": round(x * row["gpus"] / 1e15, 1)}
        )
    return rows


def table2() -> Rows:
    data = load(DATA, "sc21.json")
    rows = []
    for row in data["table2"]["rows"]:
        model = data["table2"]["models"][str(row["params_billion"])]
        shape = {**model, "seq": 2048}
        fixed = {"d": row["gpus"], "batch": row["batch"], **USUAL}
        if row["scheme"] == "PTD-P":
            fixed |= {name: row[name] for name in ("t", "p", "d")}
            found = fastest(shape, CLUSTER, fixed, (row["microbatch"],))[0]
        else:
            cluster = CLUSTER.with_software("deepspeed-zero3-2021")
            found = predict(shape, cluster, **fixed, microbatch=row["microbatch"], zero=3)
        days = 300e9 / (row["batch"] * 2048) * found.step_seconds / 86400
        rows.append(
            {"scheme": row["scheme"], "parameters, B": row["params_billion"], "gpus": row["gpus"]}
            | {"b": row["microbatch"], "TFLOP/s per GPU, paper": row["tflops_per_gpu"]}
            | {"here": round(found.hardware_flops_per_gpu / 1e12)}
            | {"days for 300B tokens, paper": row["days_for_300B_tokens"], "days here": round(days)}
        )
    return rows


def training_time() -> Rows:
    """Equation 4, 8 T P / (n X), with the paper's X, and the predicted steps."""
    cases: list[tuple[str, dict[str, Any], float, float, float, int, dict[str, Any]]] = [
        ("GPT-3 175B", GPT3, 175e9, 300e9, 140e12, 34, {"t": 8, "p": 8, "d": 16, "batch": 1536}),
        ("1T", TRILLION, 1e12, 450e9, 163e12, 84, {"t": 8, "p": 64, "d": 6, "batch": 3072}),
    ]
    rows = []
    for name, shape, parameters, tokens, x, days, degrees in cases:
        found, chosen = fastest(shape, CLUSTER, {**degrees, **USUAL}, (1, 2, 4))
        n = degrees["t"] * degrees["p"] * degrees["d"]
        formula = 8 * tokens * parameters / (n * x) / 86400
        ours = tokens / (degrees["batch"] * 2048) * found.step_seconds / 86400
        rows.append(
            {"model": name, "tokens": f"{tokens / 1e9:.0f}e9", "gpus": n}
            | {"t, p, d": "{t}, {p}, {d}".format(**degrees), "b": chosen["microbatch"], "v": chosen["v"]}
            | {
                "days, paper": days,
                "equation 4, paper's X": round(formula, 1),
                "predicted steps": round(ours, 1),
            }
        )
    return rows


TABLES = {  # with what the text does not say
    "Table 1": (table1, "b and v: the fastest that fit, by the model itself"),
    "Table 2": (
        table2,
        "v: the fastest that fits, by the model itself; t = 8 and p = the model-parallel size / 8",
    ),
    "Training time (section 5.1)": (
        training_time,
        "b and v: the fastest that fit; t, p and d of the 175B row; those of the 1T row are table 1's",
    ),
}
