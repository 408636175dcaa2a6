"""gpu.md: the files of all sections as tables for a reader, with the machine, the versions, clocks and power.

In: the folder of results, of however many sections. Out: one page. What did not run says so; nothing is judged but the checks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.goals import goals
from benchmarks.gpu.rows import Found, Journal
from benchmarks.gpu.sections import PROFILE, SECTIONS

HIDDEN = (
    "name",
    "state",
    "seconds",
    "why",
    "trace",
    "tail",
    "files",
    "end",
    "ok",
    "places",
    "forms",
    "host, us",
)
Table = list[list[str]]


def write_report(folder: Path) -> Path:
    path = folder / "gpu.md"
    parts = ["# What this GPU shows", *machine_lines(folder)]
    parts += ["## Goals", "Of one H100 or H200; on other cards, and at toy size, they say little."]
    parts.append(markdown([["goal", "aim", "found"], *goals(folder)]))
    for section in SECTIONS:
        parts += [f"## {section.title}", *section_parts(folder, section.name)]
    for file in sorted(folder.glob(f"{PROFILE.strip()}_*.json")):
        parts += ["## Profile", *profile_parts(Journal.open(folder, file.stem))]
    path.write_text("\n\n".join(parts) + "\n")
    return path


def machine_lines(folder: Path) -> list[str]:
    file = folder / "machine.json"
    if not file.is_file():
        return ["The machine was not written down."]
    found = json.loads(file.read_text())
    lines = []
    if found.get("is toy"):
        lines.append(
            "**Toy sizes on a CPU, Triton's kernels in its interpreter: this page says that the command works, not how fast.**"
        )
    card = found.get("card")
    if card:
        lines.append(markdown([list(card), list(map(str, card.values()))]))
    where = f"{found['cores']} cores of {found['processor']}, Python {found['python']}"
    lines.append(f"{where}; {', '.join(f'{name} {text}' for name, text in found['versions'].items())}.")
    if found.get("others"):
        lines.append(f"Note: {found['others']}.")
    return lines


def section_parts(folder: Path, name: str) -> list[str]:
    journal = Journal.open(folder, name)
    if not journal.rows:
        return ["Not run."]
    begin, end = (journal.content.get(key, {}).get("card", {}) for key in ("about", "about, at the end"))
    parts = [f"State: {journal.content['state']}."]
    if begin:
        clocks = [
            f"{key} {begin.get(key, '?')} to {end.get(key, '?')}"
            for key in ("SM clock, MHz", "power, W", "temperature, C")
        ]
        parts.append(f"From its begin to its end: {'; '.join(clocks)}.")
    parts += BODIES[name](journal)
    open_ones = [row for row in journal.rows if row["state"] not in ("done", "running")]
    if open_ones:
        parts.append(
            markdown(
                [
                    ["row", "", "why"],
                    *([row["name"], row["state"], short(row.get("why", ""))] for row in open_ones),
                ]
            )
        )
    if journal.content.get("not begun"):
        parts.append(f"Not begun: {', '.join(journal.content['not begun'])}.")
    return parts


def right_parts(journal: Journal) -> list[str]:
    rows = [
        [row["name"], {True: "holds", False: "**differs**"}.get(row.get("ok"), row["state"]), numbers(row)]
        for row in journal.rows
    ]
    parts = [markdown([["check", "", "found"], *rows])]
    for row in journal.rows:
        if row.get("places"):
            places = [
                [one["place"], str(one["times"]), one["line"], one["reason"] or "**none known**"]
                for one in row["places"]
            ]
            parts += [
                f"Where the host waits, {row['name'].split(': ')[-1]}:",
                markdown([["place", "times", "line", "reason"], *places]),
            ]
    return parts


def fast_parts(journal: Journal) -> list[str]:
    parts = []
    for row in journal.rows:
        forms = row.get("forms") or []
        if forms:
            parts += [f"### {row['name']}", numbers(row), table_of(forms)]
    return parts


def plain_parts(journal: Journal) -> list[str]:
    """One table per set of columns."""
    groups: dict[tuple[str, ...], list[Found]] = {}
    for row in journal.rows:
        for one in row.get("forms") or [row]:
            shown = {"row": row["name"]} | {key: value for key, value in one.items() if key not in HIDDEN}
            if len(shown) > 1:
                groups.setdefault(tuple(shown), []).append(shown)
    return [table_of(group) for group in groups.values()]


def profile_parts(journal: Journal) -> list[str]:
    parts = []
    for row in journal.rows:
        parts += [
            numbers(row),
            *([f"```text\n{row['table']}\n```"] if "table" in row else [row.get("why", row["state"])]),
        ]
    return parts


BODIES: dict[str, Callable[[Journal], list[str]]] = {
    "right": right_parts,
    "fast": fast_parts,
    "kernels": plain_parts,
    "runtime": plain_parts,
}


def table_of(rows: Sequence[Found]) -> str:
    header = list(dict.fromkeys(key for row in rows for key in row if key not in HIDDEN or key == "why"))
    return markdown([header, *([text_of(key, row.get(key, "")) for key in header] for row in rows)])


def numbers(row: Found) -> str:
    shown = {
        key: value
        for key, value in row.items()
        if key not in HIDDEN and key != "table" and value != "" and not isinstance(value, (list, dict))
    }
    return ", ".join(f"{key}: {text_of(key, value)}" for key, value in shown.items())


def text_of(key: str, value: Any) -> str:
    """A number with few digits, by its unit; an interval as median (low to high)."""
    if isinstance(value, dict) and {"median", "low", "high"} <= value.keys():
        return f"{value['median']:.3f} ({value['low']:.3f} to {value['high']:.3f})"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return short(str(value))
    if key.startswith("share"):
        return f"{value:.1%}"
    for unit, size in (("FLOP/s", 1e12), ("bytes/s", 1e12)):
        if key.endswith(unit) and abs(value) >= 1e9:
            return f"{value / size:.3g} T"
    if "bytes" in key and abs(value) >= 1e6:
        return f"{value / 1e9:.3g} GB"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def short(text: str) -> str:
    return " ".join(str(text).split())[:240].replace("|", "/")


def markdown(rows: Table) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
