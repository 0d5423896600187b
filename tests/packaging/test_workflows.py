"""The workflows of the public host: valid, pinned, with few rights, and naming what exists."""

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


def test_every_night_runs_the_command_line_with_the_lowest_versions():
    """Without extras, with each extra of users alone, and with all of them."""
    job = load(ROOT / ".github" / "workflows" / "nightly.yml")["jobs"]["lowest"]
    extras = PROJECT["optional-dependencies"].keys() - {"dev", "docs"}
    found = [set(re.findall(r"--extra (\w+)", x)) for x in job["strategy"]["matrix"]["extras"]]
    assert sorted(map(sorted, found)) == sorted([[], sorted(extras), *([x] for x in extras)])
    lines = [step.get("run", "") for step in job["steps"]]
    (compiled,) = (line for line in lines if "pip compile" in line)
    assert "--resolution lowest-direct" in compiled and "matrix.extras" in compiled
    assert ".venv/bin/growkern grow --help" in lines
    for file in re.findall(r"tests/\S+", lines[-1]):
        assert (ROOT / file).is_file()
    least = PROJECT["requires-python"].removeprefix(">=").partition(",")[0]
    assert [x["with"]["python-version"] for x in job["steps"] if "python@" in str(x)] == [least]


def test_every_night_walks_further():
    """Each module whose tests take more examples with `--walks` stands in a nightly step."""
    runs = [step.get("run", "") for step in steps(ROOT / ".github" / "workflows" / "nightly.yml")]
    named = {x for run in runs if "--walks" in run for x in re.findall(r"tests/[\w./]+", run)}
    assert all((ROOT / name).exists() for name in named)
    for module in (ROOT / "tests").rglob("test_*.py"):
        if re.search(r"^from tests\.shared.* import walks?$", module.read_text(), re.M):
            place = module.relative_to(ROOT)
            assert named & {x.as_posix() for x in (place, *place.parents)}, place


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
