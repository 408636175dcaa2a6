"""A port for a rendezvous to listen on.

Binding port 0 and letting go of it gives a port of the range that the kernel takes outgoing connections from: where many ranks
connect to each other, one of them may hold it before the rendezvous listens. Ports below that range are taken by name only.
"""

from __future__ import annotations

import random
import socket

_PORTS = range(10_000, 32_000)  # below where Linux (32768) and macOS (49152) begin
_given: set[int] = set()


def free_port() -> int:
    """Return a port on which nothing listens, and which this process was not given before."""
    draw = random.SystemRandom()
    while True:
        port = draw.choice(_PORTS)
        if port in _given:
            continue
        _given.add(port)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
