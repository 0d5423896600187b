"""A run of three sizes that is killed again and again ends with the weights of one that was not.

Each start is `main(FOLDER)` in processes of their own. FOLDER/kill.json says where it is killed:
[step, "step"] is inside that step, [step, "growth"] inside the growth before it, null nowhere.
FOLDER/killed says that it came there.
"""

import json
import os
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file

from growkern import TwoStageTrainer, run as train
from testbed.forked_ranks import on_ranks
from tests.train.growth.ranks import FILE
from tests.train.run.test_run import workplace  # noqa: F401

RUN = f"""{FILE}
warmup_steps = 2
save_every = 1
[[growth]]
at_step = 2
num_hidden_layers = 4
rewarm_steps = 2
[[growth]]
at_step = 4
hidden_size = 24
symmetry = "noise"
moments = "old_slices"
"""
# before, at and after each of the two growths
PLACES = {
    1: [(1, "step"), (2, "growth"), (3, "step"), (4, "growth"), (5, "step")],
    # `test_elastic.py` kills one of two in other places
    2: [(2, "growth"), (5, "step")],
}


def kill_in(name, step, note):
    """Wrap a method of the trainer so that the last process is killed after it."""
    method = getattr(TwoStageTrainer, name)

    def wrapped(self, *args, **options):
        result = method(self, *args, **options)
        if self.state.global_step == step and self.args.process_index == self.args.world_size - 1:
            note.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(TwoStageTrainer, name, wrapped)


def main(folder):
    torch.use_deterministic_algorithms(True, warn_only=True)
    place = json.loads((folder / "kill.json").read_text())
    if place is not None:
        step, where = place
        name = {"step": "training_step", "growth": "_forget_model"}[where]
        kill_in(name, step, folder / "killed")
    train(folder / "run.toml", progress=False)


@pytest.mark.parametrize("workplace", ["bert"], indirect=True)
@pytest.mark.parametrize("processes", PLACES)
def test_killed_again_and_again_it_ends_the_same(workplace, processes):  # noqa: F811
    (workplace / "run.toml").write_text(RUN)
    straight = workplace / "straight"
    shutil.copytree(workplace, straight)
    for folder, places in ((straight, [None]), (workplace, [*PLACES[processes], None])):
        for place in places:
            (folder / "kill.json").write_text(json.dumps(place))
            (folder / "store").unlink(missing_ok=True)
            if place is None:
                on_ranks(processes, __name__, folder)
                continue
            # the other process may be the first to end, for want of its peer
            with pytest.raises(AssertionError, match="a rank ended with"):
                on_ranks(processes, __name__, folder)
            (folder / "killed").unlink()
    ours, theirs = (load_file(x / "out" / "model.safetensors") for x in (workplace, straight))
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert torch.equal(ours[name], weight), name
