"""The namespace of the custom ops, which names the version of their code."""

import hashlib
from collections.abc import Mapping
from pathlib import Path


def namespace_of(sources: Mapping[str, bytes]) -> str:
    """A namespace for the ops of some code, such as "growkern_1f0c93ab".

    torch.compile keeps compiled steps on disk and finds them by the names and arguments of their
    ops. What an op's backward calls is in such a step, but not in the key. After an update of
    growkern, a step compiled before it would still run the old backward. Names that change with
    the code prevent this.

    Args:
        sources: the contents of the files, by their names.

    Returns:
        "growkern_" and 8 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for name, content in sorted(sources.items()):
        digest.update(b"%s\0%d\0%s" % (name.encode(), len(content), content))
    return f"growkern_{digest.hexdigest()[:8]}"


_OPS = Path(__file__).parents[1]
NAMESPACE = namespace_of(
    {file.relative_to(_OPS).as_posix(): file.read_bytes() for file in _OPS.rglob("*.py")}
)
