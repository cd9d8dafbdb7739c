"""The table of docs/models.md: what becomes of every model type of transformers that answers with text.

`make models` writes it; `python -m tests.models.models_page TYPE ...` prints the lines of some types.
"""

from __future__ import annotations

import re
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from quire.engine.models.native_config import has_native
from tests.models.any_model import Outcome, Verdict, compare

PAGE = Path(__file__).parents[2] / "docs/models.md"
BEGIN = "With transformers "  # what the table's first line begins with
SECONDS = 100  # of a processor, for a type
KINDS = {
    **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    **MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
}


def verdict_of(kind: str) -> Verdict:
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return compare(kind, Path(folder))
    except Exception as error:  # which is a fault of Quire's
        return Verdict("unequal", repr(error))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def line_of(kind: str, verdict: Verdict) -> str:
    native = has_native({"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, "")]})
    graphs = ""
    if verdict.outcome == "equal":
        graphs = f"eager: {', '.join(verdict.reads)}" if verdict.reads else "graphs"
    detail = re.sub(r"\s+", " ", verdict.detail).replace("|", "\\|")[:160]
    return f"| {kind} | {'yes' if native else ''} | {verdict.outcome} | {graphs} | {detail} |"


def main() -> None:
    def give_up(*_: object) -> None:
        raise TimeoutError(f"took longer than {SECONDS} s")

    signal.signal(signal.SIGPROF, give_up)
    transformers.logging.set_verbosity_error()
    some = sys.argv[1:]
    counts: Counter[Outcome] = Counter()
    lines = []
    for kind in some or KINDS:
        verdict = verdict_of(kind)
        counts[verdict.outcome] += 1
        lines.append(line_of(kind, verdict))
        print(lines[-1], flush=True)
    told = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    print(told, file=sys.stderr)
    if not some:
        table = [
            f"{BEGIN}{transformers.__version__}: {told}.\n",
            "| type | native | by transformers' code | on a GPU | difference, or why not |",
            "| --- | --- | --- | --- | --- |",
            *lines,
        ]
        kept = PAGE.read_text(encoding="utf-8").split(f"\n{BEGIN}")[0]
        PAGE.write_text(f"{kept}\n" + "\n".join(table) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
