"""The arguments of evaluations in a TOML file are those of the Python functions."""

import inspect
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

import growkern
from growkern import DataSection, GrowthError
from growkern.files import matching_files
from growkern.train.evaluation.evaluate import read_arguments, section

FILE = """
[evaluate]
model = "small"
text = "text/*.txt"
cache = "tokens"
masking_probability = 0.2
"""


@pytest.fixture
def read(tmp_path):
    def from_text(text):
        (tmp_path / "how.toml").write_text(text)
        return read_arguments(tmp_path / "how.toml")

    return from_text


def test_names_and_defaults_are_those_of_the_function():
    parameters = inspect.signature(growkern.evaluate).parameters
    known = {
        key: x.default for key, x in parameters.items()
        if x.kind is not x.VAR_KEYWORD and key != "progress"
    }  # fmt: skip
    of_data = {field.name: field.default for field in fields(DataSection)}
    for field in fields(section()):
        default = known.pop(field.name) if field.name in known else of_data[field.name]
        missing = default is inspect.Parameter.empty
        assert (MISSING if missing else default) == field.default, field.name
    assert not known


def test_a_table_becomes_arguments(read, tmp_path):
    assert read(FILE) == {
        "model": str(tmp_path / "small"),
        "text": [str(tmp_path / "text/*.txt")],
        "cache": str(tmp_path / "tokens"),
        "masking_probability": 0.2,
    }
    text = FILE.replace('"text/*.txt"', '["a", "/somewhere/b"]')
    assert read(text)["text"] == [str(tmp_path / "a"), str(Path("/somewhere/b"))]


def test_brackets_in_the_name_of_the_folder_are_no_pattern(tmp_path):
    folder, other = tmp_path / "e[1]", tmp_path / "e1"
    for place, words in ((folder, "right"), (other, "wrong")):
        (place / "more").mkdir(parents=True)
        for name in ("a.txt", "a[1].txt", "a1.txt", "more/b.txt"):
            (place / name).write_text(words + name)
    (folder / "how.toml").write_text(
        '[evaluate]\nmodel = "small"\ntext = ["a.txt", "a[1].txt", "*/b.txt", "m*/b.txt"]'
    )
    text = read_arguments(folder / "how.toml")["text"]
    assert text[:2] == [str(folder / name) for name in ("a.txt", "a[1].txt")]
    files = [folder / "a.txt", folder / "a[1].txt", *[folder / "more" / "b.txt"] * 2]
    assert [matching_files(Path(), name) for name in text] == [[file] for file in files]


def test_a_model_on_the_hub_is_named_by_its_id(read, tmp_path):
    text = '[evaluate]\nmodel = "some/model"\ntext = "a.txt"\n'
    assert read(text)["model"] == "some/model"
    (tmp_path / "some" / "model").mkdir(parents=True)
    assert read(text)["model"] == str(tmp_path / "some" / "model")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("masking_probability", "masking_probabilty", "did you mean 'masking_probability'"),
        ("cache", "streaming", r"\[evaluate\] has no key 'streaming'"),
        ("[evaluate]", "[evaluated]", "no table 'evaluated'; did you mean 'evaluate'"),
        ("0.2", '"much"', r"evaluate.masking_probability is 'much' \(str\): it must be a number"),
        ('model = "small"\ntext = "', 'text = "', r"\[evaluate\] lacks 'model'"),
        (FILE, "", r"has no table \[evaluate\]: add it"),
    ],
    ids=str,
)
def test_a_wrong_file_is_refused_by_file_and_key(read, old, new, message):
    assert old in FILE
    with pytest.raises(GrowthError, match=message) as refusal:
        read(FILE.replace(old, new, 1))
    assert "how.toml" in str(refusal.value)
