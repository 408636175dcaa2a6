"""Buffers that a forward replaces by other tensors of their shape (`self.count = self.count + 1`): these are updates.

In: a model, before a call. Out: after it, what was assigned to each buffer, by its path; the model has its own buffers again.

    buffers = AssignedBuffers(model, loss_fn)
    model(x)
    buffers.take()      # {"count": tensor(1)}
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from autoptd.compat import FakeTensor


class AssignedBuffers:
    """The buffers of a model, and of a loss function that is a module, as they were."""

    def __init__(self, model: nn.Module, loss_fn: Any = None) -> None:
        # (what holds it, its name there, its path, the buffer)
        self._buffers: list[tuple[dict[str, Any], str, str, Tensor]] = []
        modules = dict(model.named_modules())
        if isinstance(loss_fn, nn.Module):
            modules |= dict(loss_fn.named_modules(prefix="loss_fn"))
        for path, module in modules.items():
            for name, buffer in module._buffers.items():
                if isinstance(buffer, Tensor):
                    self._buffers.append((module._buffers, name, f"{path}.{name}".removeprefix("."), buffer))

    def take(self) -> dict[str, Tensor]:
        """Put back buffers that were replaced by others of their shape; return these by path.

        A trace gets an operator that writes the new values to the buffer.
        """
        assigned: dict[str, Tensor] = {}
        for holder, name, path, buffer in self._buffers:
            new = holder.get(name, buffer)
            if new is buffer or new is None or (new.shape, new.dtype) != (buffer.shape, buffer.dtype):
                continue
            holder[name] = buffer
            # Elsewhere backward may need what the buffer was.
            if isinstance(buffer, FakeTensor):
                buffer.copy_(new.detach())
            assigned[path] = new.detach()
        return assigned


__all__ = ["AssignedBuffers"]
