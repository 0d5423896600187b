"""The variants of the study of symmetries are what their names say, and so are its figures."""

import pytest
import torch

from bench.shared import results
from bench.symmetry.models import Model, grown
from tests.bench.pages import says, table_with

OPTIMIZERS = ("adamw", "growth")


def matrices(model):
    """The weights of the blocks by name, without embeddings and the head."""
    return {n: p for n, p in model.base_model.named_parameters() if p.ndim == 2 and ".0." in n}


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_half_of_the_connections_can_be_routed(family):
    """The other half is divided equally, and the function stays."""
    model = Model(family, layers=1, width=32)
    small = model.untrained(0).eval()
    routed, half, equal = (
        grown(small, model, symmetry, amplitude, seed=3).eval()
        for symmetry, amplitude in (("routing", 1.0), ("half-routing", 1.0), ("none", 0.0))
    )
    tokens = torch.arange(20)[None]
    expected = small(input_ids=tokens).logits
    torch.testing.assert_close(half(input_ids=tokens).logits, expected, rtol=1e-4, atol=1e-5)
    seen = 0
    for name, mixed in matrices(half).items():
        whole, shared = matrices(routed)[name], matrices(equal)[name]
        assert ((mixed == whole) | (mixed == shared)).all(), name
        differs = whole != shared
        share = (mixed == shared)[differs].float().mean().item()
        assert share == pytest.approx(0.5, abs=0.06), name
        seen += differs.sum().item()
    assert seen > 10_000


def rows():
    return results.quotable(results.RESULTS / "symmetry.json")["rows"]


def losses_of(model, symmetry, optimizer, *, amplitude=1.0, rate=1e-3, steps=2000, warmup=50):
    """The losses by steps of the study's runs of one setup, by seed."""
    wanted = (model, symmetry, optimizer, rate, steps, warmup)
    names = ("model", "symmetry", "optimizer", "rate", "steps")
    return {
        row["seed"]: {int(step): loss for step, loss in row["losses"].items()}
        for row in rows()
        if (*(row[name] for name in names), row.get("warmup", 50)) == wanted
        and (row["amplitude"] or amplitude) == amplitude
    }


SMALL = {name: f"{name} 2x48-96" for name in ("bert", "gpt2", "llama")}
LARGER = {name: f"{name} 3x64-128" for name in SMALL}


def test_the_sentences_on_optimizers_match_their_runs():
    ratios = []
    for name in ("gpt2", "llama"):
        (small,), (grown,) = (
            losses_of(SMALL[name], *how, steps=4000).values()
            for how in (("continued", "adamw"), ("routing", "growth"))
        )
        ratios.append((small[4000] - grown[4000]) / (small[2000] - grown[2000]))
    assert says(
        "it is {:.1f} times that after 2,000 for GPT-2, and {:.1f} times for Llama".format(*ratios)
    )
    rises = {
        optimizer: [
            max(losses[step] for step in (0, 25, 50, 100)) - losses[0]
            for model in (*SMALL.values(), *LARGER.values())
            for losses in losses_of(model, "routing", optimizer).values()
        ]
        for optimizer in OPTIMIZERS
    }
    assert all(len(found) == 18 for found in rises.values())
    assert sorted(rises["growth"])[len(rises["growth"]) // 2] < 0.01
    assert says(f"rises by less than 0.01, at most {max(rises['growth']):.2f} in single runs")
    assert says(f"rises by {min(rises['adamw']):.2f} to {max(rises['adamw']):.2f}")

    def lower_with_adamw(model, end=2000, **how):
        ends = [
            [losses[end] for losses in losses_of(model, "routing", name, **how).values()]
            for name in OPTIMIZERS
        ]
        return sum(ends[0]) < sum(ends[1])

    assert all(lower_with_adamw(model) for model in (SMALL["bert"], LARGER["bert"]))
    assert lower_with_adamw(SMALL["gpt2"], rate=5e-4)
    for model in (SMALL["llama"], LARGER["llama"], LARGER["gpt2"]):
        assert not lower_with_adamw(model)
    assert not lower_with_adamw(SMALL["gpt2"], 4000, steps=4000)


def test_the_sentences_on_other_variants_match_their_runs():
    def above(name, symmetry, optimizer="growth", **how):
        (default,) = (losses_of(SMALL[name], "routing", "growth")[seed] for seed in (11,))
        return losses_of(SMALL[name], symmetry, optimizer, **how)[11][2000] - default[2000]

    near = [
        above(name, *variant, **how)
        for name in ("gpt2", "llama")
        for variant, how in (
            (("aki-routing",), {}),
            (("routing", "growth-moments"), {}),
            (("routing",), {"warmup": 1}),
            (("routing",), {"warmup": 200}),
            (("split", "adamw"), {}),
        )
    ]
    assert says("within 0.003 of the default, for GPT-2") and max(map(abs, near)) < 0.0035
    ends = [
        losses_of(SMALL["bert"], "routing", "growth", amplitude=one)[11][2000]
        for one in (1.5, 2.0, 1.0)
    ]
    assert says("1.5 ends at {:.3f} and 2 at {:.3f}, the default at {:.3f}".format(*ends))
    worse = {
        name: [above(name, "routing", amplitude=one) for one in (1.5, 2.0)]
        for name in ("llama", "gpt2")
    }
    assert says("Both are worse for Llama, by {:.2f} and {:.2f}".format(*worse["llama"]))
    assert says("For GPT-2, 1.5 is {:.3f} worse and 2 is {:.3f}".format(*worse["gpt2"]))
    behind = [
        above(name, *variant, **how)
        for name in SMALL
        for variant, how in (
            (("routing",), {"amplitude": 0.5}),
            (("routing",), {"amplitude": 3.0}),
            (("half-routing",), {}),
            (("noise",), {"amplitude": 1.0}),
        )
    ]
    assert min(behind) > 0


def test_copies_can_become_different_too_fast():
    assert says("with `routing` of amplitude 0.5 they do so more slowly than by default, with 3")
    for model in SMALL.values():
        found = {
            row["amplitude"]: (row["apart"]["200"]["stream"], row["losses"]["2000"])
            for row in rows()
            if (row["model"], row["symmetry"], row["optimizer"]) == (model, "routing", "growth")
            and (row["steps"], row["rate"], row["seed"]) == (2000, 1e-3, 11)
            and row.get("warmup", 50) == 50
        }
        apart, ends = zip(*(found[one] for one in (0.5, 1.0, 3.0)), strict=True)
        assert list(apart) == sorted(apart) and min(ends) == ends[1]


def test_the_table_at_the_best_rate_matches_its_result():
    head, *lines = table_with("at 5e-4")
    assert head[1] == "small model, trained on" and len(lines) == 2
    setups = [("continued", 0, "adamw")]
    setups += [(*kind, name) for kind in (("noise", 0.5), ("routing", 1)) for name in OPTIMIZERS]
    for model, *cells in lines:
        for cell, (symmetry, amplitude, optimizer) in zip(cells, setups, strict=True):
            found = [
                row["losses"]["2000"]
                for row in rows()
                if (row["model"], row["steps"], row["rate"]) == (model, 2000, 5e-4)
                and (row["symmetry"], row["optimizer"]) == (symmetry, optimizer)
                and (row["amplitude"] or 0, row.get("warmup", 50)) == (amplitude, 50)
            ]
            assert len(found) == 3 and cell == f"{sum(found) / 3:.3f}", (model, symmetry, optimizer)
