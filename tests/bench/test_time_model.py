"""The model of the loss's time counts what the sweep does."""

import pytest

from bench.shared import results, time_model


@pytest.mark.parametrize("size, name", [(2, "bf16"), (4, "fp32")])
def test_the_model_of_time_counts_the_bytes_of_the_machine_code(size, name):
    kernel = f"kl_mlm rows linear, {name} gradient"
    (counted,) = {
        row["bytes per element"]
        for row in results.read(results.RESULTS / "aot.json")["rows"]
        if (row["kernel"], row["arch"]) == (kernel, "sm_90")
    }
    assert time_model.ROW_BYTES[size] + size == counted
