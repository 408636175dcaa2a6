"""How well the planner's performance model predicts what others have measured, set by set.

Published tables are in benchmarks/data. Sets that derive from other repositories (H100 runs, the BLOOM sweep, nccl-tests) are
read from `--data DIR`; without it they are "not run". What was fitted, and on what:

- Korthikanti et al., tables 4 and 5, are the calibration set: from them are the A100's memory fraction, the ramp of products,
  the NVLink fraction, the share of exchanges beside products, and the seconds of an exchange (5 numbers, 18 points).
- One factor for each generation of software (`software.toml`): "raw" leaves it out (1.0), "calibrated" has it.
- The link and network fractions and hops of perlmutter.toml are from nccl-tests themselves (7 numbers, 798 points); other
  clusters take the hops over.
- BLOOM's sweep gives `slack` and `context_bytes` of memory (2 numbers, 65 points) and `unaligned` (its rows with heads of 150
  elements), which are used for all clusters and sets.
- `matrix_fraction` of a GPU is the largest product in public measurements of it: no point of these sets, no vendor's number.
- Assumed, and not fitted: the overlaps and `flash_fraction` of nemo-2024 (their errors go into its factor), `fetches` = 12 of
  ZeRO-3 (the parameter tensors of a layer), `extra_parameter_bytes` of BLOOM's bf16 optimizer (from its description),
  `kernel_seconds`, `units` and `tile`.
- All else is a vendor's peak, or a count.

So two of the sets below are fitted in full (Korthikanti), two in part by themselves (BLOOM's memory, NCCL), three by one factor
(SC'21, H100, BLOOM's time), and two by nothing of their own (ZeRO-3, MT-NLG): the last column of the table says which.
Sizes that a source does not state (b and v in SC'21's table 1, v in its table 2) are those that the model itself finds fastest
among what fits. Errors are of time, or of throughput where the source states that; Spearman's rank correlation likewise.

    python benchmarks/planner_accuracy.py --data DIR      # tables, benchmarks/results/planner_accuracy.json and .svg
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from autoptd.wings.planner.cluster import Cluster, find_cluster  # noqa: E402
from autoptd.wings.planner.estimate import estimate  # noqa: E402
from autoptd.wings.planner.predict import Prediction, predict  # noqa: E402
from autoptd.wings.planner.setting import Setting  # noqa: E402
from autoptd.wings.planner.shape import find_shape  # noqa: E402
from autoptd.wings.planner.terms import Network, count_terms  # noqa: E402
from benchmarks.lib import bloom  # noqa: E402
from benchmarks.lib.points import DATA, Point, Row, held_out, load, summary  # noqa: E402


def raw(cluster: str, software: str | None = None) -> Cluster:
    """A cluster without the factor of its software."""
    found = find_cluster(cluster).with_software(software)
    return dataclasses.replace(found, software=dataclasses.replace(found.software, factor=1.0))


def fitted(cluster: str, software: str | None = None) -> Cluster:
    return find_cluster(cluster).with_software(software)


def korthikanti_steps(find: Callable[..., Cluster]) -> list[Point]:
    """Table 5: seconds of an iteration."""
    points = []
    for row in load(DATA, "korthikanti.json")["table5"]:
        config = {**row["config"], "precision": "fp16"}
        found = predict(row["shape"], find("dgx-a100", "megatron-2022"), **config)
        points.append(Point(f"{row['model']} {config['recompute']}", row["measured"], found.step_seconds))
    return points


def korthikanti_layer(find: Callable[..., Cluster]) -> list[Point]:
    """Table 4: milliseconds of one layer of the 22B model, forward and backward."""
    shape = find_shape({"layers": 48, "hidden": 6144, "heads": 64, "seq": 2048})
    cluster, points = find("dgx-a100", "megatron-2022"), []
    for row in load(DATA, "korthikanti.json")["table4"]["rows"]:
        mode = row["mode"]
        recompute = next((one for one in ("full", "selective") if one in mode), "none")
        setting = Setting(
            t=8, microbatch=4, recompute=recompute, sequence_parallel="sequence" in mode, precision="fp16"
        )
        layer = count_terms(shape, cluster, setting).layer
        for way, seconds in (("fwd", layer.whole_forward), ("bwd", layer.whole_backward)):
            points.append(Point(f"{mode}, {way}", row[way], 1e3 * cluster.software.factor * float(seconds)))
    return points


def fastest(shape: Row, cluster: Cluster, fixed: Row, microbatches: Sequence[int]) -> tuple[Prediction, Row]:
    """The fastest choice of microbatch and v that fits, where a source does not state them; `predict` of that."""
    layers, best, found = shape["layers"], float("inf"), dict(fixed)
    for v in (
        v for v in range(1, layers + 1) if layers % (v * fixed["p"]) == 0 and (v == 1 or fixed["p"] > 1)
    ):
        for b in microbatches:
            m, rest = divmod(fixed["batch"], fixed["d"] * b)
            if rest or (v > 1 and m % fixed["p"]):
                continue
            candidate = {**fixed, "v": v, "microbatch": b}
            one = estimate(shape, cluster, Setting(**candidate))
            if one.fits and one.step_seconds < best:
                best, found = float(one.step_seconds), candidate
    return predict(shape, cluster, **found), found


def sc21(find: Callable[..., Cluster]) -> list[Point]:
    """Tables 1 and 2, PTD-P: TFLOP/s per GPU with what is recomputed (equation 3)."""
    data, cluster, points = load(DATA, "sc21.json"), find("dgx-a100", "megatron-2021"), []
    usual = {"recompute": "full", "precision": "fp16"}
    for row in data["table1"]["rows"]:
        shape = {**{name: row[name] for name in ("layers", "hidden", "heads")}, "seq": 2048}
        fixed = {**{name: row[name] for name in ("t", "p", "d", "batch")}, **usual}
        found, chosen = fastest(shape, cluster, fixed, (1, 2, 4, 8, 16))
        name = f"table 1, {row['params_billion']}B, b={chosen['microbatch']} v={chosen['v']}"
        points.append(Point(name, row["tflops_per_gpu"], found.hardware_flops_per_gpu / 1e12))
    for row in data["table2"]["rows"]:
        if row["scheme"] == "PTD-P":
            shape = {**data["table2"]["models"][str(row["params_billion"])], "seq": 2048}
            fixed = {**{name: row[name] for name in ("t", "p", "d", "batch")}, **usual}
            found, chosen = fastest(shape, cluster, fixed, (row["microbatch"],))
            name = f"table 2, {row['params_billion']}B on {row['gpus']}, v={chosen['v']}"
            points.append(Point(name, row["tflops_per_gpu"], found.hardware_flops_per_gpu / 1e12))
    return points


def zero3(find: Callable[..., Cluster]) -> list[Point]:
    """Table 2, ZeRO-3: TFLOP/s per GPU. The factor is that of SC'21's other rows."""
    data, cluster, points = load(DATA, "sc21.json"), find("dgx-a100", "deepspeed-zero3-2021"), []
    for row in data["table2"]["rows"]:
        if row["scheme"] == "ZeRO-3":
            shape = {**data["table2"]["models"][str(row["params_billion"])], "seq": 2048}
            keywords = {"d": row["gpus"], "microbatch": row["microbatch"], "batch": row["batch"]}
            found = predict(shape, cluster, **keywords, zero=3, recompute="full", precision="fp16")
            name = f"{row['params_billion']}B on {row['gpus']}"
            points.append(Point(name, row["tflops_per_gpu"], found.hardware_flops_per_gpu / 1e12))
    return points


def mt_nlg(find: Callable[..., Cluster]) -> list[Point]:
    """MT-NLG 530B on Selene: seconds of an iteration. The factor is that of the BLOOM sweep, which used the same software."""
    cluster = find("dgx-a100", "megatron-deepspeed-2022")
    return [_measured(row, cluster, v=1, recompute="full") for row in load(DATA, "mt_nlg.json")["rows"]]


def h100(find: Callable[..., Cluster], folder: Path) -> list[Point]:
    """GPT3-175B and Llama-3.1-70B on DGX H100: seconds of an iteration; sequence parallelism and ZeRO-1 are assumed."""
    rows = [row for row in load(folder, "measured_points_part.json")["points"] if "H100" in row["hardware"]]
    more = {"recompute": "none", "sequence_parallel": True, "zero": 1}
    first = [{**row, "v": row["interleave_v"] if isinstance(row["interleave_v"], int) else 6} for row in rows]
    return [_measured(row, find("dgx-h100"), v=row["v"], c=row["cp"], **more) for row in first]


def _measured(row: Row, cluster: Cluster, **more: Any) -> Point:
    degrees = {name: row[name] for name in ("t", "p", "d", "batch", "microbatch")}
    found = predict(row["shape"], cluster, **degrees, **more)
    return Point(f"{row['model']} on {row['gpus']}", row["time_s"], found.step_seconds)


def collectives(_: Callable[..., Cluster], folder: Path) -> list[Point]:
    """nccl-tests on Perlmutter, 1 to 16 nodes, 1 MB and more: microseconds."""
    network, points = Network(find_cluster("perlmutter")), []
    for kind, nodes, local, nbytes, microseconds, _ in load(folder, "nccl_perlmutter_16.json")["rows"]:
        if nbytes >= 1 << 20:
            call = network.all_reduce if kind == "allreduce" else network.all_gather
            seconds = float(call(float(nbytes), nodes * local, local))
            points.append(Point(f"{kind} {nodes}x{local} {nbytes >> 20} MB", microseconds, 1e6 * seconds))
    return points


PUBLISHED = {
    "Korthikanti, table 5": korthikanti_steps,
    "Korthikanti, table 4": korthikanti_layer,
    "SC'21, tables 1 and 2": sc21,
    "SC'21, ZeRO-3": zero3,
    "MT-NLG 530B": mt_nlg,
}
OTHERS = {
    "H100": (h100, "measured_points_part.json"),
    "BLOOM, time": (bloom.seconds, bloom.FILE),
    "BLOOM, memory": (bloom.memory, bloom.FILE),
    "NCCL, >= 1 MB": (collectives, "nccl_perlmutter_16.json"),
}

# What of the model was fitted on a set's own points; the factor of the others is some other set's.
FITTED = {
    "Korthikanti, table 5": "calibration set",
    "Korthikanti, table 4": "calibration set",
    "SC'21, tables 1 and 2": "factor",
    "H100": "factor",
    "BLOOM, time": "factor, unaligned",
    "BLOOM, memory": "slack, context_bytes",
    "NCCL, >= 1 MB": "7 numbers of the network",
}

# One half gives the factor, the other is predicted with it.
HALVES: dict[str, tuple[str, Callable[[Point], bool]]] = {
    "SC'21, tables 1 and 2": ("table 2", lambda point: point.name.startswith("table 2")),
    "H100": ("GPT3-175B", lambda point: point.name.startswith("GPT3")),
    "BLOOM, time": ("its first day", bloom.is_of_the_first_day),
}


def line(name: str, found: Row) -> str:
    cells = [f"{name:24}", f"{found['raw']['points']:4}"]
    for how in ("raw", "calibrated"):
        one = found[how]
        cells.append(f"{one['mape']:7.1%} {one['worst']:7.1%} {one['spearman']:9.3f}")
    return "  ".join([*cells, f"{found['raw']['measured_over_predicted']:6.3f}", FITTED.get(name, "nothing")])


def picture(sets: dict[str, list[Point]]) -> str:
    """Predicted over measured, a column of dots per set; the band is 7% to each side."""
    width, height, top, low, high = 130 * len(sets) + 60, 320, 40, 0.7, 1.3
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">'
    ]
    lines.append('<rect width="100%" height="100%" fill="white"/>')
    lines.append(
        '<text x="10" y="22" font-size="14">predicted over measured, calibrated; band: 7% to each side</text>'
    )

    def at(ratio: float) -> float:
        return top + (high - min(max(ratio, low), high)) / (high - low) * (height - top - 50)

    lines.append(
        f'<rect x="50" y="{at(1.07):.1f}" width="{width - 60}" height="{at(0.93) - at(1.07):.1f}" fill="#e4eef8"/>'
    )
    for ratio in (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3):
        lines.append(f'<text x="14" y="{at(ratio) + 4:.1f}" font-size="11">{ratio:.1f}</text>')
        lines.append(
            f'<line x1="50" x2="{width - 10}" y1="{at(ratio):.1f}" y2="{at(ratio):.1f}" stroke="#ccc"/>'
        )
    for column, (name, points) in enumerate(sets.items()):
        left = 60 + 130 * column
        lines.append(
            f'<text x="{left}" y="{height - 20}" font-size="10">{name.replace("&", "and").replace(">=", "from")}</text>'
        )
        for i, one in enumerate(points):
            x = left + 100 * (i + 0.5) / len(points)
            y = at(one.predicted / one.measured)
            lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="#2f6db3" fill-opacity="0.6"/>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of the sets that are not in the tree")
    parser.add_argument("--points", action="store_true", help="print every point")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    sets: dict[str, Callable[[Callable[..., Cluster]], list[Point]]] = dict(PUBLISHED)
    missing = []
    for name, (function, file) in OTHERS.items():
        if args.data is not None and (args.data / file).is_file():
            sets[name] = lambda find, function=function: function(find, args.data)
        else:
            missing.append(name)
    print(
        f"{'set':24}     n   raw: MAPE   worst  Spearman  calibrated: MAPE, worst, Spearman  measured/raw, fitted on it"
    )
    record: Row = {"sets": {}, "not_run": missing}
    drawn = {}
    for name, function in sets.items():
        points = {"raw": function(raw), "calibrated": function(fitted)}
        found: Row = {how: summary(some) for how, some in points.items()}
        record["sets"][name] = {**found, "fitted": FITTED.get(name, "nothing")}
        if name in PUBLISHED:  # the others' rows stay where they are
            record["sets"][name]["points"] = [dataclasses.asdict(one) for one in points["calibrated"]]
            drawn[name] = points["calibrated"]
        print(line(name, found), flush=True)
        if name in HALVES:
            half, fits = HALVES[name]
            found = record["sets"][name]["held_out"] = {"from": half, **held_out(points["raw"], fits)}
            words = "{others} others: {mape:.1%} on average, {worst:.1%} at worst".format(**found)
            print(f"    factor from {half} alone ({found['factor']:.3f}), the {words}")
        for one in points["calibrated"] if args.points else ():
            print(
                f"    {one.name:60} measured {one.measured:10.2f} predicted {one.predicted:10.2f} {one.error:+.1%}"
            )
    for name in missing:
        print(f"{name:24}  not run (--data)")
    if "BLOOM, memory" in sets:
        cases = bloom.out_of_memory(fitted, args.data)
        record["out_of_memory"] = {name: len(some) for name, some in cases.items()}
        print(record["out_of_memory"], *cases["missed"], *cases["false_alarms"])
    if missing and (args.out / "planner_accuracy.json").exists():
        print(f"{args.out}/planner_accuracy.json is kept: it has these sets as well")
        return
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "planner_accuracy.json").write_text(json.dumps(record, indent=1) + "\n")
    (args.out / "planner_accuracy.svg").write_text(picture(drawn))


if __name__ == "__main__":
    main()
