"""What is packed, what is scattered, and when that pays: by hand."""

import pytest

from autoptd.ir.machine import Machine
from autoptd.ir.mesh import Mesh
from autoptd.program.specs import CrossingSpec, TransferBuffer
from autoptd.program.transfers import plan_transfers

MIB = 2**20
FOUR = Mesh(4, 2)


def value(
    name: str = "x", type: str = "I", numel: int = 12, dtype: str = "float32", has_grad: bool = True
) -> CrossingSpec:
    return CrossingSpec(name, 0, (1,), (numel,), dtype, has_grad, type)


def plan(
    *specs: CrossingSpec, mesh: Mesh = FOUR, p2p: str = "scatter_gather", **machine: float
) -> tuple[TransferBuffer, ...]:
    return plan_transfers(specs, range(mesh.p), mesh, p2p, Machine(**machine))  # type: ignore[arg-type]


@pytest.mark.parametrize(("type", "parts"), [("I", (4, 4)), ("R", (4, 1)), ("P", (1, 4)), ("S", (1, 1))])
def test_only_what_is_equal_on_all_tensor_ranks_is_scattered(type: str, parts: tuple[int, int]) -> None:
    there, back = plan(value(type=type))
    assert (there.parts, back.parts) == parts
    assert (there.source, there.target, there.is_gradient) == (0, 1, False)
    assert (back.source, back.target, back.is_gradient) == (1, 0, True)
    assert all("whole: differs" in one.why for one in (there, back) if one.parts == 1)


def test_a_piece_is_rounded_up() -> None:
    there, _ = plan(value(numel=13, dtype="bfloat16"))
    assert (there.numel, there.piece, there.sent_bytes) == (13, 4, 8)


def test_no_gradient_is_no_message_and_one_tensor_rank_scatters_nothing() -> None:
    (mask,) = plan(value(has_grad=False, dtype="bool"))
    assert mask.parts == 4 and mask.sent_bytes == 3
    assert [one.parts for one in plan(value(), mesh=Mesh(1, 2))] == [1, 1]


def test_direct_sends_everything_whole() -> None:
    assert [one.parts for one in plan(value(), p2p="direct")] == [1, 1]


def test_stages_of_one_rank_send_nothing() -> None:
    skip = CrossingSpec("x", 0, (1, 2), (12,), "float32", True)
    ends = [
        (one.source, one.target) for one in plan_transfers([skip], (0, 1, 0), Mesh(2, 2), "direct", Machine())
    ]
    assert ends == [(0, 1), (1, 0)]


def test_small_crossings_of_one_kind_are_packed() -> None:
    specs = (
        value("a"),
        value("b", dtype="bool", has_grad=False),
        value("c"),
        value("d", "S"),
        value("e", numel=8 * MIB),
    )
    names = [(one.is_gradient, one.names, one.numel) for one in plan(*specs)]
    values = [(False, ("a", "c"), 24), (False, ("b",), 12), (False, ("d",), 12), (False, ("e",), 8 * MIB)]
    assert names == [*values, (True, ("a", "c"), 24), (True, ("d",), 12), (True, ("e",), 8 * MIB)]


def test_what_a_send_costs_decides_what_is_small() -> None:
    two = value("a", numel=MIB), value("b", numel=MIB)
    assert len(plan(*two, message=10e-6)) == 2 and len(plan(*two, message=1e-6)) == 4


def test_auto_scatters_over_the_network_only() -> None:
    """A node has 8 ranks: at d=2 two stages are 8 ranks apart, at d=1 they are neighbours."""
    large, small = value(numel=4 * MIB), value(numel=1000)
    for mesh, spec, parts in [
        (Mesh(4, 2, 2), large, 4),
        (Mesh(4, 2, 2), small, 1),  # the gather's own price is more than what is saved
        (Mesh(4, 2, 1), large, 1),
        (Mesh(16, 2, 1), large, 1),  # the gather goes over the network as well
    ]:
        there, _ = plan(spec, mesh=mesh, p2p="auto")
        assert there.parts == parts, (mesh, there.why)
    (there, _) = plan(large, mesh=Mesh(4, 2, 2), p2p="auto")
    # 16 MiB at 25 GB/s; a quarter of that, three quarters at 200 GB/s and a call of 20 us.
    assert there.why == "1/4 each: 671 us whole, 251 us as 1/4 per rank and an all-gather"
