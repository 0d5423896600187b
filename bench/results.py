"""Where figures lie and what has to be known of them before they replace others.

A document is one JSON file: what ran, on what machine, with which sources, how it ended, rows.
"""

import datetime
import functools
import hashlib
import importlib.util
import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
# what a figure depends on; results themselves and prose do not count
SOURCES = ("growkern/**/*.py", "growkern/**/*.toml", "growkern/**/*.json", "csrc/*", "bench/*.py")
# how much a document is worth beside another one of the same piece
STATUSES = ("crashed", "timeout", "failed", "ok")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@functools.cache
def source_digest() -> str:
    """Names and contents of the sources: says what was measured where there is no git."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in SOURCES for path in ROOT.glob(pattern)}):
        if path.is_file():
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _version(package: str) -> str | None:
    if importlib.util.find_spec(package) is None:
        return None
    return getattr(importlib.import_module(package), "__version__", "unknown")


def _gpu_facts() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    query = ("nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader")
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "gpu_bytes": properties.total_memory,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "cuda": torch.version.cuda or torch.version.hip,
        "driver, power limit": _output(*query),
    }


def machine() -> dict[str, Any]:
    """Where, when and with what the figures were taken."""
    # results are no sources: the first piece's must not make the second one's look dirty
    changed = ("git", "status", "--porcelain", "--untracked-files=no", "--", "growkern", "csrc")
    status = _output(*changed, "bench", ":!bench/results")
    facts = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "commit": _output("git", "rev-parse", "--short", "HEAD")
        or os.environ.get("GROWKERN_COMMIT", "unknown"),
        "dirty": None if status is None else bool(status),
        "sources": source_digest(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    return facts | (_gpu_facts() if torch.cuda.is_available() else {})


def slug(facts: dict[str, Any]) -> str:
    """Directory of a machine's results: "nvidia-h200"; "" for a machine without a GPU."""
    return re.sub(r"[^a-z0-9]+", "-", facts.get("gpu", "").lower()).strip("-")


def same_run(document: dict[str, Any], facts: dict[str, Any]) -> bool:
    """Whether a finished document speaks of these sources on this kind of machine."""
    keys = ("sources", "gpu", "torch", "triton")
    known = document.get("machine", {})
    return document.get("status") == "ok" and all(known.get(k) == facts.get(k) for k in keys)


def _worth(document: dict[str, Any]) -> tuple[int, int]:
    """How it ended, then how well it is documented."""
    facts = document.get("machine", {})
    named = ("date", "sources", "triton", "torch")
    known = sum(facts.get(key) not in (None, "unknown") for key in named)
    # an old-style commit says "-dirty" itself
    clean = facts.get("dirty") is False or (
        "dirty" not in facts and "dirty" not in facts.get("commit", "unknown-dirty")
    )
    status = document.get("status", "ok")
    rank = STATUSES.index(status) if status in STATUSES else -1
    return rank, known + (facts.get("commit", "unknown") != "unknown") + 2 * clean


def read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):
        return {}


def write(path: Path, document: dict[str, Any]) -> None:
    """Whole or not at all: a machine may be taken away at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(document, indent=1) + "\n")
    part.replace(path)


def keep(path: Path, document: dict[str, Any]) -> Path:
    """Write a document, beside a better one (`<name>.aside.json`) where there is one."""
    aside = path.with_name(f"{path.stem}.aside.json")
    there = read(path)
    if there and _worth(document) < _worth(there):
        write(aside, document)
        return aside
    write(path, document)
    aside.unlink(missing_ok=True)
    return path
