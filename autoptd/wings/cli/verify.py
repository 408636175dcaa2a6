"""`autoptd verify`: train the model and its partition side by side in float64."""

from __future__ import annotations

from argparse import Namespace

import torch

import autoptd
from autoptd.ir.activity import activity
from autoptd.wings.cli.models import find_model, make_with_weights
from autoptd.wings.cli.programs import example_inputs
from autoptd.wings.cli.request import keywords_of
from autoptd.wings.cli.settings import read_pairs


def verify(asked: Namespace) -> int:
    """Print the largest differences; 0 where model and partition are equal, 1 where they are not."""
    # Models without weights of their own are initialised here.
    torch.manual_seed(asked.seed or 0)
    subject = find_model(asked.model, read_pairs("set", asked.set))
    with activity(f"building {asked.model}"):
        model, given = make_with_weights(subject, asked.dtype)
    batch = example_inputs(asked, subject, model, given)
    report = autoptd.verify(model, example_inputs=batch, steps=asked.steps, **keywords_of(asked))
    print(report)
    return 0 if report.passed else 1
