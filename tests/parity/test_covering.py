"""The array of `covering.py`: few cases of few ranks in every run, all under `-m thorough`; that it covers all of Options."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from autoptd.options import KEYWORDS, Options, settings
from autoptd.runtime.world.threads import ThreadRank
from tests.parity import covering
from tests.parity.covering import (
    AXES,
    BOUND,
    LEFT_OUT,
    OUTSIDE,
    OWN,
    Case,
    cases,
    combinations,
    declared,
    feasible,
    few_cases,
    goes_together,
    name_of,
)


@pytest.fixture(autouse=True)
def one_thread_a_rank() -> Iterator[None]:
    """On a busy machine copies of a norm's gradient differed now and then: by numbers of threads that differ, it may be."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


FEW = len(few_cases())
FEW_RANKS = 8


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Take all triples where thorough tests are wanted, which takes seconds to find."""
    if metafunc.function is test_case:
        is_few = "not thorough" in metafunc.config.getoption("markexpr")
        array = [
            pytest.param(case, marks=[pytest.mark.thorough] * (i >= FEW or ranks_of(case) > FEW_RANKS))
            for i, case in enumerate(few_cases() if is_few else cases(3))
        ]
        metafunc.parametrize("case", array, ids=name_of)


def ranks_of(case: Case) -> int:
    return math.prod(case[name] for name in "tpdc")


@pytest.mark.one_in(11)
def test_case(case: Case) -> None:
    covering.run(case)


def test_every_setting_is_known() -> None:
    """A new keyword is an axis, or it is said why not."""
    assert set(KEYWORDS) == set(AXES) - set(OWN) | set(OUTSIDE)
    assert not set(AXES) & set(OUTSIDE)
    assert all(OUTSIDE.values()) and all(LEFT_OUT.values())


@pytest.mark.parametrize("name", [name for name in AXES if name not in OWN])
def test_every_value_of_a_setting_is_known(name: str) -> None:
    """A new value is in the array, or it is said why not. A field without named values takes any number."""
    known = {*AXES[name], *(value for field, value in LEFT_OUT if field == name)}
    if declared(name):
        default = settings(Options())[name]
        assert (declared(name) | {default}) - {None} <= known <= declared(name) | {default}
    else:
        assert name in ("order", "recompute", "shapes") or (
            name in ("t", "p", "d", "c", "v", "num_microbatches") and min(known) >= 1
        )


@pytest.mark.one_in(9)  # finding the larger arrays takes seconds
@pytest.mark.parametrize("strength, is_few", [(2, True), (2, False), (3, False)])
def test_everything_that_goes_together_is_covered(strength: int, is_few: bool) -> None:
    """Counted again from all combinations of three axes with the bound ones."""
    array = few_cases() if is_few else cases(strength)
    covered = {one for case in array for one in itertools.combinations(case.items(), strength)}
    for names in itertools.combinations(
        [name for name in AXES if not (is_few and name == "model")], strength
    ):
        for values in itertools.product(*(AXES[name] for name in names)):
            one = tuple(zip(names, values, strict=True))
            assert one in covered or not feasible(one)


@pytest.mark.thorough
def test_all_cases_go_together() -> None:
    """The bound axes are all on which an answer of Options or of a schedule depends."""
    assert all(goes_together(case) for case in cases(3))
    assert cases(2)[:FEW] == few_cases() and {case["model"] for case in few_cases()} == set(AXES["model"])
    assert cases(3)[: len(cases(2))] == cases(2) and len({name_of(case) for case in cases(3)}) == len(
        cases(3)
    )
    for name in set(AXES) - set(itertools.chain(*BOUND)) - set(OWN):
        for case in cases(2):
            assert all(goes_together({**case, name: value}) for value in AXES[name])


@pytest.mark.thorough
def test_groups_of_bound_axes_do_not_bind_one_another() -> None:
    """What goes in each group goes together; and what does not go in one goes with nothing of the others."""
    each = math.prod(len(combinations(names)) for names in BOUND)
    together = combinations(list(itertools.chain(*BOUND)))
    assert len(together) == each and all(feasible(case.items()) for case in together)


SIMPLE: Case = {name: values[0] for name, values in AXES.items()}


def test_a_fault_is_found() -> None:
    """Gradients of a tied weight that are not summed over the stages that hold it."""
    case = {**SIMPLE, "p": 2, "num_microbatches": 2}
    covering.run(case)
    with (
        mock.patch.object(ThreadRank, "owners", lambda self, pp_ranks: self._solo),
        pytest.raises(AssertionError, match=r"gradient embed\.weight of step 0 differs"),
    ):
        covering.run(case)


def test_a_lost_state_is_found() -> None:
    """An optimizer that begins anew behind a load."""
    case = {**SIMPLE, "reload": "same mesh"}
    with (
        mock.patch("autoptd.model.parallel_model.ParallelModel.load_optimizer_state_dict", lambda *_: None),
        pytest.raises(AssertionError, match=r"parameter .* of step 2 differs"),
    ):
        covering.run(case)
