"""Every Triton kernel of the fused operators compiles for an H100, as the operators launch it; no GPU is needed for that.

No file of tests by its name: `test_triton.py` runs it in a process without Triton's interpreter.
"""

from __future__ import annotations

import pytest

from benchmarks.lib.gpu_code import Launch, compiled, cubin, has_tools, launches
from benchmarks.registers import CALLS, SPILLS, Call

SMALLER = [f"{kind} norm of {width}" for kind in ("RMS", "layer") for width in ("768", "4,096", "8,192")]
WORST = [call for call in CALLS if call.name not in (*SMALLER, "softmax of 2,048", "dropout")]  # of each kind


def launched(call: Call) -> list[Launch]:
    with launches() as found:
        call.run()
    return found


@pytest.mark.parametrize("call", WORST, ids=lambda call: call.name)
def test_compiles_without_spilling(call: Call) -> None:
    """Where the assembler's tools are not at hand, that it compiles."""
    found = launched(call)
    assert found
    for launch in found:
        if has_tools():
            code = compiled(launch)
            assert code.spills <= SPILLS.get((call.name, launch.name), 0), (
                f"{launch.name}: {code.spills} spills"
            )
            assert code.widest >= call.widest or launch.name not in call.wide, (
                f"{launch.name}: {code.widest} bits"
            )
        else:
            assert cubin(launch)


def test_every_kernel_is_launched() -> None:
    """Of all modules of kernels: one that is added is listed in benchmarks/registers.py."""
    names = {launch.kernel.fn.__module__ + "." + launch.name for call in WORST for launch in launched(call)}
    assert names == all_kernels()


def all_kernels() -> set[str]:
    """The kernels of autoptd/kernels, less those that others call."""
    import importlib
    import pkgutil

    from triton.runtime.jit import JITFunction

    from autoptd import kernels

    found: dict[str, JITFunction] = {}
    for module in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
        for one in vars(importlib.import_module(module.name)).values():
            if isinstance(one, JITFunction):
                found[f"{one.fn.__module__}.{one.__name__}"] = one
    called = {name for one in found.values() for name in one.fn.__code__.co_names}
    return {path for path in found if path.rpartition(".")[2] not in called}
