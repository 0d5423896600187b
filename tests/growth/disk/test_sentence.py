"""sentence-transformers: a grown directory gives the embeddings of its source."""

import json
import warnings

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer, models, pre_tokenizers

import growkern
from growkern.growth.disk.checksums import verify_checksums
from growkern.growth.space.spaces import copies, tied_output
from testbed.models import BERT, random_model

WORDS = [f"w{i}" for i in range(45)]
TEXTS = ["w1 w2 w3", "w40 w3 w9 w9 w12 w30 w7", "w5"]
# nothing exact has a larger error in float32
TOLERANCE = 2e-6


@pytest.fixture
def make(tmp_path):
    """Writes a tiny random model with these modules behind its transformer."""

    def write(*modules, name="small", sizes=BERT):
        plain = tmp_path / f"{name}-plain"
        model = random_model("BertModel", sizes, dtype=torch.float32)
        model.save_pretrained(plain)
        vocabulary = {"[PAD]": 0, "[UNK]": 1} | {w: i + 2 for i, w in enumerate(WORDS)}
        words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]"
        ).save_pretrained(plain)
        (plain / "README.md").write_text("---\nlicense: mit\n---\n")
        whole = SentenceTransformer(modules=[Transformer(str(plain)), *modules], device="cpu")
        whole.save(str(tmp_path / name), create_model_card=False)
        return tmp_path / name

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield write


def vectors(directory):
    with warnings.catch_warnings():
        # of the classes' own moves
        warnings.simplefilter("ignore")
        model = SentenceTransformer(str(directory), device="cpu")
    return model.encode(TEXTS, convert_to_tensor=True, show_progress_bar=False)


def grow(source, target, **sizes):
    return growkern.grow_checkpoint(source, target, progress=False, **sizes)


def linear(width, out):
    return Dense(width, out, activation_function=torch.nn.Tanh())


WIDER = {"hidden_size": 24, "num_attention_heads": 6, "intermediate_size": 40}
# exact in spite of the norm after each block
DEEPER = {"num_hidden_layers": 4, "identity_gain": 1e-8}
CASES = {
    "mean": ([Pooling(12, "mean")], WIDER),
    "cls": ([Pooling(12, "cls"), Normalize()], WIDER),
    "largest": ([Pooling(12, "max")], WIDER),
    "two modes": ([Pooling(12, ("cls", "mean")), Normalize()], WIDER),
    "a dense layer": ([Pooling(12, "mean"), linear(12, 5), Normalize()], WIDER),
    "signed shares": ([Pooling(12, "max"), Normalize()], {**WIDER, "symmetry": "split"}),
    "deeper": ([Pooling(12, "mean"), Normalize()], DEEPER),
    "both": ([Pooling(12, "mean"), Normalize()], {**WIDER, **DEEPER}),
}


@pytest.mark.parametrize("modules, how", CASES.values(), ids=CASES)
def test_a_grown_model_gives_the_embeddings_of_its_source(make, tmp_path, modules, how):
    source = make(*modules)
    report = grow(source, tmp_path / "large", **how)
    assert report.plan.exact
    old, new = vectors(source), vectors(tmp_path / "large")
    torch.testing.assert_close(new, old, rtol=0, atol=TOLERANCE * old.abs().max().item())
    assert growkern.verify(source, tmp_path / "large").ok
    assert verify_checksums(tmp_path / "large", source).ok
    kinds = [m["type"].split(".")[-1] for m in json.loads(text(tmp_path / "large/modules.json"))]
    added = ["Dense"] if "hidden_size" in how else []
    before = [type(module).__name__ for module in modules]
    assert kinds == ["Transformer", "Pooling", *added, *before[1:]]
    card = ModelCard.load(tmp_path / "large" / "README.md")
    assert card.data.to_dict()["library_name"] == "sentence-transformers"
    assert "folds the copies" in card.text


def text(file):
    return file.read_text()


def test_copies_of_both_signs_fold_behind_every_pooling():
    """Of copies times 1.5 and times -0.5, the largest token is that of the first alone."""
    index = torch.tensor([0, 1, 0, 1])
    space = tied_output(copies(index, 2, torch.tensor([2.0, 0.0, -2.0, 0.0])))
    assert space.write.tolist() == [1.5, 0.5, -0.5, 0.5]
    tokens = torch.randn(7, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    grown = tokens[:, index] * space.write
    for pooled in (lambda x: x.mean(0), lambda x: x.max(0).values):
        torch.testing.assert_close(space.fold() @ pooled(grown), pooled(tokens))


def test_an_uneven_width_is_as_close_as_its_plan_says(make, tmp_path):
    source = make(Pooling(12, "mean"), Normalize())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        grow(source, tmp_path / "large", hidden_size=20, num_attention_heads=5)
    old, new = vectors(source), vectors(tmp_path / "large")
    assert old.shape == new.shape
    torch.testing.assert_close(new, old, rtol=0, atol=1e-2)


def test_half_precision(make, tmp_path):
    source = make(Pooling(12, "mean"), Normalize())
    grow(source, tmp_path / "large", dtype=torch.bfloat16, **WIDER)
    new = vectors(tmp_path / "large")
    assert new.dtype == torch.bfloat16
    torch.testing.assert_close(new.float(), vectors(source), rtol=0, atol=3e-2)


def test_a_model_grows_twice(make, tmp_path):
    source = make(Pooling(12, "mean"), Normalize())
    grow(source, tmp_path / "large", **WIDER)
    grow(tmp_path / "large", tmp_path / "larger", hidden_size=48, num_attention_heads=12)
    old = vectors(source)
    close = {"rtol": 0, "atol": TOLERANCE}
    torch.testing.assert_close(vectors(tmp_path / "larger"), old, **close)


def breaks(name, **changes):
    def edit(directory):
        file = directory / name
        data = json.loads(file.read_text())
        target = data if isinstance(data, dict) else data[1]
        target.update(changes)
        file.write_text(json.dumps(data))

    return edit


def pickled(directory):
    weights = directory / "2_Dense" / "model.safetensors"
    weights.rename(weights.with_name("pytorch_model.bin"))


def linked(directory):
    secret = directory.parent / "secret"
    secret.write_text("of somebody else")
    (directory / "2_Dense" / "more.txt").symlink_to(secret)


BREAKAGES = [
    (breaks("modules.json", type="sentence_transformers.models.LSTM"), "Transformer, LSTM, Dense"),
    (breaks("modules.json", path="../1_Pooling"), "is not the name of a folder"),
    (breaks("modules.json", path=None), "is not the name of a folder"),
    (breaks("1_Pooling/config.json", embedding_dimension=7), "is not the width of the model, 12"),
    (lambda d: (d / "modules.json").write_text("{}"), r"modules\.json: its modules are"),
    (pickled, r"2_Dense: no model\.safetensors"),
    (linked, "outside of the checkpoint"),
]


@pytest.mark.parametrize("damage, match", BREAKAGES)
def test_other_modules_are_refused_before_any_work(make, tmp_path, damage, match):
    source = make(Pooling(12, "mean"), linear(12, 5))
    damage(source)
    with pytest.raises(growkern.GrowthError, match=match):
        grow(source, tmp_path / "large", **WIDER)
    assert not (tmp_path / "large").exists()


def test_a_wrapped_model_in_memory_is_told_what_to_do(make):
    with pytest.raises(growkern.GrowthError, match="is a SentenceTransformer: save it and give"):
        growkern.grow(SentenceTransformer(str(make(Pooling(12, "mean")))), **WIDER)
