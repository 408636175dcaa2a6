"""Which gradients are sums over ranks, and how often each is added. See `docs/silent-errors.md`."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from tests.silent_errors.models import (
    WIDTH,
    Attention,
    Block,
    Decoder,
    Latent,
    batch,
    decoder,
    of_blocks,
)
from tests.silent_errors.pair import Pair, near

IDS, LABELS = batch()


def test_a_norm_whose_heads_are_split() -> None:
    """Fails without the sum over tp (`ParamSpec.sums` over dp alone): each rank has the part of its heads."""
    with Pair(of_blocks(lambda: Block(Attention(normed=True))), (IDS, LABELS), t=2) as pair:
        pair.train(IDS, LABELS)
        assert pair.kind("layers.0.attention.q_norm.weight") == "R"
        assert pair.kind("layers.0.attention.q.weight") == "S"


def test_norms_and_biases_under_sequence_parallelism() -> None:
    """Fails without the sum over tp (`ParamSpec.sums` over dp alone): each rank has the part of its tokens."""
    with Pair(decoder(), (IDS, LABELS), t=2, sequence_parallel=True) as pair:
        pair.train(IDS, LABELS, max_norm=0.1)
        assert pair.kind("layers.0.norm_1.weight") == pair.kind("layers.0.norm_2.bias") == "R"


@pytest.mark.parametrize("kv", [1, 2])
def test_key_heads_that_tensor_ranks_share(kv: int) -> None:
    """Fails without the sum over the ranks that share a head (`ParamSpec.sums` over dp alone)."""
    with Pair(of_blocks(lambda: Block(Attention(kv))), (IDS, LABELS), t=4) as pair:
        pair.train(IDS, LABELS)
        assert pair.kind("layers.0.attention.q.weight") == "S"


def test_a_part_of_keys_that_all_heads_share() -> None:
    """Fails without the sum over tp (`ParamSpec.sums` over dp alone): each rank has the part of its heads."""
    whole = {"shard": [{"pattern": "layers.*.attention.shared.weight", "dim": None, "axis": "tp"}]}
    with Pair(of_blocks(lambda: Block(Latent())), (IDS, LABELS), t=2, plan=whole) as pair:
        pair.train(IDS, LABELS)
        assert pair.kind("layers.0.attention.q.weight") == "S"
        assert pair.kind("layers.0.attention.shared.weight") == "R"


class Experts(nn.Module):
    """A router chooses two of four experts for each token; all are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, WIDTH, 2 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(4, 2 * WIDTH, WIDTH) / 6)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        scores = torch.zeros(*x.shape[:-1], 4, dtype=x.dtype, device=x.device).scatter(-1, chosen, weights)
        hidden = F.gelu(torch.einsum("bsh,ehf->bsef", x, self.up))
        return torch.einsum("bsef,efh,bse->bsh", hidden, self.down, scores)


def test_a_router_next_to_split_experts() -> None:
    """Fails if a router gets the gradient of a rank's experts: the scores of half of them detached on one device."""
    with Pair(of_blocks(lambda: Block(mlp=Experts())), (IDS, LABELS), t=2) as pair:
        pair.train(IDS, LABELS, max_norm=0.1)
        assert pair.kind("layers.0.mlp.up") == "S"


@pytest.mark.parametrize("t", [2, 4])
def test_a_bias_after_a_sum_over_tensor_ranks(t: int) -> None:
    """Fails if each rank adds it, or if its gradient is divided by t: the bias * t, or `/ t`, on one device."""
    model = decoder()
    nn.init.normal_(model.layers[0].mlp.down.bias)
    with Pair(model, (IDS, LABELS), t=t) as pair:
        pair.train(IDS, LABELS)
        assert pair.kind("layers.0.mlp.down.weight") == "S" and pair.kind("layers.0.mlp.down.bias") != "S"


class Adapted(nn.Module):
    """A frozen layer and a low-rank update with dropout before it (Hu et al. 2021)."""

    def __init__(self, host: nn.Linear) -> None:
        super().__init__()
        self.host, self.drop = host.requires_grad_(False), nn.Dropout(0.25)
        self.down = nn.Linear(host.in_features, 3, bias=False)
        self.up = nn.Linear(3, host.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.host(x) + 2 * self.up(self.down(self.drop(x)))


# Of a layer split by columns the first factor, of one split by rows the second.
SHARED_FACTORS = ("attention.q.down", "mlp.down.up")


@pytest.mark.parametrize("split", [False, True], ids=["whole", "tokens"])
def test_adapters_of_split_layers(split: bool) -> None:
    """Fails without the sums over tp (`ParamSpec.sums` over dp alone), and for the masks of another step."""
    model = decoder()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    block = model.layers[0]
    block.attention.q, block.mlp.down = Adapted(block.attention.q), Adapted(block.mlp.down)
    whole = [{"pattern": f"layers.*.{name}.weight", "dim": None, "axis": "tp"} for name in SHARED_FACTORS]
    with Pair(model, (IDS, LABELS), t=2, sequence_parallel=split, plan={"shard": whole}) as pair:
        pair.train(IDS, LABELS, max_norm=0.1)
        pair.train(IDS, LABELS)
        assert (
            pair.kind("layers.0.mlp.down.host.weight") == pair.kind("layers.0.attention.q.host.weight") == "S"
        )
        assert pair.kind("layers.0.attention.q.down.weight") == "R"


def test_tied_embeddings_on_two_stages() -> None:
    """Fails without the sum over the stages (`ParamSpec.sums` over tp and dp alone): copies would part."""
    with Pair(decoder(2, tied=True), (IDS, LABELS), t=2, p=2) as pair:
        for _ in range(2):
            pair.train(IDS, LABELS, max_norm=0.1)
        assert pair.stages("embed.weight") == (0, 1)
        first, last = (pair.pm.rank_parameters(rank)["embed.weight"].detach() for rank in (0, 2))
        assert torch.equal(first, last)


def test_tied_embeddings_with_a_divided_optimizer() -> None:
    """Fails if the copies are not summed shard by shard (`ParamSpec.sums` over tp and dp alone)."""
    with Pair(decoder(3, tied=True), (IDS, LABELS), p=2, d=2, zero=1) as pair:
        for _ in range(2):
            pair.train(IDS, LABELS)
        assert pair.stages("embed.weight") == (0, 1)


def test_tied_embeddings_of_a_model_without_values() -> None:
    """Fails if each use is given values: two parameters on one device."""
    torch.manual_seed(0)
    with autoptd.deferred():
        model = decoder(2, tied=True)
    made = autoptd.materialize(model)
    pm = autoptd.parallelize(model, t=2, p=2, backend="local", example_inputs=(IDS, LABELS))
    state = pm.state_dict()
    assert torch.equal(state["embed.weight"], state["head.weight"])
    near(state, made.state_dict())
    loss = made(IDS, LABELS)
    loss.backward()
    assert float((pm.step(IDS, LABELS) - loss.detach()).abs()) < 1e-5
    wanted = made.embed.weight.grad
    assert wanted is not None
    torch.testing.assert_close(pm.gradients()["embed.weight"], wanted, rtol=1e-4, atol=1e-6)
    pm.close()


def test_every_stage_scales_microbatches_once() -> None:
    """Fails if stages before the last scale again: gradients of the first stage / 4 on one device."""
    with Pair(decoder(3), (IDS, LABELS), p=4, num_microbatches=4) as pair:
        pair.train(IDS, LABELS)
        assert pair.pm.program.num_microbatches == 4
        assert pair.stages("embed.weight") != pair.stages("head.weight")


@pytest.mark.filterwarnings("ignore:pm.step")
def test_steps_add_up_under_a_pipeline() -> None:
    """Fails if a step scales what was there before it: the first gradients / 2 on one device."""
    with Pair(decoder(2), (IDS, LABELS), p=2, num_microbatches=2) as pair:
        for step in range(3):
            pair.backward(IDS.roll(step, 0), LABELS)
        pair.update()


@pytest.mark.filterwarnings("ignore:pm.step")
def test_steps_of_other_lengths_add_up() -> None:
    """Fails if another length begins with new gradients: `zero_grad` between the calls of one device."""
    with Pair(decoder(2), (IDS, LABELS), p=2, shapes="exact") as pair:
        for length in (8, 5, 8):
            pair.backward(IDS[:, :length], LABELS[:, :length])
        pair.update()


class Twice(nn.Module):
    """One weight at two places of a path, and a value in two parts of equal shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.gates = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(torch.tanh(self.mix(x)))
        gate, value = self.gates(x).chunk(2, dim=-1)
        return x + gate.sigmoid() * value


@pytest.mark.parametrize("schedule", ["zb_h1", "zbv"])
def test_weight_gradients_apart_from_input_gradients(schedule: str) -> None:
    """Fails if a weight's second place is counted twice, or the two parts are one: `mix` * 2 on one device."""
    more = {"v": 2} if schedule == "zbv" else {}
    model = of_blocks(*[Twice] * 4)
    with Pair(model, (IDS, LABELS), p=2, schedule=schedule, num_microbatches=4, **more) as pair:
        pair.train(IDS, LABELS)


def test_layers_that_stages_do_not_divide() -> None:
    """Fails for a layer left out: four layers on one device."""
    with Pair(decoder(5), (IDS, LABELS), p=2, v=2, num_microbatches=2) as pair:
        pair.train(IDS, LABELS)
        assert {s for i in range(5) for s in pair.stages(f"layers.{i}.mlp.up.weight")} >= {0, 1, 2, 3}


def test_the_last_microbatch_is_in_the_sum() -> None:
    """Fails if it is not in the sum of all replicas: the loss of the other rows on one device."""
    with Pair(decoder(), (IDS, LABELS), d=2, zero=1, num_microbatches=4) as pair:
        pair.train(IDS, LABELS, max_norm=0.1)
        pair.train(IDS, LABELS)


class Partly(Decoder):
    """A first block that learns nothing."""

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for i, layer in enumerate(self.layers):
            x = layer(x) if i else layer(x).detach()
        return self.norm(x)


def test_weights_without_a_gradient_stay() -> None:
    """Fails if they are decayed where others have one: `* 0.99` on one device."""
    torch.manual_seed(0)
    with Pair(Partly([Block(), Block()]), (IDS, LABELS), t=2, d=2, zero=1) as pair:
        pair.train(IDS, LABELS, max_norm=0.1)
        assert "layers.0.mlp.up.weight" not in pair.gradients()


def test_context_ranks_of_one_replica() -> None:
    """Fails without the sum over cp (`ParamSpec.sums` over tp and dp alone)."""
    with Pair(decoder(), (IDS, LABELS), c=4) as pair:
        pair.train(IDS, LABELS, max_norm=0.1)
        assert pair.kind("layers.0.mlp.up.weight", "cp") == "R"


def test_frozen_weights_stay() -> None:
    """Fails if a frozen weight is decayed or trained: `* 0.99` on one device."""
    model = decoder(2, tied=True)
    model.layers[0].requires_grad_(False)
    before = copy.deepcopy(model.layers[0].state_dict())
    with Pair(model, (IDS, LABELS), t=2, p=2) as pair:
        pair.train(IDS, LABELS, max_norm=0.1)
        after = pair.pm.state_dict()
        assert all(torch.equal(after[f"layers.0.{name}"], x.double()) for name, x in before.items())
        assert "layers.0.mlp.up.weight" not in pair.pm.gradients()
