"""The namespace of the custom ops."""

import re

from growkern.ops.backend.custom_ops import NAMESPACE, namespace_of


def test_changes_with_every_change_of_the_code():
    sources = {"a.py": b"x = 1\n", "b.py": b"y = 2\n"}
    others = [
        {"a.py": b"x = 2\n", "b.py": b"y = 2\n"},
        {"a.py": b"x = 1\ny = 2\n", "b.py": b""},
        {"a.py": b"x = 1\n", "c.py": b"y = 2\n"},
        {"a.py": b"x = 1\n"},
    ]
    assert len({namespace_of(each) for each in (sources, *others)}) == 1 + len(others)
    assert namespace_of(dict(reversed(sources.items()))) == namespace_of(sources)
    assert re.fullmatch("growkern_[0-9a-f]{8}", NAMESPACE)
