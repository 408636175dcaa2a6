"""Calls that are expected, and their wire bytes, by hand."""

import numpy as np
import pytest

from autoptd.ir.mesh import MESH_AXES, Mesh
from autoptd.ir.names import star
from autoptd.ir.types import wire_bytes
from autoptd.program.calls import Call, axis_text, call_site, expected_calls
from autoptd.program.program import Program
from autoptd.program.specs import Collective


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("all-reduce", 1536.0),
        ("all-gather", 768.0),
        ("reduce-scatter", 768.0),
        ("all-to-all", 192.0),
        ("send", 1024.0),
    ],
)
def test_wire_bytes_of_a_ring_of_four(kind: str, expected: float) -> None:
    assert wire_bytes(kind, 1024, 4) == expected


def test_wire_bytes_of_many_rings_at_once() -> None:
    """The planner counts with arrays of candidates."""
    payload, sizes = np.array([1024, 3000]), np.array([4, 3])
    for kind in ("all-reduce", "all-gather", "all-to-all"):
        told = [wire_bytes(kind, one, n) for one, n in zip(payload.tolist(), sizes.tolist(), strict=True)]
        assert wire_bytes(kind, payload, sizes).tolist() == told


@pytest.mark.parametrize("kind", ["none", "slice", "zero-pad", "one rank keeps it"])
def test_local_conversions_send_nothing(kind: str) -> None:
    assert wire_bytes(kind, 1024, 4) == 0


@pytest.mark.parametrize(
    ("text", "starred"),
    [
        ("transformer.h.12.attn (gpt.py:46)", "transformer.h.*.attn (gpt.py:46)"),
        ("h.3", "h.*"),
        ("0.linear", "*.linear"),
        ("transformer.ln_1: add", "transformer.ln_1: add"),
        ("stage 3", "stage 3"),
    ],
)
def test_star(text: str, starred: str) -> None:
    assert star(text) == starred


@pytest.mark.parametrize(
    ("mesh", "axes", "text"),
    [
        (Mesh(2, 2, 2), ("tp",), "tp"),
        (Mesh(2, 2, 2), ("dp", "tp"), "dp x tp"),
        (Mesh(2, 1, 1), ("dp", "tp"), "tp"),
        (Mesh(2, 2, 2), MESH_AXES, "pp x dp x tp"),
        (Mesh(1, 1, 1), MESH_AXES, ""),
    ],
)
def test_axis_text_names_the_axes_along_which_ranks_differ(
    mesh: Mesh, axes: tuple[str, ...], text: str
) -> None:
    assert axis_text(mesh, mesh.group(0, axes)) == text


def test_calls_count_microbatches_directions_and_pipeline_ranks() -> None:
    f = Collective("h.1.mlp (m.py:7)", 1, "i_to_r", "tp", "none", "all-reduce", 64, 2, "why", pp_ranks=(1,))
    once = Collective("gradients w", 0, "gradient sum", "dp", "none", "all-reduce", 8, 2, "", "step", (0, 1))
    local = Collective("b (m.py:7)", 1, "i_to_p", "tp", "one rank keeps it", "none", 64, 2, "", pp_ranks=(1,))
    program = Program(Mesh(2, 2, 2), 1, 3, "1f1b", "", (), (), (), (), (), [], {}, (f, once, local))
    gradient = Call(7, "all-reduce", "dp", 8, 2, "step", -1, "gradients w")
    assert call_site(f) == "h.*.mlp"
    expected = {Call(7, "all-reduce", "tp", 64, 2, "backward", 1, "h.*.mlp"): 3, gradient: 1}
    assert expected_calls(program, 7) == expected
    assert [one.why for one in expected_calls(program, 7)] == ["why", ""]
    assert sum(expected_calls(program, 0).values()) == 1
    assert not expected_calls(program, 7, training=False)
