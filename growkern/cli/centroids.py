"""The command `growkern centroids`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from growkern.cli.app import Overwrite, Revision, Source, app, silence_transformers
from growkern.cli.teacher import Texts
from growkern.errors import GrowthError
from growkern.printing import say


@app.command()
def centroids(
    source: Source,
    texts: Texts = None,
    *,
    out: Annotated[Path, typer.Option(help="The .safetensors file to write.")],
    experts: Annotated[int, typer.Option(help="Number of experts, or of copies of the FFN.")],
    revision: Revision = None,
    passes: Annotated[int, typer.Option(help="How often the centroids move.")] = 4,
    sequence_length: Annotated[int, typer.Option(help="Tokens per block.")] = 128,
    batch_size: Annotated[int, typer.Option(help="Blocks per call of the model.")] = 32,
    seed: Annotated[int, typer.Option(help="Seed of the first centroids.")] = 0,
    overwrite: Overwrite = False,
) -> None:
    """Find clusters of the inputs of a dense model's FFNs, for `grow --to ... --router FILE`."""
    import torch

    from growkern.growth.source.hub import located
    from growkern.train.dataset.load import pack_text
    from growkern.train.model.centroids import centroids as find
    from growkern.train.model.centroids import check_file
    from growkern.train.model.load import check_fits, load_language_model, load_tokenizer

    silence_transformers()
    if not texts:
        raise GrowthError("give TEXT, the files that the model reads")
    if batch_size < 1:
        raise GrowthError(f"batch_size={batch_size}: give at least 1")
    # before the texts are read
    check_file(out, overwrite)
    place = located(source, revision)
    tokenizer = load_tokenizer(place)
    check_fits(place, tokenizer, sequence_length)
    blocks = torch.from_numpy(pack_text(texts, tokenizer, sequence_length).tokens_NS).long()
    file = find(
        load_language_model(place),
        blocks.split(batch_size),
        out,
        experts=experts,
        passes=passes,
        seed=seed,
        overwrite=overwrite,
        progress=sys.stderr.isatty(),
    )
    say(f"{file}: {experts} centroids for each layer, of {blocks.numel()} tokens")
