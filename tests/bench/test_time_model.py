"""The model of the loss's time counts what the sweep does."""

import pytest

from bench.shared import results, time_model


def test_the_model_of_time_counts_the_passes():
    """By hand: one product sums dW, of one chunk or of several, or two products do."""
    N, V, H, H_t = 256, 1024, 64, 32
    one = time_model.estimate((N, V, H, H_t))
    assert one.chunks == one.products == 1
    assert one.gemms == pytest.approx(2 * N * V * (3 * H + H_t) / time_model.DTYPES["bfloat16"][0])
    copy = time_model.COPY["H200"]
    moved = N * V * (4 + 18 / time_model.ROWS)
    launches = one.passes["small launches"]
    assert (sum(one.passes.values()) - launches) * copy == pytest.approx(moved)
    assert launches == sum(time_model.LAUNCHES) * time_model.LAUNCH
    assert one.extra_bytes == 8 * N * V + 2 * V * H
    biased = time_model.estimate((N, V, H, H_t), bias=True)
    assert (biased.seconds - one.seconds) * copy == pytest.approx(2 * N * V)
    some = time_model.estimate((2048, V, H, H_t))
    assert (some.chunks, some.products, some.passes["sums of dW"]) == (8, 1, 0)
    # more rows than 1 GiB of dz
    two = time_model.estimate((1 << 20, V, H, H_t))
    assert two.products == 2
    assert two.passes["sums of dW"] * copy == pytest.approx(16 * V * H)


@pytest.mark.parametrize("size, name", [(2, "bf16"), (4, "fp32")])
def test_the_model_of_time_counts_the_bytes_of_the_machine_code(size, name):
    kernel = f"kl_mlm rows linear, {name} gradient"
    (counted,) = {
        row["bytes per element"]
        for row in results.read(results.RESULTS / "aot.json")["rows"]
        if (row["kernel"], row["arch"]) == (kernel, "sm_90")
    }
    assert time_model.ROW_BYTES[size] + size == counted
