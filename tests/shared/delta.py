"""The delta nets of Qwen as matrix products, all of which a counter of FLOPs sees."""

import torch
from torch.nn import functional as F
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next


def by_products(monkeypatch):
    """Let Qwen3-Next and Qwen3.5 compute with the two functions below."""
    for module in (modeling_qwen3_next, modeling_qwen3_5, modeling_qwen3_5_moe):
        monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", _delta_rule)
        monkeypatch.setattr(module, "causal_conv1d_fn", _convolution)


def _delta_rule(query, key, value, g, beta, **options):
    """Token by token: the state S' = S (a (I - b k k^T)) + b v k^T, and the output S' q.

    The two products with k of one column each are made as one of two columns.
    """
    shared = value.shape[2] // key.shape[2]
    query, key = (x.repeat_interleave(shared, dim=2) for x in (query, key))
    query, key = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
    query = query / query.shape[-1] ** 0.5
    state, found = value.new_zeros(*key[:, 0].shape, value.shape[-1]), []
    for token in range(key.shape[1]):
        q, k, v, decay, rate = (x[:, token] for x in (query, key, value, g.exp(), beta))
        state = state * decay[..., None, None]
        held = (k[..., None, :] @ state).squeeze(-2)
        change = torch.stack([-held, v], -2) * rate[..., None, None]
        state = state + torch.stack([k, k], -1) @ change
        found.append((q[..., None, :] @ state).squeeze(-2))
    return torch.stack(found, 1), state


def _convolution(x, weight, bias, activation, **options):
    """Every channel by its own kernel, over a token and those before it."""
    count = weight.shape[1]
    windows = F.pad(x, (count - 1, 0)).unfold(2, count, 1)
    return F.silu((windows @ weight[..., None]).squeeze(-1))
