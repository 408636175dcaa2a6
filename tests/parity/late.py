"""Gathers of updated parameters that are done only when somebody waits for them: what is read before is NaN."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

from torch import Tensor

from autoptd.runtime.world.world import Pending


class Late(Pending):
    """A gather whose buffer, but for the rank's own range, is NaN until it is waited for."""

    log: ClassVar[list[tuple[int, str]]] = []

    def __init__(self, group: Any, flat: Tensor, site: str) -> None:
        self.flat, self.site = flat, site
        self.started = usual_gather(group, flat.clone(), site)
        width = len(flat) // group.size
        own = flat.narrow(0, group.index * width, width)
        kept = own.clone()
        flat.fill_(float("nan"))
        own.copy_(kept)

    def wait(self) -> Tensor:
        self.log.append((threading.get_ident(), self.site))
        return self.flat.copy_(self.started.wait())

    def is_done(self) -> bool:
        return False


def usual_gather(group: Any, flat: Tensor, site: str) -> Pending:
    return group.all_gather_start_(flat, site)  # type: ignore[no-any-return]
