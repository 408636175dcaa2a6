"""Whether a checkpoint is one of this model: names, shapes, dtypes, atoms, tied names; all findings at once.

In: a checkpoint and a program. Out: (missing, unexpected) names, or a PlanError that lists what does not fit. Nothing is
loaded before.

    missing, unexpected = check_model(checkpoint, program, buffers, strict=True)
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from autoptd.errors import PlanError, RuntimeFault
from autoptd.program.module_hashes import prints_of
from autoptd.program.program import Program
from autoptd.program.specs import ParamSpec
from autoptd.runtime.checkpoint.manifest import Manifest, fqn
from autoptd.runtime.checkpoint.read import Checkpoint
from autoptd.runtime.checkpoint.save import about_model
from autoptd.runtime.params.fingerprint import fingerprint_of_model
from autoptd.runtime.params.parameters import RankParameters
from autoptd.runtime.params.parts import dtype_of

SITE = "pm.load"
MOST_NAMED = 5


def check_model(
    checkpoint: Checkpoint, program: Program, buffers: Mapping[str, torch.Tensor], strict: bool
) -> tuple[list[str], list[str]]:
    """Return the names that the checkpoint lacks, and those that it has too many; both are refused if `strict`."""
    manifest = checkpoint.manifest
    own = {name for spec in program.params for name in spec.aliases} | buffers.keys()
    filled = {spec.name for spec in program.params if math.prod(spec.shape)} | buffers.keys()
    missing = sorted(name for name in filled if fqn(name, "") not in manifest.tensors)
    unexpected = sorted(checkpoint.names.keys() - own)
    findings = []
    if strict and missing:
        findings.append(f"lacks {some(missing)}")
    if strict and unexpected:
        findings.append(f"has {some(unexpected)} too many")
    for spec in program.params:
        findings += misfits(spec, manifest)
    for name, x in buffers.items():
        record = manifest.tensors.get(fqn(name, ""))
        if record is not None and record.shape != tuple(x.shape):
            findings.append(f"{name} has shape {record.shape}, not {tuple(x.shape)}")
    if strict:
        findings += other_ties(program, manifest)
        findings += other_atoms(program, manifest)
        findings += other_operators(program, manifest)
    if findings:
        remedy = "a checkpoint of this model, with the same sizes"
        raise PlanError(SITE, f"{checkpoint.path}: {some(findings, '; ')}", remedy)
    check_seed(program, manifest, strict)
    return missing, unexpected


def some(names: Collection[str], separator: str = ", ") -> str:
    """List a few names."""
    shown = list(names)[:MOST_NAMED]
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return separator.join(shown) + more


def misfits(spec: ParamSpec, manifest: Manifest) -> Iterator[str]:
    """Yield why a tensor of the checkpoint cannot become a parameter."""
    record = manifest.tensors.get(fqn(spec.name, ""))
    if record is None:
        return
    if record.shape != spec.shape:
        yield f"{spec.name} has shape {record.shape}, not {spec.shape}"
    elif not is_held(dtype_of(record.dtype), dtype_of(spec.storage.dtype)):
        yield f"{spec.name} is {record.dtype}, not {spec.storage.dtype}"


def is_held(saved: torch.dtype, stored: torch.dtype) -> bool:
    """Tell whether a dtype holds all numbers of another one: float64 those of float32."""
    is_wider = saved.is_floating_point and stored.is_floating_point and stored.itemsize > saved.itemsize
    return saved == stored or is_wider


def other_ties(program: Program, manifest: Manifest) -> Iterator[str]:
    """Yield the parameters that were tied to others than now."""
    saved: Mapping[str, Any] | None = manifest.about.get("names")
    if saved is None:
        return
    for spec in program.params:
        was = set(saved.get(spec.name, [spec.name]))
        if was != set(spec.aliases) and fqn(spec.name, "") in manifest.tensors:
            yield f"{spec.name} was tied to {ties(was - {spec.name})}, and is to {ties({*spec.aliases} - {spec.name})}"


def ties(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def other_atoms(program: Program, manifest: Manifest) -> Iterator[str]:
    """Yield the parameters that have the same shape, made of other atoms: 4 heads of 8 are not 8 heads of 4."""
    saved: Mapping[str, Any] = manifest.about.get("model", {})
    for name, entry in about_model(program).items():
        was = saved.get(name)
        if was is not None and plain(was["dims"]) != plain(entry["dims"]):
            yield f"{name} was {atoms_text(was['dims'])}, and is {atoms_text(entry['dims'])}"


def other_operators(program: Program, manifest: Manifest) -> Iterator[str]:
    """Yield the first module that computed something else; another torch may trace it differently, which is a warning."""
    saved: Mapping[str, str] = manifest.about.get("prints", {})
    prints = prints_of(program)
    module = next((module for module, text in prints.items() if saved.get(module, text) != text), None)
    if module is None:
        return
    text = f"{module or 'the model'} was made of other operators, or other numbers in them"
    if manifest.about["torch"] == torch.__version__:
        yield text
    else:
        warnings.warn(f"{SITE}: {text}, with torch {manifest.about['torch']}", stacklevel=2)


def plain(dims: Any) -> Any:
    """Return nested sequences as lists."""
    return [plain(item) for item in dims] if isinstance(dims, (list, tuple)) else dims


def atoms_text(dims: Any) -> str:
    return str(plain(dims))


def check_seed(program: Program, manifest: Manifest, strict: bool) -> None:
    """Raise PlanError if dropout would continue with other masks."""
    seed = manifest.about.get("seed", program.seed)
    if strict and program.dropouts and seed != program.seed:
        fact = f"was saved with seed={seed}, and dropout draws its masks by seed={program.seed} now"
        raise PlanError(SITE, fact, f"parallelize(..., seed={seed}); or strict=False")


def check_state(program: Program, manifest: Manifest) -> None:
    """Raise PlanError where parameters of the optimizer have neither a state nor a note that they had none."""
    record = manifest.optimizer or {}
    known = {*manifest.state, *manifest.values}
    # Frozen ones never have one; without any, it was saved before its first step, or needs none.
    frozen = {spec.name for spec in program.params if not spec.requires_grad}
    names = [name for group in record.get("groups", ()) for name in group["params"]]
    lost = [name for name in names if name not in known | frozen | {*record.get("stateless", ())}]
    if known and lost:
        fact = f"has no optimizer state of {some(lost)}, and of others it has"
        raise PlanError(SITE, fact, "another checkpoint; or load without optimizer=, and strict=False")


def check_fingerprint(checkpoint: Checkpoint, params: RankParameters) -> None:
    """Raise RuntimeFault if the weights differ in any bit from those saved; a collective of all ranks.

    Weights with another dtype or other names than in the checkpoint cannot be compared.
    """
    saved = checkpoint.manifest.about.get("fingerprint")
    specs = params.program.params
    is_same = all(is_as_saved(spec, checkpoint.manifest) for spec in specs)
    if saved is None or not is_same:
        return
    found = fingerprint_of_model(params)
    if found != saved:
        fact = f"the weights have the fingerprint {found} after loading, and had {saved} when they were saved"
        raise RuntimeFault(f"{SITE}: {checkpoint.path}", fact, "load the checkpoint before it, and report it")


def is_as_saved(spec: ParamSpec, manifest: Manifest) -> bool:
    """Tell whether a parameter was saved under its name, in the dtype in which it is stored."""
    record = manifest.tensors.get(fqn(spec.name, ""))
    known = manifest.about.get("model", {})
    return record is not None and record.dtype == spec.storage.dtype and spec.name in known


__all__ = ["check_model", "check_state"]
