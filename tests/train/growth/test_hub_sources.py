"""Run files whose models are on the Hub, from a server on this machine."""

import pytest
from safetensors.torch import load_file

import growkern
from growkern import run as train
from tests.growth.source.hub_server import commit_of, serving
from tests.growth.source.test_hub import use
from tests.train.run.test_run import RUN, workplace  # noqa: F401

GROWTH = '[growth]\nsource = "{0}"\nsizes = {{ hidden_size = 32, num_attention_heads = 4 }}\n'


@pytest.fixture
def server(workplace, monkeypatch, tmp_path):  # noqa: F811
    repositories = {f"acme/{name}": {"main": workplace / name} for name in ("model", "teacher")}
    with serving(repositories) as server:
        use(monkeypatch, server.url, tmp_path / "cache")
        yield server


@pytest.mark.parametrize("workplace", ["llama"], indirect=True)
@pytest.mark.parametrize("head", ['[model]\npath = "{0}"\n', GROWTH])
def test_models_on_the_hub_train_as_directories_do(server, workplace, head):  # noqa: F811
    text = RUN.replace('[model]\npath = "model"\n', head).replace("{{", "{").replace("}}", "}")
    here = text.replace("{0}", "model")
    there = text.replace("{0}", "acme/model").replace('["teacher"]', '["acme/teacher"]')
    there = there.replace('"out"', '"out2"')
    weights = []
    for content, out in ((here, "out"), (there, "out2")):
        (workplace / "run.toml").write_text(content)
        train(workplace / "run.toml", progress=False)
        weights.append(load_file(workplace / out / "model.safetensors"))
    for name, value in weights[0].items():
        assert value.equal(weights[1][name]), name
    # finished, and known again
    assert train(workplace / "run.toml", progress=False) is None
    # somebody pushes
    commit = commit_of(workplace / "model")
    server.models["acme/model"] = {"main": workplace / "teacher", commit: workplace / "model"}
    with pytest.raises(growkern.GrowthError, match="the files of acme/model changed"):
        train(workplace / "run.toml", progress=False)


@pytest.mark.parametrize("workplace", ["llama"], indirect=True)
def test_a_revision_is_for_the_hub(server, workplace):  # noqa: F811
    text = RUN.replace('path = "model"', 'path = "model"\nrevision = "main"')
    (workplace / "run.toml").write_text(text)
    with pytest.raises(growkern.GrowthError, match=r"--revision.* is for models on the Hub"):
        train(workplace / "run.toml", progress=False)
    text = text.replace('"model"', '"acme/model"').replace("main", "v2")
    (workplace / "run.toml").write_text(text)
    with pytest.raises(growkern.GrowthError, match="acme/model has no revision 'v2'"):
        train(workplace / "run.toml", progress=False)
