"""Match a model with a folder of Hugging Face's format, or a checkpoint: names, shapes, buffers, config.

In: the user's model, whose parameters may be on meta, and the folder's path. Out: the folder with the model's
names, checked; and the model to trace, whose parameters on meta are fake tensors: they have a real device and
no memory.

    folder = fitting(model, open_weights("llama-8b"))     # PlanError lists all that does not fit
    model = with_values(model, folder)                    # a copy; buffers have their values

No model class is special here. What transformers' models provide is used if it exists: `base_model_prefix`,
`initialize_weights`, `get_expanded_tied_weights_keys`, `_keys_to_ignore_on_load_unexpected`, `config`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoptd.compat import FakeTensorMode
from autoptd.errors import PlanError
from autoptd.ir.scopes import paused_collection
from autoptd.program.sources import FolderFormat, Weights
from autoptd.subject.storage import tied_names


@paused_collection()
def fake_mode() -> FakeTensorMode:
    """Return a mode for tensors without memory; the first one imports torch's compiler."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_parameter(
    parameter: nn.Parameter, mode: FakeTensorMode, device: str | torch.device = "cpu"
) -> nn.Parameter:
    """Make a parameter without memory that reports a device."""
    with mode:
        x = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=device)
        return nn.Parameter(x, requires_grad=parameter.requires_grad)


def fitting(model: nn.Module, folder: Weights) -> Weights:
    """Return the folder under the names of the model.

    PlanError lists all missing and unexpected names, and wrong shapes.
    """
    tied = tied_names(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = persistent_buffers(model)
    wanted = {**parameters, **buffers}
    # The renaming of transformers comes first, since prefixes belong to the model's own names.
    folder = folder.renamed({written: name for name, written in written_names(model).items()})
    folder = folder.renamed(prefixed(model, wanted, folder.entries))
    found = folder.entries
    missing = [names[0] for names in tied.values() if not found.keys() & set(names)]
    missing += [name for name in buffers if name not in found]
    derived = derived_names(model)
    unexpected = [name for name in found if name not in wanted and not _matches(name, derived)]
    wrong: list[str] = []
    for name in wanted:
        if name in found:
            wrong += misfits(name, wanted[name], folder)
    facts = []
    if missing:
        facts.append(f"missing: {counted(missing)}")
    if unexpected:
        facts.append(f"unexpected: {counted(unexpected)}")
    if facts or wrong:
        remedy = "a folder of this model: of the same class, built from the folder's own config"
        raise PlanError(f"weights={str(folder.path)!r}", "; ".join(facts + wrong), remedy)
    return folder.only(wanted)


def _matches(name: str, patterns: Iterable[re.Pattern[str]]) -> bool:
    return any(pattern.search(name) for pattern in patterns)


def misfits(name: str, mine: torch.Tensor, folder: Weights) -> list[str]:
    """Return the reason why the folder's tensor cannot become this one."""
    entry = folder.entries[name]
    if entry.shape != tuple(mine.shape):
        return [f"{name} has shape {entry.shape}, not {tuple(mine.shape)}"]
    if entry.dtype != mine.dtype and not (
        entry.dtype and entry.dtype.is_floating_point and mine.is_floating_point()
    ):
        return [
            f"{name} has dtype {entry.dtype or 'of a quantised model'}, which cannot be cast to {mine.dtype}"
        ]
    return []


def prefixed(model: nn.Module, wanted: Collection[str], found: Collection[str]) -> dict[str, str]:
    """Rename tensors saved from the base model (`wte.weight` is the model's `transformer.wte.weight`), or the
    reverse.
    """
    prefix = getattr(model, "base_model_prefix", "")
    names: dict[str, str] = {}
    if not prefix:
        return names
    for name in found:
        is_prefixed = name.startswith(f"{prefix}.")
        other = name.removeprefix(f"{prefix}.") if is_prefixed else f"{prefix}.{name}"
        if name not in wanted and other in wanted and other not in found:
            names[name] = other
    return names


def written_names(model: nn.Module) -> dict[str, str]:
    """Map the model's names to different names in its files.

    transformers renames some when it loads and saves: `lm_head.weight` of GPT-NeoX is `embed_out.weight`.
    Tensors that it splits or joins (experts) keep the model's names.
    """
    if not hasattr(model, "base_model_prefix"):
        return {}
    try:
        from transformers.core_model_loading import revert_weight_conversion
    # Transformers before 5 has no such module, and renames nothing.
    except ImportError:
        return {}
    # Renamed as for saving; a tensor that is returned itself was only renamed.
    empty = {name: torch.empty_like(x, device="meta") for name, x in model.state_dict().items()}
    name_of = {id(x): name for name, x in empty.items()}
    written: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(empty))  # type: ignore[arg-type]
    names = {}
    for other, x in written.items():
        name = name_of.get(id(x), other)
        if name != other:
            names[name] = other
    return names


def counted(names: Iterable[str]) -> str:
    """List names, joining those that differ only in numbers: `h.*.attn.bias (12), wpe.weight`."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(re.sub(r"\b\d+\b", "*", name), []).append(name)
    # A single name keeps its numbers.
    return ", ".join(
        f"{text} ({len(group)})" if len(group) > 1 else group[0] for text, group in alike.items()
    )


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers in the model's state dict, under all their names."""
    kept = model.state_dict(keep_vars=True)
    return {name: x for name, x in model.named_buffers(remove_duplicate=False) if name in kept}


def derived_names(model: nn.Module) -> list[re.Pattern[str]]:
    """Return patterns of names that a folder may have in addition: buffers that the model computes itself,
    and names that its class ignores.
    """
    kept = persistent_buffers(model)
    tails = set()
    for name, _ in model.named_buffers(remove_duplicate=False):
        if name not in kept:
            # Module and buffer: enclosing modules may have other names in the folder.
            tails.add(".".join(name.split(".")[-2:]))
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    patterns = [rf"(^|\.){re.escape(tail)}$" for tail in sorted(tails)]
    return [re.compile(pattern) for pattern in (*patterns, *ignored)]


def with_values(model: nn.Module, folder: Weights) -> nn.Module:
    """Return a copy that can be traced: with fake parameters for those on meta, the folder's persistent
    buffers, and computed values for other buffers on meta. Everything else is the model's own.

    PlanError for a buffer without values.
    """
    mode, reader, kept = fake_mode(), folder.reader(), persistent_buffers(model)
    # deepcopy uses objects in its memo instead of copies.
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = fake_parameter(parameter, mode) if parameter.is_meta else parameter
    for name, buffer in kept.items():
        device = torch.device("cpu") if buffer.is_meta else buffer.device
        memo[id(buffer)] = reader.whole(name).to(device, buffer.dtype)
    derived = {name: buffer for name, buffer in model.named_buffers() if name not in kept}
    computed = computed_buffers(model, [name for name, buffer in derived.items() if buffer.is_meta])
    for name, buffer in derived.items():
        memo[id(buffer)] = computed.get(name, buffer)
    return copy.deepcopy(model, memo)


def computed_buffers(model: nn.Module, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Return values of buffers that are not in files (tables of angles), as transformers' models compute them
    after loading.

    PlanError for a buffer that gets no values.
    """
    if not names:
        return {}
    mode = fake_mode()
    # A copy without memory for its parameters, and with buffers that can be computed.
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = fake_parameter(parameter, mode)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="cpu")
    scratch = copy.deepcopy(model, memo)
    before = {name: (buffer, buffer._version) for name, buffer in scratch.named_buffers()}
    initialize = getattr(scratch, "initialize_weights", None)
    if initialize is not None:
        # Without changing the user's random state.
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            initialize()
    now = dict(scratch.named_buffers())
    # Neither replaced nor written to.
    lost = []
    for name in names:
        buffer, version = before[name]
        if now[name] is buffer and buffer._version == version:
            lost.append(name)
    if lost:
        remedy = "give them their values on the model (module.name = tensor), or build it on a real device"
        raise PlanError(counted(lost), "buffers on the meta device, without values in the files", remedy)
    return {name: now[name] for name in names}


def format_of(model: nn.Module) -> FolderFormat:
    """Return how transformers would save the model: the names that it leaves out, and its config; empty for
    other models.
    """
    if not hasattr(model, "get_expanded_tied_weights_keys"):
        return FolderFormat(None, written_names(model), partial(write_configs, model))
    # By the current config, which is the one that is written; `all_tied_weights_keys` may be outdated.
    declared: dict[str, str] = model.get_expanded_tied_weights_keys(all_submodels=True)  # type: ignore[operator]
    left_out, remarks = ties_of(model, declared)
    return FolderFormat(left_out, written_names(model), partial(write_configs, model), remarks)


def ties_of(model: nn.Module, declared: Mapping[str, str]) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the names that `from_pretrained` ties itself, from the config's `{target: source}`; and remarks
    on parameters that were tied or untied by hand, which are written under all names.
    """
    names = tied_names(model)
    first = {name: group[0] for group in names.values() for name in group}
    # Only parameters are written.
    known = {name: source for name, source in declared.items() if name in first and source in first}
    left_out = {name for name, source in known.items() if first[name] == first[source]}
    remarks = []
    if untied := sorted(known.keys() - left_out):
        remarks.append(
            f"{counted(untied)}: not tied here, though the config says so. With config.tie_word_embeddings = False all "
            "versions of transformers load them unchanged"
        )
    for group in names.values():
        own = [name for name in group if name not in left_out]
        if len(own) > 1:
            remarks.append(
                f"{', '.join(own)}: one parameter here, which is not in the config. from_pretrained gives each its "
                "values, and they then train separately: tie them again (or, of embeddings, set config.tie_word_embeddings)"
            )
    return frozenset(left_out), tuple(remarks)


def write_configs(model: nn.Module, folder: Path) -> None:
    """Write config.json and generation_config.json next to the weights, for models that have them."""
    config: Any = copy.deepcopy(getattr(model, "config", None))
    if hasattr(config, "save_pretrained"):
        config.architectures = [type(model).__name__]
        config.dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
        config.save_pretrained(folder)
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(folder)
