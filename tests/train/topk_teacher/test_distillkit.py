"""Log-probs that DistillKit stored are read as DistillKit reads them, and train a model."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from growkern import DistillKitTeacher, GrowthError, InheritanceSchedule, TeacherCache
from growkern.train.objectives.language_modeling import CausalLMCollator
from growkern.train.topk_teacher.distillkit import read_compression
from testbed.tiny import VOCAB, TinyTokenizer, build, losses_of
from tests.train.topk_teacher.test_cached_teacher import train_with
from tests.train.topk_teacher.test_teacher_cache import make

# rows that DistillKit (a61c2e7) packed with four configs, and what it reads from these bytes
PACKED = json.loads((Path(__file__).parent / "distillkit.json").read_text())
# exact values alone, at the precision of float32
EXACT = {"d": VOCAB, "k": 6, "exact_k": 6, "residual_bins": [], "delta_encoding": False}


def texts():
    """Token ids of different lengths."""
    rng = np.random.default_rng(0)
    return [rng.integers(5, VOCAB, length).tolist() for length in (9, 7, 12, 9, 8, 10, 11, 9)]


@torch.no_grad()
def rows_of(model, tokens, k):
    log_p = model(input_ids=torch.tensor([tokens])).logits[0, :-1].float().log_softmax(-1)
    return log_p.topk(k)


def packed_columns(ids_Rk, logprobs_Rk):
    """The two columns of one text in DistillKit's format with EXACT, made bit by bit."""
    width = (VOCAB - 1).bit_length()
    texts_of_bits = ["".join(f"{i:0{width}b}" for i in row) for row in ids_Rk.tolist()]
    size = -(-len(texts_of_bits[0]) // 8)
    ids = [list(int(bits.ljust(size * 8, "0"), 2).to_bytes(size, "big")) for bits in texts_of_bits]
    floats = [list(row.numpy().astype("<f4").tobytes()) for row in logprobs_Rk]
    return {"bytepacked_indices": ids, "compressed_logprobs": floats}


def write(folder, model, k=6, *, plain=False, parts=2, config=EXACT):
    folder.mkdir()
    rows = []
    for tokens in texts():
        best = rows_of(model, tokens, k)
        row = {"token_ids": best.indices.tolist(), "top_values": best.values.tolist()}
        rows.append(
            {"input_ids": tokens} | (row if plain else packed_columns(best.indices, best.values))
        )
    for i in range(parts):
        pq.write_table(pa.Table.from_pylist(rows[i::parts]), folder / f"data_{i}.parquet")
    if not plain:
        (folder / "compression_config.yaml").write_text(yaml.safe_dump(config))
    return folder


def teacher_model():
    return build("llama", layers=2, width=8, seed=9).eval()


@pytest.mark.parametrize("case", PACKED, ids=lambda case: f"k{case['config']['k']}")
def test_reads_the_bytes_of_distillkit(case, tmp_path):
    (tmp_path / "compression_config.yaml").write_text(yaml.safe_dump(case["config"]))
    compression = read_compression(tmp_path / "compression_config.yaml")
    ids = compression.ids(np.array(case["id_bytes"], np.uint8))
    assert ids.tolist() == case["ids"]
    values = compression.logprobs(np.array(case["logprob_bytes"], np.uint8))
    assert values.tolist() == case["decoded"]


@pytest.mark.parametrize("plain", [False, True])
def test_rows_are_those_of_the_model(plain, tmp_path):
    model = teacher_model()
    teacher = DistillKitTeacher(write(tmp_path / "d", model, plain=plain))
    assert len(teacher) == 8 and sorted(teacher.dataset["input_ids"]) == sorted(texts())
    collator = CausalLMCollator(TinyTokenizer())
    batch = collator([teacher.dataset[i] for i in (5, 0, 3)])
    ids, logprobs = teacher.batch(batch)
    for b, i in enumerate((5, 0, 3)):
        tokens = teacher.dataset[i]["input_ids"]
        best, rows = rows_of(model, tokens, 6), len(tokens) - 1
        assert torch.equal(ids[b, :rows].long(), best.indices)
        torch.testing.assert_close(logprobs[b, :rows], best.values, rtol=0, atol=1e-6)
        assert (ids[b, rows:] == -1).all() and logprobs[b, rows:].isnan().all()


def test_trains_as_a_cache_of_the_same_teacher(tmp_path):
    model = teacher_model()
    teacher = DistillKitTeacher(write(tmp_path / "d", model))
    how = {"collator": CausalLMCollator(TinyTokenizer()), "blocks": teacher.dataset}
    how |= {"temperature": 1.0, "dtype": "float32", "k": 6}
    make(tmp_path / "a", "llama", model=model, **how)
    make(tmp_path / "b", "llama", model=teacher, vocab_size=VOCAB, **how)
    ours, theirs = (TeacherCache(tmp_path / name).rows(range(8)) for name in "ab")
    assert torch.equal(ours[0], theirs[0])
    torch.testing.assert_close(ours[1], theirs[1], rtol=0, atol=1e-6)
    schedule = InheritanceSchedule(rate=0.8, end_step=7, temperature=1.0)
    options = {"schedule": schedule, "dataset": teacher.dataset}
    runs = [
        train_with(tmp_path / str(i), "llama", one, **options)
        for i, one in enumerate((TeacherCache(tmp_path / "a"), teacher))
    ]
    assert losses_of(runs[1]) == pytest.approx(losses_of(runs[0]), rel=1e-5)


def test_a_row_of_a_little_more_than_all_is_scaled_down(tmp_path):
    write(tmp_path / "d", teacher_model(), k=VOCAB, plain=True)
    for file in (tmp_path / "d").iterdir():
        table = pq.read_table(file).to_pylist()
        for row in table:
            row["top_values"] = [[x + 0.005 for x in values] for values in row["top_values"]]
        pq.write_table(pa.Table.from_pylist(table), file)
    teacher = DistillKitTeacher(tmp_path / "d")
    _, logprobs = teacher.batch({"input_ids": torch.tensor([teacher.dataset[0]["input_ids"]])})
    assert torch.allclose(logprobs[:, :-1].exp().sum(-1), torch.ones(()), atol=1e-6)


def test_another_text_is_refused(tmp_path):
    teacher = DistillKitTeacher(write(tmp_path / "d", teacher_model()))
    cut = torch.tensor([teacher.dataset[0]["input_ids"][:-1]])
    with pytest.raises(GrowthError, match=r"is not in .*: train on its own dataset"):
        teacher.batch({"input_ids": cut})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"k": 7, "exact_k": 7}, "text 0: 5 bytes per row, 6 expected"),
        ({"exact_dtype": "float64"}, "text 0: 24 bytes per row are too few"),
        ({"exact_dtype": "float16"}, "text 0: 24 bytes per row, 12 expected"),
        ({"exact_dtype": "float8"}, "exact_dtype is 'float8'; did you mean 'float"),
        ({"exact_dtype": ["float32"]}, r"exact_dtype is \['float32'\]; did you mean 'float32'"),
        (
            {"polynomial_terms": ["tan"]},
            "polynomial_terms has 'tan': a term is one of sqrt, exp or",
        ),
        ({"polynomial_terms": [10**400]}, r"polynomial_terms has 1000.* a power in 0 \.\. 63"),
        ({"polynomial_terms": [-1]}, r"polynomial_terms has -1: .* a power in 0 \.\. 63"),
        ({"polynomial_terms": [1.5]}, r"polynomial_terms has 1\.5: a term is one of"),
        ({"exact_k": 9}, "exact_k and the residual_bins do not fit k"),
        ({"exact_k": -1}, "exact_k and the residual_bins do not fit k"),
        ({"d": 0}, "d is 0: it must lie in 1 .."),
        ({"d": 10**400}, "d is 1000"),
        ({"d": float("inf")}, "d is inf: it must be a whole number"),
        ({"d": "50"}, "d is '50': it must be a whole number"),
        ({"k": 6.0}, r"k is 6\.0: it must be a whole number"),
        ({"k": True}, "k is True: it must be a whole number"),
        ({"k": None}, "k is None: it must be a whole number"),
        ({"k": 10**9, "exact_k": 10**9}, "k is 1000000000, more than d, which is 48"),
        ({"delta_encoding": 1}, "delta_encoding is 1: it must be true or false"),
        ({"residual_bins": [3]}, "not a compression config of DistillKit"),
        ({"residual_bins": None}, "not a compression config of DistillKit"),
        ({"colour": "red"}, "not a compression config of DistillKit.*colour"),
        ({"colour": "red" * 10_000}, "bytes, more than any compression config has"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(change, message, tmp_path):
    write(tmp_path / "d", teacher_model(), config=EXACT | change)
    with pytest.raises(GrowthError, match=message) as error:
        teacher = DistillKitTeacher(tmp_path / "d")
        teacher.batch({"input_ids": torch.tensor([teacher.dataset[0]["input_ids"]])})
    assert "\n" not in str(error.value)


def test_other_directories_are_refused(tmp_path):
    with pytest.raises(GrowthError, match=r"has no \*\.parquet files"):
        DistillKitTeacher(tmp_path)
    folder = write(tmp_path / "d", teacher_model())
    (folder / "compression_config.yaml").unlink()
    with pytest.raises(GrowthError, match=r"compression_config\.yaml: No such file"):
        DistillKitTeacher(folder)
    for file in folder.glob("*.parquet"):
        pq.write_table(pa.Table.from_pylist([{"input_ids": [1], "text": [1]}]), file)
    message = "input_ids and bytepacked_indices and compressed_logprobs"
    with pytest.raises(GrowthError, match=message):
        DistillKitTeacher(folder)
    (folder / "data_0.parquet").write_bytes(b"PAR1")
    with pytest.raises(GrowthError, match="not readable as Parquet"):
        DistillKitTeacher(folder)


DEEP = {
    "flow": ("[" * 9_000, "more than 10 levels"),
    "map": ("{a: " * 2_000, "more than 10 levels"),
    "block": ("- " * 4_900, "more than 10 levels"),
    "lines": ("\n".join(" " * i + "a:" for i in range(120)), "more than 10 levels"),
    "aliases": (
        "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{f'*a{i - 1}, ' * 9}]\n" for i in range(1, 60)),
        "it has an alias or a merge",
    ),
    "one alias": ("d: &a 50\nk: *a", "it has an alias or a merge"),
    "merge": ("<<: {k: 3}\nd: 50\nexact_k: 3", "it has an alias or a merge"),
    "merges": (
        "a0: &a0 {k: 3}\n"
        + "".join(f"a{i}: &a{i}\n  <<: [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 9)),
        "it has an alias or a merge",
    ),
    "not text": ("\x00", ""),
    "tag": ("!!python/object/apply:os.system [ls]", "it has the tag .*os.system"),
    "tag of a truth": ("d: !!bool 'x'", "it has the tag .*bool"),
    "tag of a number": ("d: !!float ''", "it has the tag .*float"),
    "own tag": ("d: !x 3", "it has the tag '!x'"),
    "list": ("[1, 2]", "it holds a list, not a table of fields"),
    "empty": ("", "it holds a NoneType, not a table of fields"),
}


@pytest.mark.parametrize("name", DEEP)
def test_yaml_that_is_no_config_is_one_line(name, tmp_path):
    file = tmp_path / "compression_config.yaml"
    text, message = DEEP[name]
    file.write_text(text)
    message = f"not a compression config of DistillKit: .*{message}"
    with pytest.raises(GrowthError, match=message) as error:
        read_compression(file)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


def plain(ids, values, tokens=(1, 2, 3)):
    return {"input_ids": [list(tokens)], "token_ids": [ids], "top_values": [values]}


def packed(ids, logprobs):
    return {
        "input_ids": [[1, 2, 3]],
        "bytepacked_indices": [ids],
        "compressed_logprobs": [logprobs],
    }


FLOAT = [0, 0, 128, 191] * 6  # -1
INFINITE = [0, 0, 128, 127, *FLOAT[4:]]


@pytest.mark.parametrize(
    "columns, message",
    [
        (plain(None, None), "not lists|is missing"),
        (plain([[1, 2]] * 2, None), "not lists|is missing"),
        (plain([[1, 2], None], [[-1.0, -2.0]] * 2), "a list is missing"),
        (plain([None, None], [[-1.0, -2.0]] * 2), "not lists|is missing"),
        (plain([[1, None]] * 2, [[-1.0, -2.0]] * 2), "a number is missing"),
        (plain([[1, 2]] * 2, [[-1.0, None]] * 2), "a number is missing"),
        (plain([[], []], [[], []]), "its ids have the shape|not numbers"),
        (plain([["a", "b"]] * 2, [[-1.0, -2.0]] * 2), "it holds string, not numbers"),
        (plain([[1, 2]] * 2, [["a", "b"]] * 2), "it holds string, not numbers"),
        (plain([[True, False]] * 2, [[-1.0, -2.0]] * 2), "it holds bool, not numbers"),
        (plain([[1.0, 2.7]] * 2, [[-1.0, -2.0]] * 2), "it holds float64, not integers"),
        (plain([[[1, 2]]] * 2, [[-1.0, -2.0]] * 2), "not numbers"),
        (plain([1, 2], [[-1.0, -2.0]] * 2), "it holds int64, not lists"),
        (plain(7, [[-1.0, -2.0]] * 2), "it holds int64, not lists"),
        (plain("ab", "cd"), "it holds string, not lists"),
        (plain([[1, 2, 3]] * 2, [[-1.0, -2.0]] * 2), r"shape \(2, 3\), its log-probs \(2, 2\)"),
        (plain([[1, 2]] * 2, [[float("inf"), -1.0]] * 2), "it holds the log-prob inf"),
        (plain([[1, 2]] * 2, [[3.0, 2.9]] * 2), "it holds the log-prob 3: check the teacher"),
        (plain([[1, 2]] * 2, [[-0.1, -0.2]] * 2), r"it holds probabilities that add up to 1\.72"),
        (plain([[1, 2]] * 2, [[float("nan"), -1.0]] * 2), "it holds the log-prob nan"),
        (plain([[1, 2]] * 2, [[float("-inf")] * 2] * 2), "it holds the log-prob -inf"),
        (plain([[1, 1]] * 2, [[-1.0, -1.0]] * 2), "it holds token 1 twice in a row"),
        (plain([[1, -2]] * 2, [[-1.0, -1.0]] * 2), "it holds token -2"),
        (plain([[1, 1 << 32]] * 2, [[-1.0, -1.0]] * 2), "it holds token 4294967296"),
        (packed([[1] * 5] * 2, [[1.5] * 24] * 2), "it holds float64, not integers"),
        (packed([[1] * 5] * 2, [[300] * 24] * 2), "it holds numbers that are no bytes"),
        (packed([[1] * 5] * 2, [[-1] * 24] * 2), "it holds numbers that are no bytes"),
        (packed([["a"] * 5] * 2, [FLOAT] * 2), "it holds string, not numbers"),
        (packed([[0] * 5] * 2, [FLOAT] * 2), "it holds token 0 twice in a row"),
        (packed([[4, 32, 196, 20, 96]] * 2, [INFINITE] * 2), "it holds the log-prob inf"),
    ],
)
def test_rows_that_are_none_are_one_line(columns, message, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    (tmp_path / "compression_config.yaml").write_text(yaml.safe_dump(EXACT))
    with pytest.raises(GrowthError, match=message) as error:
        DistillKitTeacher(tmp_path).batch({"input_ids": torch.tensor([[1, 2, 3]])})
    assert "\n" not in str(error.value) and "text 0" in str(error.value)


@pytest.mark.parametrize(
    "tokens", [None, [None, 2], ["a", "b"], [1.5, 2.0], "text", 7, [[1], [2]], [True, False]]
)
def test_texts_that_are_none_are_one_line(tokens, tmp_path):
    columns = plain([[1, 2]], [[-1.0, -2.0]]) | {"input_ids": [tokens]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(GrowthError, match="input_ids: ") as error:
        DistillKitTeacher(tmp_path)
    assert "\n" not in str(error.value)


def test_texts_with_other_numbers_of_tokens_per_row_are_named(tmp_path):
    tables = [plain([[1, 2]] * 2, [[-1.0, -2.0]] * 2), plain([[1]], [[-1.0]], (4, 5))]
    for i, columns in enumerate(tables):
        pq.write_table(pa.table(columns), tmp_path / f"{i}.parquet")
    batch = {"input_ids": torch.tensor([[1, 2, 3], [4, 5, 0]])}
    batch["attention_mask"] = (batch["input_ids"] != 0).long()
    with pytest.raises(GrowthError, match="texts have rows of 1 to 2 tokens"):
        DistillKitTeacher(tmp_path).batch(batch)
