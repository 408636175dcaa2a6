"""What a rank can do, in round numbers: the units in which the solver weighs compute, memory and communication.

In: the keyword `machine=`, one of `PRESETS` by name, or a `Machine` (in a plan: an object of the fields that are not the
default). Out: a `Machine`.

    find_machine("h100").flops                          # 692.3e12
    autoptd.compile(model, t=8, machine="h100", ...)    # or machine=Machine(link_bandwidth=20e9)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoptd.errors import PlanError
from autoptd.ir.plan import check_known, nearest


@dataclass(frozen=True)
class Machine:
    """Per rank: `flops` per second, `memory_bandwidth` and `link_bandwidth` in bytes per second, `latency` in seconds.

    `link_bandwidth` is that between the `ranks_per_node` ranks of a node, one direction of it; `network_bandwidth` that
    between nodes. `latency` is what a collective over tp takes beside its bytes, `message` what a message between stages,
    or one more collective of theirs, does; `memory` is in bytes (no bound unless it is given).

    The defaults are a node of 8 GPUs with a 200 Gb/s card each. `redundant` is what a matrix product costs, in seconds, beside
    its time, where every rank does it in full: whoever asks for t ranks wants products split, also those of a small model,
    which would be faster whole. Unless given: ten collectives.

    `per_parameter_byte` and `per_saved_byte` are the prices, in seconds per microbatch, of a byte that a rank keeps (parameter,
    gradient and optimizer state follow it) and of a byte saved for backward. They are never zero: on time alone an
    all-gather followed by redundant GEMMs beats an all-reduce. Unless given: what a link takes for 4 bytes, for a fiftieth of
    one; where memory is short, saved bytes are made dearer (`memory_price.py`).
    """

    flops: float = 300e12
    memory_bandwidth: float = 1.5e12
    link_bandwidth: float = 200e9
    latency: float = 15e-6
    network_bandwidth: float = 25e9
    ranks_per_node: int = 8
    per_parameter_byte: float = 0.0  # 0: by the link
    per_saved_byte: float = 0.0
    redundant: float = 0.0  # 0: by the latency
    message: float = 20e-6
    memory: float = math.inf

    def __post_init__(self) -> None:
        for name, number in dataclasses.asdict(self).items():
            is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
            may_be_zero = name in ("latency", "message", "per_parameter_byte", "per_saved_byte", "redundant")
            if not is_number or math.isnan(number) or number < 0 or (number == 0 and not may_be_zero):
                what = "no number that is at least 0" if may_be_zero else "no positive number"
                raise PlanError(f"machine: {name}={number!r}", what, "leave it out, or see autoptd/ir/machine.py")
            if math.isinf(number) and name != "memory":
                raise PlanError(f"machine: {name}={number!r}", "is not finite", "a large number")
        if not self.per_parameter_byte:
            object.__setattr__(self, "per_parameter_byte", 4 / self.link_bandwidth)
        if not self.per_saved_byte:
            object.__setattr__(self, "per_saved_byte", 0.02 / self.link_bandwidth)
        if not self.redundant:
            object.__setattr__(self, "redundant", 10 * self.latency)

    def widened(self, factor: float) -> Machine:
        """The machine on which values of `factor` times the bytes take the same time and room: it gets the same plan."""
        times = ("memory_bandwidth", "link_bandwidth", "network_bandwidth", "memory")
        per = ("per_parameter_byte", "per_saved_byte")
        changed = {name: getattr(self, name) * factor for name in times}
        return dataclasses.replace(self, **changed, **{name: getattr(self, name) / factor for name in per})


# What is sustained of a vendor's peaks: by large matrix products, and by large copies and collectives. What is left of the
# memory is the allocator's, the driver's and the communicators'.
GEMM, BYTES, MEMORY = 0.7, 0.8, 0.9


def _gpu(flops: float, memory_bandwidth: float, nvlink: float, network: float, memory: float) -> Machine:
    """A GPU by the vendor's peaks; `nvlink` counts both directions, as data sheets do. Collectives start in about 15 us."""
    return Machine(
        flops=GEMM * flops,
        memory_bandwidth=BYTES * memory_bandwidth,
        link_bandwidth=BYTES * nvlink / 2,
        latency=15e-6,
        network_bandwidth=BYTES * network,
        memory=MEMORY * memory,
    )


PRESETS: dict[str, Machine] = {
    # A core of a laptop: products in float32, gloo over the loopback, whose small collectives take some 300 us.
    "laptop-cpu": Machine(
        flops=40e9,
        memory_bandwidth=10e9,
        link_bandwidth=1e9,
        latency=300e-6,
        network_bandwidth=0.1e9,  # gigabit Ethernet
        message=300e-6,
        memory=4e9,
    ),
    # NVIDIA's data sheets, dense bf16, SXM, 80 GB (H200: 141 GB); a network card per GPU, as in DGX A100 (HDR, 200 Gb/s) and
    # DGX H100 and H200 (NDR, 400 Gb/s).
    "a100": _gpu(flops=312e12, memory_bandwidth=2.039e12, nvlink=600e9, network=25e9, memory=80e9),
    "h100": _gpu(flops=989e12, memory_bandwidth=3.35e12, nvlink=900e9, network=50e9, memory=80e9),
    "h200": _gpu(flops=989e12, memory_bandwidth=4.8e12, nvlink=900e9, network=50e9, memory=141e9),
}
DEFAULT = Machine()


def find_machine(given: Any) -> Machine:
    """The Machine that is meant: None (the defaults), the name of a preset, a Machine, or its fields as a plan has them."""
    if isinstance(given, Machine):
        return given
    if given is None:
        return DEFAULT
    if isinstance(given, str):
        if given not in PRESETS:
            raise PlanError(f"machine={given!r}", "no such machine", f"{nearest(given, PRESETS)}, or a Machine")
        return PRESETS[given]
    if isinstance(given, Mapping):
        check_known("machine", given, [field.name for field in dataclasses.fields(Machine)])
        return Machine(**given)
    raise PlanError("machine", f"is a {type(given).__name__}", f"one of {', '.join(PRESETS)}, or a Machine")


def spelled(given: Any) -> str | dict[str, float] | None:
    """A machine as a plan spells it: a name, or the fields that are not the default."""
    machine = find_machine(given)
    if given is None or isinstance(given, str):
        return given
    leading = {name: getattr(machine, name) for name in ("link_bandwidth", "latency")}  # others follow them
    usual = dataclasses.asdict(Machine(**leading))
    fields = {name: one for name, one in dataclasses.asdict(machine).items() if one != usual[name]}
    return fields | {name: one for name, one in leading.items() if one != getattr(Machine, name)}


__all__ = ["PRESETS", "Machine", "find_machine", "spelled"]
