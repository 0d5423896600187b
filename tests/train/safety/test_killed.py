"""A run that is killed at any moment ends with the weights of a run that was not, bit for bit.

`python -m tests.train.safety.killer` does the same for all file operations, or for more moments.
"""

import json

import pytest

from testbed import warm
from tests.shared import walks
from tests.train.run.test_run import RUN, workplace  # noqa: F401

SIZES = """
[[growth]]
at_step = 3
num_hidden_layers = 5
[[growth]]
at_step = 4
hidden_size = 24
moments = "grow"
"""


@pytest.mark.parametrize("workplace", ["bert"], indirect=True)
@pytest.mark.parametrize(
    ("how", "growth"),
    [("random", ""), ("operations", SIZES)],
    ids=["random", "operations_with_growth"],
)
def test_killed_at_any_moment_it_ends_the_same(workplace, how, growth):  # noqa: F811
    text = RUN.replace("tensorboard = true", "tensorboard = false") + growth
    (workplace / "run.toml").write_text(
        text.replace("keep_checkpoints = 9", "keep_checkpoints = 1")
    )
    kills = 6 * walks.times
    arguments = workplace, how, kills, walks.start or 0
    done = warm.run("tests.train.safety.killer", *arguments, limit_s=600 * walks.times)
    assert done.returncode == 0, done.stderr
    rounds = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rounds) == kills
    for moment, _, left, end in rounds:
        assert end == "same", (moment, left, end, done.stderr)
    least = kills if how == "random" else kills // 2
    assert sum(struck for _, struck, *_ in rounds) >= least
