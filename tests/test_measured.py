"""What a machine measured does not decide a comparison of shown output: tried with other numbers in every measured place."""

from __future__ import annotations

import math
import re

import pytest

from autoptd.runtime.measure.stepclock import StepTimes
from autoptd.verify.verify import Difference, Report
from autoptd.wings.doctor.report import bandwidth_text
from autoptd.wings.reports.progress import progress_line
from autoptd.wings.words import bytes_text, seconds_text
from tests.measured import same_table, same_words
from tests.test_shown_output import MEASURED, blocks, claim
from tests.wings.doctor.test_processes import page_blocks

ODD = (
    0.0,
    -0.0,
    1e-17,
    -3.2e-5,
    0.5,
    7.0,
    100.0,
    999.7,
    1234.5,
    1e5,
    1e12,
    1e100,
    math.inf,
    -math.inf,
    math.nan,
)
MACHINE = tuple(x for x in ODD if x >= 0)  # seconds, bytes and rates
FORMATS = ("{}", "{:.1e}", "{:g}", "{:.3g}", "{:,.1f}", "{:+.0f}")
SHOWN = {key[1]: text for page, text in blocks() if (key := claim(page, text)) in MEASURED}


def is_number(word: str) -> bool:
    try:
        float(word.replace(",", ""))
    except ValueError:
        return False
    return True


def with_numbers(text: str, number: str) -> str:
    """Put one number in the place of every number that is a word."""
    words = re.split(r"([\s()=/%:;]+|,\s)", text)
    return "".join(number if is_number(word) else word for word in words)


@pytest.mark.parametrize("begins", SHOWN)
def test_other_numbers_are_no_difference(begins: str) -> None:
    shown = re.sub(r"at [\w.]+, step", "at lm_head.weight, step", SHOWN[begins])
    for value in ODD:
        for form in FORMATS:
            other = with_numbers(shown, form.format(value))
            assert other != shown and same_words(other) == same_words(SHOWN[begins]), other


@pytest.mark.parametrize("size", ODD)
def test_a_report_with_other_differences_has_the_same_words(size: float) -> None:
    begins, shown = next((begins, text) for begins, text in SHOWN.items() if "largest difference" in text)
    kinds = [line.split("  ")[1] for line in shown.splitlines() if "largest" in line]
    found = [
        Difference(kind, "head.0.bias", 11, size, 1e-5 if kind == "own dtype" else 1e-9) for kind in kinds
    ]
    lines = str(Report(tuple(found), 1e-9, begins)).splitlines()
    wanted = [line for line in shown.splitlines() if "largest" in line]
    assert [same_words(line) for line in lines[1:]] == [same_words(line) for line in wanted]


@pytest.mark.parametrize("value", ODD)
def test_a_step_with_other_measurements_has_the_same_words(value: float) -> None:
    rate = abs(value)
    record = {
        "step": 7,
        "loss": value,
        "grad_norm": value,
        "tokens_per_second": rate,
        "model_flops_per_second": rate,
    }
    for nbytes in (0, 999, 1 << 20, 1 << 45):
        times = [StepTimes(0, 1.0, value, 0.0, value, nbytes)]
        made = progress_line(record, 20, 4, times, "bubble and rest", f" (state {bytes_text(nbytes)})")
        assert same_words(made) == same_words(SHOWN["step  120/1000"])


@pytest.mark.parametrize("value", MACHINE)
def test_a_table_of_another_machine_has_the_same_lines(value: float) -> None:
    shown = page_blocks()[0]
    other = re.sub(r"[\d.]+ us", seconds_text(value / 1e6), shown)
    other = re.sub(r"[\d.]+ [MG]B/s", bandwidth_text(value), other)
    other = re.sub(r"\d+%", f"{value:.0%}", other).replace("15.4 GiB to 15.6 GiB", bytes_text(value))
    assert other != shown and same_table(other) == same_table(shown)


def test_other_words_are_a_difference() -> None:
    for begins, old, new in (
        ("t=2 p=1 d=1", "evaluation", "parameter"),
        ("step  120/1000", "FLOP/s", "B/s"),
        ("RuntimeFault: rank 2", "F1.2", "F1.3"),
        ("RuntimeFault: rank 2", "RECV_F1.2<0", "RECV_F1.2<1"),
    ):
        assert same_words(SHOWN[begins].replace(old, new)) != same_words(SHOWN[begins])
    table = page_blocks()[0]
    for old, new in (("936", "937"), ("broadcast ", "gather "), ("4 pairs", "3 pairs"), ("right", "wrong")):
        assert same_table(table.replace(old, new)) != same_table(table)
