"""Training data: from files or a data set to rows of tokens, cached on disk or streamed."""

from typing import TYPE_CHECKING

from growkern.rooms import opener

# fmt: off
if TYPE_CHECKING:
    from growkern.train.dataset.cache import fingerprint, from_first
    from growkern.train.dataset.records import Reader
    from growkern.train.dataset.source import find_sources, read_text
    from growkern.train.dataset.stream import PlacingCollator, StreamReader, TokenStream
    from growkern.train.dataset.training_data import (describe_data, early_collator, load_data,
        open_data, pack_text, read_data)
# fmt: on

__getattr__ = opener(__name__, __file__)
