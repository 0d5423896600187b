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
from growkern.train.data import CausalLMCollator
from growkern.train.topk_teacher.distillkit import read_compression
from tests.train.test_trainer import losses_of
from tests.train.tiny import VOCAB, TinyTokenizer, build
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


def test_a_row_of_more_than_all_is_scaled_down(tmp_path):
    write(tmp_path / "d", teacher_model(), plain=True)
    for file in (tmp_path / "d").iterdir():
        table = pq.read_table(file).to_pylist()
        for row in table:
            row["top_values"] = [[x + 5 for x in values] for values in row["top_values"]]
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
        ({"exact_dtype": "float8"}, "a dtype, a term or a size is none of DistillKit's"),
        ({"exact_k": 9}, "a dtype, a term or a size is none of DistillKit's"),
        ({"d": 0}, "a size is not positive"),
        ({"colour": "red"}, "not a compression config of DistillKit.*colour"),
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
    for columns, message in (
        (["input_ids", "packed_indices", "exact_values", "coeffs"], "older format"),
        (["input_ids", "text"], "input_ids and bytepacked_indices and compressed_logprobs"),
    ):
        for file in folder.glob("*.parquet"):
            pq.write_table(pa.Table.from_pylist([{name: [1] for name in columns}]), file)
        with pytest.raises(GrowthError, match=message):
            DistillKitTeacher(folder)
    (folder / "data_0.parquet").write_bytes(b"PAR1")
    with pytest.raises(GrowthError, match="not readable as Parquet"):
        DistillKitTeacher(folder)
