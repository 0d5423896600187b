"""Drafts the table of every class of transformers that predicts tokens, and counts the exact ones.

    python -m bench.drafts

One model type after another, by its default config, as `growkern family draft` does it. OWN has
what a default lacks. A draft is `exact` if a growth of a tiny model was exact and no plan was
wrong, `wrong` if not, and `refused` if something in the class fits no rule. A machine writes
bench/results/drafts.json, with the reasons, and for an exact draft the sizes that it does not grow.
`--against` compares with that file in place of writing it: a model type that is no longer exact
ends the command with 1. `--only llama bert` drafts these alone.
"""

import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from bench.shared.harness import measure_all, parser_of
from bench.shared.results import RESULTS, machine, read
from growkern.errors import GrowthError
from growkern.families import supported_families
from growkern.growth.draft import draft_family

KINDS = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_MASKED_LM_MAPPING_NAMES}
# ESM's own has no vocabulary or padding, and the positions of ESM-1b; ELECTRA's, narrow embeddings
OWN = {"esm": {"vocab_size": 33, "pad_token_id": 1, "position_embedding_type": "rotary"}}
OWN |= {"electra": {"embedding_size": 256}, "deepseek_v2": {"num_experts_per_tok": 6}}
OWN |= {key: {"head_dim": 128} for key in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")}
OWN |= {"nemotron": {"num_key_value_heads": 8}}


def drafted(kinds: Iterable[str]) -> Iterator[dict[str, Any]]:
    """What becomes of the draft of each model type."""
    shipped = supported_families()
    for kind in kinds:
        start = time.process_time()
        try:
            draft = draft_family(transformers.CONFIG_MAPPING[kind](**OWN.get(kind, {})))
            wrong = [
                *draft.report.faults,
                *(g.why for g in draft.report.growths if g.verdict == "wrong"),
            ]
            # of an exact draft, the sizes that it does not grow
            held = "; ".join(f"{size} refused" for size in draft.refused)
            word, why = ("exact", held) if draft.verified else ("wrong", "".join(wrong[:1]) or held)
        except Exception as error:
            # anything but a refusal is a fault of the draft
            word, why = "refused" if isinstance(error, GrowthError) else "failed", str(error)
        why = " ".join(why.split())[:200]
        seconds = round(time.process_time() - start, 1)
        row = {"model": kind, "table": kind in shipped, "draft": word}
        yield {**row, "seconds": seconds, "why": why}


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--against", action="store_true", help="compare with the saved result")
    parser.add_argument("--only", nargs="+", metavar="MODEL_TYPE", help="these model types alone")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    kinds = sorted(given.only or KINDS & {*transformers.CONFIG_MAPPING})
    if not given.against and not given.only:
        where = machine() | {"transformers": transformers.__version__}
        measure_all("drafts", drafted(kinds), where)
        return 0
    rows = []
    for row in drafted(kinds):
        rows.append(row)
        print(*(f"{value}" for value in row.values()), sep="  ", flush=True)
    print(", ".join(f"{n} {word}" for word, n in Counter(r["draft"] for r in rows).most_common()))
    if not given.against:
        return 0
    saved = read(RESULTS / "drafts.json")["rows"]
    before = {row["model"] for row in saved if row["draft"] == "exact"} & {*kinds}
    lost = before - {row["model"] for row in rows if row["draft"] == "exact"}
    print(f"{len(before)} were exact; no longer: {', '.join(sorted(lost)) or 'none'}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
