"""Where figures lie and what has to be known of them before they replace others.

A document is one JSON file: what ran, on what machine, with which sources, how it ended, rows.
"""

import contextlib
import datetime
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
# what a figure depends on; results themselves and prose do not count
SOURCES = (
    "growkern/**/*.py",
    "growkern/**/*.toml",
    "growkern/**/*.json",
    "csrc/**/*",
    "bench/**/*.py",
)
TESTS = ("tests/*.py", "tests/ops/**/*")
# how much a document is worth beside another one of the same piece
STATUSES = ("skipped", "crashed", "timeout", "failed", "ok")
# what has to be known of a run besides its commit and its GPU
VERSIONS = ("date", "sources", "python", "torch", "triton")
PACKAGES = ("transformers", "liger_kernel", "cut-cross-entropy", "quack-kernels")


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
    for path in sorted({path for pattern in (*SOURCES, *TESTS) for path in ROOT.glob(pattern)}):
        if path.is_file():
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _version(package: str) -> str | None:
    if importlib.util.find_spec(package) is None:
        return None
    return getattr(importlib.import_module(package), "__version__", "unknown")


def _packages() -> dict[str, str]:
    """Versions of what is compared and is here; their files are asked, nothing is imported."""
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


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


def git_facts() -> dict[str, Any]:
    """The commit of these sources and whether they differ from it; without git what is said."""
    # results and prose are no sources: the first piece's must not make the second one's look dirty
    changed = ("git", "status", "--porcelain", "--untracked-files=no", "--", "growkern", "csrc")
    status = _output(*changed, "bench", "tests", ":!bench/results", ":!*.md")
    commit = _output("git", "rev-parse", "--short", "HEAD")
    return {
        "commit": commit or os.environ.get("GROWKERN_COMMIT", "unknown"),
        "dirty": None if status is None else bool(status),
    }


def today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def machine() -> dict[str, Any]:
    """Where, when and with what the figures were taken."""
    facts = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        **_packages(),
        **git_facts(),
        "sources": source_digest(),
        "date": today(),
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


def lacks_peers(document: dict[str, Any]) -> bool:
    """Whether another library was asked for and not installed."""
    rows = document.get("rows", ())
    return any("is not installed" in str(row.get("why not", "")) for row in rows)


def is_done(path: Path, facts: dict[str, Any]) -> bool:
    """Whether a piece need not run again: its result, or the one beside it, is of these sources.

    Where there is no git a run knows itself by the sources' hash alone, and lies aside for ever.
    """
    return any(same_run(read(place), facts) for place in (path, aside_of(path)))


def _commit_rank(facts: dict[str, Any]) -> int:
    """A commit, one that was only said, changed sources, none."""
    commit = facts.get("commit") or "unknown"
    # an old-style commit says "-dirty" itself
    dirty = facts.get("dirty", "dirty" in commit)
    if commit == "unknown":
        return 0
    return 2 if dirty is None else 1 if dirty else 3


def rank(document: dict[str, Any]) -> tuple[int, ...]:
    """How well it is documented, then how it ended, then how much is in it."""
    facts = document.get("machine", {})
    status = document.get("status", "ok")
    return (
        not document.get("toy", False),
        _commit_rank(facts),
        bool(facts.get("gpu")),
        sum(facts.get(key) not in (None, "unknown") for key in VERSIONS),
        STATUSES.index(status) if status in STATUSES else -1,
        # a row that says why it was not measured is none
        sum("why not" not in row for row in document.get("rows", ())),
    )


def _replaces(new: dict[str, Any], old: dict[str, Any]) -> bool:
    """Whether a document is worth more; of two that are worth the same the newer one is."""
    dates = (document.get("machine", {}).get("date", "") for document in (new, old))
    return (rank(new), next(dates)) >= (rank(old), next(dates))


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


def aside_of(path: Path) -> Path:
    return path.with_name(f"{path.stem}.aside.json")


def keep(path: Path, document: dict[str, Any]) -> Path:
    """Write a document, beside a better one (`<name>.aside.json`) where there is one.

    Of several that lie aside the last one stays, but for a worse one of the same sources.
    """
    aside, there = aside_of(path), read(path)
    if there and not _replaces(document, there):
        other = read(aside)
        sources = (d.get("machine", {}).get("sources") for d in (document, other))
        if not other or next(sources) != next(sources) or _replaces(document, other):
            write(aside, document)
        return aside
    write(path, document)
    aside.unlink(missing_ok=True)
    return path


def take(folder: Path, into: Path = RESULTS) -> list[Path]:
    """Keep the results of another machine, `folder`/<gpu>/<piece>.json, by the same rule.

    Those taken without git from the very sources that are here get their commit.
    """
    ours, digest = git_facts(), source_digest()
    kept = []
    for path in sorted(folder.glob("*/*.json")):
        document = read(path)
        facts = document.get("machine", {})
        if facts.get("sources") == digest and facts.get("dirty") is None and not ours["dirty"]:
            facts |= ours
        name = path.name.replace(".aside.json", ".json")
        kept.append(keep(into / path.parent.name / name, document))
    return kept


def cell(x: Any) -> str:
    if x is None:
        return "-"
    return f"{x:.3g}" if isinstance(x, float) else str(x)
