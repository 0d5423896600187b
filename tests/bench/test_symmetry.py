"""The variants of the study of symmetries are what their names say."""

import pytest
import torch

from bench.symmetry.models import Model, grown


def matrices(model):
    """The weights of the blocks by name, without embeddings and the head."""
    return {n: p for n, p in model.base_model.named_parameters() if p.ndim == 2 and ".0." in n}


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_half_of_the_connections_can_be_routed(family):
    """The other half is divided equally, and the function stays."""
    model = Model(family, layers=1, width=32)
    small = model.untrained(0).eval()
    routed, half, equal = (
        grown(small, model, symmetry, amplitude, seed=3).eval()
        for symmetry, amplitude in (("routing", 1.0), ("half-routing", 1.0), ("none", 0.0))
    )
    tokens = torch.arange(20)[None]
    expected = small(input_ids=tokens).logits
    torch.testing.assert_close(half(input_ids=tokens).logits, expected, rtol=1e-4, atol=1e-5)
    seen = 0
    for name, mixed in matrices(half).items():
        whole, shared = matrices(routed)[name], matrices(equal)[name]
        assert ((mixed == whole) | (mixed == shared)).all(), name
        differs = whole != shared
        share = (mixed == shared)[differs].float().mean().item()
        assert share == pytest.approx(0.5, abs=0.06), name
        seen += differs.sum().item()
    assert seen > 10_000
