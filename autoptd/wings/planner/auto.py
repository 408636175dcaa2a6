"""Let the planner choose the keywords of `t="auto"`, once the number of ranks is known.

In: the model, the global batch, and the keywords of `parallelize`, at least one of them "auto". Out: the keywords
with numbers in them: those that are "auto" or missing are chosen, others are kept. The plan is for the runtime of
this project (software.toml, "autoptd").

    planned(model, (x, y), {"t": "auto", "p": 2, "gpus": 8, "machine": "h100"})
    # {"t": 4, "p": 2, "d": 1, ...}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autoptd.compat import tree_flatten
from autoptd.errors import PlanError
from autoptd.ir.machine import machine_file, machine_of_device, nearest_machines
from autoptd.ir.mesh import AXES, DEGREES, TABLE, Mesh, Role
from autoptd.ir.plan import load_plan
from autoptd.ir.quantities import check_degree
from autoptd.runtime.world.devices import device_of_ranks
from autoptd.runtime.world.rendezvous import launched_ranks
from autoptd.subject.module import check_module
from autoptd.wings.planner.cluster import CPU, PRECISIONS, Software, find_cluster, find_software
from autoptd.wings.planner.plan import plan
from autoptd.wings.planner.shape import shape_of

AUTO = "auto"
# Keywords that may be "auto".
OPEN = ("t", "p", "d", "v", "num_microbatches")
# Keywords that constrain the planner if they are given.
KEPT = ("sequence_parallel", "schedule", "memory", "zero")
# The degrees that the batch divides over.
BATCH_DEGREES = tuple(axis.degree for axis in TABLE if axis.role is Role.BATCH)
# The degree that a launch decides where the others are given.
REPLICAS = AXES["dp"].degree
# The machine of GPUs that are not described.
USUAL = "dgx-a100"


def is_auto(keywords: Mapping[str, Any]) -> bool:
    """Tell whether a keyword is left to the planner."""
    return any(keywords.get(name) == AUTO for name in OPEN)


def planned(model: nn.Module, example_inputs: Any, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return `keywords` without `gpus`, with the planner's choices for "auto"; PlanError if it finds none."""
    keywords = dict(keywords)
    gpus = keywords.pop("gpus", None)
    if not is_auto(keywords):
        if gpus is not None:
            raise PlanError(f"gpus={gpus}", "there is nothing to choose", 't="auto", or omit gpus')
        return keywords
    ranks = _ranks(gpus, keywords.get("backend"))
    if [name for name in OPEN if keywords.get(name) == AUTO] == [REPLICAS]:
        return {**keywords, REPLICAS: _replicas(ranks, keywords)}
    check_module(model)
    if example_inputs is None:
        raise PlanError('"auto"', "the planner needs the batch", "example_inputs=the global batch")
    rows, tokens = _sizes(example_inputs)
    given = {name: value for name, value in keywords.items() if value is not None}
    fixed = {name: given[name] for name in OPEN if given.get(name, AUTO) != AUTO}
    # `sequence_parallel="auto"` is not a constraint, and stays in `given`.
    constraints = {name: given[name] for name in KEPT if given.get(name, AUTO) != AUTO}
    constraints |= {name: fixed[name] for name in ("t", "p", "d", "v") if name in fixed}
    # Tokens are divided only on request.
    constraints |= {"c": given["c"]} if "c" in given else {}
    if "num_microbatches" in fixed:
        constraints["microbatch"] = _microbatch(rows, given)
    # The model's config may allow longer sequences than the batch has.
    shape = replace(shape_of(model), seq=tokens)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    if given.get("precision"):
        constraints["precision"] = given["precision"].removesuffix("-mixed")
    elif dtype in PRECISIONS:
        constraints["precision"] = PRECISIONS[dtype]
    device = device_of_ranks(model.parameters(), keywords.get("device"), keywords.get("backend"))
    name = _machine(keywords.get("machine"), device)
    cluster = find_cluster(name).with_software(_software(name, keywords))
    best = plan(shape, gpus=ranks, cluster=cluster, batch=rows, **constraints).record()
    chosen = {**best["mesh"], "num_microbatches": best["num_microbatches"], "schedule": best["schedule"]}
    return {**keywords, **best["options"], **chosen, **{name: given[name] for name in KEPT if name in given}}


def _ranks(gpus: Any, backend: str | None) -> int:
    """Return the number of ranks, of the launch or `gpus`; PlanError if they disagree or both are missing."""
    # Ranks as threads may be another number.
    launched = None if backend == "local" and gpus is not None else launched_ranks()
    if gpus is not None:
        check_degree("gpus", gpus)
    if gpus is None and launched is None:
        raise PlanError('"auto"', "the number of ranks is not known", "gpus=8, or start under torchrun")
    if gpus is not None and launched is not None and launched != gpus:
        raise PlanError(f"gpus={gpus}", f"torchrun started {launched} ranks", "omit gpus")
    return launched if gpus is None else gpus  # type: ignore[return-value]


def _replicas(ranks: int, keywords: Mapping[str, Any]) -> int:
    """Return the number of replicas among `ranks`, for the other degrees of the keywords or of their plan."""
    mesh = {} if keywords.get("plan") is None else load_plan(keywords["plan"]).get("mesh")
    # Another type is refused when the plan is read.
    mesh = mesh if isinstance(mesh, Mapping) else {}
    others = {degree: keywords.get(degree) or mesh.get(degree, 1) for degree in DEGREES if degree != REPLICAS}
    for name, degree in others.items():
        check_degree(name, degree)
    size = math.prod(others.values())
    if ranks % size:
        divided = " ".join(f"{name}={degree}" for name, degree in others.items() if degree > 1)
        remedy = f"a multiple of {size} ranks, or degrees whose product divides {ranks}"
        raise PlanError(f'{REPLICAS}="auto"', f"{ranks} ranks do not divide over {divided}", remedy)
    return ranks // size


def _sizes(example_inputs: Any) -> tuple[int, int]:
    """Return the samples of the batch and the sequence length: sizes of the first tensor with at least two dims."""
    leaves = tree_flatten(example_inputs)[0]
    found = next((leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 1), None)
    if found is None:
        raise PlanError("example_inputs", "have no tensor [rows, tokens]", "pass the arguments of the model")
    return found[0], found[1]


def _microbatch(rows: int, given: Mapping[str, Any]) -> int:
    """Return the rows of a microbatch, the planner's keyword for the number of microbatches."""
    degrees = {name: given.get(name, AUTO if name in OPEN else 1) for name in BATCH_DEGREES}
    for name, degree in degrees.items():
        if degree == AUTO:
            fact = f"is per replica, and {name} is not fixed"
            raise PlanError("num_microbatches", fact, f'{name}=1, or num_microbatches="auto"')
    mesh, count = Mesh.of(degrees), given["num_microbatches"]
    if rows % (mesh.replicas * count):
        fact = f"{rows} rows do not divide into {mesh.product_text(mesh.batch_axes)} times {count}"
        raise PlanError("num_microbatches", fact, 'num_microbatches="auto"')
    return rows // (mesh.replicas * count)


def machine_here(device: torch.device) -> str:
    """Return the name of the described machine that ranks on `device` run on, or a usual one."""
    if device.type != "cuda":
        return CPU
    return machine_of_device(torch.cuda.get_device_name(device)) or USUAL


def _machine(given: Any, device: torch.device) -> str:
    """Return the name of the machine of `machine=`, by default that of the ranks' device."""
    if given is None:
        return machine_here(device)
    file = machine_file(given) if isinstance(given, str) else None
    if file is None:
        known = nearest_machines(str(given))
        remedy = f"{known}, or plan=autoptd.plan(model, cluster=..., ...).record()"
        raise PlanError(f"machine={given!r}", "is not known to the planner", remedy)
    return file.stem


def _software(cluster: str, keywords: Mapping[str, Any]) -> Software:
    """Return the software of this runtime with these keywords; its `memory` counts tensors only."""
    software = find_software("autoptd-cpu" if cluster == CPU else "autoptd")
    if keywords.get("accumulate_allreduce_grads_in_fp32"):
        software = replace(software, extra_parameter_bytes=4.0)
    # Without `precision`, a 16-bit model is updated directly, without a float32 copy.
    if not keywords.get("precision"):
        sums = 4 if keywords.get("accumulate_allreduce_grads_in_fp32") else 2
        software = replace(software, master_weights=False, gradient_bytes=sums)
    if keywords.get("memory") is not None:
        software = replace(software, context_bytes=0.0, slack=0.0)
    return software
