"""What Triton's kernels become on a GPU that need not be there: registers, spills, instructions.

In: calls that launch kernels, on tensors of the meta device. Out: every kernel as it would be compiled for these arguments, and
what the assembler and the disassembler of the Triton wheel tell of it.

    with launches() as found:
        norms_triton.rms_norm_forward(x, weight, None, 1e-6, 0.0, x.dtype)
    code = compiled(found[0])        # Code(registers=32, spills=0, instructions=210, ...)

Imported where Triton is at hand only, and not its interpreter.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from autoptd.kernels import rows_triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.bool: "i1",
}
DIVISIBLE = [["tt.divisibility", 16]]
LOCAL = re.compile(r"\b(STL|LDL)\b")  # to and from a thread's own memory, where its registers did not do
GLOBAL = re.compile(r"\b(LDG|STG)\S*")


@dataclass(frozen=True)
class Launch:
    """A kernel, the arguments that it is compiled for, and the numbers of its other arguments and of its grid."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    grid: tuple[int, ...]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    @property
    def warps(self) -> int:
        return int(self.options.get("num_warps", 4))


@dataclass(frozen=True)
class Code:
    """Of one thread: its registers, instructions that spill, instructions at all, the widest access to memory in bits."""

    registers: int
    spills: int
    instructions: int
    widest: int
    shared: int
    sass: str


@contextmanager
def launches() -> Iterator[list[Launch]]:
    """Yield a list, in which every launch of a kernel ends up instead of on a device."""
    found: list[Launch] = []

    def take(kernel: Any, grid: Any, *args: Any, **keywords: Any) -> None:
        found.append(_launch(kernel, args, keywords, grid))

    has_values = mock.patch.object(rows_triton, "_has_no_values", lambda _: False)
    with has_values, mock.patch.object(rows_triton, "_launch", take):
        yield found


def _launch(kernel: Any, args: tuple[Any, ...], keywords: dict[str, Any], grid: Any) -> Launch:
    """What Triton compiles for: it tells numbers that are 1, and numbers and addresses that 16 divides, from others."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | keywords
    options = {name: given.pop(name) for name in list(given) if name not in kernel.arg_names}
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for i, (name, parameter) in enumerate(zip(kernel.arg_names, kernel.params, strict=True)):
        value = given[name]
        is_special = not parameter.do_not_specialize
        if parameter.is_constexpr or (is_special and isinstance(value, int) and value == 1):
            signature[name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = f"*{TYPES[value.dtype]}"
            attributes[(i,)] = DIVISIBLE
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if is_special and value % 16 == 0:
                attributes[(i,)] = DIVISIBLE
        else:
            signature[name] = "fp32"
    return Launch(kernel, signature, constants, attributes, options, grid)


def cubin(launch: Launch, architecture: int = 90) -> bytes:
    """Compile for a GPU of this compute capability (90 is an H100's)."""
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    target = GPUTarget("cuda", architecture, 32)
    return triton.compile(source, target=target, options=launch.options).asm["cubin"]  # type: ignore[no-any-return]


def compiled(launch: Launch, architecture: int = 90) -> Code:
    """Compile, and read what came of it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin(launch, architecture))
        file.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
        sass = _tool("nvdisasm", "--print-code", file.name)
    body = [line for line in sass.splitlines() if re.search(r"/\*[0-9a-f]{4,}\*/", line)]
    sizes = [int((re.search(r"\.(64|128)\b", m.group()) or [0, 32])[1]) for m in GLOBAL.finditer(sass)]
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED):(\d+)", usage)}
    return Code(
        numbers["REG"],
        sum(bool(LOCAL.search(line)) for line in body),
        len(body),
        max(sizes, default=0),
        numbers.get("SHARED", 0),
        "\n".join(body),
    )


def has_tools() -> bool:
    """Whether the wheel has the assembler and what reads its output."""
    return all((TOOLS / name).is_file() for name in ("ptxas", "cuobjdump", "nvdisasm"))


def _tool(name: str, *args: str) -> str:
    return subprocess.run([str(TOOLS / name), *args], check=True, capture_output=True, text=True).stdout
