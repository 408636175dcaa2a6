"""Trainers of other libraries."""

from importlib.util import find_spec

from tests.mutations import planted

TRL = (
    *planted(
        "autoptd/integrations/trl.py",
        "tests/integrations/test_trl.py -k run_is",
        ("counted[:, 0] = IGNORED", "pass"),
        ("self.model.training, before = self._is_training, self.model.training", "before = True"),
        ('int(inputs["attention_mask"].sum())', 'inputs["input_ids"].numel()'),
    ),
    *planted(
        "autoptd/integrations/trl.py",
        "tests/integrations/test_trl.py -k losses_are",
        ("items.clamp(min=1) if isinstance(items, torch.Tensor) else items", "items"),
    ),
    *planted(
        "autoptd/integrations/token_scores.py",
        "tests/integrations/test_trl.py -k losses_are",
        ("logs.exp().detach()", "logs.exp()"),
    ),
)
MUTATIONS = (
    *planted(
        "autoptd/integrations/transformers.py",
        "tests/integrations/test_between_trainings.py",
        ("        self.model.train()\n", ""),
        ("return found[:1].repeat(self._rows)", "return found"),
        ("len({tuple(widths_of(other)) for other in batches}) > 1,", "False,"),
        ("self._follow_edits(begins=True)\n", "pass\n"),
        ("            self._follow_edits()\n            state_dict =", "            state_dict ="),
    ),
    *planted(
        "autoptd/integrations/lightning.py",
        "tests/integrations/test_lightning.py",
        ('        vars(made)["zero_grad"] = lambda *_, **__: None\n', ""),
        ('if number % call["parts"] == 0:', "if True:"),
        ("            self._try_validation()\n", ""),
        ('pm.sizes.check_changes(f"epoch {module.current_epoch}")', "pass"),
        (
            "        loss, module = closure(), self.lightning_module\n",
            "        loss, module = None, self.lightning_module\n",
        ),
    ),
    *planted(
        "autoptd/integrations/lightning.py",
        "tests/integrations/test_lightning_processes.py",
        ("outputs=found_of, everywhere=True)", "outputs=found_of)"),
    ),
    *planted(
        "autoptd/integrations/lightning_optimizer.py",
        "tests/integrations/test_lightning.py",
        ("    vars(made).update(steps)\n", ""),
        ("    given.__class__, given.__dict__ = type(made), vars(made)\n", ""),
    ),
    *planted(
        "autoptd/integrations/lightning_steps.py",
        "tests/integrations/test_lightning.py",
        ('return loss / call["parts"]', "return loss"),
        ('own = {"batch_size": rows} if "batch_size" in how else {}', "own: dict[str, Any] = {}"),
    ),
    *planted(
        "autoptd/passes/samples.py",
        "tests/model/test_eval_rows.py -k branch",
        ("found.append((node.op, str(node.target), *read))", "found.append((node.op, str(node.target)))"),
    ),
    *planted(
        "autoptd/passes/solve/batch_types.py",
        "tests/model/test_eval_rows.py -k integer",
        ("all(x in partial or _divides(tensor(x)) for x in group)", "True"),
    ),
    *planted(
        "autoptd/trace/loss.py",
        "tests/model/test_outputs.py -k leave_the_loss_alone",
        ("loss = loss.clone()", "pass"),
    ),
    *planted(
        "autoptd/runtime/step/outputs.py",
        "tests/model/test_outputs.py -k copies",
        ("kept[0].clone() if kept", "kept[0] if kept"),
    ),
    *planted(
        "autoptd/model/outputs.py",
        "tests/model/test_outputs.py -k equal_functions",
        ("    return one is other\n", "    return one == other\n"),
    ),
    *planted(
        "autoptd/integrations/predictions.py",
        "tests/integrations/test_predictions.py",
        ('(*self.ignored, "loss")', "self.ignored"),
        ("found = self.preprocess(found, labels)", "pass"),
    ),
    *planted(
        "autoptd/integrations/transformers.py",
        "tests/integrations/test_processes.py",
        ("outputs=outputs, everywhere=True)", "outputs=outputs)"),
    ),
    *planted(
        "autoptd/runtime/step/outputs.py",
        "tests/integrations/test_processes.py",
        ("first = sum(sizes[: world.replica])", "first = 0"),
    ),
    *planted(
        "autoptd/runtime/step/outputs.py",
        "tests/processes/test_lengths.py",
        ("sizes = [rows * spec.shape[0] // program.rows for rows in program.row_counts]", "pass"),
    ),
    *planted(
        "autoptd/integrations/accumulated.py",
        "tests/integrations/test_accumulated.py",
        ('torch.full_like(copies, IGNORED) if name == "labels" else copies', "copies"),
    ),
    *planted(
        "autoptd/integrations/training_arguments.py",
        "tests/integrations/test_training_arguments.py",
        ("if name in OBEYED or name in IRRELEVANT or name in obeyed:", "if name not in REFUSED:"),
        ('"debug": (', '"debugged": ('),
        (" or name in obeyed:", ":"),
        ("found = [*values]", "found = []"),
    ),
    *planted(
        "autoptd/integrations/transformers.py",
        "tests/integrations/test_trainer.py -k another_loss",
        ("if not any(kind) or kind in self._proven:", "if True:"),
    ),
    *planted(
        "autoptd/integrations/transformers.py",
        "tests/integrations/test_trainer.py -k callbacks_see",
        ("        self.callback_handler.model = self.pm\n", ""),
        ("        self._fetch()\n        self.callback_handler.model = self.model\n", ""),
    ),
    *planted(
        "autoptd/integrations/transformers.py",
        "tests/integrations/test_trainer.py -k resumed_run",
        (
            "state_dict = self.pm.state_dict()",
            "pass",
        ),
    ),
    *planted(
        "autoptd/integrations/transformers.py",
        "tests/integrations/test_processes.py",
        ("        return self.args.world_size\n", "        return 1\n"),
    ),
    *planted(
        "autoptd/runtime/params/optimizer.py",
        "tests/integrations/test_training_arguments.py -k refused_by_transformers",
        ('if name == "_is_accelerate_prepared":', 'if name == "":'),
    ),
    # Without TRL, its tests are skipped.
    *(TRL if find_spec("trl") else ()),
)
