"""A8: the ranks' shares are every tensor, once; evenly; and torch's own check of a checkpoint's plan finds nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan

import autoptd
from autoptd.ir.layout import Layout
from autoptd.ir.mesh import Mesh
from autoptd.ir.placement import placements, sharing_of
from autoptd.ir.rectangles import Item
from autoptd.ir.types import I, R, S, Segmented
from autoptd.program.pieces import checkpoint_bytes, share_stage, stored
from autoptd.program.program import Program
from autoptd.program.specs import ParamSpec
from tests.runtime.checkpoint.models import data, tied_gpt

KEYS = {"exp_avg": 4, "exp_avg_sq": 4}


@cache
def program_of(**keywords: Any) -> Program:
    return autoptd.compile(tied_gpt(), example_inputs=data(0), **keywords)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Parameters of random shapes, cut and placed at random, on a random mesh, with ZeRO or without."""
    mesh = Mesh(
        t=draw(st.sampled_from([1, 2, 4])),
        p=draw(st.sampled_from([1, 2])),
        d=draw(st.sampled_from([1, 2, 4])),
        order=draw(st.sampled_from(["tp-dp-pp", "pp-dp-tp", "dp-tp-pp"])),
    )
    shard = draw(st.sampled_from([n for n in (1, 2, 4) if mesh.d % n == 0]))
    sharing = sharing_of(mesh, shard)
    base = program_of(t=1, p=mesh.p)
    specs = []
    for number in range(draw(st.integers(1, 6))):
        layout, dims = draw(placed(mesh))
        stages = draw(st.sampled_from([(0,), (mesh.p - 1,), tuple(range(mesh.p))]))
        is_trained = draw(st.booleans())
        how = sharing if is_trained else sharing_of(mesh)
        storage, use = placements(layout, "float32", stages, sharing=how)
        shape = tuple(map(math.prod, dims))
        name = f"w{number}"
        specs.append(ParamSpec(name, (name,), shape, dims, is_trained, stages, storage, use))
    return replace(base, mesh=mesh, params=tuple(specs))


@st.composite
def placed(draw: st.DrawFn, mesh: Mesh) -> tuple[Layout, tuple[tuple[int, ...], ...]]:
    """A layout, and the atoms of a tensor that can have it."""
    t = mesh.t
    dims: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(1, 3))):
        dims.append((draw(st.integers(1, 5)),))
    dim = draw(st.integers(0, len(dims) - 1))
    kind = draw(st.sampled_from(["whole", "partial", "equal", "blocks", "segments", "padded", "shared"]))
    each = draw(st.integers(1, 3))
    if kind in ("whole", "partial"):
        return Layout({"tp": I if kind == "whole" else R}), tuple(dims)
    if kind == "padded":
        dims[dim] = (draw(st.integers(1, 11)),)
        return Layout({"tp": S(dim, 0)}), tuple(dims)
    if kind == "shared" and t == 4:
        # Two KV heads, each on two tensor ranks.
        dims[dim] = (2, each)
        return Layout({"tp:(1)2": S(dim, 0), "tp:(2)2": R}), tuple(dims)
    if kind == "blocks":
        dims[dim] = (3, t * each)
        return Layout({"tp": S(dim, 1)}), tuple(dims)
    if kind == "segments":
        dims[dim] = (Segmented((2 * t, t, t)), each)
        return Layout({"tp": S(dim, 0)}), tuple(dims)
    dims[dim] = (t * each, 2)
    return Layout({"tp": S(dim, 0)}), tuple(dims)


def all_items(program: Program) -> dict[int, list[Item]]:
    keys = {spec.name: KEYS if spec.requires_grad else {} for spec in program.params}
    items: dict[int, list[Item]] = {}
    for pipeline_rank in range(program.mesh.pipeline_ranks):
        items |= share_stage(program, pipeline_rank, keys).items
    return items


def check_plan(program: Program, items: dict[int, list[Item]]) -> None:
    """Let torch check that chunks cover every tensor and do not overlap."""
    entries: dict[str, TensorStorageMetadata] = {}
    for spec in program.params:
        for key in ["", *(KEYS if spec.requires_grad else {})]:
            entries[f"{spec.name} {key}"] = TensorStorageMetadata(TensorProperties(), list(spec.shape), [])  # type: ignore[arg-type]
    for some in items.values():
        for item in some:
            chunk = ChunkStorageMetadata(list(item.rectangle.offsets), list(item.rectangle.sizes))  # type: ignore[arg-type]
            entries[f"{item.name} {item.key}"].chunks.append(chunk)
    # With one plan, it would not compare volumes. It returns findings; torch 2.11, whether there are none.
    found = default_planner._validate_global_plan(
        [SavePlan([]), SavePlan([])], Metadata(torch_sizes(entries))
    )
    assert found in ([], True)


def torch_sizes(entries: dict[str, TensorStorageMetadata]) -> dict[str, Any]:
    """With torch's sizes, which count their elements."""
    for entry in entries.values():
        entry.size = torch.Size(entry.size)
        for chunk in entry.chunks:
            chunk.offsets, chunk.sizes = torch.Size(chunk.offsets), torch.Size(chunk.sizes)
    return dict(entries)


@given(programs())
@settings(max_examples=300, deadline=None)
def test_each_element_is_written_once_by_a_rank_that_stores_it(program: Program) -> None:
    items = all_items(program)
    check_plan(program, items)
    for rank, some in items.items():
        held = stored(program, rank)
        for item in some:
            part = item.rectangle
            wholes = [own.common(part.offsets, part.sizes) for own in held[item.name]]
            assert part in wholes, f"rank {rank} does not store {item}"
    keys = {spec.name: KEYS if spec.requires_grad else {} for spec in program.params}
    assert sum(checkpoint_bytes(program, keys)) == sum(
        item.nbytes for some in items.values() for item in some
    )


@pytest.mark.parametrize(
    "keywords",
    [{"d": 4}, {"t": 2, "d": 2}, {"t": 4, "d": 2}, {"p": 2, "d": 4}, {"t": 2, "p": 2, "d": 2}],
    ids=str,
)
def test_replicas_have_equal_shares(keywords: dict[str, Any]) -> None:
    """The fullest rank at a place of the pipeline has 2% more than the mean at most."""
    program = program_of(**keywords)
    items = all_items(program)
    check_plan(program, items)
    for pipeline_rank in range(program.mesh.pipeline_ranks):
        bytes_of = [sum(item.nbytes for item in items[rank]) for rank in program.mesh.ranks_at(pipeline_rank)]
        mean = sum(bytes_of) / len(bytes_of)
        assert max(bytes_of) <= 1.02 * mean, bytes_of


def test_shares_of_one_rank_need_only_what_it_knows() -> None:
    """With ZeRO a rank knows nothing of the state of parameters that it does not store; its share is the same."""
    program = program_of(t=2, d=4, zero=1)
    full = {spec.name: KEYS if spec.requires_grad else {} for spec in program.params}
    everything = share_stage(program, 0, full)
    for rank in range(program.mesh.size):
        held = stored(program, rank)
        known = {name: keys for name, keys in full.items() if held[name]}
        assert share_stage(program, 0, known).items[rank] == everything.items[rank]
