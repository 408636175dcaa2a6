"""Recording a constructor and making its tensors one by one; what is refused, and how ranks that differ are told apart."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.errors import PlanError, RuntimeFault
from autoptd.ir.mesh import Mesh
from autoptd.runtime.step.launch import check_same_source
from autoptd.runtime.world.threads import ThreadWorld, run_ranks
from autoptd.subject.initial.deferred import named_tensors
from autoptd.subject.initial.recipes import Recipes, recording_of
from autoptd.subject.initial.recording import Recording
from examples.gpt import make_gpt
from tests.constructors import Holder
from tests.parity.models import batch


def deferred(build: Callable[[Any], None], **how: Any) -> nn.Module:
    with autoptd.deferred(**how):
        return Holder(build)


def recipes(build: Callable[[Any], None], **how: Any) -> Recipes:
    return Recipes(named_tensors(deferred(build, **how)))


def linear(m: Any) -> None:
    m.layer = nn.Linear(8, 6)


def functions(model: nn.Module, x: Tensor) -> list[str]:
    """The operators that make a tensor."""
    recording = recording_of(x)
    assert recording is not None
    steps = [
        recording.tape.steps[number] for number in recording.tape.makers([recording.place_of(x).storage])
    ]
    return [getattr(step.function, "__name__", "").removesuffix(".default") for step in steps]


def test_seeds_are_not_cut_to_32_bits() -> None:
    """Weights of two experts whose hashed seeds agreed in the 32 bits that `manual_seed` reads."""
    with autoptd.deferred(seed=1):
        tensors = [nn.Linear(8, 8).weight for _ in range(2)]
    names = ("layers.15.experts.197.up.weight", "layers.26.experts.124.gate.weight")
    one, two = Recipes(dict(zip(names, tensors, strict=True))).make(names).values()
    assert not torch.equal(one, two)


def test_what_is_overwritten_is_not_made() -> None:
    def build(m: Any) -> None:
        linear(m)
        nn.init.normal_(m.layer.weight)
        m.layer.bias.data[:3].normal_()
        m.copied = nn.Parameter(torch.zeros(6))
        m.copied.data.copy_(m.layer.bias)

    model = deferred(build)
    assert functions(model, model.layer.weight) == ["normal_"]
    bias = ["uniform_", "normal_"]
    assert functions(model, model.layer.bias) == bias
    assert functions(model, model.copied) == [*bias, "copy_"]


def test_a_function_that_draws_until_all_is_accepted_is_one_step() -> None:
    def build(m: Any) -> None:
        linear(m)
        nn.init.trunc_normal_(m.layer.weight, generator=torch.Generator().manual_seed(3))
        nn.init.trunc_normal_(m.layer.bias)

    model = deferred(build)
    for x in (model.layer.weight, model.layer.bias):
        assert functions(model, x) == ["_no_grad_trunc_normal_"]
    assert not model.layer.bias.fake_mode.tape.asked


def test_rows_are_those_of_the_whole() -> None:
    reader = recipes(linear).reader()
    whole = reader.whole("layer.weight")
    for dim in (0, 1):
        got = reader.rows("layer.weight", dim, torch.tensor([3, 4, 1, 0, 0]))
        padded = torch.cat([torch.zeros_like(whole.narrow(dim, 0, 1)), whole], dim)
        assert torch.equal(got, padded.index_select(dim, torch.tensor([3, 4, 1, 0, 0])))
        assert got._version == 0
    assert reader.has("layer.bias") and not reader.has("layer.other")
    whole.zero_()
    assert reader.whole("layer.weight").abs().sum() > 0, "each gets memory of its own"


def test_a_large_tensor_is_never_held_beside_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoptd.subject.initial.recipes.KEPT_BYTES", 100)
    # Of 64 bytes each, and biases of 16.
    source = recipes(lambda m: setattr(m, "layers", nn.ModuleList(nn.Linear(4, 4) for _ in range(4))))
    replay = next(iter(source._replay_of.values()))
    make, held = replay.make, []

    def noting(places: Any) -> list[Tensor]:
        made = make(places)
        held.append(sum(x.nbytes for x in [*made, *source._whole.values()]))
        return made

    monkeypatch.setattr(replay, "make", noting)
    for name in source.entries:
        source.reader().whole(name)
        source.reader().whole(name)
    assert len(held) == 8 and max(held) <= 100


@pytest.mark.parametrize("order", [False, True])
def test_any_order_of_asking_gives_the_same(order: bool) -> None:
    def build(m: Any) -> None:
        m.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        nn.init.normal_(m.layers[2].weight)
        nn.init.trunc_normal_(m.layers[1].weight)
        m.coins = nn.Parameter(torch.bernoulli(torch.rand(20)))

    wanted = recipes(build, order=order).make(recipes(build, order=order).entries)
    source = recipes(build, order=order)
    for name in reversed(source.entries):
        assert torch.equal(source.reader().whole(name), wanted[name]), name


def test_memory_that_nobody_fills_is_zero() -> None:
    source = recipes(lambda m: setattr(m, "w", nn.Parameter(torch.empty(1000))))
    assert torch.equal(source.reader().whole("w"), torch.zeros(1000))


def writes_outside(m: Any) -> None:
    OUTSIDE.copy_(torch.randn(3))


def draws_outside(m: Any) -> None:
    OUTSIDE.normal_()


def on_meta(m: Any) -> None:
    m.w = nn.Parameter(torch.empty(3, device="meta"))


def sparse(m: Any) -> None:
    m.w = torch.eye(3).to_sparse()


def rewinds(m: Any) -> None:
    state = torch.get_rng_state()
    m.a = nn.Parameter(torch.randn(3))
    torch.set_rng_state(state)
    m.b = nn.Parameter(torch.randn(3))


def fills_an_array_later(m: Any) -> None:
    array = numpy.zeros(3)
    m.register_buffer("table", torch.from_numpy(array))
    array[1] = 5.0


def shares_an_array(m: Any) -> None:
    array = numpy.ones(3, dtype=numpy.float32)
    m.w = nn.Parameter(torch.from_numpy(array))
    m.register_buffer("same", torch.from_numpy(array))
    m.w.data.mul_(2)


def materializes(m: Any) -> None:
    autoptd.materialize(nn.Linear(3, 3))


def nested(m: Any) -> None:
    with autoptd.deferred():
        linear(m)


OUTSIDE = torch.zeros(3)
REFUSED: dict[Callable[[Any], None], str] = {
    writes_outside: "made outside of the block",
    draws_outside: "made outside of the block",
    on_meta: "meta device",
    sparse: "sparse",
    rewinds: "order=True",
    fills_an_array_later: "changed after torch had read them",
    materializes: "after the block",
    nested: "inside a block",
    shares_an_array: "memory of one array",
}


@pytest.mark.parametrize("build", REFUSED, ids=lambda build: build.__name__)
def test_what_cannot_be_recorded_is_refused(build: Callable[[Any], None]) -> None:
    state, function = torch.get_rng_state(), torch.nn.init._no_grad_trunc_normal_  # type: ignore[attr-defined]
    with pytest.raises(PlanError, match=REFUSED[build]):
        deferred(build)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.nn.init._no_grad_trunc_normal_ is function  # type: ignore[attr-defined]
    assert type(torch.empty(1)) is Tensor and not OUTSIDE.any()


def test_an_exception_of_the_constructor_comes_out_as_it_is() -> None:
    state = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), autoptd.deferred():
        nn.Linear(2, 2)
        print(1 / 0)
    assert torch.equal(torch.get_rng_state(), state) and type(nn.Linear(2, 2).weight) is nn.Parameter


AFTER: dict[str, tuple[Callable[[Any], Any], str]] = {
    "draw": (lambda m: nn.init.normal_(m.layer.weight), "after its block"),
    "until accepted": (lambda m: nn.init.trunc_normal_(m.layer.weight), "autoptd.deferred"),
    "item": (lambda m: m.layer.weight.sum().item(), "materialize"),
    "copy into a real tensor": (lambda m: torch.zeros(6).copy_(m.layer.bias), "outside of the block"),
    "save": (lambda m: torch.save(m.state_dict(), io.BytesIO()), "materialize"),
    "forward": (lambda m: nn.functional.dropout(m.layer(torch.ones(2, 8))), "materialize"),
    "print a number": (lambda m: float(m.layer.weight[0, 0]), "materialize"),
    "two blocks": (lambda m: m.layer.bias + deferred(linear).layer.bias, "two deferred blocks"),
}


@pytest.mark.parametrize("name", AFTER)
def test_after_the_block_nothing_is_drawn_and_no_value_is_told(name: str) -> None:
    model = deferred(linear)
    use, words = AFTER[name]
    with torch.no_grad(), pytest.raises(PlanError, match=words):
        use(model)


def test_tensors_from_outside_keep_their_values() -> None:
    given, table = torch.arange(6.0).view(3, 2), torch.ones(3)

    def build(m: Any) -> None:
        m.embed = nn.Embedding.from_pretrained(given, freeze=False, padding_idx=1)
        m.register_buffer("table", table)
        m.register_buffer("twice", table * 2)
        m.weight = nn.Parameter(table.clone())
        given[2].fill_(9.0)
        nn.init.constant_(m.weight, 4.0)

    model = deferred(build)
    made = Recipes(named_tensors(model))
    given.add_(1)
    table.add_(1)
    values = made.make(made.entries)
    assert float(given[2, 0]) == 10.0, "what is outside is written to at once"
    assert torch.equal(values["twice"], torch.full((3,), 2.0))
    assert torch.equal(values["weight"], torch.full((3,), 4.0))
    # Those that are the model's own tensors are read when they are needed, as without the block.
    assert torch.equal(values["embed.weight"], given) and torch.equal(values["table"], table)


def test_a_default_dtype_is_remembered() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        source = recipes(lambda m: setattr(m, "w", nn.Parameter(torch.arange(3) / 2 + torch.rand(3))))
    finally:
        torch.set_default_dtype(torch.float32)
    assert source.reader().whole("w").dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32


def test_a_draw_that_was_asked_for_stays_what_it_was() -> None:
    def build(m: Any) -> None:
        x = torch.rand(5)
        m.largest = x.max().item()
        m.w = nn.Parameter(x / m.largest)

    model = deferred(build)
    assert Recipes(named_tensors(model)).reader().whole("w").max() == 1.0


def test_values_are_those_of_the_time_when_they_are_asked_for() -> None:
    with autoptd.deferred():
        x = torch.zeros(3)
        before = x[0].item()
        x[:2].fill_(2.0)
        assert (before, x[0].item(), x.tolist()) == (0.0, 2.0, [2.0, 2.0, 0.0])


def test_arrays_that_are_handed_out_cannot_be_written_to() -> None:
    with pytest.raises(ValueError, match="read-only"), autoptd.deferred():
        torch.zeros(3).numpy()[0] = 1.0


# ranks that differ


def numpy_bias(m: Any) -> None:
    m.fine = nn.Linear(3, 3)
    m.layer = nn.Linear(3, 3)
    m.layer.bias.data.copy_(torch.from_numpy(numpy.random.rand(3)))


def python_scale(m: Any) -> None:
    m.fine = nn.Linear(3, 3)
    m.layer = nn.Linear(3, 3)
    m.layer.bias.data.mul_(random.random())


def python_choice(m: Any) -> None:
    m.before = nn.Linear(3, 3)
    if random.random() < 2 * RANK[0]:
        torch.randn(3)
        m.before.bias.data.zero_()
    m.layer = nn.Linear(3, 3)


RANK = [0]


@pytest.mark.parametrize(
    ("build", "name"),
    [(numpy_bias, "layer.bias"), (python_scale, "layer.bias"), (python_choice, "before.bias")],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_random_numbers_from_elsewhere_are_a_fault_on_all_ranks(
    build: Callable[[Any], None], name: str
) -> None:
    sources = []
    for rank in range(3):
        RANK[0] = rank == 1
        numpy.random.seed(rank == 1)
        random.seed(rank == 1)
        sources.append(recipes(build))
    world = ThreadWorld(Mesh(d=3))
    words = rf"rank 1 makes other initial values of {name} than rank 0.*seed"
    with pytest.raises(RuntimeFault, match=words):
        run_ranks(world, lambda world: check_same_source(sources[world.rank], world))


def test_ranks_compare_before_they_start(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = iter("abc")
    monkeypatch.setattr(Recipes, "fingerprint", lambda self: next(texts))
    with autoptd.deferred():
        model = make_gpt(n_layer=1)
    with pytest.raises(RuntimeFault, match="other initial values of its tensors"):
        autoptd.parallelize(model, d=2, example_inputs=batch(), backend="local", timeout=20)


def test_in_order_what_was_drawn_before_counts() -> None:
    def build(m: Any) -> None:
        torch.randn(RANK[0] + 1)
        linear(m)

    prints = {}
    for order in (False, True):
        for rank in range(2):
            RANK[0] = rank
            prints[order, rank] = recipes(build, order=order).fingerprint()
    assert prints[False, 0] == prints[False, 1] and prints[True, 0] != prints[True, 1]
    assert recipes(linear, seed=1).fingerprint() != recipes(linear, seed=2).fingerprint()


def test_a_rank_that_asks_for_a_value_draws_others() -> None:
    def build(m: Any) -> None:
        linear(m)
        if RANK[0]:
            m.layer.bias.sum().item()

    found = []
    for rank in range(2):
        RANK[0] = rank
        found.append(recipes(build))
    parts = [source.parts() for source in found]
    assert (
        parts[0]["layer.weight"] == parts[1]["layer.weight"]
        and parts[0]["layer.bias"] != parts[1]["layer.bias"]
    )
    assert not torch.equal(*(source.reader().whole("layer.bias") for source in found))


def test_a_replaced_parameter_counts_with_its_values() -> None:
    def source(value: float) -> Recipes:
        model = deferred(linear)
        model.layer.bias = nn.Parameter(torch.full((6,), value))
        return Recipes(named_tensors(model))

    assert source(1.0).fingerprint() == source(1.0).fingerprint() != source(2.0).fingerprint()


def test_devices_of_ranks_do_not_count() -> None:
    def build(device: str) -> Callable[[Any], None]:
        return lambda m: setattr(m, "w", nn.Parameter(torch.randn(3, device=device).cpu()))

    one, two = (recipes(build(device)) for device in ("cuda:0", "cuda:1"))
    assert one.fingerprint() == two.fingerprint()
    assert torch.equal(one.reader().whole("w"), two.reader().whole("w"))


def test_a_recording_is_not_copied_with_its_tensors() -> None:
    import copy

    recording = Recording()
    with recording.open():
        model = nn.Linear(3, 3)
    assert copy.deepcopy(model).weight.fake_mode is recording  # type: ignore[attr-defined]
