"""The log's entries on training say what its runs say."""

import math

import pytest

from bench.paper.compare import interval, saved
from bench.shared import results
from tests.bench.pages import logs, more_saved, runs_of, says, shares_of, training_rows


def share(name, rate="0.002", baseline="tiny-bert/scratch"):
    """The per cent that a line saves with seed 1."""
    return 100 * saved(runs_of(name, rate), runs_of(baseline, rate))


def end(name, rate="0.002", seed=1):
    """The loss of a line's longest run."""
    return runs_of(name, rate, seed)[-1]["losses"][-1]


def test_runs_of_each_length_and_a_padded_hidden_state():
    direct, fpi, aki, padded, scratch = (
        [runs_of(f"tiny-gpt/{name}", "0.003", seed) for seed in (1, 2, 3)]
        for name in ("direct_copy", "fpi", "aki", "fpi_padded", "scratch")
    )
    first = [runs[0][0]["losses"][-1] for runs in (direct, fpi, aki)]
    assert logs("they are level ({:.3f}, {:.3f} and {:.3f})".format(*first))
    ends = [runs[0][-1]["losses"][-1] for runs in (direct, fpi)]
    assert logs("DirectCopy is at {:.3f} and FPI at {:.3f}".format(*ends))
    means = [
        sum(runs[-1]["losses"][-1] for runs in line) / 3 for line in (padded, fpi, direct, scratch)
    ]
    assert logs(
        "ends at {:.3f}, copies at {:.3f}, DirectCopy at {:.3f}, scratch at {:.3f}".format(*means)
    )
    below = [a[-1]["losses"][-1] - b[-1]["losses"][-1] for a, b in zip(fpi, padded, strict=True)]
    assert logs(f"Per seed it is {min(below):.3f} to {max(below):.3f} below copies")
    quarter = sum(runs[0]["losses"][-1] for runs in padded) / 3
    assert logs(f"the lowest of all ({quarter:.3f})")
    shares = [
        interval([100 * saved(own, base) for own, base in zip(line, scratch, strict=True)], 1)
        for line in (padded, fpi, direct)
    ]
    assert logs("Saved: {} %, copies {} %, DirectCopy {} %".format(*shares))


def rows_before_entry_77():
    """The runs with rows of another CPU, which this entry replaced."""
    other = results.read(results.RESULTS / "paper-other-cpu.json")["rows"]
    return training_rows() | {row["name"]: row for row in other}


def test_what_two_stages_save_less():
    for method in ("aki", "fpi"):
        less = more_saved("tiny-bert", method, f"{method}_two_stage", rows=rows_before_entry_77())
        assert logs("{:.1f}, {:.1f} and {:.1f} points less than".format(*less)), method
    rows = training_rows()
    longer = rows["tiny-bert-longer/mslt-2900-0.002-seed1"]["losses"][-1]
    assert logs(
        f"ends at {longer:.3f}, where training from scratch ends at {end('tiny-bert/scratch'):.3f}"
    )


def test_what_stage_1_is_worth():
    shares = [share(f"tiny-bert{part}/aki_two_stage") for part in ("-eb2", "", "-eb10", "-eb20")]
    assert math.isnan(shares[3])
    assert logs(
        f"AKI alone saves {share('tiny-bert/aki'):.1f} %. Stage 1 of 2, 5, 10 and 20 fortieths: "
        "{:.1f}, {:.1f}, {:.1f} %, and not reached".format(*shares)
    )
    assert logs(f"from two layers: {share('tiny-bert-lb2/aki_two_stage'):.1f} %")
    alone, after, deeper = (
        runs_of(name)
        for name in (
            "tiny-bert/aki_adamw",
            "tiny-bert/aki_after_stage1",
            "tiny-bert-lb2/aki_after_stage1",
        )
    )
    lower = [
        [a["losses"][-1] - b["losses"][-1] for a, b in zip(alone, runs, strict=True)]
        for runs in (after, deeper)
    ]
    assert logs(
        "{:.3f} lower after 500 steps, {:.3f} after 1,000 and {:.3f} after".format(*lower[0])
    )
    assert logs("from two layers {:.3f}, {:.3f} and {:.3f}".format(*lower[1]))
    scratch = runs_of("tiny-bert/scratch")
    base = 100 * saved(alone, scratch)
    more = [100 * saved(runs, scratch) - base for runs in (after, deeper)]
    assert logs("that is {:.1f} and {:.1f} points more".format(*more))
    rows = training_rows()
    costs = [
        100
        * rows[f"tiny-bert{part}/stage1-250-0.002-seed1"]["flops"][-1]
        / scratch[-1]["flops"][-1]
        for part in ("", "-lb2")
    ]
    assert logs("stages are {:.1f} and {:.1f} % of training".format(*costs))


def test_teachers_and_smaller_sources():
    lower = end("tiny-gpt/taught", "0.003") - end("tiny-gpt/taught_by_two", "0.003")
    assert logs(f"Two teachers end {lower:.3f} below one")
    names = ["taught", "taught_by_two", "taught_by_generations"]
    names += [f"taught_top{k}" for k in (1, 4, 16, 64)]
    shares = [share(f"tiny-gpt/{name}", "0.003", "tiny-gpt/scratch") for name in names]
    grown = share("tiny-gpt/fpi_padded", "0.003", "tiny-gpt/scratch")
    assert logs(f"saves {min(shares):.0f} to {max(shares):.0f} %, growth of the same small")
    assert logs(f"growth of the same small model {grown:.0f} %")
    rates = {"aki": "0.002", "direct_copy": "0.001"}
    scratch = runs_of("tiny-bert/scratch")
    whole = [
        100 * saved(runs_of(f"tiny-bert/{name}", rate), scratch) for name, rate in rates.items()
    ]
    rates["direct_copy"] = "0.002"
    half = [
        100 * saved(runs_of(f"tiny-bert-from2x64/{name}", rate), scratch)
        for name, rate in rates.items()
    ]
    assert logs("From half the layers they save {:.1f} and {:.1f} %".format(*half))
    assert logs("from all {:.1f} and {:.1f} %".format(*whole))


def test_narrow_sources_with_a_padded_hidden_state():
    quarter = [end("tiny-bert-from4x32/fpi_padded"), end("tiny-bert-from4x32/aki", "0.004")]
    assert logs(
        "From 4 x 32 the padded model ends at {:.3f}, AKI at {:.3f}, scratch at {:.3f}".format(
            *quarter, end("tiny-bert/scratch")
        )
    )
    eighth = [end(f"tiny-bert-from4x16/{name}", "0.004") for name in ("fpi_padded", "aki")]
    assert logs("From 4 x 16 it is {:.3f} and {:.3f}".format(*eighth))
    scratch = runs_of("tiny-bert/scratch")
    half = [
        100 * saved(runs_of(f"tiny-bert-from2x64/{name}"), scratch)
        for name in ("fpi_padded", "aki")
    ]
    assert logs("the padded model saves {:.1f} %, AKI {:.1f} %".format(*half))
    rows = training_rows()
    ends = [
        rows[f"tiny-bert{part}/source-2000-0.003-seed1"]["losses"][-1] for part in ("-from4x32", "")
    ]
    assert logs("The source of 4 x 32 ends at {:.2f}, that of 4 x 64 at {:.2f}".format(*ends))


def test_equal_seeds_and_directions():
    shares, counted = (
        [
            interval(
                [
                    100
                    * saved(
                        runs_of(f"{name}/fpi_padded", rate, seed),
                        runs_of("tiny-gpt/scratch", "0.003", seed),
                        with_source=with_source,
                    )
                    for seed in (1, 2, 3)
                ],
                1,
            )
            for name, rate in (
                ("tiny-gpt-at10", "0.009"),
                ("tiny-gpt-at30", "0.009"),
                ("tiny-gpt", "0.003"),
            )
        ]
        for with_source in (False, True)
    )
    assert logs("10, 30 and 100 % saves {}, {} and {} %".format(*shares))
    means = [text.split(" ± ")[0] for text in counted]
    assert logs("with the source's training {}, {} and {} % with intervals".format(*means))
    more = [
        interval(more_saved("tiny-bert", *names, rates={"direct_copy": "0.001"}), 1)
        for names in (("fpi", "aki"), ("aki", "direct_copy"), ("direct_copy", "stackbert"))
    ]
    assert logs(
        "FPI saves {} points more than AKI, AKI {} more than DirectCopy, DirectCopy {} more than "
        "StackBERT".format(*more)
    )
    ends = [
        end(f"tiny-gpt{name}/{system}", "0.003")
        for name, grown in (
            ("", "fpi_padded"),
            ("-8x96", "padded_identity"),
            ("-16x64", "fpi_identity"),
        )
        for system in ("scratch", grown)
    ]
    assert logs(
        "from scratch and grown: {:.3f} and {:.3f}, both axes {:.3f} and {:.3f}, depth {:.3f} and "
        "{:.3f}".format(*ends)
    )


def test_equal_copies_long_sources_and_shorter_runs():
    scratch = runs_of("tiny-bert/scratch")
    lines = [runs_of(f"tiny-bert/{name}") for name in ("fpi_none", "aki", "fpi")]
    shares = [100 * saved(runs, scratch) for runs in lines]
    assert logs("equal copies save {:.1f} %, AKI {:.1f} %, routing {:.1f} %".format(*shares))
    above = lines[0][-1]["losses"][-1] - lines[1][-1]["losses"][-1]
    assert logs(f"equal copies are {above:.3f} above AKI")
    longer = 100 * saved(runs_of("tiny-bert-from4x32-longer/aki"), scratch)
    assert logs(f"far more than predicted: {longer:.1f} %")
    rows = training_rows()
    source = rows["tiny-bert-from4x32-longer/source-8000-0.003-seed1"]["losses"][-1]
    assert logs(f"Its source ends at {source:.2f}")
    deeper = [
        100
        * saved(
            [rows[f"{name}-{steps}-0.003-seed1"] for steps in (62, 125, 250, 500, 1000, 2000)],
            runs_of(f"{name.split('/')[0]}/scratch", "0.003"),
        )
        for name in (
            *(f"tiny-gpt-deep/{one}" for one in ("fpi_identity", "fpi", "fpi_interleave")),
            "tiny-gpt-16x64/fpi_identity",
        )
    ]
    assert logs(
        "{:.1f} % (identity), {:.1f} % (stack) and {:.1f} % (interleave) to twice the layers, "
        "{:.1f} % to four times".format(*deeper)
    )
    t5 = [
        100 * saved(runs_of(f"tiny-t5/{name}", rate), runs_of("tiny-t5/scratch", "0.001"))
        for name, rate in (
            *(("direct_copy", "0.001"), ("fpi", "0.002")),
            *(("aki", "0.002"), ("fpi_padded", "0.002")),
        )
    ]
    assert logs(
        "DirectCopy saves {:.1f} %, FPI {:.1f} %, AKI {:.1f} %, FPI with a padded hidden state "
        "{:.1f} %".format(*t5)
    )
    chosen, higher = (runs_of("tiny-bert/direct_copy", rate) for rate in ("0.001", "0.002"))
    shares = {f"{100 * saved(runs, scratch):.1f}" for runs in (chosen, higher)}
    lower = chosen[-1]["losses"][-1] - higher[-1]["losses"][-1]
    assert len(shares) == 1 and logs(f"ends {lower:.3f} lower, a little more than predicted")
    assert logs(f"saves {min(shares)} % at both rates")


def test_sixteen_layers():
    systems = ("stackbert", "direct_copy", "fpi_padded")
    folders = ("tiny-gpt-16x64", *2 * ("tiny-gpt-16x64-from16x32",))
    scratch = runs_of("tiny-gpt-16x64/scratch", "0.003")
    runs = [runs_of(f"{a}/{b}", "0.009") for a, b in zip(folders, systems, strict=True)]
    stacked, direct, padded = (100 * saved(one, scratch) for one in runs)
    assert logs(f"At 16 layers StackBERT saves {stacked:.1f} %, where at four it does not reach")
    shallow = [share(f"tiny-gpt/{name}", "0.003", "tiny-gpt/scratch") for name in systems]
    assert math.isnan(shallow[0])
    assert logs(f"DirectCopy saves {direct:.1f} % ({shallow[1]:.1f} % at four layers)")
    assert logs(f"hidden state {padded:.1f} % ({shallow[2]:.1f} %)")
    gap = runs[0][-1]["losses"][-1] - runs[1][-1]["losses"][-1]
    before = end("tiny-gpt/stackbert", "0.003") - end("tiny-gpt/direct_copy", "0.003")
    assert logs(f"StackBERT ends {gap:.3f} above DirectCopy, at four layers {before:.3f}")
    assert before / 2 < gap < before


def test_more_seeds_of_copies_and_of_stage_1():
    more = interval(more_saved("tiny-bert", "fpi_none", "aki"), 1)
    assert logs(f"At the mark they save {more} points more than AKI")
    stages = [f"tiny-bert{part}/aki_two_stage" for part in ("-eb2", "", "-eb10")]
    before = rows_before_entry_77()
    less = [interval(more_saved("tiny-bert", "aki", name, rows=before), 1) for name in stages]
    assert logs("10 save {}, {} and {} points less than AKI alone".format(*less))
    before = ("aki_after_stage1", "tiny-bert-lb2/aki_after_stage1")
    gains = [interval(more_saved("tiny-bert", name, "aki_adamw"), 1) for name in before]
    assert logs("stage 1 adds {} points, or {} from two layers".format(*gains))


def test_rows_of_another_cpu():
    rows = training_rows()
    ends = [rows[f"tiny-t5/scratch-2000-{x}-seed100"]["losses"][-1] for x in ("0.0005", "0.001")]
    assert logs("With 0.0005 it ends at {:.3f}, with 0.001 at {:.3f}".format(*ends))
    aki, fpi = (more_saved("tiny-bert", name, f"{name}_two_stage") for name in ("aki", "fpi"))
    assert logs("saves {:.1f}, {:.1f} and {:.1f} points less than AKI".format(*aki))
    assert logs("FPI {:.1f}, {:.1f} and {:.1f} less than FPI".format(*fpi))
    before = more_saved("tiny-bert", "fpi", "fpi_two_stage", rows=rows_before_entry_77())
    assert logs(f"{before[0]:.1f} points for one seed of FPI") and before[0] > 2 * fpi[0]
    less = interval(more_saved("tiny-bert", "aki_two_stage", "aki_two_stage_ki"), 1)
    assert logs(f"Inheritance on top saves {less} points less")


def test_more_seeds_of_teachers_and_of_t5():
    names = ("taught_by_generations", "taught", "taught_by_two")
    scratch = [runs_of("tiny-gpt/scratch", "0.003", seed) for seed in (1, 2, 3)]
    shares = [
        [
            100 * saved(runs_of(f"tiny-gpt/{name}", "0.003", seed), scratch[seed - 1])
            for seed in (1, 2, 3)
        ]
        for name in names
    ]
    texts = [interval(one, 1) for one in shares]
    assert logs("generations save {} %, one teacher {} % and two {} %".format(*texts))
    assert logs("than seed 1 said, {:.0f}, {:.0f} and {:.0f} %".format(*(x[0] for x in shares)))
    ends = [runs[-1]["losses"][-1] for runs in scratch]
    assert max(ends) == ends[0]
    rates = {"direct_copy": "0.001"}
    t5 = {
        name: [
            100
            * saved(
                runs_of(f"tiny-t5/{name}", rates.get(name, "0.002"), seed),
                runs_of("tiny-t5/scratch", "0.001", seed),
            )
            for seed in (1, 2, 3)
        ]
        for name in ("direct_copy", "fpi", "aki", "fpi_padded")
    }
    direct, fpi, aki, padded = ("{1:.1f} and {2:.1f} %".format(*one) for one in t5.values())
    assert logs(f"DirectCopy {direct}, FPI {fpi}, AKI {aki}, a padded hidden state {padded}.")
    assert max(abs(a - b) for a, b in zip(t5["fpi"], t5["aki"], strict=True)) < 3
    for seed in range(3):
        assert t5["direct_copy"][seed] < min(t5["fpi"][seed], t5["aki"][seed])
        assert t5["fpi_padded"][seed] > max(t5["fpi"][seed], t5["aki"][seed])


def test_aki_with_a_padded_stream_and_more_seeds_of_symmetry():
    names = ("scratch", "fpi_padded", "aki_padded", "fpi_none", "fpi_noise", "fpi_split", "fpi")
    ends = {
        name: [runs_of(f"tiny-gpt/{name}", "0.003", seed)[-1]["losses"][-1] for seed in (1, 2, 3)]
        for name in names
    }
    below = [a - b for a, b in zip(ends["fpi_padded"], ends["aki_padded"], strict=True)]
    assert logs("AKI ends {:.3f}, {:.3f} and {:.3f} below FPI".format(*below))
    assert min(below) > 0 and max(below) < 0.02
    more = interval(more_saved("tiny-gpt", "aki_padded", "fpi_padded", "0.003"), 1)
    assert logs(f"At equal loss it saves {more} points more.")
    for scratch, none, noise, split, routed in zip(
        *(ends[name] for name in ("scratch", "fpi_none", "fpi_noise", "fpi_split", "fpi")),
        strict=True,
    ):
        assert none > scratch and abs(split - routed) < 0.007 < 0.03 < noise - routed
        assert none - noise > 0.03
    missed = [a > b for a, b in zip(ends["fpi_noise"], ends["scratch"], strict=True)]
    assert sum(missed) == 1 and logs("With noise one seed does not reach the loss from scratch.")


def test_rates_once_more():
    rows = training_rows()

    def short(setting, rate):
        return rows[f"{setting}/direct_copy-500-{rate}-seed100"]["losses"][-1]

    assert logs("({:.3f} and {:.3f})".format(*(short("tiny-bert", r) for r in ("0.001", "0.002"))))
    assert logs(
        "({:.3f} at 0.001, {:.3f} at 0.002)".format(
            *(short("tiny-t5", rate) for rate in ("0.001", "0.002"))
        )
    )
    lower = [
        end("tiny-bert/direct_copy", "0.001", seed) - end("tiny-bert/direct_copy", "0.002", seed)
        for seed in (1, 2, 3)
    ]
    shares = shares_of("tiny-bert/direct_copy", "0.002")
    assert logs(f"{interval(lower)} lower, as low as FPI, and saves {sum(shares) / 3:.1f} %")
    fpi, aki = (
        interval(more_saved("tiny-bert", name, "direct_copy"), 1) for name in ("fpi", "aki")
    )
    assert logs(f"FPI saves {fpi} points more than that, in every seed. AKI saves {aki} points")


def test_more_seeds_of_optimizers_and_of_another_domain():
    default = [end("tiny-gpt/fpi_padded", "0.003", seed) for seed in (1, 2, 3)]
    plain = [end("tiny-gpt/padded_adamw", "0.003", seed) for seed in (1, 2, 3)]
    lower = sorted(a - b for a, b in zip(plain, default, strict=True))
    assert lower[0] > 0 and logs(f"lower than AdamW, by {lower[0]:.3f} to {lower[-1]:.3f}")
    more = interval(more_saved("tiny-gpt", "fpi_padded", "padded_adamw", "0.003"), 1)
    assert logs(f"It saves {more} points more.")
    rows = training_rows()
    higher = [
        rows[f"tiny-gpt-domain/adapted_taught-500-0.003-seed{seed}"]["losses"][-1]
        - rows[f"tiny-gpt-domain/adapted-500-0.003-seed{seed}"]["losses"][-1]
        for seed in (1, 2, 3)
    ]
    assert logs(f"ends {interval(higher)} higher with the small teacher")


def test_more_seeds_of_smaller_and_narrow_sources():
    half, longer, quarter = (
        shares_of(f"tiny-bert-{name}/aki", rate)
        for name, rate in (
            *(("from2x64", "0.002"), ("from4x32-longer", "0.002")),
            ("from4x32", "0.004"),
        )
    )
    assert logs("From 2 x 64 AKI saves {:.1f}, {:.1f} and at least {:.1f} %.".format(*half))
    assert longer[1] == pytest.approx(longer[2], abs=1e-3)
    assert logs("saves {:.1f} % and, with the other seeds, at least {:.1f} %".format(*longer))
    assert sum(map(math.isnan, quarter)) == 1


def test_stage_1_before_a_gpt():
    names = "aki_adamw", "aki_after_stage1"
    lower, costs = [], []
    for seed in (1, 2, 3):
        alone, after = (runs_of(f"tiny-gpt/{name}", "0.003", seed) for name in names)
        lower.append(alone[-1]["losses"][-1] - after[-1]["losses"][-1])
        whole = runs_of("tiny-gpt/scratch", "0.003", seed)[-1]["flops"][-1]
        costs.append(100 * (after[0]["source flops"] - alone[0]["source flops"]) / whole)
    more = more_saved("tiny-gpt", *reversed(names), "0.003")
    assert logs("lowers the final loss by {:.3f}, {:.3f} and {:.3f}".format(*lower))
    assert max(lower) < 0.02 and max(more) < min(costs)
    cost = sum(costs) / 3
    texts = [f"{one:.1f}" for one in more]
    assert logs("adds {}, {} and {} points, and costs".format(*texts) + f" {cost:.1f} % of")
    assert says("adds {}, {} and {} points to what AKI saves with".format(*texts))
    assert says(f"and costs {cost:.1f} % of the FLOPs from scratch:")
