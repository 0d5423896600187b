"""The namespace of the custom ops."""

import re

import torch

import growkern
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


def test_has_all_ops():
    for name in ("expand", "kl_mlm_loss", "linear_kl_mlm_loss", "topk_kl_mlm_loss"):
        assert callable(getattr(growkern, name))
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("growkern")]
    assert len(names) == 8 and all(name.startswith(f"{NAMESPACE}::") for name in names)
