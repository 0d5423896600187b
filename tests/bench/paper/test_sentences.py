"""Sentences between the tables of training say what the tables and their runs say."""

import math

import pytest

from bench.paper.compare import compared, interval, points_of, saved
from bench.paper.plans import TABLES, lines_of
from bench.paper.runs import CLASSES
from bench.shared import results
from growkern.plot.curve import first_crossing
from tests.bench.pages import (
    first,
    logs,
    more_saved,
    paper_lines,
    runs_of,
    says,
    shares_of,
    training_rows,
)


def ends_of(name, rate="0.002"):
    """The loss of a line's longest run, for each of three seeds."""
    return [runs_of(name, rate, seed)[-1]["losses"][-1] for seed in (1, 2, 3)]


def test_the_summary_matches_the_tables():
    bert, gpt = (
        paper_lines(name, rate=rate, seeds="3")[name]
        for name, rate in (("FPI", "0.002"), ("FPI, padded stream", "0.003"))
    )
    for column in ("FLOPs saved", "source counted"):
        assert says(f"BERT {bert[column]}, GPT-2 {gpt[column]}")
    assert says("DirectCopy saves as much in GPT-2, and less in BERT and T5")
    ahead = more_saved("tiny-gpt", "fpi_padded", "direct_copy", "0.003")
    assert abs(sum(ahead) / 3) < 3
    rates = {"direct_copy": "0.001"}
    assert min(more_saved("tiny-bert", "fpi", "direct_copy", rates=rates)) > 3
    assert says("AKI saves less in BERT, and as much in GPT-2 and T5")
    assert max(more_saved("tiny-bert", "aki", "fpi")) < 0
    more = more_saved("tiny-gpt", "aki", "fpi", "0.003"), saved_in_t5("aki", "fpi")
    assert all(abs(sum(one) / 3) < 3 for one in more)
    assert says("no, with a stage 1 of E_b = 5 they save less than growth alone")
    for name in ("aki_two_stage", "aki_two_stage_ki"):
        assert min(more_saved("tiny-bert", "aki", name)) > 0
    assert says("they save less than growth alone; with E_b = 2 it cannot be told")
    short, alone = (
        shares_of(name, "0.002") for name in ("tiny-bert-eb2/aki_two_stage", "tiny-bert/aki")
    )
    assert min(map(float.__sub__, short, alone)) < 0 < max(map(float.__sub__, short, alone))


def test_the_summary_of_small_models_and_optimizers_matches_the_tables():
    assert says("half the layers and half the width, or a quarter of the width if it was trained")
    half, longer = (
        shares_of(f"tiny-bert-{name}/aki", "0.002") for name in ("from2x64", "from4x32-longer")
    )
    assert min(*half, *longer) > 50
    assert any(map(math.isnan, shares_of("tiny-bert-from4x32/aki", "0.004")))
    assert says(
        "`GrowthAdamW` saves slightly more than AdamW. GPT-2 with copies: AdamW saves more."
    )
    assert min(more_saved("tiny-gpt", "fpi_padded", "padded_adamw", "0.003")) > 0
    for name, title in (("fpi", "FPI"), ("aki", "AKI")):
        lower = sorted(
            one - other
            for one, other in zip(
                *(ends_of(f"tiny-gpt/{one}", "0.003") for one in (name, f"{name}_adamw")),
                strict=True,
            )
        )
        assert lower[0] > 0 and says(f"{lower[0]:.3f} to {lower[-1]:.3f} with {title}")
    more, less = (
        [
            more_saved("tiny-gpt", *(one.format(name) for one in pair), "0.003")
            for name in ("fpi", "aki")
        ]
        for pair in (("{}_adamw", "{}"), ("direct_copy", "{}_adamw"))
    )
    assert min(min(one) for one in (*more, *less)) > 0
    texts = [[interval(one, 1) for one in both] for both in (more, less)]
    assert says("It saves {} and {} points more".format(*texts[0]))
    assert says("that is still {} and {} points less than DirectCopy".format(*texts[1]))
    assert logs(f"AKI with copies saves {texts[0][1]} points more with AdamW")
    assert logs(
        f"FPI saves {texts[0][0]} points more, and DirectCopy {texts[1][0]} more than that."
    )
    assert logs(f"For AKI these are {texts[0][1]} and {texts[1][1]}.")
    copied = interval(shares_of("tiny-gpt/fpi_adamw", "0.003"), 0)
    assert says(f"With AdamW in place of `GrowthAdamW` copies save {copied} %.")
    more = more_saved("tiny-bert", "aki_adamw", "aki")
    assert says(f"It saves {interval(more, 1)} points more, so at equal loss")
    ends = zip(ends_of("tiny-bert/aki"), ends_of("tiny-bert/aki_adamw"), strict=True)
    level, *lower = sorted(one - other for one, other in ends)
    assert says("ends {:.3f} and {:.3f} lower in two seeds".format(*lower)) and abs(level) < 0.002


def test_the_models_are_as_small_as_the_pages_say():
    names = [name for name in TABLES if name != "domain"]
    settings = {line.setting for name in names for line in lines_of(name, "tiny")}
    sizes = [sum(p.numel() for p in one.untrained(one.target, 0).parameters()) for one in settings]
    assert says("models of at most two million parameters") and max(sizes) < 2e6
    seen = [
        one.steps * one.batch * one.length / size for one, size in zip(settings, sizes, strict=True)
    ]
    assert says("one to four tokens per parameter") and min(seen) > 1 and 4 < max(seen) < 4.5


def test_the_sentences_on_copies_match_their_table():
    names = ("scratch", "fpi_none", "fpi_noise", "fpi_split", "fpi", "aki", "fpi_padded")
    ends = {name: ends_of(f"tiny-gpt/{name}", "0.003") for name in (*names, "aki_padded")}

    def above(one, other):
        return sorted(a - b for a, b in zip(ends[one], ends[other], strict=True))

    def spread(one, other, digits=2):
        least, _, most = above(one, other)
        return f"{least:.{digits}f} to {most:.{digits}f}"

    assert above("fpi_none", "scratch")[0] > 0
    assert says(f"equal copies end above scratch, by {spread('fpi_none', 'scratch')}.")
    assert says(f"FPI ends {spread('fpi_none', 'fpi')} lower than with equal copies")
    assert above("fpi", "aki")[0] > 0
    assert says(f"at most {above('fpi', 'aki')[2]:.3f} below that")
    far = max(map(abs, above("fpi_split", "fpi")))
    assert says(f'"Unequal shares" end within {far:.3f} of routing')
    assert says(f"and noise {spread('fpi_noise', 'fpi')} higher")
    assert above("fpi_padded", "aki_padded")[0] > 0
    apart = spread("fpi_padded", "aki_padded", 3)
    assert says(f"There AKI ends lower than FPI in every seed, by {apart}")
    more = [
        interval(more_saved("tiny-gpt", *pair, "0.003"), 1)
        for pair in (("aki", "fpi"), ("aki_padded", "fpi_padded"))
    ]
    assert says(f"AKI saves {more[0]} points more than FPI with routing")
    assert says(f"At equal loss it saves {more[1]} points more")


def test_the_sentences_on_copies_in_bert_match_their_runs():
    equal, routed, aki = (ends_of(f"tiny-bert/{name}") for name in ("fpi_none", "fpi", "aki"))
    above = [one - other for one, other in zip(equal, aki, strict=True)]
    assert min(above) > 0
    assert says(f"above AKI in every seed, by {min(above):.3f} to {max(above):.3f}, as in")
    below = [one - other for one, other in zip(aki, routed, strict=True)]
    assert min(below) > 0
    assert says(f"below AKI in every seed, by {min(below):.3f} to {max(below):.3f}.")
    more = interval(more_saved("tiny-bert", "fpi_none", "aki"), 1)
    assert says(f"equal copies {more} points more")


def saved_in_t5(one, other):
    """How many points a line of T5 saves more than another one, for each of three seeds."""
    rates = {"direct_copy": "0.001"}
    shares = [shares_of(f"tiny-t5/{name}", rates.get(name, "0.002")) for name in (one, other)]
    return [first - second for first, second in zip(*shares, strict=True)]


def test_the_sentences_on_t5_match_their_table():
    scratch = [runs_of("tiny-t5/scratch", "0.001", seed) for seed in (1, 2, 3)]
    half, end = (sum(runs[i]["losses"][-1] for runs in scratch) / 3 for i in (1, 2))
    assert says(f"it is at {half:.2f} after half of the steps, and at {end:.2f} in the end")
    more = {name: saved_in_t5(name, "direct_copy") for name in ("fpi", "aki", "fpi_padded")}
    assert all(min(one) > 0 for one in more.values())
    texts = [interval(one, 1) for one in more.values()]
    assert says("FPI {} points, AKI {}, and FPI with a padded hidden state".format(*texts))
    assert says(f"the default of growkern for T5, {texts[2]}.")
    padded = ends_of("tiny-t5/fpi_padded")
    for name in ("fpi", "aki"):
        others = ends_of(f"tiny-t5/{name}")
        assert all(own < other for own, other in zip(padded, others, strict=True))
    assert says(f"AKI {interval(saved_in_t5('fpi', 'aki'), 1)} points less")


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
    alone, taught = (ends_of(f"tiny-bert/aki_two_stage{name}") for name in ("", "_ki"))
    lower = sorted(one - other for one, other in zip(alone, taught, strict=True))
    assert lower[0] > 0
    assert says(f"ends lower in every seed, by {lower[0]:.3f} to {lower[-1]:.3f}, so the teacher")
    assert says(f"inheritance would save {interval(saved_by_a_free_teacher(), 1)} points more")
    staged = found["AKI + two stages"]
    higher = first(staged["all"]) - first(found["AKI"]["all"])
    assert says(f"but the model ends {higher:.2f} higher")
    stacked, copied = (found[name]["source counted"] for name in ("StackBERT", "DirectCopy"))
    assert says(
        f"that counts it StackBERT saves {first(stacked):.0f} %, DirectCopy {first(copied):.0f} %"
    )
    assert found["MSLT"]["FLOPs saved"] == "not reached by 3 of 3"
    rows = training_rows()
    mslt, scratch = (
        rows[f"tiny-bert/{name}-2000-0.002-seed1"]["flops"][-1] for name in ("mslt", "scratch")
    )
    assert says(f"in as many steps it spends {mslt / scratch:.2f} of the FLOPs")


def test_the_sentences_on_mslt_with_as_many_flops_match_their_runs():
    rows, ends, shares = training_rows(), [], []
    for seed in (1, 2, 3):
        longer = [rows[f"tiny-bert-longer/mslt-{n}-0.002-seed{seed}"] for n in (725, 1450, 2900)]
        scratch = runs_of("tiny-bert/scratch", seed=seed)
        assert longer[-1]["flops"][-1] == pytest.approx(scratch[-1]["flops"][-1], rel=0.005)
        ends.append(longer[-1]["losses"][-1] - scratch[-1]["losses"][-1])
        shares.append(100 * saved(longer, scratch))
    below = f"{-ends[1]:.3f} and {-ends[2]:.3f} below"
    some = "{1:.1f} and {2:.1f} %".format(*shares)
    assert says(f"MSLT ends {below} training from scratch in two seeds, where it saves {some}")
    assert says(f"In the third it ends {ends[0]:.3f} above it")
    assert logs(f"Seed 1 ends {ends[0]:.3f} above scratch, the others {below} it. They save {some}")


def test_the_sentences_on_a_higher_rate_of_direct_copy_in_t5_match_their_runs():
    ends = [ends_of("tiny-t5/direct_copy", rate) for rate in ("0.001", "0.002")]
    lower = sorted(one - other for one, other in zip(*ends, strict=True))
    assert lower[0] > 0 and says(
        f"DirectCopy ends lower in every seed, by {lower[0]:.3f} to {lower[-1]:.3f}"
    )
    assert logs(f"At 0.002 DirectCopy ends {lower[0]:.3f} to {lower[-1]:.3f} lower.")
    shares = [shares_of("tiny-t5/direct_copy", rate) for rate in ("0.001", "0.002")]
    less = sorted(one - other for one, other in zip(*shares, strict=True))
    assert says(f"and saves {less[0]:.1f} to {less[-1]:.1f} points less")
    more = [
        [own - other for own, other in zip(shares_of(name, "0.002"), shares[1], strict=True)]
        for name in ("tiny-t5/fpi", "tiny-t5/aki")
    ]
    assert min(map(min, more)) > 0
    fpi, aki = (interval(one, 1) for one in more)
    assert says(f"beside it FPI saves {fpi} points more, and AKI {aki}")
    assert logs(f"FPI saves {fpi} points more, in every seed. The prediction holds")


def test_the_sentences_on_a_higher_rate_of_direct_copy_match_their_runs():
    ends = [ends_of("tiny-bert/direct_copy", rate) for rate in ("0.001", "0.002")]
    lower = [one - other for one, other in zip(*ends, strict=True)]
    gain = more_saved(
        *("tiny-bert", "tiny-bert/direct_copy", "direct_copy"), rates={"direct_copy": "0.001"}
    )
    assert says(f"At 0.002 DirectCopy ends {interval(lower)} lower than at 0.001, as low as FPI")
    assert says(f"and saves {interval(gain, 1)} points more. Beside it")
    mean, other = (sum(found) / 3 for found in (ends[1], ends_of("tiny-bert/fpi")))
    assert abs(mean - other) < 0.005
    fpi, aki = (more_saved("tiny-bert", name, "direct_copy") for name in ("fpi", "aki"))
    assert min(fpi) > 0 and says(f"FPI still saves {interval(fpi, 1)} points more, in every seed")
    found = interval(aki, 1)
    assert says(f"For AKI it is {found}, so whether AKI is ahead of DirectCopy cannot be told")
    mean, half = map(float, found.split(" ± "))
    assert mean < half


def saved_by_a_free_teacher():
    """How many points inheritance adds to two stages in each seed if its teacher costs nothing."""
    added = []
    for seed in (1, 2, 3):
        scratch, alone, taught = (
            runs_of(f"tiny-bert/{name}", seed=seed)
            for name in ("scratch", "aki_two_stage", "aki_two_stage_ki")
        )
        free = [own | {"flops": other["flops"]} for own, other in zip(taught, alone, strict=True)]
        added.append(100 * (saved(free, scratch) - saved(alone, scratch)))
    return added


def test_what_another_interpolation_would_add():
    """Mean savings of the table's lines, with losses that fall linearly in the logarithm."""
    added = []
    for pairs in compared(lines_of("table2", "tiny"), "table2", training_rows()).values():
        gains = []
        for own, base in pairs.values():
            _, flops, losses = points_of(own)
            logs = [math.log(one) for one in flops]
            spent = first_crossing(logs, losses, base[-1]["losses"][-1])
            if own is not base and spent is not None:
                share = 1 - math.exp(spent) / base[-1]["flops"][-1]
                gains.append(100 * (share - saved(own, base)))
        if gains:
            added.append(sum(gains) / len(gains))
    assert len(added) == 8
    assert says(f"would add {min(added):.1f} to {max(added):.1f} points to the savings")


def test_the_accuracies_are_those_of_the_table():
    found = paper_lines("FPI + two stages", rate="0.002")
    shares = [first(line["accuracy"]) for line in found.values()]
    assert all("(1 of 3 seeds)" in line["accuracy"] for line in found.values())
    assert says(f"between {min(shares):.0f} and {max(shares):.0f} % with one seed")
    assert says(f"Chance is {1 / len(CLASSES):.0%}".replace("%", " %")) and says(
        "tell five libraries"
    )


def test_a_second_run_that_was_killed_once_is_the_same():
    """The whole table was trained again from a fresh clone, its choice of rates included."""
    document = results.read(results.RESULTS / "paper-again.json")
    assert document["kills"] == 1 and says("It was killed once, with SIGKILL")
    assert says(f"took {document['minutes']:.0f} minutes together and chose the same rates")
    again, rows = {row["name"]: row for row in document["rows"]}, training_rows()
    lines = compared(lines_of("table2", "tiny"), "table2", rows)
    repeated = compared(lines_of("table2", "tiny"), "table2", again)
    assert list(lines) == list(repeated) and {*map(len, repeated.values())} == {1}
    for own, _ in (pairs[1] for pairs in repeated.values()):
        for row in own:
            assert row["losses"][-1] == rows[row["name"]]["losses"][-1], row["name"]
    told = {name: row["accuracy"] for name, row in again.items() if "accuracy" in row}
    assert len(told) == len(lines) == 10
    assert told == {name: rows[name]["accuracy"] for name in told}
    assert not any(row == rows[name] for name, row in again.items()), "a row is a copy"
    away = {
        name: abs(row["losses"][-1] - rows[name]["losses"][-1])
        for name, row in again.items()
        if row["seed"] == 100
    }
    untrained = {name for name in away if again[name]["source flops"] == 0}
    two_stages = {name for name in away if again[name]["system"] == "fpi_two_stage"}
    assert says('except those of "FPI + two stages", whose rows in the table began with the same')
    small = "tiny-bert/source-2000-0.003-seed100"
    ends = [found[small]["losses"][-1] for found in (again, rows)]
    assert says("ended at {:.3f} and not at {:.3f}, as".format(*ends))
    begun = away.keys() - untrained - two_stages
    alone = {name for name in untrained if again[name]["system"] != "source"}
    assert not any(away[name] for name in alone | two_stages)
    assert all(away[name] for name in begun)
    assert says(f"ended up to {max(away.values()):.3f} away")


def test_runs_on_another_kind_of_cpu_end_close_by():
    rows = training_rows()
    other = results.read(results.RESULTS / "paper-other-cpu.json")["rows"]
    assert says(f"[{len(other)} runs](../bench/results/paper-other-cpu.json) were trained on both")
    cpus = [{row["machine"]["cpu"] for row in found} for found in (other, own_rows(other, rows))]
    assert cpus[0].isdisjoint(cpus[1])
    away = {"tiny-gpt": [], "tiny-bert": []}
    for row, own in zip(other, own_rows(other, rows), strict=True):
        away[row["name"].split("/")[0]].append(abs(row["losses"][-1] - own["losses"][-1]))
    assert says("Nine of GPT-2 ended within 0.0001 of each other")
    assert len(away["tiny-gpt"]) == 9 and max(away["tiny-gpt"]) < 0.0001
    assert says(f"The others are of BERT, and ended up to {max(away['tiny-bert']):.3f} away")
    there = rows | {row["name"]: row for row in other}
    points = []
    for name in ("aki_two_stage", "aki_two_stage_ki", "fpi_two_stage"):
        for seed in (1, 2, 3):
            scratch = runs_of("tiny-bert/scratch", seed=seed)
            own = runs_of(f"tiny-bert/{name}", seed=seed)
            elsewhere = [there[row["name"]] for row in own]
            points.append(100 * abs(saved(own, scratch) - saved(elsewhere, scratch)))
    assert says(f"Their savings are up to {max(points):.1f} points away")
    assert all(
        says(f"| {line} |")
        for line in (
            *("BERT: StackBERT and MSLT | 2 and 3", "BERT: MSLT, as many FLOPs as scratch | 1"),
            "BERT: AKI + two stages, E_b = 2 | 1, one run of three",
            "GPT-2: StackBERT, MSLT, all lines with two stages | 1, and the runs that chose the "
            "rates of most",
            "GPT-2: FPI, padded stream with AdamW, with grown moments, with a re-warm-up | the "
            "runs that chose the rates",
        )
    )
    there = {
        (row["setting"], row["system"], row["seed"])
        for row in rows.values()
        if row["machine"]["cpu"] in cpus[0]
    }
    staged = ("mslt", "stackbert", "aki_two_stage_ki", "fpi_two_stage")
    moments = ("padded_adamw", "padded_moments", "padded_rewarmed")
    of_rates = {one for one in there if one[2] == 100}
    assert of_rates == {("tiny-gpt", name, 100) for name in (*staged, *moments)}
    assert there - of_rates == {
        *(("tiny-bert", name, seed) for name in ("mslt", "stackbert") for seed in (2, 3)),
        *(("tiny-gpt", name, 1) for name in ("mslt", "stackbert")),
        *(("tiny-gpt", name, 1) for name in ("aki_two_stage", "aki_two_stage_ki")),
        *(("tiny-gpt", "fpi_two_stage", 1), ("tiny-bert-longer", "mslt", 1)),
        ("tiny-bert-eb2", "aki_two_stage", 1),
    }


def own_rows(others, rows):
    """The rows of the same names."""
    return [rows[row["name"]] for row in others]


def test_how_far_the_sources_of_one_seed_differ():
    def start(name, seed):
        return runs_of(name, seed=seed)[0]["losses"][0]

    lines = (
        *((f"tiny-bert-{part}/aki_two_stage", "tiny-bert/aki") for part in ("eb2", "eb10", "eb20")),
        ("tiny-bert/aki_adamw", "tiny-bert/aki"),
        ("tiny-bert-lb2/aki_two_stage", "tiny-bert/aki"),
        ("tiny-bert/fpi_none", "tiny-bert/fpi"),
    )
    away = [abs(start(one, seed) - start(two, seed)) for one, two in lines for seed in (1, 2, 3)]
    assert says(f"Their start losses differ by up to {max(away):.3f} from those")
    # in the table itself all begin with the same weights
    for seed in (1, 2, 3):
        for method in ("aki", "fpi"):
            staged = start(f"tiny-bert/{method}_two_stage", seed)
            assert staged == pytest.approx(start(f"tiny-bert/{method}", seed), abs=1e-6)


def test_the_sentences_on_gpt2_match_their_table():
    padded, copied, direct = (
        ends_of(f"tiny-gpt/{name}", "0.003") for name in ("fpi_padded", "fpi", "direct_copy")
    )
    below = [a - b for a, b in zip(copied, padded, strict=True)]
    assert says(f"below FPI in every seed, by {min(below):.2f} to {max(below):.2f}")
    lower = sum(padded) / 3 - sum(direct) / 3
    assert says(f"ends lower still, by {lower:.2f};")
    more = interval(more_saved("tiny-gpt", "fpi_padded", "fpi", "0.003"), 1)
    assert says(f"Paired by seed it saves {more} points more")
    more = interval(more_saved("tiny-gpt", "direct_copy", "fpi_padded", "0.003"), 1)
    assert says(f"the saving is about the same, {more} points more")
    found = paper_lines("StackBERT", rate="0.003")
    for name in ("StackBERT", "MSLT"):
        assert found[name]["FLOPs saved"] == "not reached by 3 of 3"
    assert found["AKI + two stages"]["FLOPs saved"] == "not reached by 1 of 3"
    alone, staged = (ends_of(f"tiny-gpt/{name}", "0.003") for name in ("aki", "aki_two_stage"))
    (higher,) = {f"{two - one:.2f}" for one, two in zip(alone, staged, strict=True)}
    assert says(f"Two stages end higher than AKI in every seed, by {higher}")


def test_the_sentences_on_sixteen_layers_match_their_runs():
    scratch = [runs_of("tiny-gpt-16x64/scratch", "0.003", seed) for seed in (1, 2, 3)]
    names = ("/stackbert", "-from16x32/direct_copy", "-from16x32/fpi_padded")

    def shares(name, **how):
        runs = [runs_of(f"tiny-gpt-16x64{name}", "0.009", seed) for seed in (1, 2, 3)]
        return [100 * saved(one, other, **how) for one, other in zip(runs, scratch, strict=True)]

    def ahead(one, other):
        return [own - others for own, others in zip(one, other, strict=True)]

    stacked, direct, padded = map(shares, names)
    assert says(f"Here it does in every seed, and saves {interval(stacked, 1)} %")
    assert all(map(math.isnan, shares_of("tiny-gpt/stackbert", "0.003")))
    counted = [shares(name, with_source=True) for name in names]
    assert min(ahead(counted[0], counted[1])) > 0
    assert abs(sum(ahead(counted[0], counted[2])) / 3) < 3
    behind = interval(ahead(direct, stacked), 1)
    assert says(f"Without it, it is {behind} points behind DirectCopy, where the paper")
    more = ahead(padded, direct)
    less = interval(more_saved("tiny-gpt", "direct_copy", "fpi_padded", "0.003"), 1)
    assert says(
        f"FPI saves {interval(more, 1)} points more than DirectCopy, as in the paper, and at four "
        f"layers {less} points less"
    )
    texts = [interval(one, 1) for one in (stacked, direct, padded)]
    assert logs("StackBERT saves {} %, DirectCopy {}, FPI {}, in every".format(*texts))
    assert logs(f"seed {min(more):.1f} to {max(more):.1f} points more than DirectCopy")

    def above(one, other):
        return sorted(ahead(one, other))

    ends = [one[-1]["losses"][-1] for one in scratch]
    mslt = interval(above(ends_of("tiny-gpt-16x64/mslt", "0.009"), ends))
    shallow = above(ends_of("tiny-gpt/mslt", "0.003"), ends_of("tiny-gpt/scratch", "0.003"))
    assert says(
        f"It ends {mslt} above it, and at four layers {shallow[0]:.2f} to {shallow[-1]:.2f}"
    )
    assert logs(f"MSLT ends {mslt} above scratch, and reaches it in no seed")
    stacked, direct = (ends_of(f"tiny-gpt-16x64{name}", "0.009") for name in names[:2])
    gap = above(stacked, direct)
    assert logs(f"StackBERT ends {gap[0]:.2f} to {gap[-1]:.2f} above DirectCopy")
    wide, deep = (
        runs_of(f"{name}/scratch", "0.003")[-1]["flops"][-1]
        for name in ("tiny-gpt", "tiny-gpt-16x64")
    )
    assert deep == pytest.approx(wide, rel=0.005)


def test_the_sentence_on_the_rate_from_scratch_matches_its_runs():
    rows, chosen = training_rows(), ends_of("tiny-gpt/scratch", "0.003")
    low, high = (
        sorted(
            one - other
            for one, other in zip(ends_of("tiny-gpt/scratch", rate), chosen, strict=True)
        )
        for rate in ("0.001", "0.009")
    )
    assert says(f"0.001 ends at least {low[0]:.2f} higher, and 0.009 at least {high[0]:.2f}:")
    assert logs(
        f"ends {low[0]:.3f} to {low[-1]:.3f} higher, at 0.009 {high[0]:.3f} to {high[-1]:.3f}"
    )
    short = [
        rows[f"tiny-gpt/scratch-500-{rate}-seed100"]["losses"][-1]
        for rate in ("0.001", "0.003", "0.009")
    ]
    assert min(short) == short[1]
    assert logs("({:.3f}, {:.3f} and {:.3f} at 0.001, 0.003 and 0.009)".format(*short))


def test_the_sentence_on_the_source_matches_its_runs():
    rows = training_rows()
    before, after = (
        [rows[f"tiny-gpt{name}-seed{seed}"]["losses"][-1] for seed in (1, 2, 3)]
        for name in ("/source-2000-0.003", "-at400/source-8000-0.003")
    )
    assert says(f"that of GPT-2 falls from {sum(before) / 3:.2f} to {sum(after) / 3:.2f}")
    assert max(after) < min(ends_of("tiny-gpt/scratch", "0.003")) < min(before)


def test_the_sentences_on_the_length_of_stage_1_match_their_table():
    stages = [f"tiny-bert{part}/aki_two_stage" for part in ("-eb2", "", "-eb10", "-eb20")]
    ends = list(zip(*map(ends_of, stages), strict=True))
    assert all(list(seed) == sorted(seed) for seed in ends)
    less = {name: more_saved("tiny-bert", "aki", name) for name in stages[:3]}
    texts = [interval(found, 1) for found in less.values()]
    assert says("{}, {} and {} points less than AKI alone".format(*texts))
    longest = [
        saved(runs_of(stages[3], seed=seed), runs_of("tiny-bert/scratch", seed=seed))
        for seed in (1, 2, 3)
    ]
    assert [math.isnan(one) for one in longest] == [True, False, False]
    both = map(ends_of, (stages[1], "tiny-bert-lb2/aki_two_stage"))
    deeper = [one - two for one, two in zip(*both, strict=True)]
    assert min(deeper) > 0 and says(f"the model ends up to {max(deeper):.3f} lower")


def test_the_sentences_on_stage_1_as_a_run_before_match_their_table():
    names = ("tiny-bert/aki_after_stage1", "tiny-bert-lb2/aki_after_stage1")
    gains = [more_saved("tiny-bert", name, "aki_adamw") for name in names]
    assert says(f"adds {interval(gains[0], 1)} points")
    assert says(f"or {interval(gains[1], 1)} with sub-models")
    rows = training_rows()
    costs = [
        [
            100
            * rows[f"tiny-bert{part}/stage1-250-0.002-seed{seed}"]["flops"][-1]
            / runs_of("tiny-bert/scratch", seed=seed)[-1]["flops"][-1]
            for seed in (1, 2, 3)
        ]
        for part in ("", "-lb2")
    ]
    assert says(f"costs {8 * costs[0][0] / 100:.2f} of a whole step")
    means = [sum(one) / 3 for one in costs]
    assert says("it costs {:.1f} or {:.1f} % of the FLOPs from scratch".format(*means))
    for gain, cost in zip(gains, costs, strict=True):
        assert all(0 < one < other for one, other in zip(gain, cost, strict=True))


def test_the_sentences_on_smaller_sources_match_their_tables():
    half, whole = "tiny-bert-from2x64/aki", "tiny-bert/aki"
    shares = (shares_of(name, "0.002") for name in (half, whole))
    *less, more = sorted(one - other for one, other in zip(*shares, strict=True))
    assert max(less) < 0
    assert says(f"in two seeds of three, and at least {math.floor(more)} points more in the third")
    counted = (shares_of(name, "0.002", with_source=True) for name in (half, whole))
    more = min(one - other for one, other in zip(*counted, strict=True))
    assert says(f"AKI saves at least {math.floor(more)} points more from it than from 4 x 64")
    costs = [runs_of(name)[0]["source flops"] for name in (half, whole)]
    assert costs[0] / costs[1] == pytest.approx(0.5, abs=0.02)
    missed, *reached = sorted(shares_of("tiny-bert-from4x32/aki", "0.004"), key=missed_first)
    assert math.isnan(missed) and says("saves {:.0f} and {:.0f} % there".format(*reached))
    for name, rate in (
        *(("from4x32/direct_copy", "0.001"), ("from4x16/direct_copy", "0.002")),
        ("from4x16/aki", "0.004"),
    ):
        assert all(map(math.isnan, shares_of(f"tiny-bert-{name}", rate)))
    copies, padded = (
        ends_of(f"tiny-bert-from4x32/{name}", rate)
        for name, rate in (("aki", "0.004"), ("fpi_padded", "0.002"))
    )
    assert all(one < other for one, other in zip(copies, padded, strict=True))
    own, wide, longer = (
        sum(training_rows()[f"tiny-bert{name}-0.003-seed{n}"]["losses"][-1] for n in (1, 2, 3)) / 3
        for name in ("-from4x32/source-2000", "/source-2000", "-from4x32-longer/source-8000")
    )
    assert says(f"its own loss is {own:.2f}, that of 4 x 64 is {wide:.2f}")
    assert says(f"the source of 4 x 32 is at {longer:.2f}")
    least = [
        min(shares_of("tiny-bert-from4x32-longer/aki", "0.002", with_source=counted))
        for counted in (False, True)
    ]
    texts = [f"{math.floor(one)} %" for one in least]
    assert says("at least {} in every seed, or {} with that training".format(*texts))


def test_the_sentences_on_the_place_of_stackbert_match_their_runs():
    stacked = shares_of("tiny-bert/stackbert", "0.002")
    young, middle, old = (
        [shares_of(f"tiny-bert-from4x32{age}/{one}", rate) for one, rate in lines]
        for age, lines in (
            ("", (("direct_copy", "0.001"), ("aki", "0.004"))),
            ("-three-times", (("direct_copy", "0.001"), ("aki", "0.002"))),
            ("-longer", (("direct_copy", "0.001"), ("aki", "0.002"))),
        )
    )

    def ahead(shares):
        """How many points more than StackBERT; a line that misses the baseline saves nothing."""
        saves = [0 if math.isnan(one) else one for one in shares]
        return [one - other for one, other in zip(saves, stacked, strict=True)]

    rows = training_rows()
    losses = [
        sum(rows[f"tiny-bert-from4x32{source}-0.003-seed{n}"]["losses"][-1] for n in (1, 2, 3)) / 3
        for source in ("/source-2000", "-three-times/source-6000", "-longer/source-8000")
    ]
    assert says("Their own losses are {:.2f}, {:.2f} and {:.2f}".format(*losses))
    assert max(max(ahead(one)) for one in young) < 0
    assert says("DirectCopy save less than StackBERT in every seed")
    least = [math.floor(min(ahead(aki))) for _, aki in (middle, old)]
    assert min(least) > 0
    assert says(f"AKI saves at least {least[0]} points more than StackBERT, in every seed")
    assert says(f"steps AKI saves at least {least[1]} points more than StackBERT, in every seed")
    *less, more = sorted(ahead(middle[0]))
    assert max(less) < 0 < more
    assert says(f"at least {math.floor(-max(less))} points less in two seeds, and {more:.0f} more")
    *less, more = sorted(ahead(old[0]))
    assert max(less) < 0 < more
    texts = [f"{-one:.0f}" for one in sorted(less, reverse=True)]
    assert says(
        "{} and {} points less in two seeds, and {:.0f} more in the third".format(*texts, more)
    )
    fresh, first, last = (
        [runs_of(name, rate, seed)[0]["losses"][0] for seed in (1, 2, 3)]
        for name, rate in (
            ("tiny-bert/scratch", "0.002"),
            ("tiny-bert-from4x32/direct_copy", "0.001"),
            ("tiny-bert-from4x32-longer/direct_copy", "0.001"),
        )
    )
    assert says(f"An untrained model is at {min(fresh):.1f} to {max(fresh):.1f}")
    assert all(map(math.isnan, young[0]))
    assert says(f"DirectCopy begins at {min(first):.1f} to {max(first):.1f} and saves nothing")
    assert says(
        f"it begins at {min(last):.1f} to {max(last):.1f} and saves {min(old[0]):.0f} to "
        f"{max(old[0]):.0f} %"
    )
    wide = [rows[f"tiny-bert/source-2000-0.003-seed{n}"]["losses"][-1] for n in (1, 2, 3)]
    assert says(f"the source of 4 x 64 ends at {sum(wide) / 3:.2f}, above the older two")
    assert losses[1] < sum(wide) / 3 and min(shares_of("tiny-bert/direct_copy", "0.001")) > max(
        old[0]
    )
    counted = shares_of("tiny-bert-from4x32-three-times/aki", "0.002", with_source=True)
    assert sum(one < 0 for one in ahead(counted)) == 1
    assert min(ahead(shares_of("tiny-bert-from4x32-longer/aki", "0.002", with_source=True))) > 0
    ends = (
        ends_of(name, rate)
        for name, rate in (
            *(("tiny-bert-from4x32-longer/direct_copy", "0.001"), ("tiny-bert/stackbert", "0.002")),
        )
    )
    apart = interval([one - other for one, other in zip(*ends, strict=True)])
    assert says(f"and StackBERT cannot be told apart: the difference is {apart}")
    for age in ("", "-three-times", "-longer"):
        counted = shares_of(f"tiny-bert-from4x32{age}/direct_copy", "0.001", with_source=True)
        assert max(ahead(counted)) < 0
    low = [
        [
            rows[f"tiny-bert-from4x32-{age}/direct_copy-500-{rate}-seed100"]["losses"][-1]
            for rate in ("0.0005", "0.001", "0.002", "0.004")
        ]
        for age in ("three-times", "longer")
    ]
    assert all(min(found) == found[1] for found in low)
    assert logs(
        "short runs end higher: {:.3f} from 6,000 steps ({:.3f} at 0.001), and {:.3f} from 8,000 "
        "({:.3f})".format(*low[0][:2], *low[1][:2])
    )
    logged = [interval(shares, 1) for shares in (stacked, old[0])]
    assert logs("StackBERT saves {} %, DirectCopy from 8,000 steps {}".format(*logged))
    assert logs("DirectCopy saves {:.1f}, {:.1f} and {:.1f} %, less than".format(*old[0]))
    direct, aki = middle
    assert logs("AKI saves {:.1f}, {:.1f} and at least {:.1f} %, more than".format(*aki))
    assert math.isnan(direct[0])
    assert logs("and saves {:.1f} and {:.1f} % with the others".format(*direct[1:]))


def missed_first(share):
    """A key that sorts NaN before all numbers."""
    return -math.inf if math.isnan(share) else share


def test_the_sentences_on_inheritance_match_their_tables():
    scratch = ends_of("tiny-gpt/scratch", "0.003")
    names = ["taught", "taught_by_two", "taught_by_generations"]
    names += [f"taught_top{k}" for k in (1, 4, 16, 64)]
    ends = {name: ends_of(f"tiny-gpt/{name}", "0.003") for name in names}
    below = {
        name: [one - other for one, other in zip(scratch, found, strict=True)]
        for name, found in ends.items()
    }
    assert min(min(found) for found in below.values()) > 0
    texts = [interval(below[name], 2) for name in names[:3]]
    assert says("one by {}, two by {}, and one that was taught itself by {}".format(*texts))
    shares = {name: shares_of(f"tiny-gpt/{name}", "0.003") for name in (*names, "fpi_padded")}
    texts = [interval(shares[name], 1) for name in names[:3]]
    assert says("they save {}, {} and {} % of the FLOPs".format(*texts))
    for kept in zip(*(below[name] for name in names[3:]), strict=True):
        assert list(kept) == sorted(kept)
    near = [abs(a - b) for a, b in zip(ends["taught_top64"], ends["taught"], strict=True)]
    assert says(f"ends within {max(near):.3f} of the one beside the teacher")
    assert max(max(shares_of(f"tiny-gpt/{name}", "0.003", with_source=True)) for name in names) < 0
    grown = shares.pop("fpi_padded")
    assert says(f"Growth of the same small model saves more, {interval(grown, 1)} %")
    for found in shares.values():
        assert all(one < other for one, other in zip(found, grown, strict=True))

    rows = training_rows()
    flops = {
        name: rows[f"tiny-gpt/{name}-2000-0.003-seed1"]["flops"][-1]
        for name in ("scratch", "taught", "taught_top64")
    }
    # the runs of kept predictions count no teacher
    assert flops["scratch"] == flops["taught_top64"]
    source = rows["tiny-gpt/source-2000-0.003-seed1"]["flops"][-1]
    before = rows["tiny-gpt/taught_top64-2000-0.003-seed1"]["source flops"] - source
    assert says(f"They cost {before / flops['scratch']:.0%} of the".replace("%", " %"))
    # the teacher in training reads as many rows as the runs do while they have it
    read = (flops["taught"] - flops["scratch"]) / before
    assert says(f"The runs read {read:.0%} of it".replace("%", " %"))


def test_the_sentences_on_another_domain_match_their_runs():
    rows = training_rows()
    taught, alone, teacher, half = (
        [rows[f"tiny-gpt-domain/{name}-0.003-seed{seed}"]["losses"][-1] for seed in (1, 2, 3)]
        for name in ("adapted_taught-500", "adapted-500", "source_adapted-500", "adapted-250")
    )
    higher = [one - other for one, other in zip(taught, alone, strict=True)]
    assert min(higher) > 0
    assert says(f"with it the model ends {interval(higher)} higher than alone")
    assert says(f"The teacher itself ends at {sum(teacher) / 3:.3f}")
    assert max(half) < min(teacher)
    assert says(f"is below that after half of its steps, at {sum(half) / 3:.3f}")


def test_the_sentences_on_directions_match_their_table():
    names = {
        "tiny-gpt": "fpi_padded",
        "tiny-gpt-8x96": "padded_identity",
        "tiny-gpt-16x64": "fpi_identity",
    }
    # the widest model first, the deepest last
    scratch = [ends_of(f"{name}/scratch", "0.003") for name in names]
    grown = [ends_of(f"{name}/{system}", "0.003") for name, system in names.items()]
    for ends in (scratch, grown):
        assert all(list(of_seed) == sorted(of_seed) for of_seed in zip(*ends, strict=True))
    gains = [
        [a - b for a, b in zip(*pair, strict=True)] for pair in zip(scratch, grown, strict=True)
    ]
    assert all(list(of_seed) == sorted(of_seed) for of_seed in zip(*gains, strict=True))
    flops = [runs_of(f"{name}/scratch", "0.003")[-1]["flops"][-1] for name in names]
    assert flops[2] == pytest.approx(flops[0], rel=0.005)
    assert says(f"a step of the last {flops[1] / flops[0]:.2f} times as much")
    wide, both, deep = (shares_of(f"{name}/{system}", "0.003") for name, system in names.items())
    less = interval([one - other for one, other in zip(wide, both, strict=True)], 1)
    texts = interval(wide, 1), interval(both, 1), less
    assert says(
        "{} % fewer. Growth in both saves {} %, paired by seed {} points less".format(*texts)
    )
    assert logs(f"growth in both saves {less} points less than growth in width")
    assert [math.isnan(share) for share in deep] == [False, True, True]
    assert says("Growth in depth reaches that loss in one seed of three")


def test_the_sentences_on_the_optimizer_match_their_table():
    default = ends_of("tiny-gpt/fpi_padded", "0.003")

    def higher(name, rate="0.003"):
        ends = zip(ends_of(f"tiny-gpt/{name}", rate), default, strict=True)
        return sorted(one - other for one, other in ends)

    plain, moments = higher("padded_adamw"), higher("padded_moments")
    assert min(*plain, *moments) > 0
    assert says(f"lower than AdamW, by {plain[0]:.3f} to {plain[-1]:.3f}")
    assert says(f"lower than with grown moments, by {moments[0]:.3f} to {moments[-1]:.3f}")
    more = [
        interval(more_saved("tiny-gpt", "fpi_padded", name, "0.003"), 1)
        for name in ("padded_adamw", "padded_moments")
    ]
    assert says("it saves {} points more than AdamW, and {} more than with grown".format(*more))
    rewarmed = higher("padded_rewarmed", "0.001")
    lines = paper_lines("FPI, padded stream, AdamW")
    found = lines["FPI, padded stream, grown moments, re-warm-up"]
    assert float(found["rate"]) < float(lines["FPI, padded stream"]["rate"])
    assert says(f"the long run ends {rewarmed[0]:.2f} to {rewarmed[-1]:.2f} above the default")


def deep_runs(name):
    """The runs of a line of twice the layers, of six lengths, for each of three seeds."""
    rows = training_rows()
    steps = (62, 125, 250, 500, 1000, 2000)
    names = [
        [f"tiny-gpt-deep/{name}-{one}-0.003-seed{seed}" for one in steps] for seed in (1, 2, 3)
    ]
    return [[rows[one] for one in of_seed] for of_seed in names]


def test_the_sentences_on_when_to_grow_match_their_tables():
    moments = paper_lines("FPI, padded stream, source of 200 steps")
    counted = [
        first(moments[f"FPI, padded stream, source of {steps} steps"][column])
        for column in ("FLOPs saved", "source counted")
        for steps in ("200", "600", "2,000")
    ]
    gains, with_source = counted[:3], counted[3:]
    assert gains == sorted(gains)
    assert says("saved {:.0f} %, {:.0f} % and {:.0f} %".format(*gains))
    assert says(f"counted, {min(with_source):.1f} to {max(with_source):.1f} % is saved. Paired")
    early, middle, late = (
        shares_of(f"{setting}/fpi_padded", rate, with_source=True)
        for setting, rate in (
            *(("tiny-gpt-at10", "0.009"), ("tiny-gpt-at30", "0.009")),
            ("tiny-gpt", "0.003"),
        )
    )
    more = [
        [one - other for one, other in zip(middle, others, strict=True)] for others in (early, late)
    ]
    assert min(more[0]) > 0
    assert says(
        "growth after 600 steps then saves {} points more than after 200, and {} more than after "
        "2,000".format(*(interval(found, 1) for found in more))
    )
    cost = gains[2] - with_source[2]
    assert says(f"2,000 steps of it cost {cost:.0f} % of the training of the large model")
    assert says(f"In 8,000 steps the small model alone costs {4 * cost / 100:.1f} times")
    assert says("should see more than 10 %.")


def test_the_sentences_on_new_layers_match_their_table():
    scratch = [runs_of("tiny-gpt-deep/scratch", "0.003", seed) for seed in (1, 2, 3)]
    ways = ("fpi_identity", "fpi", "fpi_interleave")
    identity, stack, interleave = (
        [
            100 * saved(runs_of(f"tiny-gpt-deep-young/{way}", "0.009", seed), scratch[seed - 1])
            for seed in (1, 2, 3)
        ]
        for way in ways
    )
    more = [
        interval([own - one for own, one in zip(identity, others, strict=True)], 1)
        for others in (stack, interleave)
    ]
    assert all(float(text.split(" ± ")[0]) < float(text.split(" ± ")[1]) for text in more)
    assert says(
        "`identity` saves {} points more than `stack`, and {} more than `interleave`".format(*more)
    )
    runs = [deep_runs(way) for way in ways]
    # the first losses of the shortest runs, and the last ones of the longest
    starts, ends = (
        [[of_seed[at]["losses"][at] for of_seed in one] for one in runs] for at in (0, -1)
    )
    higher, lower = (
        [one - other for one, other in zip(*pair, strict=True)]
        for pair in ((starts[1], starts[0]), (ends[0], ends[1]))
    )
    assert min(lower) > 0 and says(
        f"a stack starts {sum(higher) / 3:.2f} higher than `identity` and ends "
        f"{sum(lower) / 3:.2f} lower, in every seed"
    )
    gains, counted = (
        [
            sum(
                100 * saved(own, other, with_source=with_source)
                for own, other in zip(one, scratch, strict=True)
            )
            / 3
            for one in runs
        ]
        for with_source in (False, True)
    )
    assert says(f"At equal loss the three save {min(gains):.0f} to {max(gains):.0f} %.")
    assert says(f"training counted, {min(counted):.0f} to {max(counted):.0f} % is saved. So")
    assert logs(f"save {min(gains):.0f} to {max(gains):.0f} %, and not 84: only with seed 1")
    assert logs(f"From sources of 200 steps `identity` saves {more[0]} points more than `stack`")
    above = [own - one[-1]["losses"][-1] for own, one in zip(starts[0], scratch, strict=True)]
    assert [f"{one:.2f}" for one in above] == ["0.01", "0.04", "0.04"]
    small, large = interval(starts[0]), interval([one[-1]["losses"][-1] for one in scratch])
    assert says(f"the small models end at {small}, and 8 x 64 reaches {large} from scratch")
