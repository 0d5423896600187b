"""`growkern.centroids`: rows for the router of a mixture, from the inputs of a dense model's FFNs.

With the inputs x_t of an FFN and unit vectors u_t = x_t / |x_t|, spherical k-means repeats

    z_t = argmax_j c_j . u_t,        c_j = s_j / |s_j|  with  s_j = sum of u_t over z_t = j.    (1)

The rows of the router are

    w_j = g (c_j - mean of all c),   g such that the mean square of all w_j . x_t is 1.         (2)

A softmax and a choice of the largest logits do not change with a vector that is the same in all
rows, so token t chooses expert z_t. The inputs of most models have a large common part. Without it
the logits stay near 0, where a sigmoid tells them apart. Random rows of a deviation of 0.02 give
logits of this size at a hidden size of 2500.

Sources: Dhillon and Modha 2001 (1); k-means++, Arthur and Vassilvitskii 2007, for the first c;
cluster-aware upcycling, arXiv 2604.13508, for centroids as a router.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import length_hint
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from growkern.arguments import check_seed, path_of, whole_number
from growkern.errors import GrowthError
from growkern.files import write_whole
from growkern.growth.source.source import open_source
from growkern.train.model.contexts import probing

# inputs for each centroid, of which the first ones are chosen
SAMPLED = 16
# of unit vectors that are equal up to rounding, 1 minus their product
EQUAL = 1e-6


def centroids(
    model: Any,
    batches: Iterable[Any],
    file: str | Path,
    *,
    experts: int,
    passes: int = 4,
    seed: int = 0,
    overwrite: bool = False,
    progress: bool = True,
) -> Path:
    """Find clusters of the inputs of a dense model's FFNs, as rows for a mixture's router.

    `growkern.grow(model, to=..., router=file)` uses them. Tokens of one cluster then choose the
    same expert, and `num_experts_per_tok` - 1 others. The clusters are those of spherical k-means,
    one set for each layer. Inputs are not kept: only sums over each cluster, and a small sample.

    Args:
        model: a dense language model of transformers.
        batches: token ids, as tensors or as dicts with `input_ids`, and with `attention_mask` if
            there is padding. They are read `passes` + 1 times, so give a list or a `DataLoader`.
        file: a .safetensors file to write. It has a matrix (experts, hidden size) for each layer.
        experts: number of clusters: that of the mixture's copies of the FFN. Those are its
            experts, unless an expert is a part of the FFN. With symmetry="noise" it is half of
            them.
        passes: how often the centroids move.
        seed: of the sample and of the first centroids.
        overwrite: replace the file if it exists.
        progress: whether to show a progress bar.

    Returns:
        The path of the file.

    Raises:
        GrowthError: an argument does not fit; the model has no dense FFN; the batches can be read
            only once, or have fewer different inputs than `experts`; or the file exists.
    """
    path = path_of("file", file, "the path of a .safetensors file")
    check_file(path, overwrite)
    _check(batches, {"experts": (experts, 2), "passes": (passes, 0)})
    reader = _Reader(model)
    rng = torch.Generator().manual_seed(check_seed(seed))
    # of some loaders the length is not known
    total = length_hint(batches) * (passes + 1) or None
    with tqdm(total=total, desc="centroids", unit=" batches", disable=not progress) as bar:
        samples = reader.sample(batches, SAMPLED * experts, rng, bar)
        centres = {key: _first(key, x_SH, experts, rng) for key, x_SH in samples.items()}
        for _ in range(passes):
            centres = reader.moved(batches, centres, bar)
    rows = {key: _rows(c_NH, samples[key]) for key, c_NH in centres.items()}
    try:
        write_whole(path, lambda part: save_file(rows, part))
    except OSError as error:
        raise GrowthError(f"{path}: cannot be written: {error}") from error
    return path


def check_file(file: Path, overwrite: bool) -> None:
    """Refuse a file that cannot be written, or that is there; arguments as in `centroids`."""
    if file.suffix != ".safetensors":
        raise GrowthError(f"{file}: give a name that ends with .safetensors")
    if file.exists() and not overwrite:
        raise GrowthError(f"{file} exists: give another name, or overwrite it (--overwrite)")
    if not file.parent.is_dir():
        raise GrowthError(f"{file.parent}: no such directory")


def _check(batches: Any, counts: dict[str, tuple[int, int]]) -> None:
    for name, (value, least) in counts.items():
        if whole_number(name, value) < least:
            raise GrowthError(f"{name}={value}: give at least {least}")
    if not isinstance(batches, Iterable) or iter(batches) is batches:
        raise GrowthError(
            f"batches is a {type(batches).__name__}, which cannot be read several times: give a "
            "list or a DataLoader"
        )


class _Reader:
    """Runs a model and passes on the inputs of its FFNs, (tokens, hidden size) for each layer."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._modules: dict[str, nn.Module] = {}
        for tensor in open_source(model).spec.own_tensors:
            if tensor.axes == ("write:ffn", "read:normed"):
                owner = tensor.name.rpartition(".")[0]
                self._modules.setdefault(f"layers.{tensor.layer}", model.get_submodule(owner))
        if not self._modules:
            raise GrowthError(f"{type(model).__name__} has no dense FFN that becomes experts")

    def _inputs(self, batches: Iterable[Any], bar: Any) -> Iterable[dict[str, Tensor]]:
        """For each batch, the inputs of each layer, without padding."""
        seen: dict[str, Tensor] = {}
        device = next(self._model.parameters()).device

        def hook(key: str) -> Any:
            return lambda _, given: seen.__setitem__(key, given[0].flatten(0, -2))

        hooks = [m.register_forward_pre_hook(hook(key)) for key, m in self._modules.items()]
        try:
            with probing(self._model):
                for batch in batches:
                    given = {"input_ids": batch} if isinstance(batch, Tensor) else dict(batch)
                    given.pop("labels", None)
                    self._model.base_model(**{k: x.to(device) for k, x in given.items()})
                    mask = given.get("attention_mask")
                    yield {
                        key: x_TH if mask is None else x_TH[mask.flatten().bool().to(x_TH.device)]
                        for key, x_TH in seen.items()
                    }
                    bar.update()
        finally:
            for handle in hooks:
                handle.remove()

    def sample(
        self, batches: Iterable[Any], count: int, rng: torch.Generator, bar: Any
    ) -> dict[str, Tensor]:
        """The inputs of `count` random tokens, the same in all layers: those with least keys."""
        keys, kept = torch.empty(0, dtype=torch.float64), dict[str, Tensor]()
        for inputs in self._inputs(batches, bar):
            tokens = len(next(iter(inputs.values())))
            keys = torch.cat([keys, torch.rand(tokens, generator=rng, dtype=torch.float64)])
            least = keys.argsort()[:count]
            keys = keys[least]
            for key, x_TH in inputs.items():
                both = torch.cat([kept[key], x_TH]) if key in kept else x_TH
                kept[key] = both[least.to(both.device)]
        return kept

    def moved(self, batches: Iterable[Any], old: dict[str, Tensor], bar: Any) -> dict[str, Tensor]:
        """The centroids after one step of (1). Those that no token is next to stay."""
        sums = {key: torch.zeros_like(c_NH, dtype=torch.float64) for key, c_NH in old.items()}
        for inputs in self._inputs(batches, bar):
            for key, x_TH in inputs.items():
                u_TH = _unit(x_TH)
                sums[key].index_add_(0, (u_TH @ old[key].T).argmax(1), u_TH.double())
        return {
            key: torch.where(s_NH.any(1, keepdim=True), _unit(s_NH).to(old[key]), old[key])
            for key, s_NH in sums.items()
        }


def _unit(x_TH: Tensor) -> Tensor:
    """Vectors of length 1, in float32 or float64."""
    return nn.functional.normalize(x_TH.to(torch.promote_types(x_TH.dtype, torch.float32)), dim=-1)


def _first(key: str, x_SH: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """The first centroids, by k-means++: each is far from those before it."""
    u_SH = _unit(x_SH)
    places = [int(torch.randint(len(u_SH), (), generator=rng))]
    near_S = u_SH @ u_SH[places[0]]
    while len(places) < count:
        gaps_S = (1 - near_S).cpu().double()
        gaps_S[gaps_S < EQUAL] = 0.0
        if not gaps_S.any():
            raise GrowthError(
                f"{key}: the batches have {len(places)} different inputs, fewer than "
                f"experts={count}: give more text, or fewer experts"
            )
        places.append(int(torch.multinomial(gaps_S, 1, generator=rng)))
        near_S = near_S.maximum(u_SH @ u_SH[places[-1]])
    return u_SH[places]


def _rows(c_NH: Tensor, x_SH: Tensor) -> Tensor:
    """The rows (2) in float32, with the inputs of the sample for x."""
    centred_NH = c_NH.double() - c_NH.double().mean(0)
    logits_SN = x_SH.double() @ centred_NH.T
    return (centred_NH / logits_SN.square().mean().sqrt()).float().cpu().contiguous()
