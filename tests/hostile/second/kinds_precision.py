"""16 bits: the reference is the same model cast by plain torch, with float32 masters, its non-persistent buffers left as they are.

On one rank with one microbatch the numbers are those of plain torch but for the order of sums; on a mesh they must be nearer to them
than the same model with these buffers rounded, or within what bf16 rounds.
"""

# ruff: noqa: E501  (lines of other sources)

from __future__ import annotations

import time
import warnings
from typing import Any

import torch

import autoptd
from autoptd.errors import PlanError, TraceError
from tests.hostile.judge import Outcome, limited, namespace
from tests.hostile.second.source import Part

ROPE = "self.register_buffer('{name}', 1.0 / 10000.0 ** (torch.arange(0, W // 4, 2).float() / (W // 4)), persistent={keep})"
TURN = """\
def turn(x, angles):
    cos, sin = (torch.cat([a, a], -1).to(x.dtype) for a in (angles.cos(), angles.sin()))
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class Rope(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(W, 3 * W), nn.Linear(W, W)
        {init}

    def forward(self, h, ids):
        q, k, v = (x.unflatten(-1, (4, W // 4)).transpose(1, 2) for x in self.qkv(h).chunk(3, -1))
        at = torch.arange(ids.shape[1]) + 8000
        {angles}
        q, k = turn(q * 4, angles), turn(k * 4, angles * 1.0)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
"""


def rope(name: str, init: str, angles: str, casts: str = "") -> Part:
    return Part(
        name,
        top=TURN.format(init=init, angles=angles),
        init="self.rope = Rope()",
        end="h = h + self.rope(h, ids)",
        more=f"CASTS = {casts.split()!r}",
    )


PRECISION = [
    rope(
        "inv_freq, not persistent",
        ROPE.format(name="inv", keep=False),
        "angles = at[:, None].float() * self.inv.float()",
    ),
    rope(
        "inv_freq, einsum under float32",
        ROPE.format(name="inv", keep=False),
        "angles = torch.einsum('i,j->ij', at.float(), self.inv)",
    ),
    rope(
        "inv_freq, persistent",
        ROPE.format(name="inv", keep=True),
        "angles = at[:, None].float() * self.inv.float()",
    ),
    rope(
        "angles as a table, not persistent",
        "self.register_buffer('table', torch.outer(torch.arange(9000.0), 0.01 ** torch.arange(0, W // 8)), persistent=False)",
        "angles = self.table[at]",
    ),
    rope(
        "cos and sin multiply in float32: h becomes float32",
        "self.register_buffer('gain', torch.linspace(0.9, 1.1, W), persistent=False)\n        "
        + ROPE.format(name="inv", keep=False),
        "angles = at[:, None].float() * self.inv.float() * self.gain.mean()",
    ),
    Part(
        "alibi, not persistent, cast by the model",
        init="self.register_buffer('slopes', 2.0 ** -torch.arange(1, W + 1).float() * 1e-3 + 1.0, persistent=False)",
        end="h = h * (1000 * (self.slopes - 1)).to(h.dtype)",
    ),
    Part(
        "a scale that torch promotes",
        init="self.register_buffer('scale_', torch.linspace(0.1, 0.2, W), persistent=False)",
        end="h = (h * self.scale_).to(self.head.weight.dtype)",
    ),
    Part(
        "a matrix that must be cast",
        init="self.register_buffer('proj', torch.randn(W, W) / 4, persistent=False)",
        end="h = h + F.linear(h, self.proj)",
        more="CASTS = ['proj']",
    ),
    Part(
        "a matrix that must be cast, and one that stays",
        init="self.register_buffer('proj', torch.randn(W, W) / 4, persistent=False)\nself.register_buffer('tab', torch.arange(W).float() * 300.3, persistent=False)",
        end="h = h + F.linear(h, self.proj) + self.tab.sin().to(h.dtype)",
        more="CASTS = ['proj']",
    ),
    Part(
        "persistent scale",
        init="self.register_buffer('ps', torch.linspace(0.1, 0.2, W))",
        end="h = h * self.ps",
    ),
    Part(
        "an integer and a bool table",
        init="self.register_buffer('it', torch.arange(W), persistent=False)\nself.register_buffer('bt', torch.arange(W) % 2 == 0)",
        end="h = h * (self.it.to(h.dtype) / W + 1) * torch.where(self.bt, 1.0, 0.5).to(h.dtype)",
    ),
    Part("sinusoids made in forward", end="h = h + torch.sin(torch.arange(W).float() * 8191.3).to(h.dtype)"),
    Part(
        "positions in float32 of arange",
        end="pos = torch.arange(L).float() + 8000.5\nh = h * pos[:, None].sin().to(h.dtype)",
    ),
    Part(
        "a norm in float32",
        end="dt = h.dtype\nh = h.float()\nh = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dt)",
    ),
    Part(
        "float64 table, not persistent",
        init="self.register_buffer('t64', torch.arange(W).double() * 1e3 + 0.123, persistent=False)",
        end="h = h * self.t64.sin().to(h.dtype)",
    ),
    Part(
        "a shared table in two modules",
        init="self.a, self.b = nn.Module(), nn.Module()\nt = torch.arange(W).float() * 1001.7\nself.a.register_buffer('t', t, persistent=False)\nself.b.register_buffer('t', t, persistent=False)",
        end="h = h + (self.a.t.sin() + self.b.t.cos()).to(h.dtype)",
    ),
    Part(
        "a buffer updated in float32",
        init="self.register_buffer('c32', torch.zeros(()), persistent=False)",
        end="self.c32 += 0.001\nh = h * (1 + self.c32).to(h.dtype)",
    ),
]


def reference(
    source: str, dtype: torch.dtype, steps: int, *, rounded: bool
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Plain torch with float32 masters."""
    case = namespace_float32(source)
    model = case["make"]()
    masters = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    kept = {}
    for module in model.modules():
        for name, x in module._buffers.items():
            if (
                name in module._non_persistent_buffers_set
                and not rounded
                and name not in case.get("CASTS", ())
            ):
                kept[module, name] = x
    model.to(dtype)
    for (module, name), x in kept.items():
        module._buffers[name] = x
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-2, eps=1e-3)
    losses = []
    for step in range(steps):
        loss = model(*case["batch"](step, case["B"]))
        loss.backward()
        losses.append(float(loss.detach()))
        for n, p in model.named_parameters():
            masters[n].grad = p.grad.float()
            p.grad = None
        optimizer.step()
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.copy_(masters[n])
    return losses, {n: x.detach() for n, x in masters.items()}


def namespace_float32(source: str) -> dict[str, Any]:
    case = namespace(source.replace("logits.flatten(0, 1)", "logits.flatten(0, 1).float()"))
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(1)
    return case


def judge_precision(source: str, mesh: dict[str, Any], steps: int = 3) -> Outcome:
    start = time.monotonic()

    def outcome(kind: str, detail: str = "") -> Outcome:
        torch.set_default_dtype(torch.float64)
        return Outcome(kind, detail, time.monotonic() - start)

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[mesh["precision"]]
    try:
        wanted, masters = reference(source, dtype, steps, rounded=False)
        rounded, _ = reference(source, dtype, steps, rounded=True)
    except Exception as error:
        return outcome("void", f"{type(error).__name__}: {error}")
    case = namespace_float32(source)
    pm = None
    try:
        with limited(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pm = autoptd.parallelize(
                case["make"](),
                **mesh,
                backend="local",
                timeout=60,
                example_inputs=case["batch"](0, case["B"]),
            )
            opt = pm.optimizer(torch.optim.AdamW, lr=1e-2, eps=1e-3)
            losses = []
            for step in range(steps):
                losses.append(float(pm.step(*case["batch"](step, case["B"]))))
                opt.step()
                opt.zero_grad()
            state = pm.state_dict()
    except (PlanError, TraceError) as error:
        return outcome("refused", str(error))
    except Exception as error:
        return outcome("raw", f"{type(error).__name__}: {error}")
    finally:
        if pm is not None:
            pm.close()
    gap = abs(losses[0] - wanted[0]) / abs(wanted[0])
    other = abs(rounded[0] - wanted[0]) / abs(wanted[0])
    limit = 2e-3 if dtype is torch.bfloat16 else 5e-4
    if gap > max(limit, 0.2 * other) or (other > 4 * limit and gap > other / 2):
        return outcome(
            "wrong", f"the first loss {losses[0]:.6f}, kept {wanted[0]:.6f}, rounded {rounded[0]:.6f}"
        )
    if any(abs(a - b) > 0.03 * abs(b) for a, b in zip(losses, wanted, strict=True)):
        return outcome("wrong", f"losses {losses} for {wanted}")
    for name, x in masters.items():
        if state[name].dtype != torch.float32 or float((state[name] - x).abs().max()) > 0.05:
            return outcome(
                "wrong",
                f"master {name}: {state[name].dtype}, off by {float((state[name] - x).abs().max()):.1e}",
            )
    return outcome("equal", f"gap {gap:.1e}, rounding {other:.1e}")
