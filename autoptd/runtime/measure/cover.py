"""Wrap every call of a rank's groups and channels in a `with` block: the common part of a record and a timed step.

In: a rank's world, and what to enter around each call. Out: a function that undoes it. Without it there is no overhead:
the wrapped methods replace those of the communicators while it is in force.

    uncover = cover(world, note)            # note("all-reduce", group.ranks, nbytes, "h.0.mlp")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch

from autoptd.runtime.checks.agreement import BATCH, COPIES, SIZES, STATE
from autoptd.runtime.world.world import Channel, Group, Pending, World

# Sites of collectives that are not part of the program, and therefore not recorded.
CHECKS = (BATCH, COPIES, SIZES, STATE)
# Arguments: kind, ranks of the group, bytes of the payload, site. The call is made in the `with` block.
Note = Callable[[str, Sequence[int], int, str], AbstractContextManager[None]]


def cover(
    world: World, note: Note, start: Note | None = None, wait: Note | None = None
) -> Callable[[], None]:
    """Wrap every call of a rank's communicators in a `note`; return the function that undoes this.

    A call that only starts a collective is wrapped in `start`, and its `wait()` in `wait`, where these are given.
    """
    groups, channels = world.communicators()
    covered: list[tuple[Group | Channel, str]] = []
    for group in groups:
        for name, (kind, payload) in GROUP_METHODS.items():
            method = getattr(group, name)
            if "_start" in name:
                wrapped = _noted(method, start or note, wait, kind, group, payload)
            else:
                wrapped = _noted(method, note, None, kind, group, payload)
            # On the instance, in front of the class's method.
            setattr(group, name, wrapped)
            covered.append((group, name))
    for peer, channel in channels.items():
        channel.send = _noted_send(channel.send, note, (world.rank, peer))  # type: ignore[method-assign]
        covered.append((channel, "send"))

    def uncover() -> None:
        for communicator, name in covered:
            # The class's own method shows again.
            delattr(communicator, name)

    return uncover


def _noted(
    method: Callable[..., Any],
    note: Note,
    wait: Note | None,
    kind: str,
    group: Group,
    payload: Callable[[Any, int], int],
) -> Callable[..., Any]:
    def call(data: Any, *args: Any, **kwargs: Any) -> Any:
        # The first string of every collective's arguments.
        site = kwargs["site"] if "site" in kwargs else next(arg for arg in args if isinstance(arg, str))
        if site in CHECKS:
            return method(data, *args, **kwargs)
        about = (kind, group.ranks, payload(data, group.size), site)
        with note(*about):
            result = method(data, *args, **kwargs)
        return result if wait is None else _NotedPending(result, partial(wait, *about))

    return call


class _NotedPending(Pending):
    """A collective under way, whose `wait()` is wrapped in a note."""

    def __init__(self, pending: Pending, note: Callable[[], AbstractContextManager[None]]) -> None:
        self._pending, self._note = pending, note

    def wait(self) -> Any:
        with self._note():
            return self._pending.wait()

    def is_done(self) -> bool:
        return self._pending.is_done()


def _noted_send(method: Callable[..., Any], note: Note, ends: tuple[int, int]) -> Callable[..., Any]:
    def call(tensors: Sequence[torch.Tensor], site: str) -> Any:
        with ExitStack() as stack:
            # The plan counts a call per buffer, and one `send` takes all buffers of a message.
            for x in tensors:
                stack.enter_context(note("send", ends, _nbytes(x), site))
            return method(tensors, site)

    return call


def _nbytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


# By method of `Group`: its kind in a record, and its payload in bytes, given a rank's data and the size of the group. The
# payload is the whole value: the result of a gather, the input of a reduce-scatter (`wire_bytes` divides).
GROUP_METHODS: dict[str, tuple[str, Callable[[Any, int], int]]] = {
    "all_reduce": ("all-reduce", lambda x, size: _nbytes(x)),
    "all_reduce_": ("all-reduce", lambda x, size: _nbytes(x)),
    "all_reduce_start": ("all-reduce", lambda x, size: _nbytes(x)),
    "all_gather": ("all-gather", lambda x, size: size * _nbytes(x)),
    "all_gather_start": ("all-gather", lambda x, size: size * _nbytes(x)),
    "all_gather_start_": ("all-gather", lambda flat, size: _nbytes(flat)),
    "reduce_scatter": ("reduce-scatter", lambda x, size: _nbytes(x)),
    "reduce_scatter_start": ("reduce-scatter", lambda x, size: _nbytes(x)),
    "all_to_all": ("all-to-all", lambda parts, size: size * sum(map(_nbytes, parts))),
    "broadcast": ("broadcast", lambda x, size: _nbytes(x)),
    "gather_objects": ("objects", lambda obj, size: 0),
}
