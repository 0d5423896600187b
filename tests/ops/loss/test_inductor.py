"""The losses under torch.compile's own compiler.

They stand together because the first use of it in a process compiles headers for many seconds.
"""

import pytest
import torch

from tests.ops.loss import test_kl_mlm_loss, test_linear_kl_mlm_loss


@pytest.fixture(autouse=True)
def quick_compiler(monkeypatch, tmp_path):
    """No vector code and no further processes: the ops are opaque to it."""
    # what an earlier run left on disk would be tested instead of this code
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    changes = {"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}
    with torch._inductor.config.patch(changes | {"compile_threads": 1}):
        yield


def test_logits(device):
    test_kl_mlm_loss.test_compiles_whole_and_once_for_every_alpha_and_size(
        "tensor", device, "inductor"
    )


def test_heads(device):
    test_linear_kl_mlm_loss.test_compiles_whole_and_once_for_every_alpha_and_size(
        device, "inductor"
    )
