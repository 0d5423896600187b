"""Makes a result document for tests, as a good run on a GPU would write it."""

ROW = {"provider": "ours"}


def document(**changes):
    """A result with some parts replaced; `machine` replaces single facts."""
    facts = {"commit": "abc", "dirty": False, "sources": "1", "date": "d", "torch": "2"}
    facts |= {"triton": "3", "gpu": "NVIDIA H200"} | changes.pop("machine", {})
    return {"status": "ok", "machine": facts, "rows": [ROW]} | changes
