"""Measures the demo model on prompts that it was never trained on, and prints what it says.

    python -m quire.loadtest.demo_model.evaluate --training training.json

Prompts are hand-written (evaluation.toml) or made by the generators and held out of the corpus.
"""

from __future__ import annotations

import argparse
import json
import random
import tomllib
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire.loadtest.demo_model.corpus import exchanges, held_out
from quire.loadtest.demo_model.tokenizer import MODEL_FOLDER
from quire.loadtest.provenance import Provenance

MAX_NEW_TOKENS = 200
BATCH = 16
GENERATED_PROMPTS = 100
MOST_OF_A_KIND = 10
SEED = 99
_FOLLOW_UPS = {"follow", "memory", "memory-now"}  # meaningless without the turns before them


@dataclass(frozen=True, slots=True)
class Prompt:
    """A user's messages; a right answer to the last contains `key`, whatever its case."""

    messages: tuple[str, ...]
    key: str
    kind: str


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    ended: bool  # with an end token within MAX_NEW_TOKENS


class Chat:
    """The demo model on the CPU in fp32, by transformers."""

    def __init__(self, folder: Path = MODEL_FOLDER) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def answer(self, conversations: list[list[dict[str, str]]], temperature: float = 0.0) -> list[Answer]:
        inputs: Any = self.tokenizer.apply_chat_template(
            conversations, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0}
        output = self.model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, **sampling)
        ends = set(self.model.generation_config.eos_token_id)
        rows = output[:, inputs["input_ids"].shape[1] :]
        texts = self.tokenizer.batch_decode(rows, skip_special_tokens=True)
        return [Answer(t, bool(ends & set(row))) for t, row in zip(texts, rows.tolist(), strict=True)]

    def talk(self, messages: tuple[str, ...]) -> Answer:
        """Return the answer to the last message of a conversation."""
        turns: list[dict[str, str]] = []
        answer = Answer("", True)
        for message in messages:
            turns.append({"role": "user", "content": message})
            answer = self.answer([turns])[0]
            turns.append({"role": "assistant", "content": answer.text})
        return answer


def written_prompts() -> list[Prompt]:
    data = tomllib.loads((Path(__file__).parent / "evaluation.toml").read_text(encoding="utf-8"))
    single = [Prompt((text,), key, "written") for text, key in data["prompts"]]
    return single + [Prompt(tuple(texts), key, "conversation") for texts, key in data["conversations"]]


def generated_prompts() -> list[Prompt]:
    """Return held-out messages with a known answer, evenly over the generators."""
    rng = random.Random(SEED)
    found: dict[str, Prompt] = {}
    counts: dict[str, int] = defaultdict(int)
    while len(found) < GENERATED_PROMPTS:
        first = exchanges(rng)[0]
        wanted = first.key and first.kind not in _FOLLOW_UPS and counts[first.kind] < MOST_OF_A_KIND
        if wanted and held_out(first.user):
            counts[first.kind] += first.user not in found
            found[first.user] = Prompt((first.user,), first.key, first.kind)
    return list(found.values())


def ask_all(chat: Chat, prompts: list[Prompt]) -> list[Answer]:
    answers: list[Answer] = []
    single = [p for p in prompts if len(p.messages) == 1]
    for start in range(0, len(single), BATCH):
        batch = single[start : start + BATCH]
        answers += chat.answer([[{"role": "user", "content": p.messages[0]}] for p in batch])
    by_prompt = dict(zip(single, answers, strict=True))
    return [by_prompt[p] if p in by_prompt else chat.talk(p.messages) for p in prompts]


def share(values: list[bool]) -> float:
    return round(sum(values) / len(values), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluate the demo model on prompts that it has not seen.")
    parser.add_argument("--training", type=Path, required=True, help="training.json that train.py wrote")
    parser.add_argument("--output", type=Path, default=Path("loadtest/results/demo-model.json"))
    arguments = parser.parse_args()
    prompts = written_prompts() + generated_prompts()
    answers = ask_all(Chat(), prompts)
    right: dict[str, list[bool]] = defaultdict(list)
    for prompt, answer in zip(prompts, answers, strict=True):
        good = prompt.key.lower() in answer.text.lower()
        right[prompt.kind].append(good)
        print(f"{'    ' if good else 'BAD '}{prompt.kind:13}{prompt.messages[-1]}\n{'':17}{answer.text}")
    record = {
        "model": "demo",
        "workload": "held-out prompts, greedy",
        "prompts": len(prompts),
        "ended_within_200_tokens": share([a.ended for a in answers]),
        "contains_expected": share([good for kind in right.values() for good in kind]),
        "contains_expected_by_kind": {kind: [share(good), len(good)] for kind, good in sorted(right.items())},
        "training": json.loads(arguments.training.read_text()),
        "device": "CPU, fp32",
        **asdict(Provenance.here()),
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
