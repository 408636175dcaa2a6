"""Machines: the speed of a rank in round numbers, in which the solver weighs compute, memory and communication.

In: the keyword `machine=`: the name of a TOML file in `autoptd/machines`, or a `Machine` (in a plan: an object with
its non-default fields). Out: a `Machine`. The planner derives a `Cluster` from the same files
(`wings/planner/cluster.py` explains their fields), and progress reports the peaks of a GPU.

    find_machine("h100").flops                          # 692.3e12
    autoptd.compile(model, t=8, machine="h100", ...)    # or machine=Machine(link_bandwidth=20e9)
    machine_file("h100").stem                           # "dgx-h100": NVIDIA's own machines are also known by their GPU
    machine_of_device("NVIDIA H100 80GB HBM3")          # "dgx-h100"
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoptd.errors import PlanError, a_type
from autoptd.ir.plan import check_known, nearest

# Numbers that may be 0; in the last three, 0 stands for their default.
MAY_BE_ZERO = ("latency", "message", "per_parameter_byte", "per_saved_byte", "redundant")


@dataclass(frozen=True)
class Machine:
    """Per rank: `flops` per second, `memory_bandwidth` and `link_bandwidth` in bytes per second, `latency` in
    seconds.

    `link_bandwidth` is between the `ranks_per_node` ranks of a node, in one direction; `network_bandwidth` is
    between nodes. `latency` is the fixed cost of a collective over tp, `message` that of a message between
    stages, or of one more collective for them. `memory` is in bytes (unbounded by default).

    The defaults describe a node of 8 GPUs with a 200 Gb/s network card each. `redundant` is the penalty, in
    seconds on top of its time, of a matrix product that every rank computes in full: a request for t ranks
    means that products should be split, even small ones that would be faster whole. The default is ten
    collectives.

    `per_parameter_byte` and `per_saved_byte` are the prices, in seconds per microbatch, of a byte of a stored
    parameter (with its gradient and optimizer state) and of a byte saved for backward. They are never zero:
    judged by time alone, an all-gather followed by redundant GEMMs beats an all-reduce. The defaults are the
    link time of 4 bytes, and of a fiftieth of a byte; if memory is short, `compiler/memory_search.py` raises both.
    """

    flops: float = 300e12
    memory_bandwidth: float = 1.5e12
    link_bandwidth: float = 200e9
    latency: float = 15e-6
    network_bandwidth: float = 25e9
    ranks_per_node: int = 8
    # 0 in these three: derived from the link or the latency.
    per_parameter_byte: float = 0.0
    per_saved_byte: float = 0.0
    redundant: float = 0.0
    message: float = 20e-6
    memory: float = math.inf

    def __post_init__(self) -> None:
        for name, number in dataclasses.asdict(self).items():
            _check_number(name, number)
        if not self.per_parameter_byte:
            object.__setattr__(self, "per_parameter_byte", 4 / self.link_bandwidth)
        if not self.per_saved_byte:
            object.__setattr__(self, "per_saved_byte", 0.02 / self.link_bandwidth)
        if not self.redundant:
            object.__setattr__(self, "redundant", 10 * self.latency)

    def with_memory_priced(self, price: float, in_flight: float, copies: float) -> Machine:
        """Return the machine on which every byte that a rank holds costs `price` more seconds per microbatch.

        A parameter is held in `copies`, counting gradient and optimizer state; saved values, once for each
        microbatch `in_flight`.
        """
        per_parameter_byte = self.per_parameter_byte + price * copies
        per_saved_byte = self.per_saved_byte + price * in_flight
        return dataclasses.replace(self, per_parameter_byte=per_parameter_byte, per_saved_byte=per_saved_byte)

    def widened(self, factor: float) -> Machine:
        """Return the machine on which values with `factor` times the bytes take the same time and memory, so
        that the plan stays the same.
        """
        times = ("memory_bandwidth", "link_bandwidth", "network_bandwidth", "memory")
        per = ("per_parameter_byte", "per_saved_byte")
        changed = {name: getattr(self, name) * factor for name in times}
        return dataclasses.replace(self, **changed, **{name: getattr(self, name) / factor for name in per})


def _check_number(name: str, number: Any) -> None:
    """Reject anything but a positive number, or 0 where allowed; only `memory` may be infinite."""
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    may_be_zero = name in MAY_BE_ZERO
    if not is_number or math.isnan(number) or number < 0 or (number == 0 and not may_be_zero):
        fact = "must be a number of at least 0" if may_be_zero else "must be a positive number"
        raise PlanError(f"machine: {name}={number!r}", fact, "leave it out, or see autoptd/ir/machine.py")
    if math.isinf(number) and name != "memory":
        raise PlanError(f"machine: {name}={number!r}", "must be finite", "use a large number")


DEFAULT = Machine()


def find_machine(given: Any) -> Machine:
    """Return the Machine for None (the defaults), a name, a Machine, or its fields from a plan."""
    if isinstance(given, Machine):
        return given
    if given is None:
        return DEFAULT
    if isinstance(given, str):
        file = machine_file(given)
        if file is None:
            remedy = f"{nearest_machines(given)}, or a Machine"
            raise PlanError(f"machine={given!r}", "no such machine", remedy)
        return _derived(tomllib.loads(file.read_text()), f"machine {file.stem}")
    if isinstance(given, Mapping):
        check_known("machine", given, [field.name for field in dataclasses.fields(Machine)])
        return Machine(**given)
    remedy = f"one of {', '.join(machine_names())}, or a Machine"
    raise PlanError("machine", f"is {a_type(given)}", remedy)


def machine_record(given: Any) -> str | dict[str, float] | None:
    """Return a machine as a plan stores it: a name, or the non-default fields."""
    machine = find_machine(given)
    if given is None or isinstance(given, str):
        return given
    # Prices and penalty default to multiples of these two, and are left out if they equal their defaults.
    leading = {name: getattr(machine, name) for name in ("link_bandwidth", "latency")}
    usual = dataclasses.asdict(Machine(**leading))
    fields = {name: number for name, number in dataclasses.asdict(machine).items() if number != usual[name]}
    return fields | {name: number for name, number in leading.items() if number != getattr(Machine, name)}


# The sustained fractions of a vendor's peaks for products, copies and collectives of a layer's sizes. The
# planner's own fractions are for large ones: usually higher; where lower, they apply. The rest of the memory
# is left for the allocator, the driver and the communicators.
GEMM, BYTES, MEMORY = 0.7, 0.8, 0.85
# The fixed cost of a collective, in hops of the low-latency protocol for small messages.
HOPS = 5


def _derived(record: Mapping[str, Any], site: str) -> Machine:
    """Return a rank of a machine that has a file; its table [solver] overrides derived values."""
    gpu, fast, network = gpu_of(record, site), record["fast"], record["network"]
    cards_per_rank = record["nics"] / record["gpus_per_node"]
    fields = {
        "flops": min(GEMM, gpu["matrix_fraction"]) * gpu["matrix_flops"],
        "memory_bandwidth": min(BYTES, gpu["memory_fraction"]) * gpu["memory_bandwidth"],
        "link_bandwidth": min(BYTES, fast["fraction"]) * fast["bandwidth"],
        "latency": HOPS * fast["small_latency"],
        "network_bandwidth": min(BYTES, network["fraction"]) * network["bandwidth"] * cards_per_rank,
        "ranks_per_node": record["gpus_per_node"],
        "message": fast["message"],
        "memory": MEMORY * gpu["memory_bytes"],
    }
    return Machine(**{**fields, **record.get("solver", {})})


FOLDER = Path(__file__).parents[1] / "machines"
GPUS = FOLDER / "gpus.toml"
# NVIDIA's own machines, which may also be called by the name of their GPU.
MAKER = "dgx-"
# Fields of gpus.toml that only wings/reports/progress.py reads.
OF_PROGRESS = ("device", "tf32_flops")


def machine_names() -> list[str]:
    """Return the names of all described machines, sorted."""
    return sorted(file.stem for file in FOLDER.glob("*.toml") if file != GPUS)


def machine_file(name: str) -> Path | None:
    """Return the file of a machine by its name, or by that of the GPU in one of NVIDIA's own; None for an
    unknown name.
    """
    known = machine_names()
    found = next((full for full in (name, MAKER + name) if full in known), None)
    return None if found is None else FOLDER / f"{found}.toml"


def nearest_machines(name: str) -> str:
    """Format the names most similar to `name`."""
    known = machine_names()
    short = [full.removeprefix(MAKER) for full in known if full.startswith(MAKER)]
    return nearest(name, [*known, *short])


def machine_of_device(device: str) -> str | None:
    """Return NVIDIA's own machine whose GPUs CUDA calls `device`, or None."""
    # "NVIDIA H100 80GB HBM3" contains "h100".
    own = [name for name in machine_names() if name.startswith(MAKER)]
    return next((name for name in own if name.removeprefix(MAKER) in device.lower()), None)


def read_gpus() -> dict[str, dict[str, Any]]:
    """Return the tables of gpus.toml, by the names of its GPUs."""
    return tomllib.loads(GPUS.read_text())


def gpu_of(record: Mapping[str, Any], site: str) -> Any:
    """Return the [gpu] of a machine's record: its own table, or the one of gpus.toml that it names; PlanError
    for an unknown name.
    """
    given = record.get("gpu")
    if not isinstance(given, str):
        return given
    known = read_gpus()
    if given not in known:
        raise PlanError(f"{site}: gpu={given!r}", "no such GPU", f"{nearest(given, known)}, or a table [gpu]")
    return {name: value for name, value in known[given].items() if name not in OF_PROGRESS}
