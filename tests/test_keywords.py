"""Values of another kind than a keyword's: one PlanError each, before anything is traced."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.errors import PlanError, TraceError
from autoptd.options import KEYWORDS, NOT_YET, make_options
from autoptd.options.elsewhere import REMEDIES
from autoptd.options.spelling import OLD, PARTS

NO_KIND = object()  # of no keyword
TENSORS = (torch.tensor(2), torch.ones(2))
BATCH = torch.linspace(-1, 1, 32).view(4, 8), torch.linspace(1, 0, 32).view(4, 8)
# Beside values that no keyword takes, those that look like one: text for numbers, True for a choice, a list for a name.
WRONG: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("t", "p", "d", "v", "num_microbatches"), ("a", 1.5, 0, True, [2])),
    **dict.fromkeys(("c", "dp_shard", "max_programs", "recompute_num_layers"), ("a", 1.5, 0, True, [2])),
    **dict.fromkeys(("loss_scale_window", "hysteresis"), ("a", 1.5, 0, True, [2])),
    **dict.fromkeys(("order", "context", "token_order", "backend", "nan", "p2p"), ("a", "", 1, [], True)),
    **dict.fromkeys(
        ("delay_wgrad_compute", "precision", "reduce_dtype"), ("a", "", 1, [], True, torch.bfloat16)
    ),
    **dict.fromkeys(("sequence_parallel", "fuse"), ("a", 2, [], {})),
    "async_tensor_model_parallel_allreduce": ("a", 1, []),
    "accumulate_allreduce_grads_in_fp32": ("a", 1, []),
    "loss_fn": ("mse", 1, True, [max]),
    "schedule": ("a", "", 1, [], {}, {1}, True),
    "seed": ("a", 1.5, True, [1], {}),
    "device": ("a", "", 0, True, [], "cpu:x"),
    "timeout": ("a", "5", 0, -1, True, [5], float("nan")),
    "check_every": ("a", 1.5, -1, True, []),
    "shapes": ("a", 1, [], (512,), True),
    "program_cache": (1, "", True, []),
    "fuse_only": ("rms_norm", 1, 0, False, True, [1], {}, ["nothing"]),
    "loss_scale": ("a", "1.0", True, [], float("nan"), -1.0),
    "initial_loss_scale": ("a", True, [], float("nan"), 0),
    "min_loss_scale": ("a", True, [], float("nan"), 0),
    "zero": ("a", 4, -1, True, []),
    "reshard_after_forward": ("a", 1, []),
    "recompute": ("a", True, 1, [], [1], {}),
    "memory": ("a", 0, -1, True, [], 10**400),
    "machine": ("a", 1, [], {"flops": "fast"}),
    "plan": ("a", 1, [], b"x", {"shard": [1]}, {"keep": [1]}),
    "weights": ("a", 1, [], True),
    "gpus": ("a", 1.5, 0),
    **dict.fromkeys(("hooks", "ranks"), ("a", 1, True, {}, autoptd.Zero())),
}
# What a keyword is asked with, so that it is not refused for the lack of that.
SCALE = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
WITH: dict[str, dict[str, Any]] = {
    "max_programs": {"shapes": "exact"},
    "program_cache": {"shapes": "exact"},
    "dp_shard": {"zero": 1, "d": 2},
    "reduce_dtype": {"zero": 1, "d": 2},
    "reshard_after_forward": {"zero": 3, "d": 2},
    "recompute_num_layers": {"recompute": "full"},
    **{name: {"precision": "fp16-mixed"} for name in SCALE},
}


IN_RECORDS = {setting.field for _, settings in PARTS.values() for setting in settings}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.down(torch.tanh(self.up(x))) - y).square().mean()


def test_every_keyword_has_wrong_values() -> None:
    taken = set(inspect.signature(autoptd.parallelize).parameters)
    assert set(WRONG) == (taken | set(OLD)) - {"model", "example_inputs", "others"}


@pytest.mark.parametrize("name", WRONG)
def test_a_value_of_another_kind_is_refused(name: str) -> None:
    # A plan with such an entry is read when the model is compiled.
    given = {"backend": "local", "example_inputs": BATCH} | WITH.get(name, {})
    for value in (NO_KIND, *TENSORS, *WRONG[name]):
        with pytest.raises(PlanError) as raised:
            autoptd.parallelize(Net(), **{**given, name: value}).close()
        assert name in str(raised.value), value
        assert raised.value.fact and raised.value.remedy


def test_a_device_that_is_not_here_is_refused() -> None:
    count = torch.cuda.device_count()
    for device in (f"cuda:{count}", "meta", *(() if count else ("cuda", torch.device("cuda")))):
        with pytest.raises(PlanError, match="device="):
            autoptd.parallelize(Net(), backend="local", example_inputs=BATCH, device=device)  # type: ignore[arg-type]


def test_a_mesh_of_more_ranks_than_there_are_is_refused() -> None:
    for name in ("t", "p", "d", "c"):
        with pytest.raises(PlanError, match="ranks or stages"):
            make_options(**{name: 10**30})
    with pytest.raises(PlanError, match="ranks or stages"):
        make_options(p=2, v=10**30)


@pytest.mark.parametrize(
    "batch", [BATCH, BATCH[0], dict(enumerate(BATCH))], ids=["tuple", "tensor", "mapping"]
)
def test_a_batch_in_the_place_of_a_degree_is_told_where_it_belongs(batch: Any) -> None:
    with pytest.raises(PlanError, match=r"^t=.*Remedy: .*batches are passed as example_inputs=") as raised:
        autoptd.parallelize(Net(), batch)
    assert len(str(raised.value)) < 200


def test_remedies_for_keywords_of_other_tools_work() -> None:
    for other, remedy in REMEDIES.items():
        # Else it would not be asked for here.
        assert other not in KEYWORDS
        named = re.findall(r"(?<![\w.])(\w+)=(\"[\w:-]+\"|\d+|True|False)?", remedy.partition("pm.")[0])
        named += [(name, "") for name in re.findall(r"called (\w) here", remedy)]
        for name, value in named:
            assert name in {*KEYWORDS, *PARTS, "example_inputs", "targets"} | IN_RECORDS, other
            if name in IN_RECORDS - set(KEYWORDS):
                continue
            if value and name != "order":
                asked = {
                    "reshard_after_forward": {"zero": 3},
                    "sequence_parallel": {"t": 2},
                    "schedule": {"p": 2, "v": 2 if "inter" in value else 1},
                }
                make_options(**{name: eval(value), **asked.get(name, {})})
        if "not implemented" in remedy:
            assert any(name in NOT_YET for name, _ in named), other


class Failing(Net):
    """Fails for any rows, or for fewer than it was given."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.shape[0] < self.rows:
            self.seen.add_(1)
            raise ValueError(f"wants {self.rows} rows")
        return super().forward(x, y)


def test_a_model_that_fails_by_itself_is_told_so() -> None:
    model = Failing(rows=99)
    before = torch.get_rng_state()
    with pytest.raises(TraceError, match=r"without AutoPTD as well: ValueError: wants 99") as raised:
        autoptd.compile(model, d=2, example_inputs=BATCH)
    assert "rows" not in raised.value.remedy and "test_keywords.py" in raised.value.site
    assert model.seen == 0 and torch.equal(torch.get_rng_state(), before)


def test_what_fails_with_fewer_rows_alone_is_told_of_rows() -> None:
    with pytest.raises(TraceError, match=r"with 2 of 4 rows it cannot be traced: ValueError"):
        autoptd.compile(Failing(rows=4), d=2, example_inputs=BATCH)


def test_a_model_that_runs_is_not_run_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("autoptd.trace.own_failure", asked)
    autoptd.compile(Net(), d=2, example_inputs=BATCH)
