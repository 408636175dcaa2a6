"""The table of collectives: numbers by hand, layers folded, local changes apart."""

import re
from typing import Any

from autoptd.ir.layout import Layout
from autoptd.ir.mesh import Mesh
from autoptd.ir.notes import Fallback
from autoptd.ir.placement import placements
from autoptd.program.costs import Costs
from autoptd.program.program import Program
from autoptd.program.specs import Collective, CrossingSpec, ParamSpec
from autoptd.wings.reports.collectives import collectives_markdown
from autoptd.wings.words import bytes_text, count_text


def on_tp(
    module: str, stage: int, conversion: str, forward: str, backward: str, size: int = 1024
) -> Collective:
    site, why = f"{module} (m.py:7)", f"{module}: a reason"
    return Collective(site, stage, conversion, "tp", forward, backward, size, 4, why, pp_ranks=(stage,))


def program(collectives: tuple[Collective, ...], **fields: Any) -> Program:
    storage, use = placements(Layout(), "float32", stages=(0, 1))
    tied = ParamSpec("wte", ("wte", "head"), (8, 8), ((8,), (8,)), True, (0, 1), storage, use)
    base = {
        "constants": (),
        "inputs": (),
        "params": (tied,),
        "stages": (),
        "orders": [],
        "sources": {},
        "tree": "",
    }
    base |= {"crossings": (CrossingSpec("x_from_0", 0, (1,), (2, 8), "bfloat16", True),)}
    return Program(
        mesh=Mesh(4, 2, 2),
        v=1,
        num_microbatches=3,
        schedule_name="1f1b",
        collectives=collectives,
        **(base | fields),
    )


def rows(text: str, section: str) -> list[list[str]]:
    """The cells of the rows of a section's table, without its heading."""
    body = re.search(rf"## {section}\n(.*?)(?=\n## |\Z)", text, re.S)
    lines = [line for line in body[1].splitlines() if line.startswith("|")] if body else []
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


LAYERS = tuple(on_tp(f"h.{k}.attn", k // 2, "i_to_r", "none", "all-reduce") for k in range(4))


def test_totals_count_microbatches_calls_and_both_directions() -> None:
    gradients = Collective(
        "stage 0", 0, "gradient sum", "dp", "none", "all-reduce", 4096, 2, "gradients", "step", (0,)
    )
    tied = Collective("wte", 0, "tied sum", "pp", "none", "all-reduce", 256, 2, "tied", "step", (0, 1))
    sent = Collective("stage 0 to 1", 0, "send", "pp", "send", "none", 32, 2, "x_from_0", pp_ranks=(0,))
    back = Collective("stage 1 to 0", 1, "send", "pp", "none", "send", 32, 2, "x_from_0", pp_ranks=(1,))
    gather = on_tp("h.0.mlp", 0, "s_to_r", "all-gather", "reduce-scatter")
    told = rows(
        collectives_markdown(program((*LAYERS, gather, gradients, tied, sent, back))), "Per rank and step"
    )
    assert told == [
        ["tp", "all-gather", "forward", "3", "3 KiB", "2.25 KiB", "pipeline rank 0", "0 B"],
        ["tp", "all-reduce", "backward", "6", "6 KiB", "9 KiB", "pipeline rank 0", "the same"],
        ["tp", "reduce-scatter", "backward", "3", "3 KiB", "2.25 KiB", "pipeline rank 0", "0 B"],
        ["dp", "all-reduce", "once a step", "1", "4 KiB", "4 KiB", "pipeline rank 0", "0 B"],
        ["pp", "send", "backward", "3", "96 B", "96 B", "pipeline rank 1", "0 B"],
        ["pp", "send", "forward", "3", "96 B", "96 B", "pipeline rank 0", "0 B"],
        ["pp", "all-reduce", "once a step", "1", "256 B", "256 B", "pipeline rank 0", "the same"],
    ]


def test_layers_are_folded_and_single_sites_keep_their_name() -> None:
    other = on_tp("h.3.mlp", 1, "p_to_i", "all-reduce", "none", size=2048)
    told = rows(collectives_markdown(program((*LAYERS, other))), "Over tp, in every microbatch")
    assert told == [
        [
            "h.*.attn (m.py:7)",
            "4",
            "0, 1",
            "f: i_to_r",
            "none",
            "all-reduce",
            "1 KiB",
            "4",
            "1.5 KiB",
            "a reason",
        ],
        ["h.3.mlp (m.py:7)", "1", "1", "g: p_to_i", "all-reduce", "none", "2 KiB", "4", "3 KiB", "a reason"],
    ]


def test_local_changes_of_type_stand_apart() -> None:
    keeps = on_tp("h.0.mlp", 0, "i_to_p", "one rank keeps it", "none")
    text = collectives_markdown(program((*LAYERS, keeps)))
    (row,) = rows(text, "Changes of type without communication")
    assert row[:4] == ["h.0.mlp (m.py:7)", "1", "0", "i_to_p"]
    assert len(rows(text, "Over tp, in every microbatch")) == 1


def test_a_skip_to_a_stage_of_the_same_rank_is_not_sent() -> None:
    skip = (CrossingSpec("x", 0, (2,), (2, 8), "float32", False),)
    text = collectives_markdown(program((), crossings=skip))
    assert "without communication" in text.splitlines()[8]


def test_what_is_computed_in_full_is_told() -> None:
    costs = Costs(redundant_gemm_flops=2_000_000, total_flops=8_000_000)
    found = tuple(Fallback(f"h.{i}.mlp", "my.op", "no rule knows my.op", "write another") for i in range(2))
    text = collectives_markdown(program((), costs=costs, fallbacks=found))
    assert "- Matrix products: 2 M FLOPs forward (25.0 % of all)." in text
    assert "- my.op in h.*.mlp x 2: no rule knows my.op. Remedy: write another." in text


def test_tables_are_well_formed() -> None:
    text = collectives_markdown(program(LAYERS))
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        assert len({line.count("|") for line in table.splitlines()}) == 1


def test_units() -> None:
    assert [bytes_text(n) for n in (512, 16384, 1_590_000)] == ["512 B", "16 KiB", "1.52 MiB"]
    assert [count_text(n) for n in (640, 14_680_064, 10**12)] == ["640", "14.7 M", "1 T"]
    assert [count_text(n, "FLOP/s") for n in (0, 640, 1000)] == ["0 FLOP/s", "640 FLOP/s", "1 kFLOP/s"]
