"""python -m tests.faults.counting DIRECTORY: reads and writes of a growth, counted twice."""

import json
import sys
from pathlib import Path

import torch
import transformers

from tests.faults import work
from tests.faults.walk import library


def by_system():
    """Calls that read and that write, by the kernel's own count for this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    fields = dict(line.split(": ") for line in lines)
    return {"reads": int(fields["syscr"]), "writes": int(fields["syscw"])}


def main():
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    directory, shim = Path(sys.argv[1]), library()
    work.start_cache(directory)
    work.save_source(directory / "growth")
    work.grow(directory / "growth")

    def by_shim():
        return {"reads": shim.faults_moved(0), "writes": shim.faults_moved(1)}

    starts = by_shim(), by_system()
    work.cache(directory)
    work.grow(directory / "growth", overwrite=True)
    ends = by_shim(), by_system()
    seen, system = (
        {name: end[name] - start[name] for name in start}
        for start, end in zip(starts, ends, strict=True)
    )
    print(json.dumps({"seen": seen, "system": system}))


if __name__ == "__main__":
    main()
