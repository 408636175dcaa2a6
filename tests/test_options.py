"""A keyword is declared once, as a field of `Options` or of one of its parts: signature, flags, plan and choices follow."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch

import autoptd
from autoptd.options import KEYWORDS, NOT_YET, Keyword, Options, make_options, settings
from autoptd.options.spelling import OLD, PARTS, flat, grouped
from autoptd.wings.cli.parser import FLAGS, make_parser, parse
from autoptd.wings.cli.programs import keywords_of

# Parameters that are not settings.
NO_OPTIONS = {"model", "example_inputs", "weights", "gpus", "others"}
# What a saved plan says, and nobody types.
IN_PLANS_ONLY = {"memory_price"}


def test_the_signature_of_parallelize_has_the_fields_of_options() -> None:
    parameters = inspect.signature(autoptd.parallelize).parameters
    taken = set(KEYWORDS) - set(OLD) - IN_PLANS_ONLY | set(PARTS)
    assert set(parameters) - NO_OPTIONS == taken
    # All but **others.
    assert len(parameters) - 1 <= 28
    # Of a keyword that exists in part, every choice is there.
    for name in set(parameters) & set(NOT_YET):
        assert set(KEYWORDS[name].choices) <= set(NOT_YET[name].neutral)
    assert all(item.default in (None, inspect.Parameter.empty) for item in parameters.values())


def test_every_keyword_is_declared_and_its_default_is_a_choice() -> None:
    defaults = settings(Options())
    assert defaults.keys() == KEYWORDS.keys() and settings(make_options()) == defaults
    for name, keyword in KEYWORDS.items():
        assert keyword.flag == "" or keyword.flag in FLAGS
        assert defaults[name] is None or keyword.allows(defaults[name])


RECORDS = {
    "zero": autoptd.Zero(shard=2, reduce_dtype="bf16"),
    "loss_scale": autoptd.LossScale(initial=8.0, window=10, hysteresis=1, minimum=2.0),
    "recompute": autoptd.Recompute("full", num_layers=2),
    "shapes": autoptd.Shapes("exact", max_programs=3, cache="programs"),
    "ranks": autoptd.RankOptions("dp-tp-cp-pp", "direct", timeout=5.0, nan="ignore", check_every=0),
    "context": autoptd.ContextParallel("all_gather", tokens="contiguous"),
    "fuse": autoptd.Fuse("eager", only=("rms_norm",)),
    "hooks": autoptd.LinearHooks(async_allreduce=True, delay_wgrad="after_b"),
}


@pytest.mark.parametrize("part", RECORDS)
def test_a_record_says_what_the_flat_names_say(part: str) -> None:
    request = {"t": 2, "d": 4, "c": 2, "precision": "fp16", part: RECORDS[part]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asked = flat(request)
    assert getattr(make_options(**asked), part) == getattr(make_options(**flat(grouped(asked))), part)
    old = {name: asked.pop(name) for name in set(asked) & set(OLD)}
    with pytest.warns(FutureWarning) as told:
        assert flat({**asked, **old}) == {**asked, **old}
    # One warning, which shows how the same is written now.
    (text,) = [str(one.message) for one in told]
    assert all(f"{name}=" in text for name in old)
    again = eval(text.partition(f"; write {part}=")[2], vars(autoptd))
    assert flat({part: again}) == {
        name: value
        for name, value in {**asked, **old}.items()
        if name in KEYWORDS and (name in old or name == part)
    }
    if part in KEYWORDS:
        with pytest.raises(autoptd.PlanError, match="both say"):
            flat({**request, **old})


def test_old_spellings_train_as_before() -> None:
    model, x = torch.nn.Linear(4, 4), torch.ones(4, 4)
    keywords: dict[str, Any] = {"d": 2, "example_inputs": {"input": x, "targets": x}, "backend": "local"}
    keywords["loss_fn"] = torch.nn.functional.mse_loss
    with pytest.warns(FutureWarning, match=r"timeout=; write ranks=RankOptions\(timeout=30.0\)") as told:
        pm = autoptd.parallelize(model, **keywords, timeout=30.0)
    assert [one.filename for one in told] == [__file__]
    assert pm.options.ranks.timeout == 30.0
    pm.close()


def test_a_new_keyword_has_a_flag_and_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KEYWORDS, "new_degree", Keyword("count", "of something new"))
    monkeypatch.setitem(
        KEYWORDS, "new_way", Keyword("choice", choices=("left", "right"), is_for_training=True)
    )
    _, commands = make_parser()
    assert (
        "--new-way" not in commands["show"].format_help() and "--new-way" in commands["train"].format_help()
    )
    asked = parse("train gpt2 --new-degree 4 --new-way left --t 2 --option nan=ignore".split())
    assert keywords_of(asked) == {"t": 2, "new_degree": 4, "new_way": "left", "nan": "ignore"}
    with pytest.raises(autoptd.PlanError, match="--new-way: invalid choice"):
        parse("train gpt2 --new-way up".split())


@pytest.mark.parametrize("name", [name for name, keyword in KEYWORDS.items() if keyword.flag == "count"])
def test_a_count_is_a_whole_number_of_at_least_1(name: str) -> None:
    for value in (0, 1.0, True, "2"):
        with pytest.raises(autoptd.PlanError, match="must be an integer of at least 1"):
            make_options(**{name: value})
    with pytest.raises(autoptd.PlanError, match="is below 1"):
        command = "train" if KEYWORDS[name].is_for_training else "show"
        parse([command, "gpt2", f"--{name.replace('_', '-')}", "0"])


@pytest.mark.parametrize(
    "given",
    [
        {"nan": "drop"},
        {"sequence_parallel": 1},
        {"fuse": True},
        {"fuse": 0},
        {"backend": "mpi"},
    ],
    ids=str,
)
def test_other_values_than_the_choices_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(autoptd.PlanError, match="no such choice"):
        make_options(**given)


def test_a_record_says_only_what_differs_from_its_defaults() -> None:
    """A plan with another setting of the same record is not contradicted."""
    plan = {"mesh": {"c": 2}, "options": {"context": "ulysses"}}
    options = make_options(**flat({"plan": plan, "context": autoptd.ContextParallel(tokens="zigzag")}))
    assert (options.context.attention, options.context.tokens) == ("ulysses", "zigzag")
    assert flat({"zero": autoptd.Zero()}) == {"zero": 1}


def test_a_record_is_made_by_a_call() -> None:
    with pytest.raises(autoptd.PlanError, match=r"Remedy: zero=autoptd.Zero\(...\)"):
        flat({"zero": autoptd.Zero})
