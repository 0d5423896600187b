"""All figures in the README and the documentation come from a commit and a machine with names."""

import re
from dataclasses import asdict

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.shared import results, time_model
from bench.shared.loss_measure import plain
from growkern.demo.config import FULL, QUICK
from growkern.ops.loss.linear import gemm
from growkern.ops.loss.linear import op as linear_op
from growkern.ops.loss.linear.heads import Head, Settings, Sizes
from growkern.ops.loss.rows.op import ROW_FUNCTIONS
from growkern.ops.loss.rows.state import Maths, RowInputs
from tests.bench.pages import (
    LOG,
    PAGES,
    ROOT,
    TEXT,
    check_source,
    paper_lines,
    says,
    table_with,
    tables,
)


def test_the_demo_matches_its_result():
    """bench.report writes its table, and test_render.py compares it."""
    document = check_source("demo")
    seconds = sum(source["seconds"][-1] for source in document["sources"])
    seconds += sum(curve["seconds"][-1] for curve in document["curves"])
    assert says(f"Two seeds, {seconds:.0f} s of training") and len(document["seeds"]) == 2
    source, target = (document["config"][name] for name in ("source", "target"))
    sizes = [f"{size['n_layer']} x {size['n_embd']}" for size in (target, source)]
    assert says(f"grows it to {sizes[0]}") and says(f"{source['n_layer']} layers x")
    # the first token of a block is no label
    labels, quick = (config.eval_blocks * (config.sequence_length - 1) for config in (FULL, QUICK))
    assert says(f"Losses are over {labels:,} labels") and labels >= 100_000
    assert says(f"fewer steps and {quick:,} labels")
    assert document["config"] == asdict(FULL)


PROVIDERS = {
    "plain PyTorch": "plain",
    "torch.compile of plain": "torch.compile",
    "Liger-Kernel 0.8.5": "liger jsd",
    "growkern": "growkern",
    "growkern with float32 logits": "growkern, float32 logits",
}


def test_the_linear_loss_matches_its_result():
    document = check_source("linear_kl_mlm_loss")
    table = table_with("`linear_kl_mlm_loss`, 2048 rows")
    assert len(table) == 10
    for name, seconds, extra, error in table[1:]:
        dtype, provider = name.split(", ")[:2]
        provider = PROVIDERS[provider]
        (row,) = [
            row
            for row in document["rows"]
            if (row["dtype"], row["provider"]) == (dtype, provider)
            and row["shape"].startswith("2048x")
        ]
        assert seconds == f"{row['wall s']:.2f}" and error == f"{row['gradient error']:.1e}", name
        # to two digits or more
        assert float(extra) == pytest.approx(row["extra MiB"], rel=0.02), name


def test_the_table_of_k_matches_its_result():
    rows = check_source("topk")["rows"]
    by = {(row["student"].split()[0], row["T"], row["k"]): row for row in rows}
    table = table_with("k, temperature 1")
    assert [row[0] for row in table[1:]] == ["1", "4", "16", "64", "256"]
    for k, *cells in table[1:]:
        grown, random = by["grown", 1.0, int(k)], by["random", 1.0, int(k)]
        seen = [f"{1 - row['KL left out'] / row['KL, nats']:.0%}" for row in (grown, random)]
        errors = [f"{row['gradient error']:.0%}" for row in (grown, random)]
        mass = f"{grown['teacher mass']:.0%}"
        assert cells == [str(grown["bytes/row"]), mass, *seen, *errors], k
    assert says(f"64 of them then hold {by['grown', 2.0, 64]['teacher mass']:.0%}")
    off = [by[name, 1.0, 64]["renormalised"] for name in ("random", "grown")]
    assert says(
        "its error is {:.1f} (random student) and {:.1f} (grown student) times".format(*off)
    )
    for row in rows:
        assert row["stored fp16"] == pytest.approx(row["gradient error"], rel=2e-3)


def test_the_errors_of_growth_match_their_result():
    rows = check_source("exactness")["rows"]
    carried = [row for row in rows if row.get("carry") == 1]
    assert len(carried) == 3
    words = ", ".join(f"{row['error']:.1e} at {row['sizes']}" for row in carried)
    assert says(f"BERT, random models: {words} |"), words
    within = {"float64": 1e-12, "float32": 1e-6}
    for row in rows:
        if row.get("carry") == 0.01:
            assert row["error"] <= 1e-6, row
        elif "head_dim" in row.get("sizes", ""):
            assert row["error"] <= (1e-8 if row["dtype"] == "float64" else 1e-6), row
        elif "sizes" in row and "carry" not in row:
            assert row["error"] <= within[row["dtype"]], row
        elif row["what"] == "linear loss, growkern":
            assert row["error"] <= {"float32": 1e-5, "bfloat16": 5e-3}[row["dtype"]], row


def test_the_sentences_between_the_tables_match_their_results():
    rows = {
        (row["dtype"], row["provider"]): row
        for row in check_source("linear_kl_mlm_loss")["rows"]
        if row["shape"].startswith("2048x")
    }

    def ratio(key, dtype, name, other):
        return rows[dtype, name][key] / rows[dtype, other][key]

    times = [ratio("gradient error", d, "plain", "growkern") for d in ("float32", "bfloat16")]
    assert says("the errors are {:.0f} and {:.0f} times smaller than plain".format(*times)), times
    # the median of the turns' ratios: a quotient of two medians may be of different hours
    turns = {key: row.get("x compile") for key, row in rows.items()}
    bfloat16, float32 = turns["bfloat16", "growkern"], "growkern, float32 logits"
    assert says(f"In bfloat16 growkern takes {bfloat16:.2f} times the time of `torch.compile`")
    memory, error = (
        ratio(key, "float32", "torch.compile", "growkern")
        for key in ("extra MiB", "gradient error")
    )
    assert says(
        f"In float32 growkern takes {turns['float32', 'growkern']:.2f} times the time of "
        f"`torch.compile` of plain, which takes {memory:.1f} times its memory and leaves "
        f"{error:.0f} times its error"
    )
    left = ratio("gradient error", "float32", float32, "torch.compile")
    assert says(
        f"growkern takes {turns['float32', float32]:.2f} of the time of "
        f"`torch.compile`, and has {left:.2f} of its error"
    )


def test_the_sentences_on_labels_alone_match_their_results():
    """bench.report writes the table above them, and test_render.py compares it."""
    names, found = ("kl_mlm_loss", "linear_kl_mlm_loss"), []
    rows = {name: check_source(name)["rows"] for name in names}
    for name in names:
        ours = [row for row in rows[name] if row["provider"] == "growkern"]
        assert ours and all(row["x compile"] <= 1 for row in ours)
        found += [row for row in rows[name] if row["provider"] == "growkern, labels alone"]
    (above,) = [row for row in found if row["x compile"] > 1]
    assert above["shape"].startswith("256x") and above in rows["linear_kl_mlm_loss"]
    assert says(
        f"With labels alone 1 of {len(found)} cases is slower: 256 rows of `linear_kl_mlm_loss` "
        f"in {above['dtype']}, with two threads, take {above['x compile']:.2f} of its time"
    )

    def memory(dtype, rows_of_it):
        ours, plain = (
            row["extra MiB"]
            for name in ("growkern", "plain")
            for row in rows["linear_kl_mlm_loss"]
            if (row["provider"], row["dtype"]) == (f"{name}, labels alone", dtype)
            and row["shape"].startswith(f"{rows_of_it}x")
        )
        return f"{ours / plain:.2f}"

    many, few = ([memory(dtype, n) for dtype in ("bfloat16", "float32")] for n in (2048, 256))
    assert says(
        f"takes {many[0]} (bfloat16) and {many[1]} (float32) of the memory of plain PyTorch for "
        f"2048 rows, and {few[0]} and {few[1]} for 256 rows"
    )


def test_the_sentence_on_another_processor_matches_its_result():
    document = check_source("linear_kl_mlm_loss-intel")
    assert "AMD" in check_source("linear_kl_mlm_loss")["machine"]["cpu"]
    assert "Intel" in document["machine"]["cpu"]
    found = {(row["dtype"], row["provider"]): row.get("x compile") for row in document["rows"]}
    teacher, logits, narrow, labels, narrow_labels = (
        f"{found[key]:.2f}"
        for key in (
            ("float32", "growkern"),
            ("float32", "growkern, float32 logits"),
            ("bfloat16", "growkern"),
            ("float32", "growkern, labels alone"),
            ("bfloat16", "growkern, labels alone"),
        )
    )
    assert says(
        f"the same 256 rows with a teacher take {teacher} times the time of `torch.compile` in "
        f"float32, {logits} with float32 logits, and {narrow} in bfloat16; with labels alone "
        f"{labels} and {narrow_labels}"
    )


def test_the_table_of_grow_checkpoint_matches_its_result():
    small, medium, large, cold = check_source("grow_checkpoint")["rows"]
    assert [row["cache"] for row in (small, medium, large, cold)] == ["warm"] * 3 + ["cold"]
    digits = {id(small): 2}
    expected = [
        [
            f"{row['target GB']:.2f} GB" + (", files not in memory" if row is cold else ""),
            f"{row['stream s']:.{digits.get(id(row), 1)}f} s",
            f"{row['stream peak MB']:.0f} MB",
            f"{row['cp, on disk s']:.{digits.get(id(row), 1)}f} s",
        ]
        for row in (large, medium, small, cold)
    ]
    assert table_with("grown on disk to")[1:] == expected


def test_the_table_of_a_whole_process_matches_its_result():
    document = check_source("grow_optimizer")
    limit = document["machine"]["memory_limit"]
    head, *lines = table_with("a whole process with")
    assert f"--memory-limit {limit}`" in head[0]
    for row, line in zip(document["rows"], lines, strict=True):
        written, peak = f"{row['written GB']:.1f} GB", f"{row['process peak MB']:.0f} MB"
        assert line[1:] == [written, peak, f"{row['seconds']:.0f} s"]
        assert says(f"take {row['base MB']:.0f} MB of each")
    assert all(row["repeats"] == 1 for row in document["rows"]) == says("Measured once")


# digits of the errors at the top of the README, in per cent
WRONG = {"plain": 0, "growkern": 2}


def test_the_readmes_table_matches_its_results():
    large = check_source("grow_checkpoint")["rows"][2]
    linear = {
        (row["dtype"], row["provider"]): row.get("gradient error")
        for row in check_source("linear_kl_mlm_loss")["rows"]
        if row["shape"].startswith("2048x")
    }
    # bench.report writes these tables
    bert = paper_lines("FPI + two stages", rate="0.002")
    gpt = paper_lines("FPI, padded stream", rate="0.003")
    padded, scratch = gpt["FPI, padded stream"], gpt["scratch"]
    assert padded["seeds"] == scratch["seeds"] == "3"
    shares = [re.findall(r"[\d.]+", line["FLOPs saved"]) for line in (padded, gpt["FPI"])]
    quoted = [" ± ".join(f"{float(x):.0f}" for x in pair) for pair in shares]
    assert says("saves {} % of the training FLOPs, and copies {} %".format(*quoted))
    expected = [
        (
            f"growing a Llama to {large['target GB']:.2f} GB, disk to disk, 2 cores",
            f"{large['stream s']:.1f} s, {large['stream peak MB']:.0f} MB of memory",
            f"`cp` of the same bytes: {large['cp, on disk s']:.1f} s",
        ),
        (
            "gradient error in bfloat16, of a student that moved 5 % away from its teacher",
            f"{linear['bfloat16', 'growkern']:.2%}",
            f"plain PyTorch: {linear['bfloat16', 'plain']:.0%}, with `torch.compile`: "
            f"{linear['bfloat16', 'torch.compile']:.0%}",
        ),
        (
            "loss of a GPT-2 of 4 x 128 after 2,000 steps, grown from 4 x 64, 3 seeds",
            padded["all"],
            f"from scratch: {scratch['all']}",
        ),
        *(
            (
                f"training FLOPs saved to reach the loss from scratch, {of}",
                line["FLOPs saved"],
                "with the small model's own training: " + line["source counted"],
            )
            for of, line in (
                ("the same runs", padded),
                (f"BERT of the same sizes, FPI, {bert['FPI']['seeds']} seeds", bert["FPI"]),
            )
        ),
    ]
    assert [tuple(row) for row in table_with("measured")[1:]] == expected
    wrong = [f"{100 * linear['bfloat16', name]:.{d}f} %" for name, d in WRONG.items()]
    assert says(
        f"In bfloat16 plain PyTorch gets the gradient of this loss {wrong[0]} wrong, "
        f"and growkern {wrong[1]}."
    )


def test_the_logs_table_of_split_products_matches_its_result():
    rows = check_source("split_products")["rows"]
    text = LOG.replace("\n  |", "\n|")
    (lines,) = [found[1:] for found in tables(text) if found[0][-1] == "TFLOP/s in the model"]
    assert len(lines) == 5
    for name, *errors, rate in lines:
        own = [row for row in rows if row["products"] == name]
        assert errors == [f"{row['error of dX']:.1e}" for row in own], name
        assert {rate} == {f"{row['TFLOP/s']:.0f}" for row in own}, name


def test_figures_made_from_results_have_sources():
    """bench.report writes the block of `expand`, and test_render.py compares it."""
    if "not measured yet" not in TEXT.split("<!-- cpu-expand -->")[1].split("<!-- /")[0]:
        check_source("expand")


def test_every_result_of_a_gpu_names_commit_machine_and_date():
    for path in results.RESULTS.glob("*/*.json"):
        facts = results.read(path).get("machine", {})
        missing = [
            key for key in ("gpu", "sources", "commit", "date", "torch") if not facts.get(key)
        ]
        assert not missing, f"{path.name}: {missing}"


def test_named_pictures_and_results_exist():
    pages = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "bench" / "LOG.md"]
    for page in pages:
        for target in re.findall(r"\]\(((?:\.\./)?bench/results[^)#]*)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} names {target}"


def test_without_gpu_results_no_speed_is_claimed():
    """Without results of a GPU no page gives a rate or a factor for one."""
    if any(results.RESULTS.glob("*/*.json")):
        return
    section = TEXT.split("## On a GPU")[1].split("\n## ")[0]
    figures = re.findall(r"\d[\d.,]*\s*(?:x|TB/s|GB/s|TFLOP/s|tokens/s|ms)\b", section)
    assert not figures, figures


def test_the_model_of_time_counts_the_passes():
    """By hand: one product sums dW, of one chunk or of several, or two products do."""
    N, V, H, H_t = 256, 1024, 64, 32
    one = time_model.estimate((N, V, H, H_t))
    assert one.chunks == one.products == 1
    assert one.gemms == pytest.approx(
        2 * N * V * (3 * H + H_t) / time_model.DTYPES["bfloat16"].flops
    )
    moved = N * V * (4 + 18)
    assert sum(one.passes.values()) * time_model.BANDWIDTH == pytest.approx(moved)
    assert one.extra_bytes == 8 * N * V + 2 * V * H
    biased = time_model.estimate((N, V, H, H_t), bias=True)
    assert (biased.seconds - one.seconds) * time_model.BANDWIDTH == pytest.approx(2 * N * V)
    some = time_model.estimate((2048, V, H, H_t))
    assert (some.chunks, some.products, some.passes["sums of dW"]) == (8, 1, 0)
    # more rows than 1 GiB of dz
    two = time_model.estimate((1 << 20, V, H, H_t))
    assert two.products == 2
    assert two.passes["sums of dW"] * time_model.BANDWIDTH == pytest.approx(16 * V * H)


@pytest.mark.parametrize("row_kernel", time_model.ROW_KERNELS)
@pytest.mark.parametrize("size, name", [(2, "bf16"), (4, "fp32")])
def test_the_model_of_time_counts_the_bytes_of_the_machine_code(row_kernel, size, name):
    prefix = "" if row_kernel == "Triton" else f"{row_kernel} "
    kernel = f"{prefix}kl_mlm rows linear, {name} gradient"
    (counted,) = {
        row["bytes per element"]
        for row in results.read(results.RESULTS / "aot.json")["rows"]
        if (row["kernel"], row["arch"]) == (kernel, "sm_90")
    }
    assert time_model.ROW_KERNELS[row_kernel][size] + size == counted


@pytest.mark.parametrize("dtype, most", [("float32", 0.01), ("tf32", 0.05)])
def test_the_model_of_time_counts_the_products_of_float32_heads(dtype, most):
    """1 GiB of dz is held. The first product writes dW, and each other reads and writes it."""
    N, V, H, H_t = time_model.SHAPES[0]
    one = time_model.estimate((N, V, H, H_t), dtype=dtype)
    assert (one.chunks, one.products) == (32, 4)
    moved = one.passes["sums of dW"] * time_model.BANDWIDTH
    assert moved == pytest.approx(8 * V * H * 3)
    assert one.passes["row kernel, Triton"] * time_model.BANDWIDTH == pytest.approx(28 * N * V)
    assert one.passes["sums of dW"] <= most * one.gemms


class MostMemory(TorchDispatchMode):
    """The most memory that tensors take at a time beside `given`, in bytes; "meta" counts."""

    def __init__(self, given):
        super().__init__()
        self.live, self.peak = {}, 0
        self.given = [StorageWeakRef(x.untyped_storage()) for x in given]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.name().startswith(("aten::addmm", "aten::mm")) and "out" in kwargs:
            made = kwargs["out"]  # PyTorch has no fake of products with an out_dtype
        else:
            made = func(*args, **kwargs)
        for x in tree_leaves(made):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                ref = StorageWeakRef(storage)
                self.live[ref] = 0 if ref in self.given else storage.nbytes()
        self.live = {ref: n for ref, n in self.live.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self.live.values()))
        return made


def memory_of_a_sweep(N, V, H, H_t, monkeypatch, dtype=torch.bfloat16, **limits):
    """The most bytes that the GPU path takes beside its inputs."""
    # of a GPU: tensors without memory have a device of their own
    for size in (2, 4):
        monkeypatch.setitem(gemm.BALANCE, ("meta", size), gemm.BALANCE["cuda", size])
    monkeypatch.setitem(ROW_FUNCTIONS, "triton", lambda *args: None)
    monkeypatch.setattr(linear_op, "may_ask", lambda device: False)
    monkeypatch.setattr(gemm, "multiplies_wide", lambda device, factor: True)
    monkeypatch.setattr(gemm, "adds_wide", lambda device, factor: True)

    def made(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    heads = [Head(made(N, width), made(V, width), made(0)) for width in (H, H_t)]
    labels, kind = made(N, dtype=torch.int64), made(N, dtype=torch.int32)
    rows = RowInputs(labels, kind, made(2, N, dtype=torch.float32))
    want = [True, True, False]
    sizes = Sizes(V, V, **limits)
    settings = Settings(sizes, Maths(), False, False, want, torch.float32, "", "triton")
    with MostMemory([x for head in heads for x in head]) as found:
        _, _, *grads = linear_op.cleared_outputs(heads[0], rows.weights, False, want)
        linear_op.sweep(heads, rows, settings, [*grads[:2], None])
    return found.peak


@pytest.mark.parametrize("shape", [*time_model.SHAPES, (40_000, 30_522, 768, 512)])
@pytest.mark.parametrize(
    "name, precision", [("bfloat16", "highest"), ("float32", "highest"), ("tf32", "high")]
)
def test_the_model_counts_the_memory_that_the_sweep_takes(shape, name, precision, monkeypatch):
    """Besides it there are only hidden states of the rows and their gradient."""
    N, _, H, H_t = shape
    expected = time_model.estimate(shape, dtype=name).extra_bytes
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
    actual = memory_of_a_sweep(*shape, monkeypatch, dtype)
    assert expected <= actual <= 1.02 * expected + 8 * N * (H + H_t)


def memory_of_plain(N, V, H, H_t):
    def made(*shape):
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    student, teacher = ([made(N, width), made(V, width)] for width in (H, H_t))
    for x in student:
        x.requires_grad_()
    labels = torch.empty(N, dtype=torch.int64, device="meta")
    with MostMemory([*student, *teacher]) as found:
        plain(student, teacher, labels, 0.5).backward()
    return found.peak


def test_memory_of_the_widest_head_beside_plain(monkeypatch):
    """dW is all that plain holds for 228 rows. Beside it there is dz, 2 of its 36 bytes."""
    sizes = (128_256, 4096, 2048)

    def ratio(rows, **limits):
        return memory_of_a_sweep(rows, *sizes, monkeypatch, **limits) / memory_of_plain(
            rows, *sizes
        )

    assert ratio(256) <= 1
    assert 0.165 <= ratio(2048) < 0.175
    # the docstring of `linear_kl_mlm_loss`
    assert ratio(2048, vocab_tile=1024) <= 1 / 8
    assert ratio(2048, chunk_bytes=64 << 20) > ratio(2048)
    assert ratio(4096) <= 1 / 8
