"""Draws loss against FLOPs of training runs, and attention maps of checkpoints.

The curve of a run comes from the log history in its training directory. It shows the validation
loss if that was measured, else the training loss. The picture tells how many FLOPs a run saved to
reach the same loss as a reference run. With F(r, l) the FLOPs at which run r first reaches loss l,

    saving = 1 - F(run, l) / F(reference, l),   l = the reference's final loss            (1)

F is interpolated linearly between the two nearest points. It is None if a run never reaches l.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from growkern.bounded import read_json
from growkern.errors import GrowthError
from growkern.growth.record.outputs import load_model
from growkern.train.load import load_tokenizer
from growkern.train.safety.checkpoints import checkpoints_in
from growkern.whole import write_whole

STATE_FILE = "trainer_state.json"
# 300,000 lines of the log
MOST_BYTES = 100_000_000
# of FLOPs, and of anything else in a log
MOST = 1e40


@dataclass(frozen=True)
class Curve:
    """The losses of a run, with the steps, FLOPs and seconds at which they were measured.

    Attributes:
        name: for the legend.
        steps: optimizer steps, ascending.
        flops: FLOPs so far, one per step.
        losses: one per step.
        seconds: of training without evaluation, one per step; empty if not recorded.
        validation: whether the losses are validation losses.
    """

    name: str
    steps: tuple[int, ...]
    flops: tuple[float, ...]
    losses: tuple[float, ...]
    seconds: tuple[float, ...] = ()
    validation: bool = True

    def flops_at(self, loss: float) -> float | None:
        """The FLOPs at which the run first reaches a loss, None if it never does."""
        return first_crossing(self.flops, self.losses, loss)

    def seconds_at(self, loss: float) -> float | None:
        """The seconds of training until the run first reaches a loss, None if it never does."""
        return first_crossing(self.seconds, self.losses, loss) if self.seconds else None


def first_crossing(costs: Sequence[float], losses: Sequence[float], target: float) -> float | None:
    """The cost at which a loss is first reached.

    Args:
        costs: ascending, one per loss.
        losses: of a run.
        target: the loss to reach.

    Returns:
        The cost, interpolated linearly between two points; None if it is never reached.
    """
    for i, loss in enumerate(losses):
        if loss <= target:
            if i == 0:
                return costs[0]
            share = (losses[i - 1] - target) / (losses[i - 1] - loss)
            return costs[i - 1] + share * (costs[i] - costs[i - 1])
    return None


def saving(curve: Curve, reference: Curve, *, extra_flops: float = 0.0) -> float | None:
    """The share of the reference's FLOPs that a run saved to reach the same final loss. (1)

    Args:
        curve: of the run.
        reference: of the run to compare with; its last loss is the one to reach.
        extra_flops: added to those of the run, such as the training of the model it grew from.

    Returns:
        Negative if the run cost more, None if it never reached that loss.
    """
    target = reference.losses[-1]
    spent, full = curve.flops_at(target), reference.flops_at(target)
    return None if spent is None or not full else 1 - (spent + extra_flops) / full


# ------------------------------------------------------------------- reading


def read_curve(directory: str | Path, name: str | None = None) -> Curve:
    """Read the curve of a training directory, finished or not.

    Args:
        directory: of the run.
        name: for the legend; None takes the name of the directory.

    Raises:
        GrowthError: the directory has no log with FLOPs.
    """
    directory = Path(directory)
    # an unfinished run has its log in its checkpoints only
    places = (directory, *checkpoints_in(directory))
    holder = next((place for place in places if (place / STATE_FILE).is_file()), None)
    if holder is None:
        runs = ", ".join(map(str, sorted(directory.glob("generation-*"))))
        hint = f": give one of its runs, {runs}" if runs else ""
        raise GrowthError(f"{directory} is not a training directory: it has no {STATE_FILE}{hint}")
    file = holder / STATE_FILE
    try:
        history = read_json(file, MOST_BYTES, "log")["log_history"]
        curve = curve_of(history, name or directory.resolve().name)
        for number in (*curve.steps, *curve.flops, *curve.losses, *curve.seconds):
            # integers of a file may be too large for a float
            if isinstance(number, str) or float(number) > MOST:
                raise ValueError(f"{str(number)[:20]} is no number of a log")
    except GrowthError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise GrowthError(f"{file}: not the log of a run: {repr(error)[:200]}") from error
    if not curve.steps:
        raise GrowthError(f"{file}: no line of the log has a loss and flops")
    return curve


def curve_of(history: Sequence[dict[str, Any]], name: str) -> Curve:
    """Make a curve from a log history. A step that a resumed run logged twice counts once.

    Args:
        history: the lines of the log.
        name: for the legend.
    """
    validation = any("eval_loss" in line for line in history)
    # with a teacher, "loss" includes the KL term; only "mlm" can be compared with other runs
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
    """Draw training directories side by side, each with the FLOPs it saved against the first.

    Args:
        runs: training directories.
        out: PNG file to write.

    Raises:
        GrowthError: see `read_curve` and `draw`.
    """
    draw([read_curve(run) for run in runs], out)


def draw(curves: Sequence[Curve], out: str | Path, *, title: str = "") -> None:
    """Draw loss against FLOPs. The first curve is the reference. (1)

    Args:
        curves: at least one.
        out: PNG file to write.
        title: of the picture.

    Raises:
        GrowthError: there are no curves, only some have validation losses, matplotlib is missing,
            or the file cannot be written.
    """
    figure = _new_figure()
    if len({curve.validation for curve in curves}) != 1:
        raise GrowthError("give runs that all have a validation loss, or runs that all have none")
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
    """The attention weights of every head.

    Args:
        model: of transformers, loaded with `attn_implementation="eager"`. For an encoder-decoder
            model these are the weights of the encoder.
        tokens: (1, length) int64.

    Returns:
        (layers, heads, length, length) float32.
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
        checkpoints: directories, such as a source and the model grown from it.
        text: is split into tokens by the tokenizer of the first checkpoint.
        out: PNG file to write.
        length: tokens to show, from the start of the text.

    Raises:
        GrowthError: the text is empty, matplotlib is missing, or the file cannot be written.
    """
    figure = _new_figure()
    if not text.strip():
        raise GrowthError("the text to draw attention maps for is empty")
    tokenizer = load_tokenizer(Path(checkpoints[0]))
    ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=length)["input_ids"]
    models = (load_model(c, attention="eager") for c in checkpoints)
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
        # not pyplot: it would choose a display and keep every figure in memory
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
