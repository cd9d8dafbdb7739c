"""The list of docs/parallel.md: which types of models by transformers' code are equal on two ranks.

`python -m tests.models.divided_page` writes it, and with TYPE ... prints the lines of some types.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import transformers

from quire.engine.models.reading import read_model
from tests.models.any_model import Outcome, tiny_model
from tests.models.divided_model import compare_divided
from tests.models.models_page import KINDS

PAGE = Path(__file__).parents[2] / "docs/parallel.md"
BEGIN, END = "With transformers ", "\n## "
RANKS = 2


def outcomes(kind: str) -> Iterator[tuple[str, Outcome, str]]:
    """Yield in what way a type was divided, and what became of it; nothing of one that no rank could run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            reference = tiny_model(kind, folder)
            whole = read_model(folder, "transformers")
        except Exception:  # docs/models.md says why
            return
        for way, wanted in (("by columns", True), ("whole experts", whole.has_experts)):
            if wanted:
                verdict = compare_divided(folder, reference, RANKS, expert_parallel=way == "whole experts")
                yield way, verdict.outcome, verdict.detail


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    some = sys.argv[1:]
    kinds: dict[tuple[str, Outcome], list[str]] = {}
    for kind in some or KINDS:
        for way, outcome, detail in outcomes(kind):
            print(f"{kind}, {way}: {outcome}: {detail}", flush=True)
            kinds.setdefault((way, outcome), []).append(kind)
    unequal = {way: names for (way, outcome), names in kinds.items() if outcome == "unequal"}
    if some or unequal:
        sys.exit(f"unequal: {unequal}" if unequal else None)
    columns, whole = (kinds[way, "equal"] for way in ("by columns", "whole experts"))
    lines = [
        f"{BEGIN}{transformers.__version__} {len(columns)} types are equal on {RANKS} ranks: "
        f"{', '.join(columns)}.",
        f"With whole experts {len(whole)} of them: {', '.join(whole)}.",
    ]
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, behind = rest.partition(END)
    PAGE.write_text(before + "\n\n".join(lines) + "\n" + end + behind, encoding="utf-8")


if __name__ == "__main__":
    main()
