"""Carries out one random growth and holds its outputs against the plan's word."""

import copy
import math
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers

import growkern
from bench.fuzz_exactness.cases import DEPENDENT, ODD, OPTIONS, Case
from bench.shared.harness import largest_error
from growkern.growth.outputs import Float64, random_inputs
from growkern.growth.plan import NEW_TOKENS, OUTPUT_ERROR, GrowthPlan, add_errors
from growkern.growth.record import PLANNED_ERROR, measured_level, planned_error
from growkern.growth.record.compare import rounding_error
from growkern.growth.record.verdict import (
    GENERATION_ERROR,
    ROUNDED_LOGITS,
    ROUNDING_ERROR,
    rounding,
)
from testbed.models import as_stored, eager, images, random_model, run, takes_images
from testbed.second import drafts, saved

# float32 shares of weights are rounded, and may be larger than the weights
FLOAT32_ROOM = 16.0
# tokens that are generated after padded prompts
STEPS = 4
# the words of plans and of `verify`, from the strictest on
WORDS = ("exact", "approximate", "changed")


class Weights(Protocol):
    """What `hashlib.sha256` gives."""

    def update(self, data: Any, /) -> None: ...


def check(case: Case, weights: Weights | None = None) -> str:
    """Carry out a case, and add the grown weights to a hash.

    Returns:
        The plan's word, or "refused" or "no source".
    """
    try:
        source = _source(case)
        # a model in float32 would mix its dtype with the casts that `Float64` redirects
        _outputs(copy.deepcopy(source).double(), _inputs(source, "right"))
    except Exception:
        # transformers refuses the config, or cannot run the model
        return "no source"
    try:
        how, plan = _planned(source, case.how)
    except growkern.GrowthError as error:
        assert "\n" not in str(error), str(error)
        return "refused"
    case = replace(case, how=how)
    try:
        grown, report = _grown(case, source, plan)
    except growkern.GrowthError as error:
        # the weights are read only now
        assert plan.may_overflow and "weights are beyond" in str(error), str(error)
        return "refused"
    if weights is not None:
        for name, x in sorted(grown.state_dict().items()):
            weights.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
            weights.update(x.contiguous().reshape(-1).view(torch.uint8).numpy())
    _check_structure(source, grown, plan)
    _check_report(plan, report)
    errors = _all_errors(plan, report, source.double(), grown.double())
    assert all(map(math.isfinite, errors.values())), errors
    dtype = torch.float32 if plan.dtype == torch.float32 else torch.float64
    _, contradiction = measured_level(plan, errors, dtype)
    assert _is_lost(plan) or not contradiction, f"{contradiction}; {errors}"
    if case.second:
        _check_second(case, source)
    return _word(plan)


def _planned(source: Any, how: dict[str, Any]) -> tuple[dict[str, Any], GrowthPlan]:
    """The options, changed as refusals advise, and their plan."""
    refused, changed = "", set()
    while True:
        try:
            return how, growkern.plan(source, **how)
        except growkern.GrowthError as error:
            advised = _advised(str(error), how)
            both = all("sizes that fit" in words for words in (refused, str(error)))
            # of two sizes that have nothing to do with each other, both may be wrong, and a size
            # that suits the heads may be that of the embeddings
            both = both and "would be lost" not in str(error)
            assert not both or (advised and _changed(how, advised).isdisjoint(changed)), (
                f"{refused}; then {error}"
            )
            if advised is None:
                raise
            changed |= _changed(how, advised)
            how, refused = advised, str(error)


def _advised(refusal: str, how: dict[str, Any]) -> dict[str, Any] | None:
    """Options that differ as a refusal advises; None if it gives no advice that grows."""
    idle = refusal.partition("=")[0]
    if idle in how and "has no effect" in refusal:
        return {name: value for name, value in how.items() if name != idle}
    fits = refusal.partition("sizes that fit: ")[2]
    sizes = {name: int(size) for name, size in re.findall(r"(\w+)=(\d+)", fits)}
    if "nearest sizes that fit" in refusal:
        # each is enough by itself
        sizes = dict([next(iter(sizes.items()))])
    idle = re.findall(r"\w+", refusal.partition("Leave out ")[2])
    kept = {name: value for name, value in how.items() if name not in idle}
    return kept | sizes if sizes else None


def _changed(how: dict[str, Any], advised: dict[str, Any]) -> set[str]:
    """The names of the options that differ."""
    return {name for name in how | advised if how.get(name) != advised.get(name)}


def _word(plan: GrowthPlan) -> str:
    """The weakest word of a plan's findings."""
    return max((finding.level for finding in plan.findings), key=WORDS.index)


def _is_lost(plan: GrowthPlan) -> bool:
    """True where the plan itself says that something is lost unasked: that is a failure too."""
    return any(finding.level == "changed" and not finding.asked for finding in plan.findings)


def _source(case: Case) -> Any:
    model_class = getattr(transformers, case.class_name)
    known = model_class.config_class().to_dict()
    sizes = {name: value for name, value in case.sizes.items() if name in known or name not in ODD}
    source = random_model(case.class_name, sizes, std=case.std, dtype=case.dtype)
    if source.can_generate():
        source.generation_config.update(**case.generation)
    return source


def _grown(case: Case, source: Any, plan: GrowthPlan) -> tuple[Any, growkern.VerifyReport]:
    """The grown model, and what `verify` says of it."""
    how = _by_config(source, case.how, plan) if case.by_config else case.how
    grown = growkern.grow(source, **how)
    if not case.on_disk:
        return grown, growkern.verify(source, grown)
    with tempfile.TemporaryDirectory() as name:
        small, large = Path(name) / "small", Path(name) / "large"
        source.save_pretrained(small)
        if case.by_config:
            # saving may drop labels that follow from the class
            saved = type(source.config).from_pretrained(small)
            how = how | {"target_config": _resized(saved, plan)}
        growkern.grow_checkpoint(small, large, progress=False, **how)
        report = growkern.verify(small, large)
        loaded, info = type(source).from_pretrained(large, dtype="auto", output_loading_info=True)
        loaded = as_stored(loaded, large)
    assert not any(info.values()), info
    state = grown.state_dict()
    for key, value in loaded.state_dict().items():
        # transformers loads some weights of 16-bit models, and of those in float64, in float32
        narrow = min(value.dtype, state[key].dtype, key=lambda dtype: dtype.itemsize)
        assert torch.equal(value.to(narrow), state[key].to(narrow)), (
            f"{key} differs between memory and disk"
        )
    return eager(loaded.eval()), report


def _check_second(case: Case, source: Any) -> None:
    """Layers that predict a second token, which only files have, are as exact as the plan says."""
    family, how = case.family, {**case.how, "dtype": torch.float64}
    with tempfile.TemporaryDirectory() as name:
        small, large = Path(name) / "small", Path(name) / "large"
        saved(source, small, family)
        plan = growkern.grow_checkpoint(small, large, progress=False, **how).plan
        _check_report(plan, growkern.verify(small, large))
        pairs = zip(drafts(small, family), drafts(large, family, plan.layer_maps[""]), strict=True)
        errors = [
            ((x - y[..., : x.shape[-1]]).abs().max() / x.abs().max()).item() for x, y in pairs
        ]
    assert plan.small.second and all(map(math.isfinite, errors)), errors
    assert not plan.exact or max(errors) <= rounding(torch.float64), errors


def _by_config(source: Any, how: dict[str, Any], plan: GrowthPlan) -> dict[str, Any]:
    """The same growth, with a whole config instead of the target's sizes."""
    names = {*OPTIONS, "dtype"}.union(*DEPENDENT.values())
    changed = {"target_config": _resized(source.config, plan)} | {
        name: how[name] for name in how.keys() & names
    }
    assert growkern.plan(source, **changed).findings == plan.findings
    return changed


def _resized(config: Any, plan: GrowthPlan) -> Any:
    """A copy of a source's config with the target's sizes."""
    resized = copy.deepcopy(config)
    text = plan.small.family.text(resized)
    for name, (_, size) in plan.size_changes().items():
        setattr(text, name, size)
    family = plan.small.family
    # a layer that is dense in the source stays so
    for field in (*family.sparse_fields, *(entry.count_of for entry in family.config.values())):
        if field is not None:
            setattr(text, field, getattr(plan.large.text, field))
    return resized


def _check_structure(source: Any, grown: Any, plan: GrowthPlan) -> None:
    """What every grown model must satisfy, whatever the plan's word."""
    with torch.device("meta"):
        fresh = type(source)(plan.target_config)
    state = grown.state_dict()
    shapes, wanted = ({n: x.shape for n, x in s.items()} for s in (state, fresh.state_dict()))
    assert shapes == wanted
    for name, x in state.items():
        assert bool(torch.isfinite(x).all()), name


def _check_report(plan: GrowthPlan, report: growkern.VerifyReport) -> None:
    """The word of `verify` is the plan's or a stricter one, and no tensor differs."""
    said = f"planned {_word(plan)}, verify says {report.level}: {report.failure}"
    assert all(group.ok for group in report.groups) and not report.contradictions, said
    if _is_lost(plan):
        # a loss that nobody asked for must not pass, unless it does not show
        shows = not report.outputs[OUTPUT_ERROR] <= rounding(torch.float32)
        assert not (report.ok and (shows or report.level == "changed")), said
    else:
        assert report.ok and WORDS.index(report.level) <= WORDS.index(_word(plan)), said


def _inputs(model: Any, side: str) -> dict[str, torch.Tensor]:
    if takes_images(model):
        return images(model)
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 40, (3, 7), generator=rng)
    mask = torch.ones_like(ids)
    mask[1, (slice(5, 7) if side == "right" else slice(0, 2))] = 0
    padding = getattr(model.config, "pad_token_id", None)
    ids[mask == 0] = 0 if padding is None else padding
    if hasattr(model, "classification_head"):
        # an encoder-decoder that classifies looks for the end of the text
        ids[:, 3] = model.config.eos_token_id
    inputs = {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder and hasattr(model, "get_decoder"):
        is_headed = hasattr(model, "classification_head")
        decoder = ids if is_headed else torch.randint(3, 40, (3, 7), generator=rng)
        inputs["decoder_input_ids"] = decoder
    if "MultipleChoice" in type(model).__name__:
        inputs = {name: x[None] for name, x in inputs.items()}
    return inputs


@torch.no_grad()
def _outputs(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Outputs by name; those per token at unmasked positions only."""
    at = inputs.get("attention_mask", torch.ones(0)).bool()
    per_token = {"decoder_input_ids"}.isdisjoint(inputs)
    return {
        name: x[at] if per_token and x.shape[:2] == at.shape else x
        for name, x in run(model, inputs).items()
    }


def _all_errors(
    plan: GrowthPlan, report: growkern.VerifyReport, source: Any, grown: Any
) -> dict[str, float]:
    """The measures of `growkern.verify`, taken on padded inputs, of both models in float64."""
    errors: dict[str, float] = {}
    for side in ("right", "left"):
        for name, value in _errors(plan, source, grown, side).items():
            errors[name] = largest_error([value, errors.get(name, 0.0)])
    if source.can_generate():
        errors |= _generation_error(source, grown)
    errors[ROUNDED_LOGITS] = report.outputs.get(ROUNDED_LOGITS, 0.0)
    for name, sample in ((PLANNED_ERROR, planned_error), (ROUNDING_ERROR, rounding_error)):
        if name in report.outputs:
            errors[name] = max(report.outputs[name], *_samples(plan, source, sample))
    if PLANNED_ERROR in errors:
        # padding may enlarge it, and outputs beside the main one may err more
        add_errors(plan, moved := copy.deepcopy(source))
        seen = (_errors(None, source, moved, side) for side in ("right", "left"))
        errors[PLANNED_ERROR] = max(errors[PLANNED_ERROR], *(x["relative error"] for x in seen))
    if not plan.rounds_weights and plan.exact and plan.dtype == torch.float32:
        with Float64():
            sample = rounding_error(plan, source, random_inputs(plan.source))
        # `verify` allows 1e-4 for any model; this is the rounding of this one
        assert errors["relative error"] <= FLOAT32_ROOM * sample, (errors, sample)
    return errors


def _samples(plan: GrowthPlan, source: Any, sample: Any) -> list[float]:
    """A sample of the source's own error on the texts of `_inputs`, for both sides of padding."""
    inputs = (next(iter(_inputs(source, side).values())) for side in ("right", "left"))
    texts = [x if x.is_floating_point() else x.flatten(0, -2) for x in inputs]
    with Float64():
        return [sample(plan, source, tokens) for tokens in texts]


def _errors(plan: GrowthPlan | None, source: Any, grown: Any, side: str) -> dict[str, float]:
    """The measures of `growkern.verify` for one side of padding; without a plan, nothing grew."""
    inputs = _inputs(source, side)
    old, new = _outputs(source, inputs), _outputs(grown, inputs)
    assert old.keys() == new.keys(), (old.keys(), new.keys())
    errors, rise = list[float](), 0.0
    for name, x in old.items():
        y = new[name]
        if name == "last_hidden_state" and plan:
            space = plan.layout.space(plan.small.output_space)
            copy = ~space.is_extra & (space.write != 0)
            y, x = y[..., copy] / space.write[copy], x[..., space.read_index[copy]]
        elif y.shape != x.shape:
            size = x.shape[-1]
            rise = (y.logsumexp(-1) - y[..., :size].logsumexp(-1)).max().item()
            y = y[..., :size]
        errors.append(((x - y).abs().max() / x.abs().max().clamp(min=1e-3)).item())
    return {"relative error": largest_error(errors), NEW_TOKENS: rise}


def _generation_error(source: Any, grown: Any) -> dict[str, float]:
    """Compare the scores of greedy generation, prompts padded on the left.

    Scores are logits that the settings of generation have changed. Those of steps after the models
    choose different tokens are left out.
    """
    prompts = torch.randint(3, 40, (2, 5), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(prompts)
    mask[1, :2] = prompts[1, :2] = 0
    try:
        old, chosen = _generated(source, prompts, mask)
    except Exception:
        # transformers cannot generate with every model that has the method
        return {}
    new, others = _generated(grown, prompts, mask)
    count = min(old.shape[1], new.shape[1])
    differ = (chosen[:, :count] != others[:, :count]).long()
    is_same = differ.cumsum(1) - differ == 0
    x, y = old[:, :count][is_same], new[:, :count, : old.shape[-1]][is_same]
    allowed = x.isfinite()
    assert torch.equal(allowed, y.isfinite()), "other tokens are suppressed"
    x, y = x[allowed], y[allowed]
    return {GENERATION_ERROR: ((x - y).abs().max() / x.abs().max()).item()}


@torch.no_grad()
def _generated(
    model: Any, prompts: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of every step, (batch, steps, vocabulary), and the tokens, (batch, steps)."""
    how = {"max_new_tokens": STEPS, "do_sample": False, "num_beams": 1, "pad_token_id": 0}
    with Float64():
        generated = model.generate(
            prompts, attention_mask=mask, return_dict_in_generate=True, output_scores=True, **how
        )
    scores = torch.stack(generated.scores, 1)
    return scores, generated.sequences[:, -scores.shape[1] :]
