"""Rows of a router: centroids of what a dense model's FFNs read, here one for each of 8 copies.

python -m examples.centroids DENSE text.txt rows.safetensors 8    # pip install scikit-learn
"""

import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from sklearn.cluster import KMeans
from torch.nn.functional import normalize


@torch.no_grad()
def inputs_of(model, batches):
    """What the FFN of each layer reads, (tokens, hidden size), for batches of ids without pads."""
    seen = {layer.mlp: [] for layer in model.base_model.layers}
    hooks = [mlp.register_forward_pre_hook(lambda m, x: seen[m].append(x[0])) for mlp in seen]
    for batch in batches:
        model.base_model(batch)
    for hook in hooks:
        hook.remove()
    return {f"layers.{n}": torch.cat(x).flatten(0, 1).double() for n, x in enumerate(seen.values())}


def rows_of(x_TH, count, seed=0):
    """Centroids of directions, without their common part, at a mean square of 1 for a logit."""
    found = KMeans(count, n_init=4, random_state=seed).fit(normalize(x_TH)).cluster_centers_
    centred_NH = (c_NH := normalize(torch.from_numpy(found))) - c_NH.mean(0)
    return (centred_NH / (x_TH @ centred_NH.T).square().mean().sqrt()).float().contiguous()


if __name__ == "__main__":
    dense, text, out, experts = sys.argv[1:]
    tokens = transformers.AutoTokenizer.from_pretrained(dense)(Path(text).read_text())["input_ids"]
    small = transformers.AutoModelForCausalLM.from_pretrained(dense).eval()
    blocks = torch.tensor(tokens[: len(tokens) // 128 * 128]).view(-1, 128).split(16)
    save_file({name: rows_of(x, int(experts)) for name, x in inputs_of(small, blocks).items()}, out)
