"""Forecasts: their evidence, their range, and when they are against growth."""

import dataclasses
import io

import pytest
from rich.console import Console

import growkern
from growkern.errors import GrowthError
from growkern.growth.plan.advice import evidence, forecast
from growkern.growth.plan.advice.evidence import stacking_tokens
from growkern.growth.plan.advice.forecast import span
from tests.growth.models import BERT
from tests.growth.plan.test_advice import BIG, DEEPER, meta

# tokens: fewer than 20 for each parameter of source and target
YOUNG, SHORT = 1e9, 1e9
# below 2.5 times the parameters
WIDE = {"hidden_size": 1408}
# as small as our own runs: a source of 1.3 million parameters, and a target of 2.8
LITTLE = {
    "hidden_size": 128,
    "num_attention_heads": 8,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "vocab_size": 1000,
}
WIDER, FEW = {"hidden_size": 192}, 1e7
BASE_GPT2 = {"n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257}


def forecast_of(growth, tokens, source_tokens=None, sizes=BIG):
    return growkern.plan(meta("LlamaForCausalLM", **sizes), **growth).forecast(
        tokens, source_tokens
    )


def printed(plan, **tokens):
    """The table of a plan as text, in lines that do not break."""
    console = Console(file=io.StringIO(), width=400)
    console.print(plan.table(**tokens))
    return console.file.getvalue()


def test_a_forecast_is_the_range_of_the_savings_along_its_axes():
    plan = growkern.plan(meta("LlamaForCausalLM", **LITTLE), **WIDER)
    found = plan.forecast(FEW, FEW)
    # the 95 % intervals of our own runs
    assert (found.low, found.high) == pytest.approx((0.378 - 0.170, 0.479 + 0.093))
    assert not found.reasons and found.saves and not found.against and not found.is_untried
    assert {paper.axis for paper in found.papers} == {"width"}
    assert found.flops == plan.flops_per_token() * FEW
    share = plan.flops_per_token("source") / plan.flops_per_token()
    assert found.with_source == pytest.approx((found.low - share, found.high - share))
    assert found.verdict.startswith("grow: 21% to 57% of")
    assert plan.forecast(FEW).with_source is None
    # a source that costs more than growth saves
    found = forecast_of(WIDE, SHORT, YOUNG)
    assert found.with_source[1] < 0 and "do not train one" in found.verdict
    deeper = forecast_of({**DEEPER, "depth": "stack"}, SHORT, 0.1 * SHORT)
    assert {paper.axis for paper in deeper.papers} == {"depth"}
    assert (deeper.low, deeper.high) == pytest.approx((0.198 - 0.037, 1 - 194 / 300))


def test_a_large_model_is_not_promised_what_only_small_ones_saved():
    found = forecast_of(WIDE, SHORT)
    assert found.is_untried and found.low == 0 < found.high
    assert found.verdict.startswith("try it on a small scale first: 0% to 57% of")
    times = f"{growkern.plan(meta('LlamaForCausalLM', **BIG), **WIDE).parameters() / 2e6:.0f}"
    assert f"this one has {times} times the 2 M parameters of the largest" in found.reasons[0]
    found = forecast_of({"hidden_size": 320}, FEW, sizes=LITTLE)
    assert found.is_untried and found.low == 0 < found.high
    assert "5.5 times its parameters; these savings were measured at 4 times" in found.reasons[0]
    # papers have measured these
    for how in ({**WIDE, "stream": "copies"}, DEEPER):
        assert not forecast_of(how, SHORT, 0.1 * SHORT).is_untried


def test_the_evidence_is_that_of_the_way_to_grow():
    def found(**how):
        return growkern.plan(meta("GPT2LMHeadModel", **BASE_GPT2), n_embd=1024, **how).forecast(1e9)

    def names(forecast):
        return [one.paper for one in forecast.papers]

    padded, copies, aki = found(), found(stream="copies"), found(method="aki", stream="copies")
    assert names(padded) == 2 * ["growkern"]
    assert names(copies) == ["bert2BERT", "SPARKLING", "growkern"]
    assert names(aki) == [*3 * ["bert2BERT"], "growkern"]
    # bert2BERT's 38 %, 45 % and 47 % are those of AKI
    assert copies.high < 0.4 < aki.high == 0.47
    # the interval of our own copies reaches below 0
    assert copies.low == pytest.approx(0.172 - 0.203) and "costs more" in copies.verdict
    for how, said in (
        ({"method": "random"}, "choose method='fpi': method='random' is a baseline"),
        ({"method": "direct_copy"}, "unknown: method='direct_copy' is a baseline"),
        ({"stream": "copies", "symmetry": "none"}, "with equal copies a small GPT-2 did not"),
        # of heads and units
        ({"symmetry": "none"}, "with equal copies a small GPT-2 did not"),
    ):
        forecast = found(**how)
        assert not forecast.papers and not forecast.saves and said in forecast.verdict
        assert forecast.range == "no evidence"


def test_runs_of_more_layers_are_evidence_for_young_sources():
    young, trained = (forecast_of(DEEPER, SHORT, share * SHORT) for share in (0.1, 1))
    assert young.low == pytest.approx(0.214 - 0.054) and young.high < 0.35
    assert {paper.paper for paper in young.papers} == {"G_stack", "growkern"}
    # G_stack's sources were young, and ours stood at the loss of training from scratch
    assert not trained.papers and not trained.reasons
    assert trained.verdict.startswith("unknown: such growth was measured only from sources that")
    assert forecast_of(DEEPER, SHORT).papers == young.papers


@pytest.mark.parametrize(
    "share, high, both",
    [
        (0.02, 0.143, 0.318),
        (0.1, 0.143, 0.318),
        (0.2, 0.1755, 0.318),
        # more layers were measured from young sources alone
        (0.65, 0.378, 0.378),
        (1, 0.572, 0.732),
    ],
)
def test_a_young_source_saves_no_more_than_ours_of_its_age(share, high, both):
    found = forecast_of(WIDE, SHORT, share * SHORT)
    assert found.high == pytest.approx(high, abs=5e-4)
    youngest = "the source saw a smaller share of the target's tokens than in any measurement"
    assert any(youngest in line for line in found.reasons) == (share < 0.1)
    deeper = forecast_of({**WIDE, **DEEPER}, SHORT, share * SHORT)
    assert deeper.high == pytest.approx(both, abs=5e-4)
    # more layers too, where no law says when
    large = {**BIG, "num_hidden_layers": 4 * BIG["num_hidden_layers"]}
    for depth, sizes, tokens, is_told in (
        ("identity", large, 1e10, True),
        ("stack", LITTLE, FEW, True),
        ("stack", large, 1e10, False),
    ):
        growth = {"num_hidden_layers": 2 * sizes["num_hidden_layers"], "depth": depth}
        found = forecast_of(growth, tokens, share * tokens, sizes)
        is_told = is_told and share < 0.1
        assert any(youngest in line for line in found.reasons) == is_told
        if share < 0.1:
            said = "try it on a small scale first: 0% to" if is_told else "grow: "
            assert found.verdict.startswith(said)


def test_units_alone_are_no_evidence():
    found = forecast_of({"intermediate_size": 8192}, SHORT)
    assert not found.papers and not found.saves and found.verdict.startswith("unknown")
    assert "no evidence" in printed(
        growkern.plan(meta("LlamaForCausalLM", **BIG), intermediate_size=8192), tokens=SHORT
    )


@pytest.mark.parametrize(
    ("growth", "tokens", "source_tokens", "reason"),
    [
        (WIDER, 10 * FEW, None, "tokens per parameter; gains were largest"),
        (WIDER, FEW, 100 * FEW, "the less each further token gains"),
        ({"hidden_size": 224}, FEW, None, "times was most reliable"),
        ({"hidden_size": 144, "num_attention_heads": 9}, FEW, None, "less than in any"),
        (WIDER, FEW, 0.1 * FEW, "saw 0.1 times the tokens"),
    ],
)
def test_a_forecast_starts_at_0_where_a_paper_doubts_it(growth, tokens, source_tokens, reason):
    found = forecast_of(growth, tokens, source_tokens, LITTLE)
    assert found.low == 0 < found.high and found.saves
    assert [reason in line for line in found.reasons] == [True]


@pytest.fixture
def without_ours(monkeypatch):
    """The evidence of papers alone."""
    papers = tuple(one for one in evidence.SAVINGS if one.paper != evidence.OURS)
    monkeypatch.setattr(forecast, "SAVINGS", papers)


def test_width_of_a_large_decoder_may_lose(request):
    large = {**BIG, "hidden_size": 2048, "num_attention_heads": 32, "num_hidden_layers": 16}
    found = forecast_of({"hidden_size": 3072}, SHORT, None, large)
    assert found.low == pytest.approx(1 - 1 / (1 - 0.179))
    assert found.verdict.startswith("try it on a small scale first: -22% to 57%")
    assert "below 0% it costs more" in found.verdict
    # in no other way was a gain measured
    request.getfixturevalue("without_ours")
    found = forecast_of({"hidden_size": 3072, "method": "aki"}, SHORT, None, large)
    assert not found.saves and found.verdict.startswith("train from scratch")


def test_a_source_that_saw_little_is_no_doubt_for_more_layers():
    assert not forecast_of(DEEPER, SHORT, 0.1 * SHORT).reasons
    assert not forecast_of(WIDER, FEW, 0.5 * FEW, LITTLE).reasons


@pytest.mark.parametrize(
    ("growth", "tokens", "source_tokens", "sizes", "said"),
    [
        ({"hidden_size": 3072}, 1e12, None, BIG, "gains shrink with both"),
        # a source that is practically untrained
        (WIDE, SHORT, 1, BIG, "the source saw fewer than 0.1 tokens per parameter"),
        # a far larger factor, at few tokens
        (
            {"hidden_size": 8192},
            SHORT,
            YOUNG,
            BIG,
            "saved much only from a source",
        ),
        # nobody measured one so large, from any source
        ({"hidden_size": 8192}, SHORT, 10 * SHORT, BIG, "no gain was measured above 15 times"),
        ({"num_hidden_layers": 61}, SHORT, YOUNG, {**BIG, "num_hidden_layers": 1}, "61 times"),
    ],
)
def test_a_forecast_can_be_against_growth(growth, tokens, source_tokens, sizes, said):
    found = forecast_of(growth, tokens, source_tokens, sizes)
    assert not found.saves and not found.papers and found.low == found.high == 0
    assert found.verdict == found.against and said in found.against
    assert found.against.startswith("train from scratch") and found.with_source is None


def test_many_layers_from_few_are_no_growth_that_is_too_large():
    sizes = {**BIG, "num_hidden_layers": 1}
    assert forecast_of({"num_hidden_layers": 60}, SHORT, None, sizes).saves


def test_a_source_is_not_trained_for_a_target_that_sees_far_more_tokens():
    assert not forecast_of(WIDE, 1e10).must_be_free
    found = forecast_of(WIDE, 1e11)
    assert found.verdict.startswith("train from scratch, unless the source exists already: then 0%")
    # one that costs less than a hundredth is not worth a thought
    plan = growkern.plan(meta("LlamaForCausalLM", **BIG), **WIDE)
    share = plan.flops_per_token("source") / plan.flops_per_token() / 1e11
    assert plan.forecast(1e11, 0.011 / share).must_be_free
    cheap = plan.forecast(1e11, 0.009 / share)
    assert not cheap.must_be_free
    assert cheap.verdict.startswith("try it on a small scale first: 0% to 14%")


def test_a_target_that_hardly_sees_a_token_has_no_forecast():
    parameters = growkern.plan(meta("LlamaForCausalLM", **BIG), **WIDE).parameters()
    found = forecast_of(WIDE, 0.09 * parameters)
    assert not found.papers and "unknown: the target sees fewer than 0.1" in found.verdict
    assert forecast_of(WIDE, 0.11 * parameters).papers


def test_a_forecast_is_unknown_where_only_the_vocabulary_grows():
    found = forecast_of({"vocab_size": BIG["vocab_size"] + 64}, SHORT)
    assert not found.papers and found.verdict.startswith("unknown")


def test_one_number_is_no_range_and_0_has_no_sign():
    assert span(0.353, 0.353) == "about 35%" and span(-0.003, 0.47) == "0% to 47%"
    assert span(-0.031, 0.375) == "-3% to 38%"
    one = forecast_of({**WIDE, "stream": "copies"}, SHORT)
    own = tuple(paper for paper in one.papers if paper.bound)
    alone = dataclasses.replace(one, papers=own, low=own[0].low, high=own[0].high)
    assert alone.range == "up to 35% (one measurement)"


def test_when_to_stack_follows_the_published_law():
    # N = 1e9 and C = 1e20: log10 d = 0.88 * 9 + 163.27 / 20 - 5.74 = 10.3435
    assert stacking_tokens(10**9, 1e20) == pytest.approx(10**10.3435)
    sizes = {**BIG, "hidden_size": 2048, "num_hidden_layers": 16}
    stacked = {"num_hidden_layers": 32, "depth": "stack"}
    line = forecast_of(stacked, 1e11, 2e9, sizes).reasons[-1]
    assert "stacking is best after" in line and "yours saw 2 G" in line
    # the law names more tokens than the target will see
    line = forecast_of(stacked, 1e10, 2e9, sizes).reasons[-1]
    assert "does not hold for so short a training" in line and "best after" not in line
    # a small model is outside of the law
    assert not forecast_of({**DEEPER, "depth": "stack"}, SHORT).reasons


def test_the_table_has_the_forecast_if_the_tokens_are_given():
    plan = growkern.plan(meta("LlamaForCausalLM", **BIG), **WIDE, stream="copies")
    text = printed(plan, tokens=SHORT, source_tokens=YOUNG)
    for part in ("what growth may save", "-3% to 38%", "published: SPARKLING", "forecast: "):
        assert part in text
    assert "measured by us, GPT-2" in text and "published: growkern" not in text
    assert "up to 35%" in text and "17% ± 20%" in text
    assert "forecast" not in printed(plan)
    with pytest.raises(GrowthError, match=r"source_tokens=1e\+09 is for the forecast: give tokens"):
        plan.table(source_tokens=YOUNG)


@pytest.mark.parametrize(
    ("class_name", "sizes", "growth", "said"),
    [
        ("LlamaForCausalLM", BIG, WIDE, "recommended: method fpi, stream padded (a small GPT-2"),
        ("LlamaForCausalLM", BIG, DEEPER, "depth identity (keeps the function;"),
        (
            "LlamaForCausalLM",
            BIG,
            {"intermediate_size": 8192},
            "method fpi (keeps the function; no",
        ),
        ("BertForMaskedLM", BERT, {"hidden_size": 24}, "method fpi (a small BERT"),
    ],
)
def test_the_table_recommends_a_method_and_says_why(class_name, sizes, growth, said):
    plan = growkern.plan(meta(class_name, **sizes), allow_nonfinite=True, **growth)
    (line,) = [one for one in printed(plan).splitlines() if one.startswith("recommended: ")]
    assert said in line and ("measured by us" in line or "no evidence" in line)


def recommended(growth, sizes=BIG, **tokens):
    plan = growkern.plan(meta("LlamaForCausalLM", **sizes), **growth)
    (line,) = [one for one in printed(plan, **tokens).splitlines() if one.startswith("recommended")]
    return line.removeprefix("recommended: ")


def test_the_recommendation_follows_the_forecast(request):
    """Where training from scratch is better, no method is recommended."""
    assert recommended(WIDE, tokens=SHORT).startswith("method fpi, stream padded")
    # the source has seen nothing
    said = recommended(WIDE, tokens=SHORT, source_tokens=1)
    assert said == "train from scratch (see the forecast)"
    said = recommended(WIDE, tokens=1e12)
    assert said.startswith("if the source exists already, method fpi")
    # a source that costs more than growth saves
    said = recommended(WIDE, tokens=SHORT, source_tokens=SHORT)
    assert said.startswith("if the source exists already, method fpi")
    # a baseline is no reason not to grow
    assert recommended({**WIDE, "method": "random"}, tokens=SHORT).startswith("method fpi")
    # every measurement of such a growth was a loss
    request.getfixturevalue("without_ours")
    large = {**BIG, "hidden_size": 2048, "num_attention_heads": 32, "num_hidden_layers": 16}
    said = recommended({"hidden_size": 3072, "method": "aki"}, large, tokens=SHORT)
    assert said == "train from scratch (see the forecast)"


def test_a_plan_says_one_thing_about_layers():
    """It once recommended one way to add layers and advised another below."""
    plan = growkern.plan(meta("LlamaForCausalLM", **BIG), **DEEPER)
    for source_tokens in (2, 2e3):
        text = printed(plan, tokens=SHORT, source_tokens=source_tokens * plan.parameters("source"))
        (line,) = [one for one in text.splitlines() if "depth " in one]
        assert "depth identity (keeps" in line


@pytest.mark.parametrize("tokens", [0.5, 1e19, 1e308])
def test_a_number_of_tokens_that_no_model_sees_is_refused(tokens):
    for given in ({"tokens": tokens}, {"tokens": SHORT, "source_tokens": tokens}):
        with pytest.raises(GrowthError, match=r"give a number of tokens from 1 to 1e\+18"):
            growkern.plan(meta("LlamaForCausalLM", **BIG), **WIDE).forecast(**given)


def test_a_far_growth_needs_a_source_that_was_trained_for_long():
    """Three times the tokens that the target will see, for growth to 13 to 15 times."""
    far = {"hidden_size": 4864}
    assert "grows to 14 times" in forecast_of(far, SHORT, 2.9 * SHORT).against
    found = forecast_of(far, SHORT, 3 * SHORT)
    assert not found.against and found.low <= 0 < found.high
    for reason in (
        "measured at 4 times or less",
        "only one small BERT saved much: AKI in every seed",
    ):
        assert any(reason in line for line in found.reasons)
    assert found.verdict.startswith("try it on a small scale first")
