"""Read the user's model once.

In: the user's model and, optionally, its initial weights. Out: a frozen `Subject` with everything that the
compiler and the running model need to know about it.

    subject = Subject.of(model, weights=open_weights("llama-8b"))
    subject.model              # the traced model: `model` itself, or a copy whose parameters have no memory
    subject.source             # where ranks read initial values; None: the model's own
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from autoptd.compat import tree_map
from autoptd.errors import PlanError
from autoptd.ir.buffers import SharedBuffers, same_entries
from autoptd.program.sources import FolderFormat, Source, Weights
from autoptd.subject.call import Call, argument_names
from autoptd.subject.initial.deferred import is_deferred, traceable
from autoptd.subject.initial.recipes import Recipes
from autoptd.subject.match_folder import fitting, format_of, with_values
from autoptd.subject.module import check_module
from autoptd.subject.storage import shared_buffers


@dataclass(frozen=True)
class Subject:
    """Hold a model and the facts read from it.

    `given` is the user's own module, `model` the one that is traced. `recipes` make the initial values of a
    deferred model, `weights` bring others. `arguments` are the names of forward's positional arguments,
    `shared` says which buffers share memory, `format` how transformers would save the model.
    """

    given: nn.Module
    model: nn.Module
    recipes: Recipes | None
    weights: Weights | None
    arguments: tuple[str, ...]
    shared: SharedBuffers
    format: FolderFormat

    @classmethod
    def of(cls, given: nn.Module, weights: Weights | None = None) -> Subject:
        """Read a model; PlanError or TraceError for one that cannot be divided, or that `weights` do not fit."""
        check_module(given)
        model, recipes = traceable(given) if is_deferred(given) else (given, None)
        if weights is not None:
            # Names and shapes are checked before anything is traced: a wrong folder costs seconds, not
            # minutes.
            weights = fitting(model, weights)
            model = with_values(model, weights)
        return cls(
            given=given,
            model=model,
            recipes=recipes,
            weights=weights,
            arguments=argument_names(model),
            shared=shared_buffers(model),
            format=format_of(model),
        )

    @property
    def source(self) -> Source | None:
        """Where ranks read their initial values; None for the model's own."""
        return self.weights or self.recipes

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state dict of the model that is traced."""
        return self.model.state_dict()

    def check_values(self) -> None:
        """Raise PlanError where ranks would have no values to start from."""
        if any(parameter.is_meta for parameter in self.model.parameters()):
            remedy = "build it in `with autoptd.deferred():`, or pass weights='a folder with its safetensors'"
            raise PlanError("model", "its weights are on meta: there is nothing to train", remedy)

    def remade(self) -> nn.Module:
        """Return the model that would be traced now: a loop may have changed the user's own since."""
        model = traceable(self.given)[0] if is_deferred(self.given) else self.given
        return model if self.weights is None else with_values(model, self.weights)

    def on_its_device(self, call: Call) -> Call:
        """Return a call on the model's device: a step takes tensors from anywhere, tracing does not."""
        devices = {parameter.device for parameter in self.model.parameters()}
        if len(devices) != 1 or any(device.type == "meta" for device in devices):
            return call
        (home,) = devices
        return tree_map(lambda leaf: leaf.to(home) if isinstance(leaf, torch.Tensor) else leaf, call)  # type: ignore[no-any-return]

    @contextmanager
    def holding(self, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Set the model's buffers to copies of these values temporarily; ignore other names."""
        before: list[tuple[nn.Module, str, torch.Tensor]] = []
        # By identity: modules may share a buffer.
        copies: dict[int, torch.Tensor] = {}
        for path, module in self.model.named_modules():
            for name, own in module._buffers.items():
                value = values.get(f"{path}.{name}" if path else name)
                # A buffer with these values already stays the very tensor, which the user may have views of.
                if own is None or value is None or own.is_meta or same_entries(own, value.to(own.device)):
                    continue
                before.append((module, name, own))
                copies.setdefault(id(own), value.to(own, copy=True))
        for module, name, own in before:
            module._buffers[name] = copies[id(own)]
        try:
            yield
        finally:
            for module, name, own in before:
                module._buffers[name] = own
