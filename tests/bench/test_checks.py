"""The checks that run on a GPU notice every kind of wrong result. Here they run on the CPU."""

import contextlib
import functools
import itertools
import math
from unittest import mock

import pytest
import torch
import transformers

from bench.launches import cases, smoke
from bench.on_gpu import check_expand, check_loss
from bench.shared import llama_growth
from bench.shared.harness import largest_error
from bench.shared.loss_measure import gradient_error
from bench.shared.recorder import Recorder
from growkern.ops.backend.launch import HAS_TRITON
from testbed import cuda_emulator

# Masked lanes of a kernel compute inf - inf, which NumPy warns of. The kernel drops the result.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")


@pytest.fixture
def recorder(tmp_path):
    return Recorder("test", tmp_path / "document.json", toy=True)


def expand_case(recorder, layout="strided"):
    rng = torch.Generator(recorder.device).manual_seed(0)
    case = check_expand.make_case((9, 7, 20, 33), torch.float32, rng, upper=True, noise="col")
    out = check_expand.in_nan((20, 33), torch.float32, rng, layout)
    check_expand.check_case(recorder, "case", case, out)
    return recorder.document["failures"]


def one_wrong(out, base):
    out[-1, -1] *= 1 + 1e-5


def one_missing(out, base):
    out[3, 4] = float("nan")


def one_outside(out, base):
    base.view(-1)[-1] = 0.0


@needs_triton
@pytest.mark.parametrize("harm", [None, one_wrong, one_missing, one_outside])
def test_check_of_expand_sees_every_kind_of_error(harm, recorder, monkeypatch):
    right = check_expand.expand

    def wrong(*args, out, **kwargs):
        right(*args, out=out, **kwargs)
        if harm is not None:
            harm(out, out._base)

    monkeypatch.setattr(check_expand, "expand", wrong)
    failures = expand_case(recorder)
    assert bool(failures) == (harm is not None), failures


def wrong_gradient(loss, z):
    # the term is 0, but its derivative is not
    return loss + 0.02 * (z[-1, -1] - z[-1, -1].detach())


def wrong_sum(loss, z):
    return loss * 1.001


def unwritten_row(loss, z):
    return loss + float("nan") * (z[0] - z[0].detach()).sum()


@needs_triton
@pytest.mark.parametrize("harm", [None, wrong_gradient, wrong_sum, unwritten_row])
def test_check_of_the_loss_sees_every_kind_of_error(harm, recorder, monkeypatch):
    right = check_loss.kl_mlm_loss

    def wrong(z, *args, **options):
        loss = right(z, *args, **options)
        return loss if harm is None or options["backend"] == "reference" else harm(loss, z)

    monkeypatch.setattr(check_loss, "kl_mlm_loss", wrong)
    rng = torch.Generator(recorder.device).manual_seed(0)
    student, teacher = check_loss.make_logits(4, 50, torch.float32, rng)
    labels = check_loss.make_labels(4, 50, rng)
    check_loss.check_rows(recorder, "rows", student, teacher, labels)
    assert bool(recorder.document["failures"]) == (harm is not None)


@needs_triton
@pytest.mark.parametrize("option", ["divergence", "row_weights", None])
def test_check_of_the_options_sees_one_that_is_ignored(option, recorder, monkeypatch):
    right = cases.kl_mlm_loss

    def wrong(*args, **options):
        if options["backend"] != "reference":
            options.pop(option, None)
            if option == "divergence":
                options.pop("beta", None)
        return right(*args, **options)

    monkeypatch.setattr(cases, "kl_mlm_loss", wrong)
    monkeypatch.setattr(recorder, "pick", lambda full, toy: 1 if full == 1 else toy)
    right_losses = check_loss.losses
    monkeypatch.setattr(
        check_loss,
        "losses",
        lambda *given: (case for case in right_losses(*given) if case.name.startswith("rows ")),
    )
    check_loss.every_option(recorder)
    failures = recorder.document["failures"]
    assert bool(failures) == (option is not None)
    assert all(option in failure for failure in failures)


@needs_triton
@pytest.mark.parametrize("option, value", [("temperature", 1.0), ("alpha", 0.0)])
def test_checks_have_the_default_temperature_and_labels_alone(option, value, recorder, monkeypatch):
    """Kernels are compiled for a temperature and for a number of teachers."""
    right = check_loss.kl_mlm_loss

    def wrong(*args, **options):
        is_wrong = options[option] == value and options["backend"] != "reference"
        return right(*args, **options) * (1.001 if is_wrong else 1)

    monkeypatch.setattr(check_loss, "kl_mlm_loss", wrong)
    check_loss._rows(recorder)
    failures = recorder.document["failures"]
    assert failures and all(f"{option} {value}" in failure for failure in failures), failures


@needs_triton
def test_check_of_the_work_list_sees_a_tensor_that_is_left_out(recorder, monkeypatch):
    right = check_expand.expand_many
    monkeypatch.setattr(check_expand, "expand_many", lambda jobs: right(jobs[:-1]))
    check_expand.work_list(recorder)
    assert recorder.document["failures"]


@pytest.mark.parametrize("missing", [0, 1])
def test_check_of_the_cuda_kernel_runs_its_source(missing, recorder, monkeypatch):
    """The emulated kernel passes. Without the last column the check fails."""
    if torch.cuda.is_available():
        pytest.skip("the kernel itself runs: check_cuda")
    right, called = cuda_emulator.emulate, []

    def emulate(kernel, grid, args, device=None):
        called.append(kernel.name)
        if kernel.name == "expand_rows":
            args.N -= missing
        right(kernel, grid, args)

    monkeypatch.setattr(cuda_emulator, "emulate", emulate)
    check_expand.check_cuda(recorder)
    assert set(called) == {"expand_rows", "row_lists"}
    assert bool(recorder.document["failures"]) == missing


@needs_triton
def test_a_check_that_raises_does_not_end_the_others(recorder, monkeypatch):
    def raises(recorder, case, bars):
        if recorder.document["rows"]:
            raise RuntimeError("out of resources\nand more")
        recorder.check(case.name, 0.0, 1.0)

    monkeypatch.setattr(check_loss, "check_case", raises)
    check_loss.every_option(recorder)
    failures, rows = recorder.document["failures"], recorder.document["rows"]
    assert failures and all("RuntimeError: out of resources" in failure for failure in failures)
    assert len(rows) == len(failures) + 1


@needs_triton
def test_smoke_sees_a_wrong_result_and_a_launch_that_fails(recorder, monkeypatch):
    rng = torch.Generator(recorder.device).manual_seed(0)
    case = next(cases.headline(rng, smoke.TOY_SHAPES))
    smoke.check_case(recorder, case, smoke.BARS)
    assert recorder.document["rows"][-1]["ok"] and not recorder.document["failures"]

    def wrong(backend):
        return [x * (1.02 if backend == "triton" else 1) for x in case.run(backend)]

    smoke.check_case(recorder, case._replace(run=wrong), smoke.BARS)
    assert len(recorder.document["failures"]) == 1


@pytest.mark.parametrize("place", [0, 1])
def test_smoke_sees_nan_from_padding_in_every_gradient(place, recorder, monkeypatch):
    """In dW too, which comes behind a gradient without an error."""

    class Spoiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            ctx.grads = [torch.ones_like(x) for x in inputs]
            ctx.grads[place] += 0 * inputs[0][-1, -1]
            return torch.zeros(())

        @staticmethod
        def backward(ctx, above):
            return tuple(ctx.grads)

    def loss(x, w, *rest, **options):
        return Spoiled.apply(x, w)

    monkeypatch.setattr(smoke, "linear_kl_mlm_loss", loss)
    smoke._nan_in_the_last_row(recorder)
    (failure,) = recorder.document["failures"]
    assert failure.startswith("NaN in the last row: error nan")


def test_no_error_hides_nan():
    exact, nan = torch.ones(2), torch.full((2,), float("nan"))
    assert math.isnan(gradient_error([exact, nan], [exact.double()] * 2))
    assert largest_error([0.5, 2.0, 1.0]) == 2.0 and math.isnan(largest_error([0.5, math.nan]))


class Graph:
    """A CUDA graph on a CPU: outputs of captured calls are NaN until it is replayed."""

    capturing = None

    def __init__(self):
        self.outputs = []

    @classmethod
    @contextlib.contextmanager
    def capture(cls, graph):
        cls.capturing = graph
        yield
        cls.capturing = None

    @classmethod
    def captured(cls, case):
        def run(backend):
            values = case.run(backend)
            if cls.capturing is None:
                return values
            cls.capturing.outputs += zip([x * float("nan") for x in values], values, strict=True)
            return [x for x, _ in cls.capturing.outputs]

        return case._replace(run=run)

    def replay(self):
        for x, value in self.outputs:
            x.copy_(value)


@pytest.fixture
def two_gpus(monkeypatch):
    """Let the smoke piece take its steps for GPUs on a CPU, with two cases of each kind."""

    def two(right, *given):
        return map(Graph.captured, itertools.islice(right(*given), 2))

    make = torch.Generator
    monkeypatch.setattr(torch, "Generator", mock.Mock(side_effect=lambda device: make()))
    for name in ("captured", "headline", "all_cases"):
        monkeypatch.setattr(smoke, name, functools.partial(two, getattr(smoke, name)))
    for name in ("multiplies_wide", "adds_wide"):
        monkeypatch.setattr(smoke, name, lambda device, dtype: (device.type, device.index))
    stream = functools.partial(mock.Mock, spec=torch.cuda.Stream)
    given = {"Stream": stream, "stream": contextlib.nullcontext, "CUDAGraph": Graph}
    given |= {"current_stream": stream, "graph": Graph.capture, "device_count": lambda: 2}
    for name, value in given.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return smoke


@needs_triton
def test_smoke_takes_its_steps_for_gpus(two_gpus, recorder):
    recorder.device = "cuda"
    two_gpus.run(recorder)
    assert not recorder.document["failures"]
    names = [row["case"] for row in recorder.document["rows"] if row.get("ok")]
    # at toy sizes one of the twelve first cases is taken
    expected = {"NaN in the": 1, "CUDA graph, linear": 2, "on cuda:1, linear": 2, "linear": 1}
    assert expected == {start: sum(x.startswith(start) for x in names) for start in expected}
    torch.Generator.assert_any_call("cuda:1")
    wide = [row for row in recorder.document["rows"] if "addmm" in row]
    assert len(wide) == 2 and all(row["mm"] == ("cuda", 0) for row in wide)


def test_nothing_recorded_is_a_failure_and_nan_is_no_error(recorder):
    recorder.check("case", float("nan"), 1.0)
    assert recorder.document["failures"] and not recorder.document["rows"][0]["ok"]
    empty = Recorder("empty", recorder.path, toy=True)
    assert empty.finish() == "failed"


def test_the_calls_of_a_growth_make_every_tensor_of_the_target():
    sizes, target = llama_growth.SIZES["toy"]
    follows = {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 30}
    config = transformers.LlamaConfig(**(sizes | target | follows))
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    expected = {k: tuple(v.shape) for k, v in model.state_dict().items() if k != "lm_head.weight"}
    for method in ("fpi", "aki"):
        calls = llama_growth.expand_calls("toy", method)
        made = {call.name: call.shape[-len(expected[call.name]) :] for call in calls}
        assert made == expected and len(calls) == len(expected)
        assert any(call.has_upper for call in calls) == (method == "aki")
        assert any("routing" in call.given for call in calls)
