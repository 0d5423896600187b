"""The checks that run on a GPU notice every kind of wrong result. Here they run on the CPU."""

import math

import pytest
import torch

from bench.launches import cases, smoke
from bench.on_gpu import check_expand, check_loss
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
def test_smoke_sees_a_wrong_result_and_a_launch_that_fails(recorder, monkeypatch):
    rng = torch.Generator(recorder.device).manual_seed(0)
    case = next(cases.headline(rng, smoke.TOY_SHAPES))
    smoke.check_case(recorder, case, smoke.BARS)
    assert recorder.document["rows"][-1]["ok"] and not recorder.document["failures"]

    def wrong(backend):
        return [x * (1.02 if backend == "triton" else 1) for x in case.run(backend)]

    smoke.check_case(recorder, case._replace(run=wrong), smoke.BARS)
    assert len(recorder.document["failures"]) == 1


def test_no_error_hides_nan():
    exact, nan = torch.ones(2), torch.full((2,), float("nan"))
    assert math.isnan(gradient_error([exact, nan], [exact.double()] * 2))
    assert largest_error([0.5, 2.0, 1.0]) == 2.0 and math.isnan(largest_error([0.5, math.nan]))


def test_nothing_recorded_is_a_failure_and_nan_is_no_error(recorder):
    recorder.check("case", float("nan"), 1.0)
    assert recorder.document["failures"] and not recorder.document["rows"][0]["ok"]
    empty = Recorder("empty", recorder.path, toy=True)
    assert empty.finish() == "failed"
