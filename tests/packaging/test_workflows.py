"""The workflows of the public host: pinned, with few rights, and naming what exists."""

import re

import pytest
import yaml

from tests.packaging.project import PROJECT, ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
READ_ONLY = {"contents": "read"}

pytestmark = pytest.mark.skipif(not WORKFLOWS, reason="a source archive has no workflows")


def load(path):
    # YAML 1.1 reads the key "on" as True
    return yaml.safe_load(path.read_text())


def steps(path):
    for job in load(path)["jobs"].values():
        yield from job["steps"]


@pytest.fixture(params=WORKFLOWS, ids=lambda path: path.stem)
def path(request):
    return request.param


def test_every_action_is_pinned_to_a_commit(path):
    used = re.findall(r"uses: (.*)", path.read_text())
    assert len(used) == sum("uses" in step for step in steps(path)) > 0
    for line in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)


def test_commands_and_files_exist(path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for step in steps(path):
        assert set(re.findall(r"\bmake ([a-z-]+)", step.get("run", ""))) <= targets
        file = step.get("with", {}).get("cache-dependency-path", "pyproject.toml")
        assert (ROOT / file).is_file()
    for file in (load(path)[True].get("pull_request") or {}).get("paths", []):
        assert list(ROOT.glob(file))


def test_only_a_pushed_tag_may_do_more_than_read(path):
    workflow = load(path)
    assert workflow["permissions"] == READ_ONLY
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 60
        if "permissions" in job:
            assert job["permissions"] == {"id-token": "write"}
            assert job["if"] == "github.event_name == 'push' && github.ref_type == 'tag'"
            assert set(job["needs"]) == workflow["jobs"].keys() - {"publish"}


def test_every_supported_python_is_tested():
    classified = [line.rpartition(":: ")[2] for line in PROJECT["classifiers"]]
    supported = [version for version in classified if re.fullmatch(r"3\.\d+", version)]
    workflow = load(ROOT / ".github" / "workflows" / "tests.yml")
    assert workflow["jobs"]["tests"]["strategy"]["matrix"]["python"] == supported
    commands = [
        step["run"] for step in steps(ROOT / ".github/workflows/tests.yml") if "run" in step
    ]
    in_run = re.findall(r"^make [a-z-]+", (ROOT / ".ci" / "run").read_text(), re.M)
    assert [re.match(r"make [a-z-]+", command)[0] for command in commands] == in_run
