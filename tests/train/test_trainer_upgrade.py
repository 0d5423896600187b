"""The private methods of `transformers.Trainer` that ours overrides or calls, as it knows them.

An upgrade that renames one, or gives it other arguments, fails here by its name. The nightly job
runs this with the oldest and the newest transformers that pyproject.toml allows.
"""

import ast
import inspect
from pathlib import Path

import pytest
from transformers import Trainer

import growkern.train.loop
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
    "_maybe_log_save_evaluate": (
        "tr_loss grad_norm model trial epoch ignore_keys_for_eval start_time learning_rate"
    ),
    "_move_model_to_device": "model device",
    "_save_checkpoint": "model trial",
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
    "_save_optimizer_and_scheduler": "output_dir",
    "_save_rng_state": "output_dir",
    "_save_scaler": "output_dir",
}
MOST_OVERRIDDEN, MOST_PRIVATE = 24, 14


@pytest.mark.parametrize("name, arguments", sorted((OVERRIDDEN | CALLED).items()))
def test_transformers_has_the_method(name, arguments):
    _, *found = inspect.signature(getattr(Trainer, name)).parameters
    assert found == arguments.split()


def test_the_trainer_is_one_class_with_few_overridden_methods():
    own = [cls for cls in TwoStageTrainer.__mro__ if cls.__module__.startswith("growkern")]
    assert own == [TwoStageTrainer]
    overridden = {
        name
        for name, value in vars(TwoStageTrainer).items()
        if inspect.isfunction(value) and hasattr(Trainer, name) and name != "__init__"
    }
    private = {name for name in overridden if name.startswith("_")}
    assert private == OVERRIDDEN.keys()
    assert len(overridden) <= MOST_OVERRIDDEN and len(private) <= MOST_PRIVATE
    order = [name for name in vars(Trainer) if name in overridden]
    assert [name for name in vars(TwoStageTrainer) if name in overridden] == order


def test_all_private_methods_that_are_called_are_listed():
    """Of the trainer itself; a collaborator has private methods of its own."""
    called = set()
    for path in Path(growkern.train.loop.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            is_method = isinstance(node, ast.Attribute) and node.attr.startswith("_")
            if is_method and inspect.isfunction(getattr(Trainer, node.attr, None)):
                called.add(node.attr)
    called = {name for name in called if not name.startswith("__")}
    assert called - OVERRIDDEN.keys() == CALLED.keys()
