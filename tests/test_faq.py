"""docs/faq.md: the errors that it shows or quotes are raised, and the names in its answers exist."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import autoptd
from autoptd.integrations.training_arguments import REFUSED
from autoptd.model.parallel_model import ParallelModel
from autoptd.runtime.checks import inputs
from examples.gpt import GPT, GPTConfig

TEXT = (Path(__file__).parents[1] / "docs/faq.md").read_text()
ANSWERS = dict(re.findall(r"^## (.+?)\n\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S))
IDS = torch.randint(256, (4, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def pm() -> Iterator[ParallelModel]:
    model = autoptd.parallelize(GPT(GPTConfig()), t=2, p=2, backend="local", example_inputs=(IDS, IDS))
    yield model
    model.close()


def test_names_exist() -> None:
    for name in re.findall(r"`pm\.(\w+)", TEXT):
        assert hasattr(ParallelModel, name), name
    for name in re.findall(r"`autoptd\.(\w+)", TEXT):
        assert hasattr(autoptd, name), name
    known = {
        name
        for call in (autoptd.parallelize, autoptd.RankOptions, ParallelModel.save)
        for name in inspect.signature(call).parameters
    }
    prose = re.sub(r"^```.*?^```", "", TEXT, flags=re.S | re.M)
    keywords = set(re.findall(r"[`(](\w+)=", prose)) - {"fp16", "parallel"}
    assert keywords <= known and "memory" in keywords
    assert autoptd.RankOptions().timeout == 300


def test_an_optimizer_of_torch_is_the_error_that_is_shown(pm: ParallelModel) -> None:
    (shown,) = re.findall(r"```text\n(.*?)```", TEXT, re.S)
    with pytest.raises(autoptd.PlanError) as found:
        torch.optim.AdamW(pm.parameters())
    assert " ".join(shown.split()) == f"PlanError: {found.value}"


def test_where_gradients_are() -> None:
    model = GPT(GPTConfig())
    pm = autoptd.parallelize(model, t=2, p=2, backend="local", example_inputs=(IDS, IDS))
    pm.step(IDS, IDS)
    assert all(parameter.grad is not None for parameter in pm.parameters())
    whole = pm.gradients()
    assert {name: x.shape for name, x in whole.items()} == {
        name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    with pytest.warns(UserWarning, match=r"pm\.gradients\(\) has all"):
        assert all(parameter.grad is None for parameter in model.parameters())
    pm.close()


def test_a_nan_names_the_step(pm: ParallelModel) -> None:
    optimizer = pm.optimizer(torch.optim.SGD, lr=1e30)
    with pytest.raises(
        autoptd.RuntimeFault, match=r"step \d: the loss is NaN on rank .*gradients were dropped"
    ):
        for _ in range(4):
            pm.step(IDS, IDS)
            optimizer.step()
            optimizer.zero_grad()


def test_what_the_error_about_batches_is_called() -> None:
    (quoted,) = re.findall(r'^## "(got other inputs or targets) than rank', TEXT, re.M)
    assert quoted in inspect.getsource(inputs)


def test_no_model_generates(pm: ParallelModel) -> None:
    with pytest.raises(AttributeError, match="state_dict"):
        pm.generate(IDS)


def test_what_is_refused() -> None:
    assert "fp16" in REFUSED
    for keywords in ({"fp8": True}, {"cpu_offload": True}, {"context": "ring", "c": 2}):
        with pytest.raises(autoptd.PlanError, match=r"not available|not implemented"):
            autoptd.parallelize(GPT(GPTConfig()), t=2, backend="local", example_inputs=(IDS, IDS), **keywords)


def test_it_answers_what_people_ask() -> None:
    asked = "memory hangs replica differs resume NaN first mesh TraceError None AdamW generate nodes fp16 not"
    questions = " ".join(ANSWERS)
    assert [word for word in asked.split() if word not in questions] == []
    assert all("](" in answer or "`" in answer for answer in ANSWERS.values())
