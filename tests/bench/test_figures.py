"""All figures in the README and the documentation come from a commit and a machine with names."""

import re

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.paper.tables import interval, saved
from bench.shared import results, time_model
from bench.shared.loss_measure import plain
from growkern.ops.loss.linear import gemm
from growkern.ops.loss.linear import op as linear_op
from growkern.ops.loss.linear.heads import Head, Settings, Sizes
from growkern.ops.loss.rows.op import ROW_FUNCTIONS
from growkern.ops.loss.rows.state import Maths, RowInputs

ROOT = results.ROOT
OPTIMIZERS = ("adamw", "growth")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = "\n".join(page.read_text() for page in PAGES)
CLEAN = re.compile(r"[0-9a-f]{7,40}")


def tables(text):
    """The Markdown tables of a text, each as a list of rows of cells. The first row is the head."""
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.M):
        lines = [[c.strip() for c in line.strip("|").split("|")] for line in block.splitlines()]
        yield [lines[0], *lines[2:]]


def table_with(head):
    (found,) = [table for table in tables(TEXT) if table[0][0].startswith(head)]
    return found


def check_source(name):
    """Check that a quoted result names its machine and a commit without changes: its document."""
    document = results.read(results.RESULTS / f"{name}.json")
    assert document, f"{name}.json is missing or broken, so the README's figures have no source"
    facts = document["machine"]
    assert CLEAN.fullmatch(document.get("commit") or facts.get("commit", "")), f"{name}: no commit"
    assert not facts.get("dirty"), f"{name}: measured from sources that were not committed"
    assert facts.get("cpu") or facts.get("gpu") or facts.get("devices"), f"{name}: no machine"
    return document


def test_the_demo_matches_its_result():
    """bench.report writes its table, and test_render.py compares it."""
    document = check_source("demo")
    seconds = sum(source["seconds"][-1] for source in document["sources"])
    seconds += sum(curve["seconds"][-1] for curve in document["curves"])
    assert says(f"Two seeds, {seconds:.0f} s of training") and len(document["seeds"]) == 2
    source, target = (document["config"][name] for name in ("source", "target"))
    sizes = [f"{size['n_layer']} x {size['n_embd']}" for size in (target, source)]
    assert says(f"grows it to {sizes[0]}") and says(f"{source['n_layer']} layers x")


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


def says(sentence):
    """Whether a page has these words, with any line breaks."""
    return " ".join(sentence.split()) in " ".join(TEXT.split())


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


def test_the_table_at_the_best_rate_matches_its_result():
    rows = results.quotable(results.RESULTS / "symmetry.json")["rows"]
    head, *lines = table_with("at 5e-4")
    assert head[1] == "small model, trained on" and len(lines) == 2
    setups = [("continued", 0, "adamw")]
    setups += [(*kind, name) for kind in (("noise", 0.5), ("routing", 1)) for name in OPTIMIZERS]
    for model, *cells in lines:
        for cell, (symmetry, amplitude, optimizer) in zip(cells, setups, strict=True):
            found = [
                row["losses"]["2000"]
                for row in rows
                if (row["model"], row["steps"], row["rate"]) == (model, 2000, 5e-4)
                and (row["symmetry"], row["optimizer"]) == (symmetry, optimizer)
                and (row["amplitude"] or 0, row.get("warmup", 50)) == (amplitude, 50)
            ]
            assert len(found) == 3 and cell == f"{sum(found) / 3:.3f}", (model, symmetry, optimizer)


# digits of the errors at the top of the README, in per cent
WRONG = {"plain": 0, "growkern": 1}


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
    assert says("saves {} % of the training FLOPs, copies {} %".format(*quoted))
    expected = [
        (
            f"growing a Llama to {large['target GB']:.2f} GB, disk to disk, 2 cores",
            f"{large['stream s']:.1f} s, {large['stream peak MB']:.0f} MB of memory",
            f"`cp` of the same bytes: {large['cp, on disk s']:.1f} s",
        ),
        (
            "gradient error in bfloat16, of a student that moved 5 % away from its teacher",
            f"{linear['bfloat16', 'growkern']:.2%}",
            f"`torch.compile` of plain PyTorch: {linear['bfloat16', 'torch.compile']:.0%}",
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
                "with the small model's own training: " + line["with the source's"],
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


def paper_lines(name, **known):
    """The lines by their systems of the table of training in which `name` stands with `known`."""
    for head, *lines in tables(TEXT):
        found = {line[0]: dict(zip(head, line, strict=True)) for line in lines}
        if head[0] == "system" and name in found and known.items() <= found[name].items():
            return found
    raise AssertionError(name)


def test_the_sentences_on_copies_match_their_table():
    found = paper_lines("FPI, equal copies")
    ends = {name: float(line["all"].split()[0]) for name, line in found.items()}
    assert says(f"FPI ends {ends['FPI, equal copies'] - ends['FPI, routing']:.2f} lower")
    assert found["FPI, equal copies"]["FLOPs saved"].startswith("not reached")
    # the table of GPT-2 has the same runs
    beside = paper_lines("FPI", all=found["FPI, routing"]["all"])
    assert abs(float(beside["AKI"]["all"]) - ends["FPI, routing"]) < 0.005
    assert abs(ends["FPI, unequal shares"] - ends["FPI, routing"]) < 0.005
    assert ends["FPI, noise 0.5"] > ends["FPI, routing"] + 0.04
    more = interval(more_saved("tiny-gpt", "aki", "fpi", "0.003"), 1)
    assert says(f"Over three seeds AKI saves {more} points more than FPI with routing")


def first(cell):
    """The mean in a cell of a table, without its interval."""
    return float(cell.split()[0])


def test_the_sentences_on_bert_match_their_table():
    found = paper_lines("FPI + two stages", rate="0.002")
    shares = {name: first(line["FLOPs saved"]) for name, line in found.items() if name != "MSLT"}
    ranks = ["FPI", "AKI", "AKI + two stages", "StackBERT"]
    assert sorted(ranks, key=shares.get, reverse=True) == ranks
    assert {found[name]["seeds"] for name in found} == {"3"}
    assert min(shares[name] for name in ("FPI", "AKI", "DirectCopy")) > 45
    more = {
        names: more_saved("tiny-bert", *names, rates={"direct_copy": "0.001"})
        for names in (
            ("fpi", "aki"),
            ("aki", "direct_copy"),
            ("direct_copy", "stackbert"),
            ("aki", "aki_two_stage"),
            ("aki_two_stage", "aki_two_stage_ki"),
        )
    }
    assert all(min(found) > 0 for found in more.values())
    texts = [interval(found, 1) for found in more.values()]
    assert says("FPI saves {} points more than AKI, AKI {} more than DirectCopy".format(*texts))
    assert says(f"and DirectCopy {texts[2]} more than StackBERT")
    assert says(f"Two stages save {texts[3]} points less than AKI alone")
    assert says(f"Inheritance on top saves {texts[4]} points less")
    lower = first(found["AKI + two stages"]["all"]) - first(
        found["AKI + two stages + inheritance"]["all"]
    )
    assert says(f"It ends {lower:.3f} lower, and its teacher costs")
    staged = found["AKI + two stages"]
    higher = first(staged["all"]) - first(found["AKI"]["all"])
    assert says(f"but the model ends {higher:.2f} higher")
    stacked, copied = (found[name]["with the source's"] for name in ("StackBERT", "DirectCopy"))
    assert says(f"{first(stacked):.0f} %, beside {first(copied):.0f} % for DirectCopy")
    assert found["MSLT"]["FLOPs saved"] == "not reached by 3 of 3"
    rows = training_rows()
    mslt, scratch = (
        rows[f"tiny-bert/{name}-2000-0.002-seed1"]["flops"][-1] for name in ("mslt", "scratch")
    )
    assert says(f"in as many steps it spends {mslt / scratch:.2f} of the FLOPs")
    longer = paper_lines("MSLT, as many FLOPs as scratch")["MSLT, as many FLOPs as scratch"]
    assert says(f"MSLT ends {-first(longer['below it']):.2f} above training from scratch")
    spent = rows["tiny-bert-longer/mslt-2900-0.002-seed1"]["flops"][-1]
    assert spent == pytest.approx(scratch, rel=0.005)


def training_rows():
    return {row["name"]: row for row in results.read(results.RESULTS / "paper.json")["rows"]}


def runs_of(name, rate="0.002", seed=1):
    """The runs of a setting and system with a seed, after 500, 1000 and 2000 steps."""
    rows = training_rows()
    return [rows[f"{name}-{steps}-{rate}-seed{seed}"] for steps in (500, 1000, 2000)]


def more_saved(setting, one, other, rate="0.002", rates=None):
    """How many points `one` saves more than `other`, for each of three seeds."""
    differences = []
    for seed in (1, 2, 3):
        scratch = runs_of(f"{setting}/scratch", rate, seed)
        runs = [
            runs_of(f"{setting}/{name}", (rates or {}).get(name, rate), seed)
            for name in (one, other)
        ]
        first, second = (100 * saved(own, scratch) for own in runs)
        differences.append(first - second)
    return differences


def test_the_sentences_on_gpt2_match_their_table():
    padded, copied, direct = (
        [runs_of(f"tiny-gpt/{name}", "0.003", seed)[-1]["losses"][-1] for seed in (1, 2, 3)]
        for name in ("fpi_padded", "fpi", "direct_copy")
    )
    below = [a - b for a, b in zip(copied, padded, strict=True)]
    assert says(f"below FPI in every seed, by {min(below):.2f} to {max(below):.2f}")
    lower = sum(padded) / 3 - sum(direct) / 3
    assert says(f"ends lower still, by {lower:.2f};")
    more = interval(more_saved("tiny-gpt", "fpi_padded", "fpi", "0.003"), 1)
    assert says(f"Paired by seed it saves {more} points more")
    more = interval(more_saved("tiny-gpt", "direct_copy", "fpi_padded", "0.003"), 1)
    assert says(f"the saving is about the same, {more} points more")
    alone = paper_lines("StackBERT", rate="0.003")
    assert all(line["seeds"] == "1" for line in alone.values())
    for name in ("StackBERT", "MSLT"):
        assert alone[name]["FLOPs saved"] == "not reached by 1 of 1"
    assert float(alone["AKI + two stages"]["all"]) > float(alone["AKI"]["all"])


def test_the_sentence_on_the_source_matches_its_runs():
    rows = training_rows()
    ends = [
        rows[f"tiny-gpt{name}-seed1"]["losses"][-1]
        for name in ("/source-2000-0.003", "-at400/source-8000-0.003")
    ]
    assert says("that of GPT-2 falls from {:.2f} to {:.2f}".format(*ends))
    scratch = runs_of("tiny-gpt/scratch", "0.003")[-1]["losses"][-1]
    assert ends[1] < scratch < ends[0]


def test_the_sentences_on_stage_1_match_their_table():
    scratch, aki = runs_of("tiny-bert/scratch"), runs_of("tiny-bert/aki")
    stages = [runs_of(f"tiny-bert{part}/aki_two_stage") for part in ("-eb2", "", "-eb10", "-eb20")]
    ends = [one[-1]["losses"][-1] for one in (aki, *stages)]
    assert ends == sorted(ends)
    assert says(f"AKI alone ends at {ends[0]:.3f} and saves {100 * saved(aki, scratch):.1f} %")
    deeper = runs_of("tiny-bert-lb2/aki_two_stage")[-1]["losses"][-1]
    assert abs(deeper - ends[2]) < 0.001

    alone, after, deeper = (
        100 * saved(runs_of(name), scratch)
        for name in (
            "tiny-bert/aki_adamw",
            "tiny-bert/aki_after_stage1",
            "tiny-bert-lb2/aki_after_stage1",
        )
    )
    assert says(f"adds {after - alone:.1f} points") and says(
        f"or {deeper - alone:.1f} with sub-mod"
    )
    rows, whole = training_rows(), scratch[-1]["flops"][-1]
    cost, more = (
        100 * rows[f"tiny-bert{part}/stage1-250-0.002-seed1"]["flops"][-1] / whole
        for part in ("", "-lb2")
    )
    assert says(f"costs {8 * cost / 100:.2f} of a whole step")
    assert says(f"it costs {cost:.1f} or {more:.1f} % of the FLOPs from scratch")
    assert after - alone < cost and deeper - alone < more


def test_the_sentences_on_smaller_sources_match_their_table():
    scratch = runs_of("tiny-bert/scratch")
    short, whole = (
        [100 * saved(runs_of(name), scratch, with_source=counted) for counted in (False, True)]
        for name in ("tiny-bert-from2x64/aki", "tiny-bert/aki")
    )
    assert says("saves {:.1f} % with AKI, and {:.1f} % with its own".format(*short))
    assert says("one of 4 x 64 saves {:.1f} and {:.1f} %".format(*whole))
    narrow = runs_of("tiny-bert-from4x32/aki", "0.004")
    ahead = [
        base["losses"][-1] - own["losses"][-1] for own, base in zip(narrow, scratch, strict=True)
    ]
    assert ahead[1] > 0 and says(f"after half of the steps, and ends {-ahead[2]:.2f} above it")
    padded = runs_of("tiny-bert-from4x32/fpi_padded")[-1]["losses"][-1]
    assert says(f"it ends {padded - scratch[-1]['losses'][-1]:.2f} above")
    own = [
        training_rows()[f"tiny-bert{name}/source-2000-0.003-seed1"]["losses"][-1]
        for name in ("-from4x32", "")
    ]
    assert says("its own loss is {:.2f}, that of 4 x 64 is {:.2f}".format(*own))


def test_the_sentences_on_inheritance_match_their_tables():
    found = paper_lines("taught by the source")
    lines = [
        found[name]
        for name in (
            "taught by the source",
            "taught by two sources",
            "taught by a middle size, that by the source",
        )
    ]
    below = [line["below it"] for line in lines]
    assert says("by {:.2f}, two by {:.2f}, and one that was".format(*map(float, below)))
    gains = [first(line["FLOPs saved"]) for line in lines]
    assert says("they save {:.0f}, {:.0f} and {:.0f} % of the FLOPs".format(*gains))
    kept = [float(found[f"taught, {k} tokens kept"]["below it"]) for k in (1, 4, 16, 64)]
    assert [*kept, float(below[0])] == sorted([*kept, float(below[0])])
    assert says(f"ends {float(below[0]) - kept[-1]:.3f} above the one beside the teacher")
    taught = {name: line for name, line in found.items() if name != "scratch"}
    assert {line["seeds"] for line in taught.values()} == {"1"}
    assert max(first(line["with the source's"]) for line in taught.values()) < 0

    rows = training_rows()
    flops = {
        name: rows[f"tiny-gpt/{name}-2000-0.003-seed1"]["flops"][-1]
        for name in ("scratch", "taught", "taught_top64")
    }
    # the runs of kept predictions count no teacher
    assert flops["scratch"] == flops["taught_top64"]
    assert says(f"it is {flops['taught'] / flops['scratch'] - 1:.0%}".replace("%", " %"))
    grown = saved(runs_of("tiny-gpt/fpi_padded", "0.003"), runs_of("tiny-gpt/scratch", "0.003"))
    assert says(f"saves more, {100 * grown:.0f} % with the same seed") and 100 * grown > max(gains)

    ends = {
        name: rows[f"tiny-gpt-domain/{name}-0.003-seed1"]["losses"][-1]
        for name in ("adapted_taught-500", "adapted-500", "source_adapted-500", "adapted-250")
    }
    taught, alone, teacher, half = ends.values()
    assert says(f"with it the model ends at {taught:.3f}, alone at {alone:.3f}")
    assert says(f"This one ends at {teacher:.3f}. Alone, the model has {half:.3f} after half")


def test_the_sentences_on_directions_match_their_table():
    wide, deep, both = (
        [runs_of(f"{name}/{system}", "0.003") for system in ("scratch", grown)]
        for name, grown in (
            ("tiny-gpt", "fpi_padded"),
            ("tiny-gpt-16x64", "fpi_identity"),
            ("tiny-gpt-8x96", "padded_identity"),
        )
    )
    flops = [runs[0][-1]["flops"][-1] for runs in (wide, deep, both)]
    assert flops[1] == pytest.approx(flops[0], rel=0.005)
    assert says(f"a step of the last {flops[2] / flops[0]:.2f} times as much")
    for start in (0, 1):
        ends = [runs[start][-1]["losses"][-1] for runs in (wide, both, deep)]
        assert ends == sorted(ends)
    shares = [100 * saved(runs[1], wide[0]) for runs in (wide, both, deep)]
    assert says(
        "{:.0f} % fewer than the wide model from scratch, growth in both {:.0f} %, and in "
        "depth {:.0f} %".format(*shares)
    )
    gains = [runs[0][-1]["losses"][-1] - runs[1][-1]["losses"][-1] for runs in (deep, both, wide)]
    assert gains == sorted(gains, reverse=True)


def test_the_sentences_on_the_optimizer_match_their_table():
    found = paper_lines("FPI, padded stream, AdamW")
    rows = training_rows()
    default = rows["tiny-gpt/fpi_padded-2000-0.003-seed1"]["losses"][-1]
    assert says(f"the default ends at {default:.3f}")
    padded = "FPI, padded stream, "
    for name in ("AdamW", "grown moments"):
        assert abs(first(found[padded + name]["all"]) - default) <= 0.0105
    rewarmed = found[padded + "grown moments, re-warm-up"]
    assert float(rewarmed["rate"]) < float(found["FPI, padded stream"]["rate"])
    assert says(f"the long run ends {first(rewarmed['all']) - default:.2f} higher")


def test_the_sentences_on_when_to_grow_match_their_tables():
    moments = paper_lines("FPI, padded stream, after 10 %")
    counted = [
        float(re.findall(r"-?[\d.]+", moments[f"FPI, padded stream, after {share} %"][column])[0])
        for column in ("FLOPs saved", "with the source's")
        for share in (10, 30, 100)
    ]
    gains, with_source = counted[:3], counted[3:]
    assert gains == sorted(gains)
    assert says("saved {:.0f} %, {:.0f} % and {:.0f} %".format(*gains))
    assert says(
        f"counted, {min(with_source):.1f} to {max(with_source):.1f} % is saved, and the inter"
    )
    cells = [
        moments[f"FPI, padded stream, after {share} %"]["with the source's"]
        for share in (10, 30, 100)
    ]
    spans = [[float(x) for x in re.findall(r"-?[\d.]+", cell)] for cell in cells]
    assert max(mean - half for mean, half in spans) < min(mean + half for mean, half in spans)
    cost = gains[2] - with_source[2]
    assert says(f"its training costs {cost:.0f} % of that of the large model")
    assert says(f"the small model alone has cost {4 * cost / 100:.1f} times")

    depth = paper_lines("FPI, identity, source of 200 steps")
    ends = {
        age: {
            way: float(depth[f"FPI, {way}, {age}"]["all"])
            for way in ("identity", "stack", "interleave")
        }
        for age in ("source of 200 steps", "source of 2,000 steps")
    }
    spread = {age: max(found.values()) - min(found.values()) for age, found in ends.items()}
    assert says(f"the three ways end within {spread['source of 200 steps']:.3f} of each other")
    assert says(f"ways ended within {spread['source of 2,000 steps']:.2f} of each other")
    start = {
        way: float(depth[f"FPI, {way}, source of 2,000 steps"]["start loss"])
        for way in ("identity", "stack")
    }
    old = ends["source of 2,000 steps"]
    assert min(old, key=old.get) == "stack" and max(old, key=old.get) == "identity"
    assert says(
        f"a stack starts {start['stack'] - start['identity']:.2f} higher than identity and ends "
        f"{old['identity'] - old['stack']:.2f} lower"
    )
    assert says("Both are of one seed") == all(line["seeds"] == "1" for line in depth.values())


def test_the_logs_table_of_split_products_matches_its_result():
    rows = check_source("split_products")["rows"]
    text = (ROOT / "bench" / "LOG.md").read_text().replace("\n  |", "\n|")
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
