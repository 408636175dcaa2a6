"""What a rank can do, in round numbers: the units in which the solver weighs compute, memory and communication.

In: the keyword `machine=`, the name of a file in `autoptd/machines`, or a `Machine` (in a plan: an object of the fields
that are not the default). Out: a `Machine`. The files are the planner's clusters too: see `machine_files.py`.

    find_machine("h100").flops                          # 692.3e12
    autoptd.compile(model, t=8, machine="h100", ...)    # or machine=Machine(link_bandwidth=20e9)
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoptd.errors import PlanError
from autoptd.ir.machine_files import gpu_of, machine_file, machine_names, nearest_machines
from autoptd.ir.plan import check_known

COPIES = 4  # of a parameter that is trained: itself, its gradient, AdamW's two moments


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
                raise PlanError(
                    f"machine: {name}={number!r}", what, "leave it out, or see autoptd/ir/machine.py"
                )
            if math.isinf(number) and name != "memory":
                raise PlanError(f"machine: {name}={number!r}", "is not finite", "a large number")
        if not self.per_parameter_byte:
            object.__setattr__(self, "per_parameter_byte", 4 / self.link_bandwidth)
        if not self.per_saved_byte:
            object.__setattr__(self, "per_saved_byte", 0.02 / self.link_bandwidth)
        if not self.redundant:
            object.__setattr__(self, "redundant", 10 * self.latency)

    def with_memory_priced(self, price: float, in_flight: float) -> Machine:
        """The machine for which a byte that a rank holds costs `price` seconds per microbatch more.

        A parameter is held in all its copies; what is saved for backward, once for each microbatch `in_flight`.
        """
        per_parameter_byte = self.per_parameter_byte + price * COPIES
        per_saved_byte = self.per_saved_byte + price * in_flight
        return dataclasses.replace(self, per_parameter_byte=per_parameter_byte, per_saved_byte=per_saved_byte)

    def widened(self, factor: float) -> Machine:
        """The machine on which values of `factor` times the bytes take the same time and room: it gets the same plan."""
        times = ("memory_bandwidth", "link_bandwidth", "network_bandwidth", "memory")
        per = ("per_parameter_byte", "per_saved_byte")
        changed = {name: getattr(self, name) * factor for name in times}
        return dataclasses.replace(self, **changed, **{name: getattr(self, name) / factor for name in per})


# What is sustained of a vendor's peaks by products, copies and collectives of the sizes that a layer has. The
# planner's own fractions are of large ones: usually higher, and where they are lower they count. What is left of
# the memory is the allocator's, the driver's and the communicators'.
GEMM, BYTES, MEMORY = 0.7, 0.8, 0.85
HOPS = 5  # of the low-latency protocol of small messages: what a collective takes beside its bytes


def _derived(record: Mapping[str, Any], site: str) -> Machine:
    """A rank of a machine that has a file. What its table [solver] says is taken as it is."""
    gpu, fast, network = gpu_of(record, site), record["fast"], record["network"]
    cards = record["nics"] / record["gpus_per_node"]  # network cards of a rank
    fields = {
        "flops": min(GEMM, gpu["matrix_fraction"]) * gpu["matrix_flops"],
        "memory_bandwidth": min(BYTES, gpu["memory_fraction"]) * gpu["memory_bandwidth"],
        "link_bandwidth": min(BYTES, fast["fraction"]) * fast["bandwidth"],
        "latency": HOPS * fast["small_latency"],
        "network_bandwidth": min(BYTES, network["fraction"]) * network["bandwidth"] * cards,
        "ranks_per_node": record["gpus_per_node"],
        "message": fast["message"],
        "memory": MEMORY * gpu["memory_bytes"],
    }
    return Machine(**{**fields, **record.get("solver", {})})


DEFAULT = Machine()


def find_machine(given: Any) -> Machine:
    """The Machine that is meant: None (the defaults), a name, a Machine, or its fields as a plan has them."""
    if isinstance(given, Machine):
        return given
    if given is None:
        return DEFAULT
    if isinstance(given, str):
        file = machine_file(given)
        if file is None:
            raise PlanError(
                f"machine={given!r}", "no such machine", f"{nearest_machines(given)}, or a Machine"
            )
        return _derived(tomllib.loads(file.read_text()), f"machine {file.stem}")
    if isinstance(given, Mapping):
        check_known("machine", given, [field.name for field in dataclasses.fields(Machine)])
        return Machine(**given)
    raise PlanError(
        "machine", f"is a {type(given).__name__}", f"one of {', '.join(machine_names())}, or a Machine"
    )


def machine_record(given: Any) -> str | dict[str, float] | None:
    """A machine as a plan spells it: a name, or the fields that are not the default."""
    machine = find_machine(given)
    if given is None or isinstance(given, str):
        return given
    leading = {name: getattr(machine, name) for name in ("link_bandwidth", "latency")}  # others follow them
    usual = dataclasses.asdict(Machine(**leading))
    fields = {name: one for name, one in dataclasses.asdict(machine).items() if one != usual[name]}
    return fields | {name: one for name, one in leading.items() if one != getattr(Machine, name)}


__all__ = ["Machine", "find_machine", "machine_record"]
