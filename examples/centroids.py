"""Rows for the router of a mixture: centroids of what the FFNs of a dense model read.

    python -m examples.centroids DENSE text.txt rows.safetensors 8

The last number is that of the copies of the FFN: `grow(..., router="rows.safetensors")` starts each
copy with the tokens of one cluster. Spherical k-means repeats, with u = x / |x|,

    z_t = argmax_j c_j . u_t,        c_j = s_j / |s_j|  with  s_j = sum of u_t over z_t = j.

Sources: Dhillon and Modha 2001; k-means++, Arthur and Vassilvitskii 2007, for the first c;
cluster-aware upcycling, arXiv 2604.13508, for centroids as a router.
"""

import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch.nn.functional import normalize


@torch.no_grad()
def inputs_of(model, batches):
    """What the FFN of each layer reads, (tokens, hidden size), for batches of ids without pads."""
    seen, hooks = {}, []
    for number, layer in enumerate(model.base_model.layers):
        kept = seen[f"layers.{number}"] = []
        add = lambda _, x, kept=kept: kept.append(x[0].flatten(0, 1))  # noqa: E731
        hooks.append(layer.mlp.register_forward_pre_hook(add))
    for batch in batches:
        model.base_model(batch.to(model.device))
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(kept) for name, kept in seen.items()}


def rows_of(x_TH, count, passes=4, seed=0):
    """The centroids without their common part, so that the mean square of a logit is 1."""
    rng, x_TH = torch.Generator().manual_seed(seed), x_TH.double().cpu()
    u_TH = normalize(x_TH)
    c_NH = u_TH[torch.randint(len(u_TH), (1,), generator=rng)]
    while len(c_NH) < count:
        gaps_T = (1 - u_TH @ c_NH.T).amin(1).clamp(min=0)
        c_NH = torch.cat([c_NH, u_TH[torch.multinomial(gaps_T, 1, generator=rng)]])
    for _ in range(passes):
        nearest_T = (u_TH @ c_NH.T).argmax(1)
        c_NH = normalize(torch.zeros_like(c_NH).index_add_(0, nearest_T, u_TH))
    centred_NH = c_NH - c_NH.mean(0)
    return (centred_NH / (x_TH @ centred_NH.T).square().mean().sqrt()).float().contiguous()


if __name__ == "__main__":
    dense, text, out, experts = sys.argv[1:]
    tokens = transformers.AutoTokenizer.from_pretrained(dense)(Path(text).read_text())["input_ids"]
    small = transformers.AutoModelForCausalLM.from_pretrained(dense).eval()
    blocks = torch.tensor(tokens[: len(tokens) // 128 * 128]).view(-1, 128).split(16)
    save_file({name: rows_of(x, int(experts)) for name, x in inputs_of(small, blocks).items()}, out)
