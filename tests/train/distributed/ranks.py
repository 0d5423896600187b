"""Runs cases on several ranks: `python -m tests.forked_ranks N tests.train.distributed.ranks DIR`.

DIR/cases.json names the cases. The first rank leaves DIR/<number>.pt.
"""

import json

import torch
import torch.distributed as dist

from tests.train.distributed.parity import Case, found_in


def main(folder):
    cases = [Case(**fields) for fields in json.loads((folder / "cases.json").read_text())]
    for number, case in enumerate(cases):
        found = found_in(folder / f"run{number}", case)
        if dist.get_rank() == 0:
            torch.save(found, folder / f"{number}.pt")
