"""`with autoptd.deferred():`: models without memory, whose weights are the same on every mesh and on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.compat import FakeTensor
from autoptd.errors import PlanError
from autoptd.runtime.params.fingerprint import fingerprint_of_values
from autoptd.runtime.params.parts import shard_of
from autoptd.subject.initial.deferred import named_tensors
from autoptd.subject.initial.recipes import Recipes
from examples.gpt import GPT, GPTConfig
from tests.constructors import KINDS
from tests.parity.models import batch


def small(layers: int = 2, **more: Any) -> GPT:
    sizes = {"vocab_size": 61, "block_size": 8, "n_head": 4, "n_embd": 32} | more
    return GPT(GPTConfig(n_layer=layers, **sizes))


def deferred_gpt(seed: int = 0, **sizes: Any) -> GPT:
    with autoptd.deferred(seed):
        return small(**sizes)


def plain_and_deferred(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """The model as its constructor makes it, and as the recorded constructor does."""
    before = torch.get_rng_state()
    with autoptd.deferred(seed=5, order=True):
        model = make()
    assert torch.equal(torch.get_rng_state(), before), "the block changed torch's generator"
    made = autoptd.materialize(model)
    assert torch.equal(torch.get_rng_state(), before), "materialize changed torch's generator"
    torch.manual_seed(5)
    return make(), made


def assert_same(plain: nn.Module, made: nn.Module) -> None:
    """Assert that two models have the same tensors, to the bit, in the same layouts."""
    ours, theirs = named_tensors(made), named_tensors(plain)
    assert list(ours) == list(theirs)
    for name, x in ours.items():
        want = theirs[name]
        assert not isinstance(x, FakeTensor), f"{name} has no values"
        assert type(x) is type(want), name
        assert (x.dtype, x.shape, x.stride()) == (want.dtype, want.shape, want.stride()), name
        assert x.requires_grad == want.requires_grad, name
        assert torch.equal(x.detach().nan_to_num(7.5), want.detach().nan_to_num(7.5)), name
    assert list(dict(made.named_buffers())) == list(dict(plain.named_buffers()))


def numbers(model: nn.Module) -> dict[str, Any]:
    """What the constructor read back: numbers, and lists of them."""
    found = {}
    for name, value in vars(model).items():
        if isinstance(value, int | float) or (
            isinstance(value, list) and all(isinstance(x, float) for x in value)
        ):
            found[name] = value
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_in_order_the_bits_are_those_of_the_constructor(kind: str) -> None:
    plain, made = plain_and_deferred(KINDS[kind])
    assert_same(plain, made)
    assert numbers(plain) == numbers(made)


def test_in_order_a_gpt_has_the_bits_of_its_constructor() -> None:
    plain, made = plain_and_deferred(small)
    assert_same(plain, made)
    assert made.lm_head.weight is made.transformer.wte.weight


@pytest.mark.parametrize("kind", KINDS)
def test_one_by_one_and_all_at_once_are_the_same(kind: str) -> None:
    if kind == "generators":
        pytest.skip("it sets torch's state back, which draws by name refuse")
    with autoptd.deferred(seed=5):
        model = KINDS[kind]()
    made = named_tensors(autoptd.materialize(model))
    recipes = Recipes(named_tensors(model))
    for name in reversed(recipes.entries):
        one = recipes.reader().whole(name)
        assert torch.equal(one.nan_to_num(7.5), made[name].detach().nan_to_num(7.5)), name


MESHES = (
    {"t": 2, "p": 2, "d": 2},
    {"t": 4},
    {"t": 8, "zero": 0},
    {"p": 2, "v": 1, "d": 2, "zero": 1},
    {"d": 4, "zero": 1},
    {"t": 2, "d": 2, "zero": 1, "precision": "bf16-mixed"},
    {"t": 3},
    {"p": 2},
)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_mesh_starts_from_the_same_bits(mesh: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"n_head": 8} if mesh.get("t") == 8 else {}
    model = deferred_gpt(seed=3, **sizes)
    made = autoptd.materialize(model)
    wanted = made.state_dict()
    pm = autoptd.parallelize(model, **mesh, example_inputs=batch(8, 61), backend="local", timeout=60)
    try:
        assert pm.fingerprint() == fingerprint_of_values(dict(made.named_parameters()))
        state = pm.state_dict()
        for name, x in wanted.items():
            assert torch.equal(state[name], x), name
        for rank in pm.run.ranks.here:  # type: ignore[union-attr]
            for spec in rank.params.specs:
                if (local := rank.params.local.get(spec.name)) is not None:
                    own = shard_of(spec, wanted[spec.name], rank.world)
                    assert torch.equal(local, own.to(local.dtype)), (rank.world.rank, spec.name)
        assert torch.isfinite(pm.step(*batch(8, 61)))
    finally:
        pm.close()


def test_each_parameter_is_spread_as_by_its_constructor() -> None:
    ours = autoptd.materialize(deferred_gpt(seed=1, n_embd=128, vocab_size=512))
    theirs = small(n_embd=128, vocab_size=512).state_dict()
    for name, x in ours.named_parameters():
        if x.numel() >= 4096:
            assert float(x.detach().std()) == pytest.approx(float(theirs[name].std()), rel=0.03), name
            assert not torch.equal(x, theirs[name])
        elif x.dim() == 1:
            assert torch.equal(x, theirs[name]), name
    # No two draws are the same.
    drawn = [x.detach().flatten()[:8] for x in ours.parameters() if x.dim() > 1]
    assert len({tuple(x.tolist()) for x in drawn}) == len(drawn)


def test_a_layer_more_changes_no_other_weight() -> None:
    two, three = (autoptd.materialize(deferred_gpt(layers=n)).state_dict() for n in (2, 3))
    # The scale of c_proj counts the layers.
    same = [name for name in two if not name.endswith("c_proj.weight")]
    assert len(same) > 20 and all(torch.equal(two[name], three[name]) for name in same)
    other = autoptd.materialize(deferred_gpt(seed=1)).state_dict()
    assert not torch.equal(two["lm_head.weight"], other["lm_head.weight"])


def change_after_the_block(model: GPT) -> None:
    block = model.transformer.h[0]
    block.mlp.c_fc.weight.data.mul_(2.0)
    with torch.no_grad():
        block.ln_1.weight[:3] = 0.5
        block.attn.c_attn.bias.copy_(torch.arange(96.0))
    block.attn.c_proj.weight = nn.Parameter(torch.full((32, 32), 0.125))
    model.transformer.h.append(copy.deepcopy(block))
    model.transformer.ln_f.load_state_dict({"weight": torch.full((32,), 3.0), "bias": torch.ones(32)})
    block.mlp.c_proj.bias.data = block.mlp.c_proj.weight.data[:, 0].clone()
    model.bfloat16()
    model.transformer.wpe.float()
    model.transformer.wpe.requires_grad_(False)
    model.lm_head.weight.note = "kept"  # type: ignore[attr-defined]
    model.eval()


def test_changes_after_the_block_are_followed() -> None:
    with autoptd.deferred(seed=5, order=True):
        model = small()
    torch.manual_seed(5)
    plain = small()
    for each in (model, plain):
        change_after_the_block(each)
    made = autoptd.materialize(model)
    assert_same(plain, made)
    assert made.transformer.wte.weight.note == "kept" and not made.training
    assert isinstance(model.lm_head.weight, FakeTensor), "materialize makes a copy"
    pm = autoptd.parallelize(
        model.float().train(), t=2, p=2, example_inputs=batch(8, 61), backend="local", timeout=60
    )
    try:
        state = pm.state_dict()
        assert all(torch.equal(state[name], x.float()) for name, x in plain.state_dict().items())
    finally:
        pm.close()


def test_models_of_two_blocks_make_one() -> None:
    with autoptd.deferred(seed=1):
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    with autoptd.deferred(seed=2):
        third = nn.Linear(4, 4)
    made = autoptd.materialize(nn.Sequential(first, second, third, nn.Linear(4, 4)))
    assert len({float(layer.weight[0, 0]) for layer in made}) == 4  # type: ignore[union-attr,arg-type]
    again = autoptd.materialize(nn.Sequential(first, second))
    assert torch.equal(again[0].weight, made[0].weight), "seeds are of names"
    # Models of the same names, from the same seed, are the same.
    assert torch.equal(autoptd.materialize(first).weight, autoptd.materialize(second).weight)


def test_a_model_with_values_is_left_alone() -> None:
    model = small()
    assert autoptd.materialize(model) is model


def test_it_computes_what_it_computes_on_one_device() -> None:
    report = autoptd.verify(deferred_gpt(), t=2, p=2, d=2, example_inputs=batch(8, 61), steps=2)
    assert report.passed


def test_compiling_draws_nothing() -> None:
    one = autoptd.compile(deferred_gpt(), t=2, p=2, example_inputs=batch(8, 61))
    two = autoptd.compile(small(), t=2, p=2, example_inputs=batch(8, 61))
    assert one.fingerprint() == two.fingerprint()


def test_weights_of_a_folder_come_before_recipes(tmp_path: Any) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    given = small()
    tensors = {name: x.detach() for name, x in given.named_parameters()}
    safetensors.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    pm = autoptd.parallelize(
        deferred_gpt(), t=2, example_inputs=batch(8, 61), weights=tmp_path, backend="local", timeout=60
    )
    try:
        state = pm.state_dict()
        assert all(torch.equal(state[name], x) for name, x in given.state_dict().items())
    finally:
        pm.close()


class Tables(nn.Module):
    """Buffers and plain tensors that the constructor computes, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(61, 16), nn.Linear(16, 61)
        self.register_buffer("angles", torch.outer(torch.arange(8.0), torch.rand(16)), persistent=False)
        self.register_buffer("kept", torch.randn(16))
        self.shift = torch.linspace(0, 1, 16)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids) + self.angles + self.kept + self.shift
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class FrozenTwice(nn.Module):
    """Two frozen parameters over the same memory, which count as one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(61, 16), nn.Embedding(61, 16)
        self.first.weight.requires_grad_(False)
        self.second.weight = nn.Parameter(self.first.weight.detach(), requires_grad=False)
        self.head = nn.Linear(16, 61)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.head(self.first(ids) + self.second(ids).square())
        return nn.functional.cross_entropy(x.flatten(0, 1), targets.flatten())


def test_memory_that_was_replaced_and_seeds_that_are_none_are_refused() -> None:
    with autoptd.deferred():
        model = nn.Linear(4, 4)
    model.weight.data = torch.zeros(4, 4)
    for use in (autoptd.materialize, lambda x: autoptd.parallelize(x, t=2, backend="local")):
        with pytest.raises(PlanError, match=r"^weight: its \.data was replaced by a tensor with values"):
            use(model)
    for seed in (1.0, True, None, 2**64):
        with pytest.raises(PlanError, match="must be a 64-bit integer"), autoptd.deferred(seed):  # type: ignore[arg-type]
            pass


def test_frozen_parameters_over_the_same_memory_are_one() -> None:
    with autoptd.deferred(seed=4):
        model = FrozenTwice()
    made = autoptd.materialize(model)
    first, second = made.first.weight, made.second.weight
    assert first.data_ptr() == second.data_ptr()
    pm = autoptd.parallelize(model, t=2, example_inputs=batch(8, 61), backend="local", timeout=60)
    try:
        assert float(pm.step(*batch(8, 61))) == pytest.approx(float(made(*batch(8, 61))), rel=1e-5)
        assert torch.equal(pm.state_dict()["second.weight"], first)
    finally:
        pm.close()


def test_buffers_and_plain_tensors_have_their_values() -> None:
    with autoptd.deferred(seed=4):
        model = Tables().double()
    model.shift = model.shift.double()
    reference = autoptd.materialize(model)
    pm = autoptd.parallelize(model, t=2, d=2, example_inputs=batch(8, 61), backend="local", timeout=60)
    try:
        for _ in range(2):
            loss = reference(*batch(8, 61))
            assert float(pm.step(*batch(8, 61))) == pytest.approx(float(loss), abs=1e-12)
        assert torch.equal(pm.state_dict()["kept"], reference.kept)
    finally:
        pm.close()


class Normed(nn.Module):
    """Its parametrization writes to buffers with `out=`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean()


def test_buffers_that_the_forward_changes_are_updated_alike() -> None:
    plain = Normed()
    with autoptd.deferred():
        without_memory = Normed()
    made = [
        autoptd.compile(model, t=2, example_inputs=(torch.ones(4, 8),)) for model in (plain, without_memory)
    ]
    assert made[0].updated == ("linear.parametrizations.weight.0._u", "linear.parametrizations.weight.0._v")
    assert made[0].sources == made[1].sources and made[0].updated == made[1].updated
