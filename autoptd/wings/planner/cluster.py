"""Read a cluster from a TOML file: the speeds of a GPU, a node and the network, and how software uses them.

In: the name of a machine (ir/machine.py), a path, or a `Cluster`. Out: a `Cluster`. Every number that
such a file may set is a field below: peaks are the vendor's, and fractions are the part of a peak that large
transfers and products reach. `gpu` is a table, or the name of one in gpus.toml; the table [solver] belongs to
`Machine` (ir/machine.py).

    find_cluster("dgx-a100").gpu.flops("bf16")      # 312e12
    find_cluster("my.toml")
    uncertainty(find_cluster("dgx-a100"), "fp16")   # 0.082: predictions of SC'21's points are 4.2% low to 3.7% high
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autoptd.errors import PlanError
from autoptd.ir.machine import gpu_of, machine_file, nearest_machines
from autoptd.ir.plan import check_known, nearest

GENERATIONS = Path(__file__).parent / "software.toml"
# The machine of ranks on CPUs.
CPU = "laptop-cpu"
# torch's name of a dtype -> precision.
PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
OVERLAPS = ("tp_overlap", "tp_overlap_backward", "dp_overlap", "pp_overlap")
# Fields that are fractions, 0 to 1.
SHARES = {*OVERLAPS, *"matrix_fraction memory_fraction unaligned unaligned_single".split()}
SHARES |= {"fraction", "small", "causal", "flash_fraction"}
# Every other number must be above 0.
MAY_BE_ZERO = {*OVERLAPS, *"units ramp kernel_seconds latency message small_latency nics".split()}
MAY_BE_ZERO |= {"exchange_seconds", "extra_parameter_bytes", "context_bytes", "slack"}
ATTENTIONS = ("unfused", "flash")
CONTEXTS = ("ring", "solved")
# Predictions in both are the same: one measurement counts for either.
HALF = ("fp16", "bf16")
# Error message of a record with a wrong layout.
SEE = "see autoptd/wings/planner/cluster.py"


@dataclass(frozen=True)
class Gpu:
    """One GPU (or one CPU rank).

    `matrix_flops`, `float32_flops`: peak FLOP/s of products in 16 and in 32 bits; `matrix_fraction`: the part
    of the peak that a large product reaches. `units`: processors that share the tiles of a product (0: no
    quantization), `tile`: elements of a side of a tile, `ramp`: length k of a product that reaches half of
    that rate; `unaligned`, `unaligned_single`: fraction of that rate if a dim of a batch of products (of
    attention), or of a single one, is not a multiple of 8 elements of 16 bits. `memory_bytes`;
    `memory_bandwidth` in bytes/s, `memory_fraction`, the part of it that large kernels reach.
    `kernel_seconds`: launch time of a kernel that the previous one does not hide. `bf16`: whether it has
    products in bfloat16.
    """

    matrix_flops: float
    float32_flops: float
    memory_bytes: float
    memory_bandwidth: float
    matrix_fraction: float = 0.8
    memory_fraction: float = 0.8
    units: int = 0
    tile: int = 128
    ramp: float = 0.0
    unaligned: float = 1.0
    unaligned_single: float = 1.0
    kernel_seconds: float = 0.0
    bf16: bool = True

    def flops(self, precision: str) -> float:
        """Peak FLOP/s of products in a precision."""
        return self.float32_flops if precision == "fp32" else self.matrix_flops


@dataclass(frozen=True)
class Link:
    """The links of a GPU in a node, or one network card.

    `bandwidth`: bytes/s in one direction; `fraction`: the part of it that large messages reach; `latency`: seconds of
    a hop of a ring collective, `message`: of one message between stages; `small`: fraction of the bandwidth in the
    low-latency protocol for small messages, `small_latency`: the seconds of its hop.
    """

    bandwidth: float
    fraction: float = 0.8
    latency: float = 0.0
    message: float = 0.0
    small: float = 1.0
    small_latency: float = 0.0


@dataclass(frozen=True)
class Software:
    """How a training system uses the hardware.

    `attention`: "unfused" or "flash"; `causal`: fraction of a causal mask's products that flash attention
    computes; `flash_fraction`: the part of the matrix peak that flash attention reaches. `tp_overlap`,
    `dp_overlap`, `pp_overlap`: fraction of the communication of tensor, data and pipeline ranks that overlaps
    computation, as far as there is any; `tp_overlap_backward`: the same for the exchanges of tensor ranks
    during the wgrad GEMMs. `scatter`: stage boundaries are sent in t pieces. `exchange_seconds`: the time of
    an exchange with the neighboring stages in addition to its message, in which ranks wait for one another.
    `gradient_bytes`: bytes of a parameter's gradient in sums over ranks; `fetches`: collectives that
    ZeRO-3 makes for a layer's parameters. `extra_parameter_bytes`: bytes kept per parameter in addition to
    weight, gradient and optimizer state (counts.py). `master_weights`: 16-bit weights have a float32 copy,
    gradient and moments; else all of these are 16 bits wide too. `copies_fp16_gradients`: in float16, the
    gradient of the float32 copy is held in addition to a 16-bit one (Megatron-LM). `factor`: multiplies all
    of a step's time, the one number that is fitted for a generation of software. `replays`: the part of a
    layer that full recomputation runs again, "all" of it or the part "needed" by its backward, without the
    last product. `context`: how context ranks attend, "ring" (keys and values circulate during attention) or
    as chosen by `passes/solve`, "solved": all-to-alls of heads if t c divides the KV heads, else gathered
    keys and values. `context_bytes`: memory outside of tensors (CUDA, NCCL, libraries), `slack`: fraction of
    tensors that the allocator adds.
    """

    attention: str = "flash"
    causal: float = 0.5
    flash_fraction: float = 0.5
    tp_overlap: float = 0.0
    tp_overlap_backward: float = 0.0
    dp_overlap: float = 0.0
    pp_overlap: float = 0.0
    scatter: bool = True
    exchange_seconds: float = 0.0
    gradient_bytes: int = 4
    fetches: int = 1
    extra_parameter_bytes: float = 0.0
    master_weights: bool = True
    copies_fp16_gradients: bool = True
    factor: float = 1.0
    replays: str = "all"
    context: str = "ring"
    context_bytes: float = 3.5e9
    slack: float = 0.1


@dataclass(frozen=True)
class Cluster:
    """`nics` network cards serve the `gpus_per_node` GPUs of a node, which `fast` joins.

    `network` is one card's.

    `switched`: a GPU reaches all of its fast bandwidth with any number of peers; else each pair has separate
    links, and a group of l of n GPUs uses (l - 1) / (n - 1) of a GPU's bandwidth. `source` cites the source
    of the numbers.
    """

    name: str
    gpus_per_node: int
    gpu: Gpu
    fast: Link
    network: Link
    nics: int = 0
    switched: bool = True
    software: Software = field(default_factory=Software)
    source: str = ""

    def __post_init__(self) -> None:
        if not self.nics:
            # Where the file does not say: a card per GPU, as in a DGX.
            object.__setattr__(self, "nics", self.gpus_per_node)

    def with_software(self, name: str | Software | None) -> Cluster:
        """Return the cluster with another generation of software; None keeps its own."""
        return self if name is None else dataclasses.replace(self, software=find_software(name))


def find_cluster(given: Cluster | str | Path) -> Cluster:
    """Return the Cluster for a `Cluster`, the name of a machine, or the path of a TOML file."""
    if isinstance(given, Cluster):
        return given
    path = Path(given)
    # "dgx-a100" is a name, "my.toml" a path.
    if not path.suffix:
        file = machine_file(str(given))
        if file is None:
            remedy = f"{nearest_machines(str(given))}, or a .toml file"
            raise PlanError(f"cluster={str(given)!r}", "no such cluster", remedy)
        path = file
    if not path.is_file():
        raise PlanError(f"cluster={str(given)!r}", "no such file", "a path, or the name of a cluster")
    try:
        return read_cluster(tomllib.loads(path.read_text()), path.stem)
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"cluster {path.name}", f"is not valid TOML: {error}", "correct the file") from None


def find_software(given: Software | str) -> Software:
    """Return a generation of software by its name in `software.toml`."""
    if isinstance(given, Software):
        return given
    known = tomllib.loads(GENERATIONS.read_text())
    if given not in known:
        raise PlanError(f"software={given!r}", "no such generation", nearest(given, sorted(known)))
    return _record(Software, known[given], given)


def read_cluster(record: Mapping[str, Any], name: str) -> Cluster:
    """Build a Cluster from a record with the layout of a file.

    `software` is a name, or a table of `Software`'s fields with a `base`.
    """
    # [solver] is for `Machine`, which the compiler reads.
    given = {key: value for key, value in record.items() if key != "solver"}
    if "gpu" in given:
        given["gpu"] = gpu_of(given, f"cluster {name}")
    parts: dict[str, Any] = {}
    for key, kind in (("gpu", Gpu), ("fast", Link), ("network", Link)):
        if key not in given:
            raise PlanError(f"cluster {name}", f"has no table [{key}]", SEE)
        parts[key] = _record(kind, given.pop(key), f"{name} [{key}]")
    software = given.pop("software", {})
    if isinstance(software, Mapping):
        base = find_software(software["base"]) if "base" in software else Software()
        changed = {key: value for key, value in software.items() if key != "base"}
        # `replace` would report an unknown field as a TypeError without its location.
        _check_fields(Software, changed, f"{name} [software]")
        parts["software"] = dataclasses.replace(base, **changed)
    elif isinstance(software, str):
        parts["software"] = find_software(software)
    else:
        fact = "is neither a name nor a table"
        raise PlanError(f"cluster {name}: software={software!r}", fact, "a name of software.toml")
    return _record(Cluster, {"name": name, **given, **parts}, name)


def _record(kind: Any, record: Any, site: str) -> Any:
    if not isinstance(record, Mapping):
        raise PlanError(f"cluster {site}", f"{record!r} is not a table", SEE)
    fields = dataclasses.fields(kind)
    _check_fields(kind, record, site)
    # A field without a default or a factory is required.
    needed = [item.name for item in fields if item.default is item.default_factory is dataclasses.MISSING]
    missing = [name for name in needed if name not in record]
    if missing:
        raise PlanError(f"cluster {site}", f"{', '.join(missing)} missing", SEE)
    return kind(**record)


def _check_fields(kind: Any, record: Mapping[str, Any], site: str) -> None:
    """Raise PlanError for a field that is unknown, or has the wrong type or an impossible value."""
    types = {item.name: item.type for item in dataclasses.fields(kind)}
    check_known(f"cluster {site}", record, list(types))
    for name, value in record.items():
        fact, remedy = _wrong(name, str(types[name]), value)
        if fact:
            raise PlanError(f"cluster {site}: {name}={value!r}", fact, remedy)


def _wrong(name: str, kind: str, value: Any) -> tuple[str, str]:
    """Return the error in the value of a field and its legal values; "" if there is none."""
    choices = {"attention": ATTENTIONS, "context": CONTEXTS}.get(name)
    if choices and value not in choices:
        return f"no such {name}", " or ".join(map(repr, choices))
    if kind not in ("float", "int"):
        # Gpu, Link and Software were checked when they were built from their tables.
        expected = {"bool": bool, "str": str}.get(kind, object)
        return ("", "") if isinstance(value, expected) else (f"is not a {kind}", f"a {kind}")
    accepted = int | float if kind == "float" else int
    # In Python a bool is an int, and TOML has inf and nan.
    if isinstance(value, bool) or not isinstance(value, accepted) or not math.isfinite(value):
        wanted = "a number" if kind == "float" else "an integer"
        return f"is not {wanted}", wanted
    if value < 0 or (value == 0 and name not in MAY_BE_ZERO) or (value > 1 and name in SHARES):
        least = "0" if name in MAY_BE_ZERO else "more than 0"
        return "is out of range", f"{least} to 1" if name in SHARES else f"{least} and up"
    return "", ""


@dataclass(frozen=True)
class Compared:
    """Predictions compared with measurements: the range of predicted over measured time, minus 1.

    The numbers are the extremes of the sets in benchmarks/planner_accuracy.py, with the software's factor, and of
    docs/planner.md.
    """

    cluster: str
    software: str
    lowest: float
    highest: float
    source: str
    precisions: tuple[str, ...] = HALF
    is_zero_3: bool = False

    @property
    def apart(self) -> float:
        """The largest relative discrepancy between two predictions."""
        return (1 + self.highest) / (1 + self.lowest) - 1


COMPARED = (
    Compared("dgx-a100", "megatron-2021", -0.042, 0.037, "SC'21, tables 1 and 2"),
    Compared("dgx-a100", "deepspeed-zero3-2021", 0.0, 0.265, "SC'21, ZeRO-3", is_zero_3=True),
    Compared("dgx-a100", "megatron-2022", -0.014, 0.005, "Korthikanti, table 5"),
    Compared("dgx-a100", "megatron-deepspeed-2022", -0.066, -0.027, "MT-NLG 530B"),
    Compared("dgx-h100", "nemo-2024", -0.008, 0.017, "H100"),
    Compared("jean-zay-a100", "megatron-deepspeed-2022", -0.134, 0.092, "BLOOM, time"),
    Compared("jean-zay-a100", "megatron-deepspeed-bf16-2022", -0.134, 0.092, "BLOOM, time"),
    Compared("laptop-cpu", "autoptd-cpu", 1 / 2.8 - 1, 1 / 1.5 - 1, "docs/planner.md", ("fp32",)),
)


def uncertainty(cluster: Cluster, precision: str, is_zero_3: bool = False) -> float:
    """Return the largest relative error between two predictions in comparisons with measurements.

    Infinity if nothing comparable was measured: another machine or software, or 32 bits instead of 16.
    """
    for row in COMPARED:
        is_alike = row.cluster == cluster.name and precision in row.precisions and row.is_zero_3 == is_zero_3
        # All numbers must be the same: a modified cluster of that name was never measured.
        if is_alike and cluster == find_cluster(row.cluster).with_software(row.software):
            return row.apart
    return math.inf
