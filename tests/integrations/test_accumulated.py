"""The batches of one update as one batch: rows in order, padding that is not seen, or an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoptd.errors import PlanError
from autoptd.integrations.accumulated import merged, rows_in, with_rows


def batch(rows: int, length: int, **others: Any) -> dict[str, Any]:
    ids = torch.arange(rows * length).reshape(rows, length)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone(), **others}


def test_shorter_batches_are_padded() -> None:
    found = merged([batch(2, 3), batch(1, 4)], pad_token=9)
    assert found["input_ids"].tolist() == [[0, 1, 2, 9], [3, 4, 5, 9], [0, 1, 2, 3]]
    assert found["labels"].tolist() == [[0, 1, 2, -100], [3, 4, 5, -100], [0, 1, 2, 3]]
    assert found["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1]]


def test_added_rows_have_no_labels() -> None:
    found = with_rows({**batch(3, 2), "scale": torch.tensor(2.0), "flag": True}, multiple=4)
    assert rows_in(found) == 4 and found["labels"].tolist()[3] == [-100, -100]
    assert found["input_ids"][3].equal(found["input_ids"][0]) and found["scale"] == 2.0 and found["flag"]
    assert with_rows(batch(4, 2), multiple=4)["labels"].equal(batch(4, 2)["labels"])


@pytest.mark.parametrize(
    ("batches", "fact"),
    [
        ([batch(2, 3), {"input_ids": torch.ones(2, 3)}], "different keys"),
        ([batch(2, 3, flag=True), batch(2, 3, flag=False)], "flag differs"),
        ([batch(2, 3, pixels=torch.ones(2, 5)), batch(2, 3, pixels=torch.ones(2, 6))], "pixels has rows of"),
        (
            [{"input_ids": torch.ones(2, 3)}, {"input_ids": torch.ones(2, 4)}],
            "input_ids has rows of different shapes",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(batches: list[dict[str, Any]], fact: str) -> None:
    with pytest.raises(PlanError, match=fact):
        merged(batches, pad_token=0)


@pytest.mark.parametrize("labels", [None, torch.ones(3, 2)])
def test_rows_are_not_added_without_labels_to_ignore(labels: Any) -> None:
    with pytest.raises(PlanError, match="3 rows, which do not divide into 2 parts"):
        with_rows({**batch(3, 2), "labels": labels}, multiple=2)
