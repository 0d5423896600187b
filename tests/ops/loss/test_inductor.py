"""The losses under torch.compile: its own compiler, and one graph for every option.

The tests of its compiler stand together because its first use in a process compiles headers for
many seconds. Before Python 3.12 a comprehension is a function of its own: a name that it needs and
that has no value yet breaks the graph, even if nothing is iterated over.
"""

import inspect

import pytest
import torch

import growkern
from growkern.ops.loss.rows.options import LossCall
from tests.ops.loss import test_kl_mlm_loss, test_linear_kl_mlm_loss


@pytest.fixture
def quick_compiler(monkeypatch, tmp_path):
    """No vector code and no further processes: the ops are opaque to it."""
    # what an earlier run left on disk would be tested instead of this code
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    changes = {"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}
    with torch._inductor.config.patch(changes | {"compile_threads": 1}):
        yield


def test_logits(device, quick_compiler):
    test_kl_mlm_loss.test_compiles_whole_and_once_for_every_alpha_and_size(
        "tensor", device, "inductor"
    )


def test_heads(device, quick_compiler):
    test_linear_kl_mlm_loss.test_compiles_whole_and_once_for_every_alpha_and_size(
        device, "inductor"
    )


# ------------------------------------------------------------------- one graph

LOSSES = ("kl_mlm_loss", "linear_kl_mlm_loss", "topk_kl_mlm_loss")
N, H, V = 6, 8, 12
# options of a process group need one; a compiled step of several processes is in test_kl_mlm_ranks
LEFT_OUT = {"group", "vocab_start"}
VALUES = {
    "alpha": [0.3, 1.0, 0.0, torch.tensor(0.4)],
    "temperature": [2.0],
    "divergence": ["reverse", "jsd"],
    "beta": [0.2],
    "ignore_index": [-1],
    "kl_rows": ["all", torch.arange(N) % 2 == 0],
    "teacher_weights": [(0.3, 0.7)],
    "vocab_size": [11],
    "teacher_vocab_size": [9],
    "row_weights": [torch.linspace(0, 1, N)],
    "softcap": [5.0],
    "teacher_softcap": [4.0],
    "label_smoothing": [0.1],
    "z_loss": [0.01],
    "tail": ["renormalise"],
    "reduction": ["sum", "none"],
    "num_items": [7, torch.tensor(7.0), (5, 6)],
    "return_parts": [True],
    "chunk_bytes": [200],
    "max_rows": [N],
    "vocab_tile": [5],
    "logits_dtype": [torch.float64],
    "backend": ["reference", "cpu"],
}
# of one loss, which has a bias for each head
VALUES |= {"student_bias": [torch.linspace(-1, 1, V)], "teacher_bias": [torch.linspace(1, -1, V)]}
# beside values of all sorts, and without a teacher where that is a call of its own
ALONE = ("alpha", "reduction", "num_items", "return_parts", "label_smoothing", "student_bias")


def options_of(loss):
    found = inspect.signature(getattr(growkern, loss)).parameters.values()
    return [x.name for x in found if x.kind is x.KEYWORD_ONLY and x.name not in LEFT_OUT]


def together(loss, taught):
    """Every option at once, as far as they go together.

    Of VALUES the first two go together for each loss, and rates that are tensors for one.
    """
    tensors = (3,) if loss == "linear_kl_mlm_loss" else ()
    for number in (0, 1, *tensors) if taught else (0,):
        names = [x for x in options_of(loss) if taught or x in ALONE]
        options = {x: VALUES[x][number % len(VALUES[x])] for x in names}
        # numbers of items divide a mean, and beta mixes the two sides of one divergence
        del options["num_items" if number % 2 else "reduction"]
        if options.get("divergence") == "reverse":
            del options["beta"]
            # it gives probability 0, which a reversed divergence turns into infinity
            options.pop("tail", None)
        yield options


# the first loss that has an option tries it alone
FIRST = {option: loss for loss in reversed(LOSSES) for option in options_of(loss)}
CALLS = [
    (loss, {option: value}, taught, None)
    for loss in LOSSES
    for option in options_of(loss)
    if option in ALONE or FIRST[option] == loss
    for number, value in enumerate(VALUES[option])
    for taught in (
        (True, False) if option in ALONE and (number == 0 or option != "alpha") else (True,)
    )
]
# with dynamic=True numbers are symbols, as sizes are: no property of a tuple may read them
CALLS += [
    (loss, options, taught, True)
    for loss in LOSSES
    for taught in (True, False)
    for options in together(loss, taught)
]


def step(loss, options, taught):
    """A function of hidden states and weight, and these."""
    rng = torch.Generator().manual_seed(0)
    hidden, weight, *others = (torch.randn(rows, H, generator=rng) for rows in (N, V, N, V))
    labels = torch.randint(9, (N,), generator=rng)
    labels[2] = options.get("ignore_index", -100)
    teachers = 2 if "teacher_weights" in options else 1
    logits = others[0] @ others[1].T
    given = {
        "kl_mlm_loss": [logits],
        "linear_kl_mlm_loss": others,
        "topk_kl_mlm_loss": [*reversed(logits[:, :9].log_softmax(-1).topk(4))],
    }[loss]
    given = [x if teachers == 1 else [x] * 2 for x in given] if taught else [None] * len(given)
    options = {"divergence": "jsd"} | options if "beta" in options else options
    options = options if taught else options | {"alpha": 0.0}
    function = getattr(growkern, loss)

    def call(hidden, weight):
        student = [hidden @ weight.T] if loss == "kl_mlm_loss" else [hidden, weight]
        return function(*student, *given, labels, **options)

    return call, hidden.requires_grad_(), weight.requires_grad_()


@pytest.mark.parametrize(
    "loss, options, taught, dynamic",
    CALLS,
    ids=[f"{loss}-{'all' if all_ else next(iter(x))}-{taught}" for loss, x, taught, all_ in CALLS],
)
# PyTorch 2.9 would compile the guards of symbols in C++
@torch._dynamo.config.patch(enable_cpp_symbolic_shape_guards=False)
def test_one_graph(loss, options, taught, dynamic):
    call, *inputs = step(loss, options, taught)
    torch._dynamo.reset()
    # of an option alone, only the graph's tracing is of its own
    backend = "aot_eager" if dynamic else "eager"
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend=backend)
    results = []
    for function in (call, compiled):
        found = function(*inputs)
        found, parts = found if "return_parts" in options else (found, ())
        gradients = torch.autograd.grad(found.sum(), inputs)
        results.append([found, *gradients, *(x for x in parts if x is not None)])
    for ours, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, ours)


def test_every_option_is_tried():
    for dynamic in (None, True):
        calls = [call for call in CALLS if call[3] is dynamic]
        tried = {(loss, option) for loss, options, *_ in calls for option in options}
        # alone, an option of several losses is that of the first one
        assert dynamic is None or tried == {(x, name) for x in LOSSES for name in options_of(x)}
        assert {option for _, option in tried} == FIRST.keys()
        # a comprehension over teachers that are not there broke the graph
        bare = {loss for loss, options, taught, _ in calls if "alpha" in options and not taught}
        assert bare == {*LOSSES}
    assert {*LossCall._fields} - LEFT_OUT <= {option for _, option in tried}
