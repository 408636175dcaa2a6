"""Turn assignments to buffers in forward (`self.count = self.count + 1`) into updates of these buffers.

In: a model, before a call. Out: after the call, the tensor assigned to each buffer, by path; the model's own
buffers are back in place.

    buffers = AssignedBuffers(model, loss_fn)
    model(x)
    buffers.take()      # {"count": tensor(1)}
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from autoptd.compat import FakeTensor


class AssignedBuffers:
    """Save the buffers of a model, and of a loss function that is a module, to restore replaced ones."""

    def __init__(self, model: nn.Module, loss_fn: Any = None) -> None:
        # (the dict that holds it, its key there, its path, the buffer)
        self._buffers: list[tuple[dict[str, Any], str, str, Tensor]] = []
        modules = dict(model.named_modules())
        if isinstance(loss_fn, nn.Module):
            modules |= dict(loss_fn.named_modules(prefix="loss_fn"))
        for path, module in modules.items():
            for name, buffer in module._buffers.items():
                if isinstance(buffer, Tensor):
                    self._buffers.append((module._buffers, name, f"{path}.{name}".removeprefix("."), buffer))

    def take(self) -> dict[str, Tensor]:
        """Restore buffers that were replaced by tensors of the same shape; return the replacements by path.

        In a trace, this adds an operator that writes the new values to the buffer.
        """
        assigned: dict[str, Tensor] = {}
        for holder, name, path, buffer in self._buffers:
            new = holder.get(name, buffer)
            if new is buffer or new is None or (new.shape, new.dtype) != (buffer.shape, buffer.dtype):
                continue
            holder[name] = buffer
            # Outside of a trace backward may need the old value of the buffer.
            if isinstance(buffer, FakeTensor):
                buffer.copy_(new.detach())
            assigned[path] = new.detach()
        return assigned


__all__ = ["AssignedBuffers"]
