"""Runs the ops' own tests on this device: one row of counts per file, one failure per test."""

import importlib.util
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from bench.shared.recorder import Recorder, needs
from bench.shared.results import ROOT


def run(recorder: Recorder) -> None:
    needs("pytest", "hypothesis")
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
        command += [f"--junitxml={report}"]
        # most of the time is spent compiling kernels, and each process compiles one at a time
        if importlib.util.find_spec("xdist") and not recorder.toy:
            command += ["-n", str(min(8, os.cpu_count() or 1))]
        # a dry run only shows that tests can be run, so few are enough
        command += recorder.pick(
            ["tests/ops"], ["tests/ops/expand/test_expand.py", "-k", "test_empty"]
        )
        code = subprocess.run(command, cwd=ROOT, env=dict(os.environ)).returncode
        if not report.exists():
            raise RuntimeError(f"pytest wrote no report, exit code {code}")
        suite = ElementTree.parse(report).getroot()
    files: dict[str, dict[str, int]] = {}
    for case in suite.iter("testcase"):
        name = case.get("classname", "")
        counts = files.setdefault(name, dict.fromkeys(("passed", "failed", "skipped"), 0))
        broken = [child for child in case if child.tag in ("failure", "error")]
        if broken:
            message = (broken[0].get("message") or "").splitlines()[:1]
            recorder.fail(f"{name}::{case.get('name')}: {''.join(message)[:300]}")
        outcome = "failed" if broken else "passed" if case.find("skipped") is None else "skipped"
        counts[outcome] += 1
    for name, counts in files.items():
        recorder.add({"case": name, **counts})
    if code and not recorder.document["failures"]:
        recorder.fail(f"pytest ended with exit code {code}")
