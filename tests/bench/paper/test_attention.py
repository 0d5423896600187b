"""Attention maps, and heads of a grown model below the heads they come from."""

import pytest
import torch

import growkern
from bench.paper.attention import plot_attention
from examples.demo.corpus import train_tokenizer
from testbed.models import BERT, random_model
from tests.plot.runs import drawn, texts

TEXT = "attention is drawn for every head of every layer " * 4


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A source of 3 heads and 2 layers, grown to 6 heads and 3 layers, one of them inserted."""
    folder = tmp_path_factory.mktemp("attention")
    tokenizer = train_tokenizer([TEXT], 50)
    sizes = {"vocab_size": len(tokenizer), "dtype": torch.float32}
    source = random_model("BertModel", BERT, **sizes)
    grown = growkern.grow(source, hidden_size=24, num_hidden_layers=3)
    for name, model in (("small", source), ("large", grown)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder / "small", folder / "large"


def test_attention_is_drawn(pair, tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    plot_attention(pair, TEXT, tmp_path / "a.png")
    with image.open(tmp_path / "a.png") as picture:
        assert picture.width <= 1600
    figure = drawn(monkeypatch, lambda: plot_attention(pair, TEXT, tmp_path / "a.png", length=7))
    main, bar = figure.axes
    assert texts(figure, "row") == [
        *("small\nlayer 0", "grown\nlayer 0"),
        *("small\nlayer 0", "grown\nlayer 1\ninserted"),
        *("small\nlayer 1", "grown\nlayer 2"),
    ]
    heads = [f"head {h}" for h in (0, 0, 1, 1, 2, 2)], [f"head {h}" for h in (0, 3, 1, 4, 2, 5)]
    assert texts(figure, "cell") == [*heads[0], *heads[1]] * 3
    # the first layer of the source and of the grown model attend alike, head by head
    maps = [torch.tensor(one.get_array()) for one in main.images]
    assert len(maps) == 36 and all(one.shape == (7, 7) for one in maps)
    for source, grown in zip(maps[:6], maps[6:12], strict=True):
        torch.testing.assert_close(source, grown, atol=1e-5, rtol=1e-4)
    assert len({one.norm for one in main.images}) == 1 and bar.get_ylabel() == "attention weight"
    # tokens at the left of 6 rows, and below 6 columns
    assert len(texts(figure, "token")) == 7 * (6 + 6)
