"""`autoptd verify`: train a model with and without partitioning in float64."""

from __future__ import annotations

from argparse import Namespace

import torch

import autoptd
from autoptd.ir.scopes import activity
from autoptd.options import grouped
from autoptd.wings.cli.models import find_model, make_with_weights
from autoptd.wings.cli.programs import example_inputs
from autoptd.wings.cli.request import keywords_of
from autoptd.wings.cli.settings import read_pairs


def verify(args: Namespace) -> int:
    """Print the largest differences; return 0 if the two agree, else 1."""
    # Seeds the weights of models that come without any.
    torch.manual_seed(args.seed or 0)
    subject = find_model(args.model, read_pairs("set", args.set))
    with activity(f"building {args.model}"):
        model, given = make_with_weights(subject, args.dtype)
    batch = example_inputs(args, subject, model, given)
    report = autoptd.verify(model, example_inputs=batch, steps=args.steps, **grouped(keywords_of(args)))
    print(report)
    return 0 if report.passed else 1
