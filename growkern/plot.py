"""Loss against FLOPs: what a run has saved, at equal loss, next to another one; attention maps.

A run's curve is the log history of its training directory: validation loss where it was measured,
else training loss. With F(r, l) the FLOPs at which run r first reaches loss l,

    saving = 1 - F(run, l) / F(reference, l),   l = the reference's final loss            (1)

F is linear between the two points around the crossing, and None where a run never gets there.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from growkern.errors import GrowthError
from growkern.growth.record.outputs import load_model
from growkern.train.run import last_checkpoint
from growkern.whole import write_whole

STATE_FILE = "trainer_state.json"


@dataclass(frozen=True)
class Curve:
    """Loss of a run as its FLOPs, steps and seconds go up; four tuples of one length.

    seconds: of training alone, without evaluation; empty where a run did not record them.
    validation: whether the losses are validation losses.
    """

    name: str
    steps: tuple[int, ...]
    flops: tuple[float, ...]
    losses: tuple[float, ...]
    seconds: tuple[float, ...] = ()
    validation: bool = True

    def flops_at(self, loss: float) -> float | None:
        """FLOPs at which the run first reaches a loss, None if it never does."""
        return first_crossing(self.flops, self.losses, loss)

    def seconds_at(self, loss: float) -> float | None:
        """Seconds of training at which the run first reaches a loss, None if it never does."""
        return first_crossing(self.seconds, self.losses, loss) if self.seconds else None


def first_crossing(costs: Sequence[float], losses: Sequence[float], target: float) -> float | None:
    """Cost at which the losses first come down to `target`, linear between two points."""
    for i, loss in enumerate(losses):
        if loss <= target:
            if i == 0:
                return costs[0]
            share = (losses[i - 1] - target) / (losses[i - 1] - loss)
            return costs[i - 1] + share * (costs[i] - costs[i - 1])
    return None


def saving(curve: Curve, reference: Curve, *, extra_flops: float = 0.0) -> float | None:
    """Share of the reference's FLOPs that a run did without at the reference's final loss. (1)

    extra_flops: counted on top of the run's own, such as the training of the model it grew from.
    returns: negative where the run cost more; None where it never reached that loss.
    """
    target = reference.losses[-1]
    spent, full = curve.flops_at(target), reference.flops_at(target)
    return None if spent is None or not full else 1 - (spent + extra_flops) / full


# ------------------------------------------------------------------- reading


def read_curve(directory: str | Path, name: str | None = None) -> Curve:
    """The curve of a training directory, finished or not.

    raises: GrowthError when it holds no log with FLOPs.
    """
    directory = Path(directory)
    # a run that is not finished has a log in its checkpoints only
    holder = directory if (directory / STATE_FILE).is_file() else last_checkpoint(directory)
    if holder is None:
        raise GrowthError(f"{directory} is no training directory: it has no {STATE_FILE}")
    history = json.loads((holder / STATE_FILE).read_text())["log_history"]
    curve = curve_of(history, name or directory.resolve().name)
    if not curve.steps:
        raise GrowthError(f"{holder / STATE_FILE}: no line has a loss and flops: not our log")
    return curve


def curve_of(history: Sequence[dict[str, Any]], name: str) -> Curve:
    """The curve in a log history. A step that was logged twice (a resumed run) counts once."""
    validation = any("eval_loss" in line for line in history)
    # beside a teacher, "loss" is a mixture and "mlm" is what other runs can be compared with
    keys = ("eval_loss",) if validation else ("mlm", "loss")
    lines: dict[int, tuple[float, dict[str, Any]]] = {}
    for line in history:
        key = next((key for key in keys if key in line), None)
        if key is not None and "flops" in line:
            lines[line["step"]] = (line[key], line)
    steps = tuple(sorted(lines))
    losses = tuple(lines[step][0] for step in steps)
    points = [lines[step][1] for step in steps]
    timed = all("seconds" in line for line in points)
    return Curve(
        name,
        steps,
        flops=tuple(line["flops"] for line in points),
        losses=losses,
        seconds=tuple(line["seconds"] for line in points) if timed else (),
        validation=validation,
    )


# ------------------------------------------------------------------- drawing


def plot_runs(runs: Sequence[str | Path], out: str | Path) -> None:
    """Draw training directories side by side, each with its saving against the first one."""
    draw([read_curve(run) for run in runs], out)


def draw(curves: Sequence[Curve], out: str | Path, *, title: str = "") -> None:
    """Write a PNG of loss against FLOPs; the first curve is the reference. (1)

    raises: GrowthError without curves, for a mixture of training and validation losses, without
        matplotlib.
    """
    figure = _new_figure()
    if len({curve.validation for curve in curves}) != 1:
        raise GrowthError("give runs that all have a validation loss, or none of which has")
    reference, target = curves[0], curves[0].losses[-1]
    axes = figure.add_subplot()
    for curve in curves:
        label = curve.name if curve is reference else f"{curve.name}: {_words(curve, reference)}"
        line = axes.plot(curve.flops, curve.losses, label=label, linewidth=1.6)[0]
        if (flops := curve.flops_at(target)) is not None:
            axes.plot([flops], [target], marker="o", color=line.get_color())
    axes.axhline(target, color="0.6", linewidth=0.8, linestyle="--")
    axes.set_xlabel("training FLOPs, teacher included")
    axes.set_ylabel("validation loss" if reference.validation else "training loss")
    axes.set_title(title)
    axes.grid(alpha=0.25)
    axes.legend(fontsize="small", title=f"FLOPs saved at loss {target:.3f}")
    _save(figure, Path(out))


# ----------------------------------------------------------------- attention


def attention_maps(model: Any, tokens: Tensor) -> Tensor:
    """What every head attends to: (layers, heads, length, length), float32.

    Args:
        model: of transformers, loaded with `attn_implementation="eager"`; of an encoder-decoder
            the encoder is shown.
        tokens: (1, length) int64.
    """
    inputs = {"input_ids": tokens}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens
    with torch.no_grad():
        output = model(**inputs, output_attentions=True)
    maps = getattr(output, "attentions", None) or output.encoder_attentions
    return torch.stack([layer[0].float() for layer in maps])


def plot_attention(
    checkpoints: Sequence[str | Path], text: str, out: str | Path, *, length: int = 32
) -> None:
    """Draw the attention maps of checkpoints side by side (bert2BERT, Figures 9 to 12).

    Args:
        checkpoints: directories, such as a source and what was grown from it.
        text: its first `length` tokens are attended to; the first checkpoint's tokenizer is used.

    Raises:
        GrowthError: an empty text; without matplotlib.
    """
    figure = _new_figure()
    if not text.strip():
        raise GrowthError("there is no text to attend to")
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoints[0])
    ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=length)["input_ids"]
    models = (load_model(c, attn_implementation="eager") for c in checkpoints)
    all_maps = [attention_maps(model, ids) for model in models]
    widths = [maps.shape[1] for maps in all_maps]
    figure.set_size_inches(0.9 * sum(widths) + 1, 0.9 * max(map(len, all_maps)) + 1)
    panels = figure.subfigures(1, len(all_maps), width_ratios=widths, squeeze=False)[0]
    for panel, maps, checkpoint in zip(panels, all_maps, checkpoints, strict=True):
        panel.suptitle(f"{Path(checkpoint).name}: layers x heads", fontsize="medium")
        grid = panel.subplots(*maps.shape[:2], squeeze=False)
        for layer, row in enumerate(grid):
            row[0].set_ylabel(str(layer), rotation=0, labelpad=8)
            for head, axes in enumerate(row):
                axes.imshow(maps[layer, head].numpy(), vmin=0, cmap="viridis")
                axes.set(xticks=[], yticks=[])
    _save(figure, Path(out))


# -------------------------------------------------------------------- shared


def _words(curve: Curve, reference: Curve) -> str:
    share = saving(curve, reference)
    return "not reached" if share is None else f"{share:.0%}"


def _new_figure() -> Any:
    try:
        # the figure itself: pyplot would choose a display and keep figures alive
        from matplotlib.figure import Figure
    except ImportError as error:
        raise GrowthError("plots need matplotlib: pip install 'growkern[plot]'") from error
    return Figure(figsize=(9, 5.5), layout="constrained")


def _save(figure: Any, out: Path) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, lambda partial: figure.savefig(partial, format="png", dpi=130))
    except OSError as error:
        raise GrowthError(f"{out}: {error.strerror or error}") from error
