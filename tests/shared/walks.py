"""Random examples: the same in every run, and more or others of them on demand.

`pytest --walks 50` takes 50 times as many examples, `--seed 7` takes others.
"""

from collections.abc import Callable
from typing import Any

import hypothesis

# set by the options of pytest, before any test module is imported
times = 1
start: int | None = None


def walk(examples: int) -> Callable[[Any], Any]:
    """Decorate a test that takes random examples with ``hypothesis.given``.

    Args:
        examples: how many it takes unless `--walks` asks for more.

    Returns:
        The decorator; it goes above ``given``.
    """
    settings = hypothesis.settings(
        max_examples=examples * times,
        derandomize=start is None,
        database=None,
        deadline=None,
        print_blob=True,
        # these measure time, or forbid fixtures that the tests use on purpose
        suppress_health_check=list(hypothesis.HealthCheck),
    )

    def decorate(test: Any) -> Any:
        test = settings(test)
        return test if start is None else hypothesis.seed(start)(test)

    return decorate
