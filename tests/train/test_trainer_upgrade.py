"""What ours takes of `transformers.Trainer`: the private methods, and all attributes.

An upgrade that renames one, or gives a method other arguments, fails here by its name. So does one
that takes a name of ours for something else. The nightly job runs this with the oldest and the
newest transformers that pyproject.toml allows.
"""

import ast
import inspect
import re
from pathlib import Path

import pytest
from transformers import Trainer

import growkern.train
from growkern import TwoStageTrainer

# their arguments
OVERRIDDEN = {
    "_clip_grad_norm": "model",
    "_finalize_training": "trial num_train_samples start_time",
    "_get_grad_norm": "model grad_norm",
    "_init_training_state": (
        "max_steps num_update_steps_per_epoch num_train_epochs resume_from_checkpoint trial"
    ),
    "_issue_warnings_after_load": "load_result",
    "_load_best_model": "",
    "_load_from_checkpoint": "resume_from_checkpoint model",
    "_load_optimizer_and_scheduler": "checkpoint",
    "_load_rng_state": "checkpoint",
    "_maybe_log_save_evaluate": (
        "tr_loss grad_norm model trial epoch ignore_keys_for_eval start_time learning_rate"
    ),
    "_move_model_to_device": "model device",
    "_save_checkpoint": "model trial",
    "_save_optimizer_and_scheduler": "output_dir",
    "_save_rng_state": "output_dir",
}
CALLED = {
    "_determine_best_metric": "metrics trial",
    "_evaluate": "trial ignore_keys_for_eval skip_scheduler",
    "_get_collator_with_removed_columns": "data_collator description",
    "_get_num_items_in_batch": "batch_samples device",
    "_get_output_dir": "trial",
    "_prepare_inputs": "inputs",
    "_push_from_checkpoint": "checkpoint_folder",
    "_save": "output_dir state_dict",
}
# private attributes that are no methods
ATTRIBUTES = {"_loss_shifts_labels", "_train_batch_size"}
# of growkern's trainer alone
OWN = {
    *("batches", "growths", "meter", "optimizers", "precision"),
    *("saver", "shards", "steps", "stops", "two_stage", "_begin", "_sums"),
    *("evaluates_first", "evaluates_start", "misses_evaluation", "_make_up_evaluation"),
    *("fit_to", "_replace_model", "_forget_model", "save_final_model", "take_end"),
    *("_make_collaborators", "_train_part"),
    # of Trainer too, which sets it in a search of hyperparameters; that needs a `model_init`, and
    # growkern refuses those
    "objective",
}
# in these `self` is a trainer
METHODS = {"loop/trainer.py"}


def nodes():
    """The syntax of growkern.train: pairs of a file and a node."""
    folder = Path(growkern.train.__file__).parent
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            yield path.relative_to(folder).as_posix(), node


def used():
    """The names of the attributes that growkern reads or sets of a trainer."""
    names = {name for name in vars(TwoStageTrainer) if not name.startswith("__")}
    for file, node in nodes():
        owners = {"trainer", *(("self", "super()") if file in METHODS else ())}
        match node:
            case ast.Attribute(owner, name) if ast.unparse(owner) in owners:
                names.add(name)
            # such as setting(self, "data_collator", ...)
            case ast.Call(args=[owner, ast.Constant(str(name)), *_]) if (
                ast.unparse(owner) in owners
            ):
                names.add(name)
    return names - {"__init__"}


def mentioned():
    """The names of the attributes in the source of the installed Trainer."""
    tree = ast.parse(inspect.getsource(Trainer))
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {x.attr for x in attributes if ast.unparse(x.value) == "self"} | set(dir(Trainer))


@pytest.mark.parametrize("name, arguments", sorted((OVERRIDDEN | CALLED).items()))
def test_transformers_has_the_method(name, arguments):
    _, *found = inspect.signature(getattr(Trainer, name)).parameters
    assert found == arguments.split()


def test_all_private_names_are_listed():
    """Of the trainer itself; a collaborator has private names of its own."""
    names = {node.attr for _, node in nodes() if isinstance(node, ast.Attribute)}
    private = {name for name in names & mentioned() if re.match("_[^_]", name)}
    assert private - OVERRIDDEN.keys() == CALLED.keys() | ATTRIBUTES


def test_transformers_has_the_attributes():
    missing = (used() | ATTRIBUTES) - OWN - mentioned()
    assert not missing, f"{missing}: not in this Trainer, or not in OWN"
    assert used() >= OWN, "names that growkern has no more"
    assert OWN & mentioned() == {"objective"}, "this Trainer has them for itself"
