"""Loops as users port them: what has to be said exactly once, and right loops, of which nothing may be said.

A case is the body of `loop(pm, model)`, with `x(step)` a batch and `opt` an optimizer; `says` are words of the warnings, in any order.
"""

# ruff: noqa: E501  (lines of other sources)

from __future__ import annotations

import re
import time
import warnings
from dataclasses import dataclass
from typing import Any

import autoptd
from autoptd.errors import AutoptdError
from autoptd.options import grouped
from tests.hostile.judge import Outcome, is_ours, limited, namespace
from tests.hostile.second.source import write

NO, UP, OLD, WAIT = "no gradients", "add up", "has the weights from before", "wait|no update|gradients"
STILL = "still have those of the last update"
STEP = "loss = pm.step(*x({0}))"


@dataclass(frozen=True)
class Loop:
    name: str
    body: str
    says: tuple[str, ...] = ()
    error: str = ""  # words of an AutoPTD error that is right instead


def n(lines: str, steps: int = 4) -> str:
    return f"for i in range({steps}):\n" + "\n".join("    " + x for x in lines.splitlines())


S = "loss = pm.step(*x(i))\n"
LOOPS = [
    Loop("the loop of the README", n(S + "pm.clip_grad_norm_(1.0)\nopt.step()\nopt.zero_grad()")),
    Loop("zero_grad first", n("opt.zero_grad()\n" + S + "opt.step()")),
    Loop("zero_grad between", n(S + "opt.zero_grad()\n" + S + "opt.step()\nopt.zero_grad()")),
    Loop("zero_grad(set_to_none=False)", n(S + "opt.step()\nopt.zero_grad(set_to_none=False)")),
    Loop("no zero_grad ever", n(S + "opt.step()"), (STILL,)),
    Loop("grads set to None by hand", n(S + "opt.step()\nfor p in pm.parameters():\n    p.grad = None")),
    Loop("two steps, then an update", n(S + S + "opt.step()\nopt.zero_grad()"), (UP,)),
    Loop("accumulation by a counter", n(S + "if i % 2:\n    opt.step()\n    opt.zero_grad()", 8), (UP,)),
    Loop("zero_grad, then two steps", n("opt.zero_grad()\n" + S + S + "opt.step()"), (UP,)),
    Loop(
        "accumulation where grads are None in between",
        n(S + "for p in pm.parameters():\n    p.grad = None\n" + S + "opt.step()\nopt.zero_grad()"),
    ),
    Loop(
        "loss of the model, backward, opt.step",
        n("loss = model(*x(i))\nloss.backward()\nopt.step()\nopt.zero_grad()"),
        (NO,),
    ),
    Loop("loss of the model, no backward", n("model(*x(i))\nopt.step()\nopt.zero_grad()"), (NO,)),
    Loop("only opt.step", n("opt.step()"), (NO,)),
    Loop("opt.step twice", n(S + "opt.step()\nopt.step()\nopt.zero_grad()")),
    Loop("opt.step after zero_grad", n(S + "opt.zero_grad()\nopt.step()"), (NO,)),
    Loop(
        "a warm-up step of the scheduler's kind: opt.step before the loop",
        "opt.step()\n" + n(S + "opt.step()\nopt.zero_grad()"),
        (NO,),
    ),
    Loop("eval steps only", n("pm.eval_step(*x(i))")),
    Loop("eval between", n(S + "opt.step()\nopt.zero_grad()\npm.eval_step(*x(9))")),
    Loop("eval between step and update", n(S + "pm.eval_step(*x(9))\nopt.step()\nopt.zero_grad()")),
    Loop(
        "state_dict of the model after training",
        n(S + "opt.step()\nopt.zero_grad()") + "\nmodel.state_dict()\nmodel.state_dict()",
        (OLD,),
    ),
    Loop(
        "state_dict of a submodule after training",
        n(S + "opt.step()\nopt.zero_grad()") + "\nmodel.blocks.state_dict()",
        (),
    ),
    Loop("state_dict before training", "model.state_dict()\n" + n(S + "opt.step()\nopt.zero_grad()")),
    Loop(
        "state_dict before the first update",
        S.replace("i", "0", 1).replace("x(i)", "x(0)") + "model.state_dict()\nopt.step()\nopt.zero_grad()",
    ),
    Loop("pm.state_dict after training", n(S + "opt.step()\nopt.zero_grad()") + "\npm.state_dict()"),
    Loop(
        "model.load_state_dict(pm.state_dict()), then its state_dict",
        n(S + "opt.step()\nopt.zero_grad()") + "\nmodel.load_state_dict(pm.state_dict())\nmodel.state_dict()",
    ),
    Loop(
        "deepcopy of the model after training",
        n(S + "opt.step()\nopt.zero_grad()") + "\nimport copy\ncopy.deepcopy(model).state_dict()",
        (OLD,),
    ),
    Loop(
        "torch.save of the model's state",
        n(S + "opt.step()\nopt.zero_grad()") + "\nimport io\ntorch.save(model.state_dict(), io.BytesIO())",
        (OLD,),
    ),
    Loop("pickle of the model", n(S + "opt.step()\nopt.zero_grad()") + "\nimport copy\ncopy.copy(model)"),
    Loop(
        "save and load", n(S + "opt.step()\nopt.zero_grad()\npm.save(folder, opt)\npm.load(folder, opt)", 2)
    ),
    Loop(
        "save between accumulated steps",
        n(S + "pm.save(folder, opt)\n" + "opt.step()\nopt.zero_grad()", 2),
        (WAIT,),
    ),
    Loop(
        "load over gradients",
        S.replace("x(i)", "x(0)")
        + "opt.step()\nopt.zero_grad()\npm.save(folder, opt)\n"
        + S.replace("x(i)", "x(1)")
        + "pm.load(folder, opt)",
        (WAIT,),
    ),
    Loop(
        "load, then zero_grad",
        S.replace("x(i)", "x(0)")
        + "opt.step()\nopt.zero_grad()\npm.save(folder, opt)\npm.load(folder, opt)\nopt.zero_grad()\n"
        + S.replace("x(i)", "x(1)")
        + "opt.step()",
    ),
    Loop(
        "save after opt.step, before zero_grad", n(S + "opt.step()\npm.save(folder, opt)\nopt.zero_grad()", 2)
    ),
    Loop(
        "zero_grad at the loop's head, save at its end",
        n("opt.zero_grad()\n" + S + "opt.step()\npm.save(folder, opt)", 2),
    ),
    Loop(
        "two optimizers, a step each",
        "a = pm.optimizer(torch.optim.SGD, ['blocks.*'], lr=1e-2)\nb = pm.optimizer(torch.optim.SGD, ['head.*', 'embed.*'], lr=1e-2)\n"
        + n(S + "a.step()\nb.step()\na.zero_grad()\nb.zero_grad()"),
    ),
    Loop(
        "two optimizers in turns",
        "a = pm.optimizer(torch.optim.SGD, ['blocks.*'], lr=1e-2)\nb = pm.optimizer(torch.optim.SGD, ['head.*', 'embed.*'], lr=1e-2)\n"
        + n(S + "(a if i % 2 else b).step()\na.zero_grad()\nb.zero_grad()"),
    ),
    Loop(
        "one of two optimizers has no gradients yet: frozen group",
        "a = pm.optimizer(torch.optim.SGD, ['blocks.*'], lr=1e-2)\n" + n(S + "a.step()\na.zero_grad()"),
        (),
    ),
    Loop(
        "a scheduler",
        "rates = torch.optim.lr_scheduler.StepLR(opt, 1)\n"
        + n(S + "opt.step()\nrates.step()\nopt.zero_grad()"),
    ),
    Loop("skipped updates of the loop (bad loss)", n("opt.zero_grad()\n" + S + "if i != 2:\n    opt.step()")),
    Loop(
        "gradients kept for the norm only",
        n(S + "pm.clip_grad_norm_(1e9)\npm.gradients()\nopt.step()\nopt.zero_grad()"),
    ),
    Loop("measured_step", n("pm.measured_step(*x(i))\nopt.step()\nopt.zero_grad()")),
    Loop("record", "with pm.record():\n    loss = pm.step(*x(0))\nopt.step()\nopt.zero_grad()"),
    Loop(
        "memory, show, fingerprint",
        n(S + "opt.step()\nopt.zero_grad()", 1) + "\npm.memory()\nrepr(pm)\npm.fingerprint()",
    ),
    Loop("check_ranks", n(S + "opt.step()\nopt.zero_grad()", 1) + "\npm.check_ranks(*x(3))"),
    Loop(
        "model in eval for a look, then training",
        n(S + "opt.step()\nopt.zero_grad()") + "\nmodel.eval()\nmodel(*x(0))\nmodel.train()",
        (OLD,),
    ),
    Loop("optimizer state before any step", "opt.state_dict()\n" + n(S + "opt.step()\nopt.zero_grad()")),
    Loop(
        "a second pm of the trained model",
        n(S + "opt.step()\nopt.zero_grad()")
        + "\nother = autoptd.parallelize(model, backend='local', example_inputs=x(0))\nother.close()",
    ),
    Loop(
        "verify of the model after training",
        n(S + "opt.step()\nopt.zero_grad()") + "\nautoptd.compile(model, x(0), t=1) if False else None",
    ),
    *(
        Loop(f"pm.{call}", f"pm.{call}", (), word)
        for call, word in [
            ("eval()", "pm"),
            ("train()", "pm"),
            ("zero_grad()", "zero_grad"),
            ("to('cpu')", "device"),
            ("cuda()", "device"),
            ("generate(x(0)[0])", ""),
            ("backward(1)", "step"),
            ("half()", "precision"),
            ("requires_grad_(False)", ""),
            ("named_buffers()", ""),
            ("buffers()", ""),
            ("modules()", ""),
            ("forward(*x(0))", "step"),
            ("cpu()", ""),
            ("compile()", ""),
            ("apply(print)", ""),
            ("no_sync()", ""),
            ("module", ""),
            ("state", ""),
            ("parallel_model_typo", ""),
        ]
    ),
    Loop("pm(...)", "pm(*x(0))", (), "pm.step"),
    Loop("loss.backward()", "pm.step(*x(0)).backward()", (), ""),
    Loop("deepcopy(pm)", "import copy\ncopy.deepcopy(pm)", (), "state_dict|save"),
    Loop("pickle(pm)", "import pickle\npickle.dumps(pm)", (), "state_dict|save"),
    Loop("AveragedModel(pm)", "torch.optim.swa_utils.AveragedModel(pm)", (), "average|state_dict|save"),
    Loop("torch.save(pm)", "import io\ntorch.save(pm, io.BytesIO())", (), "save"),
    Loop("torch.compile(pm)", "torch.compile(pm)(*x(0))", (), "pm.step"),
    Loop("add_param_group", "opt.add_param_group({'params': []})", (), "group"),
    Loop("opt.step with a closure", "opt.step(lambda: pm.step(*x(0)))"),
    Loop(
        "GradScaler around it",
        "s = torch.amp.GradScaler('cpu')\nloss = pm.step(*x(0))\ns.scale(loss).backward()",
        (),
        "",
    ),
]
MAYBE = {"opt.step with a closure", "loss.backward()", "GradScaler around it"}


def judge_loop(loop: Loop, mesh: dict[str, Any], folder: str) -> Outcome:
    start = time.monotonic()

    def outcome(kind: str, detail: str = "") -> Outcome:
        return Outcome(kind, detail, time.monotonic() - start)

    case = namespace(write([], (8, 4, 8, 12, 2)))
    model, torch = case["make"](), case["torch"]
    x = lambda step: case["batch"](step, 8)  # noqa: E731
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        pm = None
        try:
            with limited():
                pm = autoptd.parallelize(
                    model, **grouped({**mesh, "timeout": 60}), backend="local", example_inputs=x(0)
                )
                opt = pm.optimizer(torch.optim.AdamW, lr=1e-2)
                exec(
                    loop.body,
                    {
                        "pm": pm,
                        "model": model,
                        "opt": opt,
                        "x": x,
                        "torch": torch,
                        "folder": folder,
                        "autoptd": autoptd,
                    },
                )
        except AutoptdError as error:
            if loop.error and re.search(loop.error, str(error)):
                return outcome("refused", str(error))
            kind = (
                "refused" if loop.name in MAYBE or (not loop.says and loop.body.startswith("pm.")) else "raw"
            )
            return outcome(kind, f"{type(error).__name__}: {error}")
        except AttributeError as error:
            is_plain = loop.name.startswith("pm.") and not loop.error
            return outcome("refused" if is_plain else "raw", f"AttributeError: {error}")
        except Exception as error:
            return outcome("refused" if loop.name in MAYBE else "raw", f"{type(error).__name__}: {error}")
        finally:
            if pm is not None:
                pm.close()
    texts = [str(one.message) for one in said if is_ours(one)]
    lines = [one for one in said if is_ours(one) and "/autoptd/" in str(one.filename)]
    if loop.error:
        return outcome("wrong", f"no error; said {texts}")
    for words in loop.says:
        found = [text for text in texts if re.search(words, text)]
        if len(found) != 1:
            return outcome("wrong", f"said {len(found)} times, not once: {words}; all: {texts}")
        texts.remove(found[0])
    if texts:
        return outcome("wrong", f"a false alarm: {texts}")
    if lines:
        return outcome("wrong", f"a warning with a line of AutoPTD's: {lines[0].filename}:{lines[0].lineno}")
    return outcome("equal")
