"""Measures `linear_kl_mlm_loss` from hidden states: time, memory and gradient error.

    python -m bench.speed.linear_kl_mlm_loss

Each row is one forward and backward pass with temperature 1 and alpha 0.5, which all libraries
support. Every row of the hidden states has a label. "GEMMs alone" is the limit: the time of the
matrix products that no such loss can avoid. All take turns. "x compile" is the median, over the
turns, of the time over that of torch.compile.

The gradient error is that of the KL part (alpha 1), on 64 rows of a student that has drifted 5 %
from its teacher. The truth is float64.

The rows "labels alone" have no teacher (alpha 0), to compare with libraries that offer only that
case. Their error is that of the label loss's gradient.
"""

import functools
from functools import partial

import torch
from torch.nn import functional as F

from bench.shared import peers
from bench.shared.harness import captured, measure_all, name_of, options_of
from bench.shared.loss_measure import (
    DEVICE,
    Provider,
    error_of,
    growkern,
    in_turns,
    loss_parser,
    make_inputs,
    plain,
    run_step,
)
from growkern.ops.loss.linear.heads import held_rows
from growkern.ops.loss.linear_kl_mlm_loss import linear_kl_mlm_loss

# rows, vocabulary, student width, teacher width
SHAPES = {
    "cpu": [(256, 30522, 768, 512), (2048, 32_000, 768, 512)],
    "cuda": [(N, 30522, 768, 512) for N in (9830, 256, 2048)]
    + [(N, 128_256, 4096, 2048) for N in (8192, 256, 2048)],
}
DTYPES = (torch.bfloat16, torch.float32)


class Float32Logits(torch.autograd.Function):
    """``F.linear`` without a bias, with a float32 result from 16-bit factors. For a GPU."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)

    @staticmethod
    def backward(ctx, dz):
        hidden, weight = ctx.saved_tensors
        dz = dz.to(hidden.dtype)
        return dz @ weight, dz.t() @ hidden


# `plain` with logits that are not rounded to bfloat16: the gradient that one wants
plain_float32 = partial(plain, linear=Float32Logits.apply)
# as plain PyTorch has them; for float32 heads the default may be float64
growkern_float32 = partial(growkern, logits_dtype=torch.float32)
# float64 products, too
growkern_float64 = partial(growkern, logits_dtype=torch.float64)


def plain_labels(student, teacher, labels, alpha):
    z = F.linear(*student)
    return F.cross_entropy(z if z.dtype == torch.float64 else z.float(), labels)


def growkern_labels(student, teacher, labels, alpha):
    return linear_kl_mlm_loss(*student, None, None, labels, alpha=0.0)


def gemms_alone(student, teacher, labels, alpha):
    """Only the matrix products that every loss from hidden states needs.

    Logits are made in the chunks of `linear_kl_mlm_loss`: all at once they take longer. A loss may
    overwrite the teacher's logits, so the student's take their place.
    """
    with torch.no_grad():
        (hidden, weight), heads = student, (student, teacher) if alpha else (student,)
        (N, V), widths = (len(hidden), len(weight)), [head[0].shape[1] for head in heads]
        rows, _ = held_rows(N, widths, hidden.itemsize, -(-V // 64) * 64)
        z = hidden.new_empty(N, V)
        for x, w in reversed(heads):
            for some, into in zip(x.split(rows), z.split(rows), strict=True):
                torch.mm(some, w.t(), out=into)
        return z @ weight, z.t() @ hidden


def losses(with_compile, dtype):
    """The losses to compare, each as (name, loss, alpha, alpha of its error, peer or None)."""
    both = {"growkern": growkern, "plain": plain}
    alone = {"growkern": growkern_labels, "plain": plain_labels}
    if dtype == torch.float32:
        both["growkern, float32 logits"] = growkern_float32
        if DEVICE == "cpu":
            both["growkern, float64 products"] = growkern_float64
    if with_compile:
        both["torch.compile"] = torch.compile(plain)
        alone["torch.compile"] = torch.compile(plain_labels)
        if DEVICE == "cuda" and dtype != torch.float32:
            both["torch.compile, float32 logits"] = torch.compile(plain_float32)
    named = [(name, loss, 0.5, 1.0, None) for name, loss in both.items()]
    named += [(name, peer.call, 0.5, 1.0, peer) for name, peer in peers.WITH_TEACHER.items()]
    named += [(f"{name}, labels alone", loss, 0.0, 0.0, None) for name, loss in alone.items()]
    named += [
        (f"{name}, labels alone", peer.call, 0.0, 0.0, peer)
        for name, peer in peers.LABELS_ALONE.items()
    ]
    return named


def graphed(step):
    """The step in a CUDA graph, which leaves out what the CPU does between launches.

    It is captured when it first runs.
    """
    graph = functools.cache(lambda: captured(step)[0])
    return lambda: graph().replay()


def providers(shape, dtype, with_compile):
    student, teacher, labels = make_inputs(*shape, dtype)
    given = (student, teacher, labels)
    gemms = partial(gemms_alone, *given)
    graph = graphed(partial(run_step, growkern, *given, 0.5))
    graphs = [Provider("growkern, CUDA graph", graph, replays=True)]
    named = [
        Provider(
            name, partial(run_step, fn, *given, alpha),
            partial(error_of, fn, error_alpha, *shape[1:], dtype), peer,
            ours=name.startswith("growkern"),
        )
        for name, fn, alpha, error_alpha, peer in losses(with_compile, dtype)
    ]  # fmt: skip
    # the first of the others; what matters most comes first, as a run may end at any time
    plain_at = next(i for i, provider in enumerate(named) if provider.name == "plain")
    named[plain_at:plain_at] = graphs if DEVICE == "cuda" else ()
    first = Provider("GEMMs alone", partial(gemms, 0.5))
    return [first, *named, Provider("GEMMs alone, labels alone", partial(gemms, 0.0))]


def apart(named):
    """The providers in two groups: compiling takes so long that the run may end while it lasts.

    The second group has all that torch.compile, and growkern again, for the ratios of its turns.
    """
    compiled = [p for p in named if p.name.startswith("torch.compile") or is_compiled(p.peer)]
    again = {
        "growkern": "growkern, again",
        "growkern, labels alone": "growkern, again, labels alone",
    }
    ours = [p._replace(name=again[p.name], error=None) for p in named if p.name in again]
    return [p for p in named if p not in compiled], [*ours, *compiled] if compiled else []


def is_compiled(peer):
    return peer is not None and peer.compiles


def main():
    parser = loss_parser(__doc__)
    parser.add_argument("--vocabulary", type=int, help="measure only shapes with this vocabulary")
    parser.add_argument(
        "--first",
        action="store_true",
        help="only its first shape, in bfloat16, compiled losses last",
    )
    parser.add_argument("--alone", action="store_true", help="without peers and plain PyTorch")
    args = options_of(parser, "tests/ops/loss/test_linear_kl_mlm_loss.py")
    measure_all("linear_kl_mlm_loss", all_rows(args))


def all_rows(args):
    shapes = [shape for shape in SHAPES[DEVICE] if args.vocabulary in (None, shape[1])]
    for shape in shapes[:1] if args.first else shapes:
        for dtype in DTYPES[:1] if args.first else DTYPES:
            # After 8 shapes the cache is full, and PyTorch runs all others uncompiled.
            torch._dynamo.reset()
            what = {"shape": "{}x{}x{}/{}".format(*shape), "dtype": name_of(dtype)}
            named = providers(shape, dtype, args.compile and not args.alone)
            if args.alone:
                named = [p for p in named if p.name.startswith(("growkern", "GEMMs"))]
            for group in apart(named) if args.first else (named,):
                yield from in_turns(group, args.repeats, what)


if __name__ == "__main__":
    main()
