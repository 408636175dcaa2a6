"""What a user gets wrong: each mistake is one clear error, with site, fact and remedy, before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import autoptd
from autoptd.errors import with_article
from tests.parity.models import VOCAB, batch, gpt


def compile_gpt(**keywords: Any) -> autoptd.Program:
    return autoptd.compile(gpt(2), example_inputs=keywords.pop("example_inputs", batch()), **keywords)


@pytest.mark.parametrize(
    "text",
    "a Linear, an int, an AdamW, an SGD, a GPT, an LSTM, a UNet, an ASGD, a dict, an Identity".split(", "),
)
def test_names_of_types_have_the_right_article(text: str) -> None:
    assert with_article(text.split()[1]) == text


def test_more_stages_than_cut_points() -> None:
    with pytest.raises(autoptd.PlanError, match="more stages than the model can be cut into"):
        compile_gpt(p=16, num_microbatches=8)


def test_batch_that_does_not_divide() -> None:
    with pytest.raises(autoptd.PlanError, match="7 rows do not divide over d=2"):
        compile_gpt(d=2, example_inputs=batch(7))
    with pytest.raises(autoptd.PlanError, match=r"do not divide into 3 microbatches.*\{1, 2, 4, 8\}"):
        compile_gpt(num_microbatches=3)
    with pytest.raises(autoptd.PlanError, match=r"batch of 2 .*num_microbatches=1, .*multiple of 16"):
        compile_gpt(d=2, num_microbatches=8, example_inputs=batch(2))


def test_microbatches_that_the_rows_do_not_divide_into() -> None:
    with pytest.raises(autoptd.PlanError, match="num_microbatches"):
        autoptd.compile(gpt(4), p=2, v=2, num_microbatches=3, example_inputs=batch())


@contextmanager
def running(shapes: str | None) -> Iterator[autoptd.ParallelModel]:
    pm = autoptd.parallelize(gpt(1), d=2, backend="local", example_inputs=batch(), shapes=shapes)
    try:
        yield pm
    finally:
        pm.close()


def test_another_shape_later() -> None:
    pm = autoptd.parallelize(gpt(2), p=2, backend="local", example_inputs=batch())
    try:
        with pytest.raises(autoptd.PlanError, match="drop_last=True"):
            pm.step(*batch(6))
        pm.step(*batch())  # the mistake left nothing behind
    finally:
        pm.close()


@pytest.mark.parametrize("shapes", [None, "exact", "bucket"])
def test_an_empty_batch(shapes: str | None) -> None:
    for ids, targets in (batch(0), (x[:, :0] for x in batch())):
        with pytest.raises(autoptd.PlanError, match=r"the batch is empty: tensor 0 is .*at least one row"):
            autoptd.compile(gpt(2), d=2, example_inputs=(ids, targets))
    with running(shapes) as pm:
        with pytest.raises(autoptd.PlanError, match=r"idx.*Remedy: (a batch of )?at least one row"):
            pm.eval_step(*batch(0))
        if shapes:
            with pytest.raises(autoptd.PlanError, match=r"at least one (row|token)"):
                pm.step(*(x[:, :0].contiguous() for x in batch()))


def test_a_batch_that_is_a_list() -> None:
    """As a DataLoader gives it."""
    with running(None) as pm:
        for call in (pm.step, pm.eval_step):
            with pytest.raises(autoptd.PlanError, match=rf"pm\.{call.__name__}\(\*batch\), with a star"):
                call(list(batch()))
        with pytest.raises(autoptd.PlanError, match="pass what example_inputs holds"):
            pm.step([batch()[0]])


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.embed(ids))
        if logits.sum() > 0:  # the branch
            logits = 2 * logits
        return F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1))


def test_control_flow_on_data_names_the_line(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(autoptd.TraceError, match=r"test_bad_input\.py:\d+  if logits\.sum\(\) > 0"):
        autoptd.compile(Branching(), example_inputs=batch())
    assert capfd.readouterr().err == "", "torch tells a page more about it"


def test_no_loss() -> None:
    ids, _ = batch()
    with pytest.raises(autoptd.TraceError, match="no loss found"):
        autoptd.compile(gpt(2), example_inputs=(ids,))


class Mixing(nn.Module):
    """An in-batch loss: every sample is compared with all others."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        a, b = self.embed(ids).mean(1), self.embed(targets).mean(1)
        return F.cross_entropy(a @ b.T, torch.arange(len(ids)))


def test_an_operator_that_mixes_samples() -> None:
    with pytest.raises(autoptd.PlanError, match="mixes the samples"):
        autoptd.compile(Mixing(), example_inputs=batch(), num_microbatches=2)
    autoptd.verify(Mixing(), example_inputs=batch(), num_microbatches=1, t=2, steps=1)


def test_example_inputs_on_another_device() -> None:
    ids, targets = batch()
    with pytest.raises(autoptd.PlanError, match="is on meta, the model on cpu"):
        autoptd.compile(gpt(2), example_inputs=(ids, targets.to("meta")))


@pytest.mark.parametrize("mesh", [{}, {"t": 2, "p": 2, "d": 2}])
def test_nan_loss_raises_on_all_ranks(mesh: dict[str, int]) -> None:
    model = gpt(2)
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    pm = autoptd.parallelize(model, **mesh, backend="local", example_inputs=batch())
    try:
        with pytest.raises(autoptd.RuntimeFault, match=r"step 1: the loss is NaN on rank"):
            pm.step(*batch())
        assert not pm.gradients()
    finally:
        pm.close()


def test_nan_loss_may_pass() -> None:
    model = gpt(2)
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    pm = autoptd.parallelize(model, p=2, backend="local", nan="ignore", example_inputs=batch())
    try:
        assert pm.step(*batch()).isnan()
    finally:
        pm.close()


FUTURE = {
    "context": "ring",
    "summa": True,
}


@pytest.mark.parametrize("name", FUTURE)
def test_a_feature_that_is_not_there_yet(name: str) -> None:
    with pytest.raises(autoptd.PlanError, match=f"{name}=.*is not implemented"):
        compile_gpt(**{name: FUTURE[name]})


ELSEWHERE = {
    "tp": "it is called t here",
    "pipeline_model_parallel_size": "it is called p here",
    "dp": "it is called d here",
    "bf16": 'precision="bf16"',
    "mixed_precision": 'precision="bf16"',
    "fp16": 'or "fp16"',
    "dynamic_loss_scale": "loss_scale",
    "zero_stage": "zero=1",
    "world_size": "--nproc-per-node",
    "gradient_accumulation_steps": "num_microbatches",
    "max_grad_norm": "clip_grad_norm_",
    "sequence_paralel": "sequence_parallel",
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_keyword_that_does_not_exist(name: str) -> None:
    with pytest.raises(autoptd.PlanError, match=rf"^{name}=: no such keyword\. Remedy: .*{ELSEWHERE[name]}"):
        compile_gpt(**{name: 2})


@pytest.mark.parametrize(
    "wrong", [{"t": 0}, {"p": 1.5}, {"d": "2"}, {"schedule": "zigzag"}, {"v": 2}, {"timeout": 0}]
)
def test_values_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(autoptd.PlanError):
        compile_gpt(**wrong)


def test_dropout_that_evaluations_draw_as_well() -> None:
    class Always(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(self.inner(x), 0.5).mean()  # what forgets training=self.training

    pm = autoptd.parallelize(Always(), backend="local", example_inputs=(torch.ones(4, 4),))
    pm.step(torch.ones(4, 4))
    with pytest.raises(autoptd.PlanError, match=r"dropout of 0\.5 is drawn in eval mode"):
        pm.eval_step(torch.ones(4, 4))
    pm.close()


def test_weights_on_meta_compile_but_do_not_run() -> None:
    with torch.device("meta"):
        model = gpt(2)
    meta = tuple(one.to("meta") for one in batch())
    assert autoptd.compile(model, t=2, p=2, example_inputs=meta).sources
    with pytest.raises(autoptd.PlanError, match="meta"):
        autoptd.parallelize(model, t=2, backend="local", example_inputs=meta)
    with pytest.raises(autoptd.PlanError, match="meta"):
        autoptd.verify(model, t=2, example_inputs=meta)


def test_state_before_the_first_step_needs_example_inputs() -> None:
    pm = autoptd.parallelize(gpt(2), p=2, backend="local")
    assert repr(pm) == "<ParallelModel on 2 threads: compiled at the first step>"
    with pytest.raises(autoptd.PlanError, match="example_inputs="):
        pm.state_dict()
    with pytest.raises(autoptd.PlanError, match=r"^pm\.show: .*example_inputs="):
        pm.show()


def test_a_program_is_printed_on_a_line() -> None:
    program = compile_gpt(t=2, p=2, num_microbatches=4)
    assert repr(program).startswith("<Program t=2 p=2 d=1 v=1, 1f1b, 4 x 2 rows a replica: 2 stages, ")
    assert len(repr(program)) < 150


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 8), norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x)).square().mean()


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(8), nn.BatchNorm1d(8, track_running_stats=False)])
def test_batch_norm_over_microbatches(norm: nn.Module) -> None:
    with pytest.raises(autoptd.PlanError, match=r"batch norm in .*Remedy: .*\.eval.*num_microbatches=1"):
        autoptd.compile(Normed(norm), d=2, num_microbatches=2, example_inputs=(torch.randn(8, 8),))


def test_batch_norm_that_does_not_learn() -> None:
    model = Normed(nn.BatchNorm1d(8))
    model.norm.eval()
    assert autoptd.compile(model, d=2, example_inputs=(torch.randn(8, 8),)).sources


def test_experts_of_transformers_in_a_loop() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 16, "vocab_size": 16, "num_local_experts": 2}
    counts = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1)
    config = transformers.MixtralConfig(**sizes, **counts)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    ids = torch.randint(16, (4, 4))
    with pytest.raises(autoptd.AutoptdError, match=r'Remedy: .*experts_implementation="grouped_mm"'):
        autoptd.compile(model, d=2, example_inputs={"input_ids": ids, "labels": ids})


def test_modes_of_torch_around_a_step() -> None:
    pm = autoptd.parallelize(gpt(2), p=2, backend="local", example_inputs=batch())
    try:
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(autoptd.PlanError, match="autocast is on"):
            pm.step(*batch())
        with torch.inference_mode(), pytest.raises(autoptd.PlanError, match="inference_mode"):
            pm.step(*batch())
        with torch.no_grad(), pytest.raises(autoptd.PlanError, match=r"no_grad.*pm.eval_step"):
            pm.step(*batch())
    finally:
        pm.close()


def test_a_parameter_changed_on_one_rank_only() -> None:
    pm = autoptd.parallelize(gpt(2), d=2, backend="local", example_inputs=batch())
    try:
        with torch.no_grad():
            next(pm.parameters()).mul_(2)
        with pytest.raises(autoptd.PlanError, match="changed on some ranks only"):
            pm.step(*batch())
    finally:
        pm.close()


def test_a_model_that_torch_compile_wraps() -> None:
    with pytest.raises(autoptd.PlanError, match=r"wrapped by torch\.compile"):
        autoptd.compile(torch.compile(gpt(2)), example_inputs=batch())


def test_verify_refuses_a_model_whose_own_loss_is_not_finite() -> None:
    ids = torch.zeros(4, 2, dtype=torch.long)
    with pytest.raises(autoptd.PlanError, match="not finite"):
        autoptd.verify(
            nn.Embedding(4, 4),
            loss_fn=lambda x, y: (x - x).log().sum(),
            example_inputs={"input": ids, "targets": ids},
        )


def test_verify_refuses_a_model_that_amplifies_its_own_rounding() -> None:
    ids = torch.tensor([[0, 1], [2, 3]])

    def loss_fn(x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return ((x.float() - x.detach().float() * (1 + 1e-7)) * 1e7).square().sum()

    with pytest.raises(autoptd.PlanError, match="casts to float32 change"):
        autoptd.verify(nn.Embedding(4, 4), loss_fn=loss_fn, example_inputs={"input": ids, "targets": ids})
