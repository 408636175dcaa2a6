"""Fill the tables of docs/benchmarks.md and some other pages from benchmarks/results/*.json, and those of results/gpu/.

PYTHONPATH=. python docs/make_benchmarks.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import machine_lines, section_parts

PAGES = tuple(Path(__file__).parent / name for name in ("benchmarks.md", "compare.md", "real-models.md"))
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
MARKED = re.compile(r"(<!-- table: ([\w/]+) -->\n).*?(<!-- end of table -->\n)", re.DOTALL)
Found = dict[str, Any]


def filled(page: str) -> str:
    """The page with every table as the results have it, and a line about the machine."""

    def table(match: re.Match[str]) -> str:
        if match[2].startswith("gpu/"):
            text = "\n\n".join(_gpu(match[2].removeprefix("gpu/")))
        else:
            found = json.loads((RESULTS / f"{match[2]}.json").read_text())
            text = "\n\n".join([*TABLES[match[2]](found), *_machine(found)])
        return f"{match[1]}\n{text}\n\n{match[3]}"

    return MARKED.sub(table, page)


def _gpu(section: str) -> list[str]:
    """A section of `make gpu`, if its file was kept."""
    folder = RESULTS / "gpu"
    if not (folder / f"{section}.json").is_file():
        return ["Not run: there was no GPU yet."]
    return [*machine_lines(folder), *section_parts(folder, section)]


def _peers(found: Found) -> list[str]:
    rows = []
    for row in found["rows"]:
        if row["who"] == "AutoPTD":
            ours = row
            continue
        mega = [f"{one['peak MB']:.1f}" for one in (ours, row)]
        rows.append(
            [row["case"], row["h"], row["who"], row["pairs"], _ratio(row["wall"]), _ratio(row["cpu"]), *mega]
        )
    return [
        _table(
            ["case", "h", "compared with", "turns", "wall time", "CPU time", "peak MB, ours", "theirs"], rows
        )
    ]


def _peers_and_lines(found: Found) -> list[str]:
    lines = ", ".join(f"{who} {count}" for who, count in found["lines of user code"].items())
    return [*_peers(found), f"Lines of code beyond the model: {lines}."]


def _compare(found: Found) -> list[str]:
    ran, refused = [], []
    for row in found["rows"]:
        what = [row["model"], row["mesh"], row["who"]]
        if "reason" in row:
            refused.append([*what, row["reason"].replace("|", "/")])
            continue
        ratios = [_ratio(row[one]) if one in row else "" for one in ("wall", "cpu")]
        errors = [_error(row[f"{one} error"]) for one in ("loss", "weight")]
        size = f"{row['peak bytes'] / 1e6:.1f}"
        ran.append([*what, row["lines"], f"{row['ms']:.0f}", *ratios, size, *errors])
    header = ["model", "mesh", "with", "lines", "ms", "wall time / ours", "CPU time / ours", "peak MB"]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return [
        _table([*header, "loss error", "weight error"], ran),
        "Did not run, with the message:",
        _table(["model", "mesh", "with", "message"], refused),
        f"{versions}. The device mesh of torchtitan: {found['elsewhere']['torchtitan']}.",
    ]


def _error(value: float) -> str:
    """Bold, if rounding does not explain it."""
    return f"**{value:.0e}**" if value > 1e-5 else f"{value:.0e}"


def _zero(found: Found) -> list[str]:
    rows = []
    for row in found["rows"]:
        ratios = [_ratio(row[one]) if one in row else "" for one in ("wall", "cpu", "wall beside zero=3")]
        speed = [row["turns"], f"{row['ms']:.1f}"]
        sizes = [f"{row[f'{what} bytes'] / 1e6:.1f}" for what in ("state", "held")]
        rows.append([row["d"], row["h"], row["who"], *speed, *ratios, *sizes])
    header = [
        "d",
        "h",
        "form",
        "turns",
        "ms",
        "wall time / ours zero=1",
        "CPU time / ours zero=1",
        "wall time / ours zero=3",
        "state, MB",
        "parameters, MB",
    ]
    update = _table(
        ["h", "tensors", "elements", "foreach, a tensor each / flat", "fused"],
        [
            [one["h"], one["tensors"], one["elements"], _ratio(one["foreach"]), _ratio(one["fused"])]
            for one in found["update"]
        ],
    )
    return [
        _table(header, rows),
        "AdamW's update alone, one device, over the model's tensors and over one flat tensor:",
        update,
    ]


def _experts(found: Found) -> list[str]:
    rows = []
    for row in found["rows"]:
        ratio = _ratio(row["wall"]) if "wall" in row else ""
        sizes = [row["experts"], row["k"], row["f"], row["who"], row["turns"]]
        rows.append([*sizes, f"{row['ms']:.0f}", ratio])
    header = ["experts", "choices", "channels", "form", "turns", "ms", "transformers' wall time / its"]
    parts = [
        [stack, name, f"{1e3 * seconds:.2f}"]
        for stack, about in found["layers"].items()
        for name, seconds in about["parts"].items()
    ]
    return [_table(header, rows), "A layer's parts, alone:", _table(["stack", "part", "ms"], parts)]


def _context(found: Found) -> list[str]:
    rows = []
    for row in found["rows"]:
        ratios = [_ratio(row[one]) if one in row else "" for one in ("wall", "cpu")]
        numbers = [f"{row['ms']:.0f}", f"{row['balance']:.2f}", row.get("beside", ""), *ratios]
        rows.append([row["c"], row["tokens"], row["who"], row["turns"], *numbers, f"{row['peak MB']:.0f}"])
    header = [
        "c",
        "tokens",
        "form",
        "turns",
        "ms",
        "busiest / mean",
        "compared with our",
        "wall time",
        "CPU time",
        "peak MB",
    ]
    said = found["context_parallel on CPU"]
    return [_table(header, rows), f"torch's `context_parallel` on a CPU: {said or 'runs'}"]


def _single(found: Found) -> list[str]:
    rows = []
    for row in found["rows"]:
        ratios = [_ratio(row[one]) if one in row else "" for one in ("wall", "cpu")]
        speed = [
            f"{row['ms']:.2f}",
            f"{row['GFLOP/s']:.1f}",
            f"{row['of GEMM']:.0%}",
            f"{row['peak MB']:.1f}",
        ]
        rows.append([row["setup"], row["who"], *speed, *ratios])
    header = [
        "model",
        "form",
        "ms",
        "GFLOP/s",
        "share of GEMM",
        "peak MB",
        "wall time / ours plain",
        "CPU time / ours plain",
    ]
    return [_table(header, rows)]


def _fusion(found: Found) -> list[str]:
    rows = [
        [
            row["model"],
            row["fused"],
            row["times"] or "",
            _ratio(row["gain"]),
            f"{row['peak bytes'] / row['peak bytes of none']:.2f}",
        ]
        for row in found["fusion"]
    ]
    sizes, layout, embedding = (
        found["sizes"],
        found["layout"]["gain of [s, b, h]"],
        found["embedding"]["gain"],
    )
    about = (
        f"{sizes['rows']} x {sizes['tokens']} tokens, h={sizes['h']}, {sizes['layers']} layers, "
        f"vocabulary {sizes['vocabulary']}, {found['device']}. A block of attention laid out as [s, b, h] over [b, s, h] "
        f"(SC'21, section 4.2): {_ratio(layout)}. Embedding and positions summed in one buffer: {_ratio(embedding)}; "
        "there is no pattern for it."
    )
    loss = _table(
        ["MB of logits", "gain"],
        [[f"{row['MB of logits']:.1f}", _ratio(row["gain"])] for row in found["loss"]],
    )
    header = ["model", "fused", "times", "gain", "peak memory"]
    return [_table(header, rows), about, "The head and its loss in chunks alone:", loss]


def _memory(found: Found) -> list[str]:
    header = ["shape", "recompute", "t", "sequence parallel", "paper", "without masks", "kept"]
    return [_table(header, [[row[name] for name in header] for row in found["rows"]])]


def _recompute(found: Found) -> list[str]:
    rows = []
    for row in found["rows"]:
        median, low, high = row["time"]
        gain, memory = f"{median:.3f} ({low:.3f} to {high:.3f})", f"{row['memory']:.2f}"
        rows.append([row["setup"], row["ours"], row["theirs"], f"{row['ms']:.0f}", gain, memory])
    return [_table(["setup", "this", "compared with", "ms", "time", "memory"], rows)]


def _recompute_plans(found: Found) -> list[str]:
    rows = []
    for row in found["rows"]:
        gain = f"{row['gain']:.3f}" if row["beside"] else ""
        seconds, nbytes = f"{row['seconds']:.2f}", f"{row['GiB']:.1f}"
        again = [f"{row[f'again, {which} stage']:.1%}" for which in ("first", "last")]
        chosen = f"{row['chosen in']:.2f}" if row["recompute"] == "auto" else ""
        what = [row["model"], row["tokens"], row["recompute"], row["beside"] or ""]
        rows.append([*what, seconds, nbytes, gain, *again, chosen])
    header = ["model", "sequence parallel", "recompute", "in the bytes of", "step, s", "GiB", "faster"]
    return [_table([*header, "again, first stage", "last stage", "chosen in, s"], rows)]


def _collectives(found: Found) -> list[str]:
    def told(row: Found, by: str) -> str:
        calls = row[f"{by} calls"]
        return f"{row[by]:,.0f}" + ("" if calls is None else f" in {calls:g}")

    ways = ["formula", "planned", "sent"]
    rows = [[row["mesh"], row["what"], *(told(row, by) for by in ways)] for row in found["rows"]]
    return [_table(["mesh", "what", *ways], rows)]


def _overhead(found: Found) -> list[str]:
    return [
        _table(["", "microseconds"], [[row["what"], f"{row['microseconds']:.0f}"] for row in found["rows"]])
    ]


def _registers(found: Found) -> list[str]:
    header = ["operator", "kernel", "warps", "registers", "spills", "instructions", "widest access, bits"]
    keys = ("call", "kernel", "warps", "registers", "spills", "instructions", "widest")
    return [_table(header, [[row[key] for key in keys] for row in found["rows"]])]


def _schedules(found: Found) -> list[str]:
    rows = []
    for row in found["rows"]:
        bubbles = [f"{row[how]['bubble']:.1%}" for how in ("simulated", "executed")]
        gain, held = f"{row['executed']['gain']:.2f}", f"{row['peak_live_microbatches']:g}"
        rows.append([row["schedule"], row["v"], row["m"], *bubbles, gain, held])
    return [
        _table(["schedule", "v", "m", "simulated", "executed", "gain over 1F1B", "microbatches held"], rows)
    ]


def _initial(found: Found) -> list[str]:
    made, rows = found["record"], []
    seconds = [f"{made[name]:.2f}" for name in ("record s", "seeds s", "hash s")]
    row = [f"{made['parameters'] / 1e12:.3f}T", made["operators"], *seconds]
    header = ["parameters", "operators", "record, s", "seeds, s", "hash, s", "peak, GiB", "torch alone, GiB"]
    first = _table(header, [[*row, *(f"{made[name] / 2**30:.2f}" for name in ("peak bytes", "torch bytes"))]])
    for one in found["ranks"]:
        sizes = [one[f"{name} bytes"] / 2**30 for name in ("slices", "largest", "compiled", "peak", "bound")]
        size = f"{one['parameters'] / 1e9:.2f}B, {one['case']} of 64"
        rows.append(
            [size, *(f"{x:.2f}" for x in sizes), f"{one['drawn'] / 1e6:.0f}", f"{one['seconds']:.1f}"]
        )
    header = ["", "slices, GiB", "largest parameter", "compiled", "peak", "bound", "million drawn", "seconds"]
    return [first, _table(header, rows)]


def _checkpoints(found: Found) -> list[str]:
    nbytes, seconds, stalls, rows = found["bytes"], found["seconds"], found["stalls"], []
    for name, taken in seconds.items():
        plain = seconds["plain writes" if "save" in name or "write" in name else "plain reads"]
        rows.append([name, f"{taken:.2f}", f"{nbytes / taken / 1e9:.2f}", f"{plain / taken:.2f}"])
    first = _table([f"{nbytes / 1e6:.0f} MB", "seconds", "GB/s", "relative to plain"], rows)
    rows = [["cloning a share", f"{1e3 * stalls['pm.checkpointer']['clone']:.0f}", ""]]
    for name in ("pm.checkpointer", "dcp.async_save"):
        rows.append([name, *(f"{1e3 * stalls[name][what]:.0f}" for what in ("stall", "step"))])
    tables = [first, _table(["asynchronous", "stall, ms", "a step, ms"], rows)]
    if one := found.get("of one rank"):
        rows = [[name, f"{row['seconds']:.2f}", f"{row['bytes'] / 1e6:.0f}"] for name, row in one.items()]
        tables.append(_table(["saved by one rank, loaded by four", "seconds", "MB read per rank"], rows))
    return tables


def _restart(found: Found) -> list[str]:
    row = found["median"]
    parts = [name for name in row if name not in ("again", "total")]
    rows = [[part, f"{row[part]:.2f}", f"{row[part] / row['total']:.0%}"] for part in parts]
    return [_table(["part", "seconds", "share"], [*rows, ["total", f"{row['total']:.2f}", ""]])]


def _plans(found: Found) -> list[str]:
    header = ["model", "t", "tokens", "sequence parallel", "parameters", "forward", "backward", "Megatron"]
    header += ["layer, us", "Megatron's, us", "microbatch, ms", "kept, MiB"]
    rows = []
    for row in found["rows"]:
        mine, known = row["layer"], row["megatron"]
        sent = [
            f"{_calls(mine[phase])}, {mine[f'{phase} bytes'] / 2**20:,.0f} MiB"
            for phase in ("forward", "backward")
        ]
        theirs = " + ".join(f"{known[f'{phase} bytes'] / 2**20:,.0f}" for phase in ("forward", "backward"))
        times = [f"{1e6 * one['seconds']:,.0f}" for one in (mine, known)]
        what = [
            row["model"],
            row["t"],
            row["tokens"],
            row["sequence parallel"],
            f"{row['parameters over 1/t']:.2f}",
        ]
        rows.append(
            [
                *what,
                *sent,
                f"{theirs} MiB",
                *times,
                f"{1e3 * row['seconds']:.1f}",
                f"{row['kept bytes'] / 2**20:,.0f}",
            ]
        )
    return [_table(header, rows)]


def _calls(counts: Found) -> str:
    short = {"all-reduce": "AR", "all-gather": "AG", "reduce-scatter": "RS", "all-to-all": "A2A"}
    return " ".join(f"{count} {short[kind]}" for kind, count in counts.items())


def _losses(found: Found) -> list[str]:
    rows = []
    for row in found["rows"]:
        cells = ["right" if cell["is"] == "right" else f"**{cell['is']}**" for cell in row["cells"].values()]
        moved = row["tp"]
        a_token = "" if moved is None else f"{moved['a token']:.4g}"
        rows.append([f"`{row['name']}`", row["about"], *cells, a_token])
    counts = ", ".join(f"{number} {kind}" for kind, number in found["counts"].items())
    exact = [cell["largest"] for row in found["rows"] for cell in row["cells"].values() if "largest" in cell]
    said = f"Cells: {counts}. The largest difference in a right cell is {max(exact):.0e}."
    logits = next(row["tp"]["logits a token"] for row in found["rows"] if row["tp"])
    about = f"Bytes are per token over tp; the logits of a token have {logits:,.0f} bytes."
    return [_table(["loss", "description", *found["meshes"], "bytes"], rows), f"{said} {about}"]


TABLES: dict[str, Callable[[Found], list[str]]] = {
    "peers": _peers_and_lines,
    "peers_ceiling": _peers,
    "compare": _compare,
    "single": _single,
    "zero": _zero,
    "context": _context,
    "experts": _experts,
    "fusion": _fusion,
    "memory": _memory,
    "recompute": _recompute,
    "recompute_plans": _recompute_plans,
    "collectives": _collectives,
    "overhead": _overhead,
    "schedules": _schedules,
    "plans": _plans,
    "registers": _registers,
    "initial": _initial,
    "checkpoints": _checkpoints,
    "restart": _restart,
    "losses": _losses,
}


def _machine(found: Found) -> list[str]:
    one = found["machine"]
    what = one.get("gpu") or f"{one['cores']} cores of an {one['processor']}"
    return (
        [f"{what}, torch {one['torch']}; load at the start {one['load at start']}."]
        if "load at start" in one
        else []
    )


def _ratio(one: dict[str, float]) -> str:
    return f"{one['median']:.2f} ({one['low']:.2f} to {one['high']:.2f})"


def _table(header: list[str], rows: list[list[Any]]) -> str:
    lines = [header, ["---"] * len(header), *([str(one) for one in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text()))
