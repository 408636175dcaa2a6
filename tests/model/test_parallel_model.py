"""The user's object on a program written by hand: the training loop, names, state, groups, and what it refuses."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoptd.compiler.compiler import Compiler
from autoptd.errors import PlanError, RuntimeFault
from autoptd.model.parallel_model import ParallelModel
from autoptd.options import Options, make_options
from autoptd.program.program import Program
from autoptd.runtime.step.launch import is_launched
from autoptd.subject.call import Call
from autoptd.subject.subject import Subject
from tests.forks import CONTEXT
from tests.ports import free_port
from tests.runtime.tied_model import Case, TiedModel, make_batch, make_model, make_program
from tests.waits import LONG

SMALL, FULL = Case(), Case(t=2, p=2, d=2, v=2, m=2, schedule="interleaved")


def options_of(case: Case, **keywords: Any) -> Options:
    keywords = {"backend": "local", "timeout": 20.0, **keywords}
    return make_options(t=case.t, p=case.p, d=case.d, v=case.v, schedule=case.schedule, **keywords)


@contextmanager
def parallel(case: Case, model: TiedModel | None = None, **keywords: Any) -> Iterator[ParallelModel]:
    model = model or make_model(case.layers)
    pm = ParallelModel(make_program(case, model), options_of(case, **keywords), model.state_dict())
    try:
        yield pm
    finally:
        pm.close()


def decayed(named: Any) -> list[dict[str, Any]]:
    """The usual grouping: weight decay for matrices only."""
    named = list(named)
    return [
        {"params": [x for _, x in named if x.dim() >= 2], "weight_decay": 0.3},
        {"params": [x for _, x in named if x.dim() < 2], "weight_decay": 0.0},
    ]


def train(model: Any, step: Any, opt: torch.optim.Optimizer, steps: int = 3, seed: int = 1) -> list[float]:
    """The loop of DESIGN.md 4; `model` has clip_grad_norm_ or parameters."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: 1 / (1 + k))
    losses = []
    for k in range(steps):
        losses.append(step(*make_batch(seed=seed + k)).item())
        if isinstance(model, nn.Module):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        else:
            model.clip_grad_norm_(0.1)
        opt.step()
        scheduler.step()
        opt.zero_grad()
    return losses


def plain_step(model: nn.Module) -> Any:
    def step(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = model(ids, targets)
        loss.backward()
        return loss.detach()

    return step


@pytest.mark.parametrize("case", [SMALL, Case(t=2), FULL], ids=str)
def test_training_loop_equals_the_models(case: Case) -> None:
    model = make_model()
    with parallel(case) as pm:
        ours = pm.optimizer(torch.optim.AdamW, decayed(pm.named_parameters()), lr=1e-2)
        assert isinstance(ours, torch.optim.AdamW)
        theirs = torch.optim.AdamW(decayed(model.named_parameters()), lr=1e-2)
        losses = train(pm, pm.step, ours)
        expected = train(model, plain_step(model), theirs)
        assert losses == pytest.approx(expected, rel=1e-12, abs=0)
        assert losses[0] != losses[-1]
        state = pm.state_dict()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


def test_the_users_model_is_not_touched() -> None:
    model = make_model()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with parallel(SMALL, model) as pm:
        train(pm, pm.step, pm.optimizer(torch.optim.SGD, lr=1.0))
        state = pm.state_dict()
        pm.load_state_dict({name: x + 1 for name, x in state.items()})
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_state_dict_is_the_models() -> None:
    model = make_model()
    with parallel(FULL, model) as pm:
        state = pm.state_dict()
        assert list(state) == list(model.state_dict())
        assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
        make_model(seed=5).load_state_dict(state)
        assert all(x.device.type == "cpu" for x in state.values())


def test_save_load_next_loss_identical_also_on_another_mesh(tmp_path: Path) -> None:
    with parallel(FULL) as pm:
        opt = pm.optimizer(torch.optim.AdamW, decayed(pm.named_parameters()), lr=1e-2)
        train(pm, pm.step, opt)
        torch.save({"model": pm.state_dict(), "optimizer": opt.state_dict()}, tmp_path / "saved.pt")
        following = train(pm, pm.step, opt, steps=2, seed=7)
    for case, exact in ((FULL, True), (Case(t=2, m=4), False)):
        saved = torch.load(tmp_path / "saved.pt")
        with parallel(case, make_model(seed=9)) as pm:
            opt = pm.optimizer(torch.optim.AdamW, decayed(pm.named_parameters()), lr=1e-2)
            result = pm.load_state_dict(saved["model"])
            assert result == ([], [])
            pm.load_optimizer_state_dict(opt, saved["optimizer"])
            losses = train(pm, pm.step, opt, steps=2, seed=7)
            assert losses == (following if exact else pytest.approx(following, rel=1e-12, abs=0))
    for state in saved["optimizer"]["state"].values():
        assert state["step"] == 3  # what was loaded is not stepped on


def test_optimizer_state_has_full_tensors_by_name() -> None:
    model = make_model()
    theirs = torch.optim.Adam(model.parameters(), lr=1e-2)
    train(model, plain_step(model), theirs)
    with parallel(FULL) as pm:
        opt = pm.optimizer(torch.optim.Adam, lr=1e-2)
        assert opt.state_dict()["state"] == {}
        train(pm, pm.step, opt)
        saved = pm.optimizer_state_dict(opt)
    assert saved["param_groups"][0]["params"] == [spec.name for spec in make_program(FULL, model).params]
    assert "head.weight" not in saved["state"] and "offset" not in saved["state"]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            for key in ("exp_avg", "exp_avg_sq", "step"):
                torch.testing.assert_close(
                    saved["state"][name][key], theirs.state[parameter][key], rtol=1e-8, atol=1e-12
                )


def test_load_state_dict_lists_what_does_not_fit() -> None:
    with parallel(SMALL) as pm:
        state = pm.state_dict()
        with pytest.raises(PlanError, match=r"missing \['head.weight'\], unexpected \['extra'\]"):
            pm.load_state_dict(
                {"extra": torch.ones(1)} | {k: x for k, x in state.items() if k != "head.weight"}
            )
        with pytest.raises(PlanError, match=r"offset has shape \(2,\), not \(6,\)"):
            pm.load_state_dict({"offset": torch.ones(2)}, strict=False)
        changed = {"offset": torch.full((6,), 0.25).double(), "table": torch.zeros(5, 6).double()}
        result = pm.load_state_dict(changed, strict=False)
        assert "wte.weight" in result.missing_keys
        after = pm.state_dict()
        assert torch.equal(after["offset"], changed["offset"]) and torch.equal(
            after["table"], changed["table"]
        )
        model = make_model()
        model.load_state_dict(after)
        assert pm.eval_step(*make_batch()).item() == pytest.approx(model(*make_batch()).item(), rel=1e-13)


def test_gradients_and_parameters_by_name() -> None:
    with parallel(FULL) as pm:
        assert pm.gradients() == {}
        pm.step(*make_batch())
        assert set(pm.gradients()) == {name for name in pm.state_dict() if name not in ("offset", "table")}
        named = dict(pm.named_parameters())  # all ranks' parts, one rank after the other
        held = [x for rank in range(8) for x in pm.rank_parameters(rank).values()]
        assert [id(x) for x in pm.parameters()] == [id(x) for x in held] and len(held) > len(named)
        assert next(iter(named)) == "wte.weight" and "head.weight" not in named
        assert set(named) == {spec.name for spec in pm.program.params}
        assert named["wte.weight"].shape == (6, 6) and named["layers.0.gate_up.weight"].shape == (8, 6)
        assert all(isinstance(x, nn.Parameter) for x in pm.parameters())
        assert set(pm.rank_parameters(7)) == {"wte.weight"} | {
            name for name in named if name[:8] in ("layers.1", "layers.3")
        }
        assert pm.rank_parameters(0)["wte.weight"] is next(pm.parameters())
        with pytest.raises(PlanError, match="rank 8"):
            pm.rank_parameters(8)


def test_eval_step_gives_the_loss_alone() -> None:
    with parallel(FULL) as pm:
        loss = pm.eval_step(*make_batch())
        assert loss.item() == pytest.approx(make_model()(*make_batch()).item(), rel=1e-13)
        assert pm.gradients() == {}


def test_eval_step_runs_the_program_compiled_in_eval_mode() -> None:
    model, asked = make_model(), []
    batch = make_batch(rows=12)

    class Evaluations(Compiler):
        def for_evaluation(
            self, call: Call, first: Program, counts: tuple[int, ...] = (), outputs: Any = None
        ) -> Program:
            asked.append((call[0][0].shape, first is pm.program))
            # Another batch size shows which one runs.
            return make_program(dataclasses.replace(FULL, rows=12), model)

    compiler = Evaluations(Subject.of(model), options_of(FULL))
    pm = ParallelModel(make_program(FULL, model), compiler.options, model.state_dict(), compiler=compiler)
    try:
        for _ in range(2):
            assert pm.eval_step(*batch).item() == pytest.approx(model(*batch).item(), rel=1e-13)
        assert asked == [((12, 5), True)]
        pm.step(*make_batch())
    finally:
        pm.close()


# Optimizer groups


def test_groups_by_name_glob_and_tensor_mean_all_copies() -> None:
    with parallel(FULL) as pm:
        named = dict(pm.named_parameters())
        opt = pm.optimizer(
            torch.optim.SGD,
            [
                {"params": ["layers.*.bias", "head.weight"], "lr": 0.5},
                {"params": [("layers.0.scale", named["layers.0.scale"]), named["layers.1.scale"]]},
            ],
            lr=0.1,
        )
        names = [group["params"] for group in opt.state_dict()["param_groups"]]
        assert names[0] == ["wte.weight", *(f"layers.{i}.down.bias" for i in range(4))]
        assert names[1] == ["layers.0.scale", "layers.1.scale"]
        assert [group["lr"] for group in opt.param_groups] == [0.5, 0.1]
        assert len(opt.param_groups[0]["params"]) == 8 + 4 * 4 and len(opt.param_groups[1]["params"]) == 2 * 4
        before = pm.state_dict()
        pm.step(*make_batch())
        gradients = pm.gradients()
        opt.step()
        after = pm.state_dict()
        torch.testing.assert_close(
            after["head.weight"], before["head.weight"] - 0.5 * gradients["head.weight"]
        )
        torch.testing.assert_close(
            after["layers.1.scale"], before["layers.1.scale"] - 0.1 * gradients["layers.1.scale"]
        )
        assert torch.equal(after["layers.2.scale"], before["layers.2.scale"])


def test_optimizer_refusals() -> None:
    class Own(torch.optim.SGD):
        pass

    class Elementwise(torch.optim.SGD):
        elementwise = True

    with parallel(SMALL) as pm:
        for cls in (torch.optim.LBFGS, torch.optim.SparseAdam):
            with pytest.raises(PlanError, match=f"{cls.__name__}.*element"):
                pm.optimizer(cls)
        assert isinstance(pm.optimizer(Elementwise, lr=0.1), Elementwise)
        assert isinstance(pm.optimizer(Own, lr=0.1), Own)
        with pytest.raises(PlanError, match=r"'layer\.\*' does not match any parameter"):
            pm.optimizer(torch.optim.SGD, ["layer.*"], lr=0.1)
        for nothing in ([], [{"params": []}]):
            with pytest.raises(PlanError, match=r"no parameter in any group.*such as 'wte.weight'"):
                pm.optimizer(torch.optim.SGD, nothing, lr=0.1)
        with pytest.raises(PlanError, match=r"wte.weight are in two groups"):
            pm.optimizer(torch.optim.SGD, [{"params": "head.weight"}, {"params": ["wte.*"]}], lr=0.1)
        with pytest.raises(PlanError, match=r"not a local parameter.*named_parameters"):
            pm.optimizer(torch.optim.SGD, make_model().parameters(), lr=0.1)
        opt = pm.optimizer(torch.optim.SGD, pm.parameters(), lr=0.1)
        with pytest.raises(PlanError, match="groups are fixed"):
            opt.add_param_group({"params": []})
        with pytest.raises(PlanError, match="with the saved groups"):
            opt.load_state_dict(pm.optimizer(torch.optim.SGD, ["wte.weight"], lr=0.1).state_dict())


def test_replaced_storage_is_refused() -> None:
    with parallel(SMALL) as pm:
        parameter = next(pm.parameters())
        parameter.data = parameter.data.clone()
        with pytest.raises(PlanError, match=r"wte.weight: its .data was replaced"):
            pm.step(*make_batch())


# What step is given


def test_another_batch_is_refused_with_all_differences() -> None:
    with parallel(FULL) as pm:
        ids, targets = make_batch(6)
        with pytest.raises(PlanError, match=r"ids is \[6, 5\] .*expected \[8, 5\] .*drop_last") as caught:
            pm.step(ids, targets.int())
        assert "targets is [6, 5] int32" in str(caught.value) and caught.value.site == "step"
        with pytest.raises(PlanError, match="nesting"):
            pm.step(ids, targets=targets)
        with pytest.raises(PlanError, match="nesting"):
            pm.eval_step(ids)
        with pytest.raises(PlanError, match="targets is None"):
            pm.step(make_batch()[0], None)
        assert pm.step(*make_batch()).isfinite()


def test_nan_stops_or_passes() -> None:
    model = make_model()
    with torch.no_grad():
        dict(model.named_parameters())["layers.3.down.bias"][0] = float("nan")
    with parallel(Case(p=2), model) as pm:
        with pytest.raises(RuntimeFault, match=r"step 1: the loss is NaN on rank 1 .*nan='ignore'"):
            pm.step(*make_batch())
        assert pm.gradients() == {}
    with parallel(Case(p=2), model, nan="ignore") as pm:
        assert pm.step(*make_batch()).isnan() and pm.gradients()


def test_local_batch_is_the_identity_for_threads() -> None:
    ids, targets = make_batch()
    with parallel(FULL) as pm:
        assert pm.local_batch(ids, targets) == (ids, targets)
        assert pm.local_batch(ids=ids) == {"ids": ids}
        assert pm.local_batch(ids, targets=targets) == ((ids,), {"targets": targets})
        assert pm.coordinate.pp == pm.coordinate.dp == pm.coordinate.tp == 0


def test_show_writes_the_program_and_what_draw_adds(tmp_path: Path) -> None:
    model, drawn = make_model(), []
    pm = ParallelModel(
        make_program(SMALL, model),
        options_of(SMALL),
        model.state_dict(),
        draw=lambda program, folder, spans: drawn.append((folder, spans)),  # type: ignore[arg-type, func-returns-value, return-value]
    )
    pm.show(tmp_path / "out")
    pm.show()
    pm.close()
    assert (tmp_path / "out" / "stage_0.py").exists() and drawn == [(tmp_path / "out", ()), (None, ())]
    loaded = Program.load(tmp_path / "out")
    pm = ParallelModel(loaded, options_of(SMALL), model.state_dict())
    assert pm.step(*make_batch()).item() == pytest.approx(model(*make_batch()).item(), rel=1e-13)
    with pytest.raises(PlanError, match=r"pm\.show: .*draw="):
        pm.show()
    pm.close()


# Before there is a program, and worlds that cannot be


def test_lazy_model_compiles_at_the_first_step() -> None:
    model, calls = make_model(), []

    class Written(Compiler):
        def for_training(self, call: Call, replicas: int, check: bool = True) -> Program:
            calls.append(call[0])
            return make_program(FULL, model)

    pm = ParallelModel.lazy(Written(Subject.of(model), options_of(FULL)))
    for ask in (
        lambda: pm.optimizer(torch.optim.SGD, lr=0.1),
        lambda: list(pm.named_parameters()),
        lambda: list(pm.parameters()),
        pm.state_dict,
        lambda: pm.load_state_dict({}),
        pm.gradients,
        lambda: pm.clip_grad_norm_(1.0),
        lambda: pm.show("nowhere"),
    ):
        with pytest.raises(PlanError, match="example_inputs="):
            ask()
    batch = make_batch()
    assert pm.local_batch(*batch) == batch
    for _ in range(2):
        pm.step(*batch)
    assert calls == [batch] and pm.gradients()
    pm.close()


def test_worlds_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    mesh = options_of(FULL).mesh
    assert not is_launched(options_of(SMALL).mesh, None) and not is_launched(mesh, "local")
    with pytest.raises(PlanError, match=r"8 ranks.*torchrun --nproc-per-node 8.*backend='local'"):
        ParallelModel(None, options_of(FULL, backend=None), {})
    with pytest.raises(PlanError, match="torchrun"):
        is_launched(options_of(SMALL).mesh, "gloo")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(PlanError, match=r"world size 4: t\*p\*d is 8"):
        ParallelModel(None, options_of(FULL, backend=None), {})


def test_meta_weights_are_refused() -> None:
    model = make_model().to("meta")
    with pytest.raises(PlanError, match=r"wte.weight: is on the meta device"):
        ParallelModel(make_program(SMALL, make_model()), options_of(SMALL), model.state_dict())


# Real processes


def _process(rank: int, size: int, port: int, case: Case, out: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    try:
        model = make_model(seed=rank)  # rank 0's weights count
        program = make_program(case, model)
        pm = ParallelModel(program, options_of(case, backend=None, device="cpu"), model.state_dict())
        assert pm.coordinate == case_mesh(case).coordinate(rank)
        opt = pm.optimizer(torch.optim.AdamW, decayed(pm.named_parameters()), lr=1e-2)
        losses = train(pm, lambda *batch: pm.step(*pm.local_batch(*batch)), opt)
        saved = opt.state_dict()
        state = pm.state_dict()
        assert bool(saved) == bool(state) == (rank == 0) and pm.gradients() == {}
        losses.append(pm.eval_step(*pm.local_batch(*make_batch())).item())
        out.put(
            (rank, losses, {name: x.numpy() for name, x in state.items()}, sorted(saved.get("state", {})))
        )
        pm.close()
    except Exception as exc:
        out.put((rank, f"{type(exc).__name__}: {exc}", {}, []))


def case_mesh(case: Case) -> Any:
    return options_of(case).mesh


@pytest.mark.processes
@pytest.mark.parametrize(
    "case", [Case(t=2, p=2), pytest.param(Case(d=2), marks=pytest.mark.thorough)], ids=str
)
def test_processes_over_gloo_train_as_the_model_does(case: Case) -> None:
    port = free_port()
    size = case_mesh(case).size
    out = CONTEXT.Queue()
    processes = [CONTEXT.Process(target=_process, args=(rank, size, port, case, out)) for rank in range(size)]
    for process in processes:
        process.start()
    said = {}
    for _ in processes:
        rank, losses, state, names = out.get(timeout=LONG)
        said[rank] = (losses, state, names)
    for process in processes:
        process.join(30)
    model = make_model()
    expected = train(model, plain_step(model), torch.optim.AdamW(decayed(model.named_parameters()), lr=1e-2))
    expected.append(model(*make_batch()).item())
    for losses, _, _ in said.values():
        assert losses == pytest.approx(expected, rel=1e-12, abs=0), losses
    assert set(said[0][1]) == set(model.state_dict())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(torch.from_numpy(said[0][1][name]), value, rtol=1e-9, atol=1e-12)
    assert len(said[0][2]) == 17  # wte and 4 x 4; the frozen one has no state
