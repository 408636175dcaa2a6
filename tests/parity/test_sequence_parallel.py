"""Sequence parallelism (Korthikanti et al. 2022, section 4.2.2): right, Megatron's plan, and fewer bytes kept for backward."""

from __future__ import annotations

import html
import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import autoptd
from autoptd import runtime as rt
from autoptd.ir.machine import Machine
from autoptd.ir.mesh import Mesh
from autoptd.ir.types import wire_bytes
from autoptd.runtime.world.threads import ThreadGroup, ThreadWorld, run_ranks
from autoptd.runtime.world.world import Communicators, Pending, World
from autoptd.wings.reports.report import report_html
from autoptd.wings.reports.summary import summarize
from examples.gpt import GPT, GPTConfig
from tests.parity.kept import kept_bytes
from tests.parity.models import LENGTH, batch, dropping_gpt, gpt, separate, uneven

OVERLAP: dict[str, Any] = {"async_tensor_model_parallel_allreduce": True}
HOOKS: dict[str, Any] = {
    **OVERLAP,
    "accumulate_allreduce_grads_in_fp32": True,
    "delay_wgrad_compute": "before_reduce",
}


def conversions(program: autoptd.Program, layer: str = "") -> Counter[str]:
    return Counter(
        one.conversion
        for one in program.collectives
        if one.axis == "tp"
        and one.scope == "microbatch"
        and {one.forward, one.backward} & {"all-gather", "all-reduce"}
        if layer in one.site
    )


def wide_gpt(layers: int = 2) -> GPT:
    """Of a size at which people train; on meta."""
    with torch.device("meta"):
        return GPT(GPTConfig(vocab_size=50304, block_size=1024, n_layer=layers, n_head=16, n_embd=2048))


def test_a_request_that_changes_nothing_is_reported() -> None:
    text = "sequence_parallel=True changes nothing"
    with pytest.warns(UserWarning, match=text):
        autoptd.compile(
            gpt(2), t=2, sequence_parallel=True, machine=Machine(latency=1e-3), example_inputs=batch()
        )
    ids = torch.zeros(4, 1024, dtype=torch.long, device="meta")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", text)
        autoptd.compile(wide_gpt(1), t=8, sequence_parallel=True, example_inputs=(ids, ids))
        autoptd.compile(gpt(1), t=2, sequence_parallel="auto", example_inputs=batch())


def test_a_layer_has_two_gathers_and_two_reduce_scatters() -> None:
    ids = torch.zeros(4, 1024, dtype=torch.long, device="meta")
    for choice in (True, "auto"):
        program = autoptd.compile(
            wide_gpt(), t=8, sequence_parallel=choice, num_microbatches=2, example_inputs=(ids, ids)
        )
        if choice is True:
            assert conversions(program, "transformer.h.1.") == {"s_to_r": 2, "p_to_s": 2, "gathered again": 2}
            assert "all-reduce" not in {
                one.forward for one in program.collectives if "transformer" in one.site
            }
    plain = autoptd.compile(wide_gpt(), t=8, num_microbatches=2, example_inputs=(ids, ids))
    assert conversions(plain, "transformer.h.1.") == {"i_to_r": 2, "p_to_i": 2}


def test_norms_and_residuals_are_kept_as_shards() -> None:
    """Korthikanti et al. 2022, table 2: with tensor parallelism s b h (10 + 24/t) and attention, with SP all of it over t."""
    ids, targets = batch(4)
    one, two = (
        {layers: kept_bytes(gpt(layers), (ids, targets), t, sequence_parallel=choice) for layers in (1, 2)}
        for t, choice in ((1, False), (4, True))
    )
    plain = {layers: kept_bytes(gpt(layers), (ids, targets), 4) for layers in (1, 2)}
    per_layer = [sizes[2] - sizes[1] for sizes in (one, plain, two)]
    unit = 4 * LENGTH * 32 * 4  # bytes of one activation, float32
    assert per_layer[2] == per_layer[0] / 4
    assert [round(size / unit) for size in per_layer] == [
        16,
        7,
        4,
    ]  # 4 + 12, 4 + 12/t, (4 + 12)/t activations


def test_what_cannot_be_is_refused_and_auto_goes_on() -> None:
    ids, targets = batch()
    odd = (ids[:, :7].contiguous(), targets[:, :7].contiguous())
    with pytest.raises(autoptd.PlanError, match="7 tokens do not divide over t=2"):
        autoptd.compile(gpt(2), t=2, sequence_parallel=True, example_inputs=odd)
    autoptd.verify(gpt(2), t=2, sequence_parallel="auto", example_inputs=odd, steps=1)
    with pytest.raises(autoptd.PlanError, match="True, False, 'auto'"):
        autoptd.compile(gpt(2), t=2, sequence_parallel="yes", example_inputs=(ids, targets))
    assert LENGTH % 4 == 0


class Told(Pending):
    def __init__(self, pending: Pending, tell: Callable[[str], None], what: str) -> None:
        self.pending, self.tell, self.what = pending, tell, what

    def wait(self) -> Any:
        self.tell(f"wait for {self.what}")
        return self.pending.wait()

    def is_done(self) -> bool:
        return self.pending.is_done()


class Gemms(TorchDispatchMode):
    """Tells of every product."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self.tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.tell("GEMM")
        return func(*args, **(kwargs or {}))


def events_of_backward(monkeypatch: pytest.MonkeyPatch, readers: int) -> list[str]:
    """What happens, in which order, in the backward of `readers` GEMMs of one gathered value, on rank 0 of two."""
    found: list[str] = []

    def tell(name: str, what: str) -> None:
        start = getattr(ThreadGroup, name)

        def told(self: ThreadGroup, *call: Any) -> Pending:
            note: Callable[[str], None] = found.append if self.index == 0 else lambda event: None
            note(f"start {what}")
            return Told(start(self, *call), note, what)

        monkeypatch.setattr(ThreadGroup, name, told)

    tell("all_gather_start", "gather")
    tell("reduce_scatter_start", "scatter")

    def body(world: World) -> None:
        group = world.group(("tp",))
        x = torch.randn(2, 4, 6, requires_grad=True)
        whole = rt.all_gather_again(x, group, 1, 1, gemms=readers, overlap=True, site="here")
        weights = [torch.randn(3, 6, requires_grad=True) for _ in range(readers)]
        total = torch.stack([rt.linear(whole, weight) for weight in weights]).sum()
        with Gemms(found.append if world.rank == 0 else lambda event: None):
            total.backward()

    run_ranks(ThreadWorld(Mesh(t=2), Communicators(), timeout=20.0), body)
    return found


def test_gather_and_reduce_scatter_run_beside_the_gemms(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gather beside the input's gradient, its reduce-scatter beside the weight's (Korthikanti et al. 2022, 4.2.2)."""
    alone = ["start gather", "GEMM", "start scatter", "wait for gather", "GEMM", "wait for scatter"]
    assert events_of_backward(monkeypatch, readers=1) == alone
    monkeypatch.undo()
    # Two readers: their input gradients are added up first, and scattered once, behind both.
    both = ["start gather", "GEMM", "wait for gather", "GEMM", "GEMM", "GEMM"]
    assert events_of_backward(monkeypatch, readers=2) == both


# On links this slow, and with parameters that cost next to nothing, whole weights beat gathered activations.
WHOLE_WEIGHTS = Machine(
    link_bandwidth=1e7, latency=1e-9, per_parameter_byte=1e-13, per_saved_byte=1e-12, redundant=1.0
)


def matrices(program: autoptd.Program) -> dict[str, str]:
    """How the matrices of layers are stored."""
    return {
        one.name: one.use.layout["tp"].kind
        for one in program.params
        if ".h." in one.name and len(one.shape) == 2
    }


def test_what_is_split_without_it_stays_split() -> None:
    """Korthikanti's plan whatever the prices; "auto" finds another, and says so beside the known ones."""
    request: dict[str, Any] = {"t": 2, "machine": WHOLE_WEIGHTS, "example_inputs": batch()}
    plain, asked, free = (
        autoptd.compile(gpt(2), sequence_parallel=way, **request) for way in (False, True, "auto")
    )
    assert set(matrices(plain).values()) == {"S"} and matrices(asked) == matrices(plain)
    assert conversions(asked, "transformer.h.1.") == {"s_to_r": 2, "p_to_s": 2, "gathered again": 2}
    assert "R" in matrices(free).values()
    weighed = free.plan["weighed"]
    assert "weighed" not in asked.plan and weighed["True"]["over_least"] < weighed["auto"]["over_least"]
    assert weighed["auto"]["sent_bytes"] < weighed["True"]["sent_bytes"]
    assert weighed["auto"]["seconds"] < weighed["True"]["seconds"]
    wanted = sum(math.prod(one.local_shape(free.mesh)) for one in free.params)
    assert weighed["auto"]["parameters"] == wanted and "parameters" in weighed["found"]
    for told in (str(summarize(free)), free.explain("transformer.h.1.mlp"), report_html(free)):
        assert html.escape(weighed["found"]) in told or weighed["found"] in told
    assert "products and parameters stay split" in asked.explain("transformer.h.1.mlp")


def test_weighed_bytes_are_those_of_the_collectives() -> None:
    """`weighed` is counted on the graph, `collectives` is what runs."""
    program = autoptd.compile(
        gpt(2), t=2, sequence_parallel="auto", machine=WHOLE_WEIGHTS, example_inputs=batch()
    )
    sent = [
        wire_bytes(kind, one.payload_bytes, one.group_size)
        for one in program.collectives
        if one.axis == "tp" and one.scope == "microbatch" and not one.conversion.startswith("vocab_parallel")
        for kind in (one.forward, one.backward)
    ]
    assert program.plan["weighed"]["auto"]["sent_bytes"] == sum(sent)


@pytest.mark.thorough
@pytest.mark.one_in(30)
@pytest.mark.parametrize(
    ("choice", "mesh", "model"),
    list(
        itertools.product(
            ["auto", True],
            [{"t": 2}, {"t": 4, "d": 2}, {"t": 2, "p": 2, "v": 2}],
            [gpt, separate, dropping_gpt],
        )
    ),
)
def test_parity_where_auto_finds_another_plan(choice: bool | str, mesh: dict[str, Any], model: Any) -> None:
    ids, targets = batch()
    request: dict[str, Any] = {**mesh, "sequence_parallel": choice, "machine": WHOLE_WEIGHTS}
    autoptd.verify(model(), **request, example_inputs=(ids, uneven(targets)), steps=2)


@pytest.mark.thorough
def test_auto_pays_for_what_it_holds_where_memory_is_short() -> None:
    """`memory=` counts for parameters too: less is held than by the plan that takes fewest seconds."""
    request: dict[str, Any] = {
        "t": 2,
        "machine": WHOLE_WEIGHTS,
        "sequence_parallel": "auto",
        "example_inputs": batch(),
    }
    free = summarize(autoptd.compile(gpt(4), **request)).ranks[0].total_bytes
    short = autoptd.compile(gpt(4), memory=0.95 * free, recompute=False, **request)
    assert summarize(short).ranks[0].total_bytes <= 0.95 * free
    assert short.plan["weighed"]["auto"]["over_least"] < 1.1  # 1.136 where nothing is short
