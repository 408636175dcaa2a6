"""Scale the loss for float16: backward starts from the scale, so that small gradients do not underflow.

In: per update, whether a gradient was not finite on any rank. Out: the scale of the next step, and whether
the update is skipped. All ranks decide alike, since they count the same findings. The rules are those of
Megatron-LM's dynamic scaler; with `hysteresis=1` the scales equal those of `torch.amp.GradScaler`, which has
no `min_loss_scale`, down to that bound. As there, and unlike in Megatron-LM, a scale is not doubled if
float32 cannot hold the result.

    scale = LossScaler(initial=2.0**16, window=1000, hysteresis=2)
    scale.renew()                    # a step has added to the gradients
    scale.settle(lambda: False)      # an update may take place: False, it is not skipped
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from autoptd.errors import PlanError
from autoptd.options import MAX_SCALE, Options


class LossScaler:
    """A power of two, as a rule: then scaling changes no bit of a gradient that is in range."""

    def __init__(
        self,
        initial: float = 2.0**16,
        window: int = 1000,
        hysteresis: int = 2,
        least: float = 1.0,
        is_dynamic: bool = True,
    ) -> None:
        self.value = initial
        self.window, self.hysteresis, self.least = window, hysteresis, least
        self.is_dynamic = is_dynamic
        # Updates since the last overflow or doubling, and overflows that are let pass before it is halved.
        self._good, self._left = 0, hysteresis
        # Whether the gradients of now are finite; None: not known yet.
        self._norm: torch.Tensor | None = None
        self._is_bad: bool | None = None
        self._is_settled = True

    @classmethod
    def of(cls, options: Options) -> LossScaler | None:
        """Return the requested scale; None if nothing is computed in float16."""
        if not options.is_fp16:
            return None
        asked = options.loss_scale
        if asked.fixed is not None:
            return cls(asked.fixed, is_dynamic=False)
        return cls(asked.initial, asked.window, asked.hysteresis, asked.minimum)

    def renew(self) -> None:
        """Discard the findings about the gradients: a step has added to them."""
        self._norm, self._is_bad, self._is_settled = None, None, False

    def saw(self, norm: torch.Tensor) -> None:
        """Note the norm of all gradients, which is finite if they are; it is read when an update needs it.

        A non-finite norm is kept, since clipping by value afterwards makes gradients finite.
        """
        if self._is_bad is None:
            self._norm = norm if self._norm is None else self._norm + norm

    def settle(self, find_norm: Callable[[], torch.Tensor]) -> bool:
        """Return whether an update is skipped, and set the scale for the next step; once for all optimizers.

        `find_norm` is called, a collective, unless the norm was seen already.
        """
        if self._is_settled:
            return bool(self._is_bad)
        norm = find_norm() if self._norm is None else self._norm
        self._is_bad, self._is_settled = not bool(norm.isfinite()), True
        if self.is_dynamic:
            self._update(self._is_bad)
        return self._is_bad

    def _update(self, is_bad: bool) -> None:
        if is_bad:
            self._good, self._left = 0, self._left - 1
            if self._left <= 0:
                self.value = max(self.value / 2, self.least)
            return
        self._good += 1
        if self._good >= self.window:
            self._good, self._left = 0, self.hysteresis
            if 2 * self.value <= MAX_SCALE:
                self.value *= 2

    def state_dict(self) -> dict[str, float]:
        """Return the state that a resumed run needs to continue identically."""
        return {"value": self.value, "good": self._good, "left": self._left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state_dict()`; a fixed scale is kept."""
        if set(state) != {"value", "good", "left"}:
            fact = (
                f"its loss_scale has {', '.join(map(str, state)) or 'no keys'} instead of value, good, left"
            )
            raise PlanError("optimizer.load_state_dict", fact, "a state dict of pm.optimizer(...)")
        if self.is_dynamic:
            self.value = float(state["value"])
            self._good, self._left = int(state["good"]), int(state["left"])
