"""The demo model's tokenizer: byte-level BPE, one token per digit, and its chat template.

`python -m quire.loadtest.demo_model.tokenizer` trains it on the corpus and writes it to service/demo/model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from quire.loadtest.demo_model.corpus import documents
from quire.service import demo

MODEL_FOLDER = Path(demo.MODEL_FOLDER)
VOCAB_SIZE = 4096
CONTEXT_LENGTH = 2048
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
TRAINING_SEED = 7
TRAINING_DOCUMENTS = 40_000

# A message is its role's token, its text, and <|end|>. Nothing but the text is subject to trimming. Functions
# and calls are written as Hermes writes them; the model has learnt nothing of them.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}{{ '<|system|>' }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] | trim + '\\n\\n' }}{% endif %}"
    "{{ 'You may call functions:\\n<tools>' }}"
    "{% for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}"
    '{{ \'\\n</tools>\\nA call is <tool_call>\\n{"name": its name, "arguments": an object}\\n\' }}'
    "{{ '</tool_call><|end|>' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "{{ '<|user|><tool_response>\\n' + message['content'] | trim + '\\n</tool_response><|end|>' }}"
    "{% elif message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('role must be system, user, assistant or tool, got ' + message['role']) }}"
    "{% elif not (tools and loop.first and message['role'] == 'system') %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '\\n<tool_call>\\n{\"name\": ' + call['function']['name'] | tojson + ', \"arguments\": ' }}"
    "{{ call['function']['arguments'] if call['function']['arguments'] is string "
    "else call['function']['arguments'] | tojson }}"
    "{{ '}\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|end|>' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def _texts() -> Iterator[str]:
    for document in islice(documents(TRAINING_SEED), TRAINING_DOCUMENTS):
        yield from (message["content"] for message in document.messages)
        if document.text:
            yield document.text


def train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    bos = (SPECIAL_TOKENS[0], tokenizer.token_to_id(SPECIAL_TOKENS[0]))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos[0]} $A", pair=f"{bos[0]} $A $B", special_tokens=[bos]
    )
    return tokenizer


def write(folder: Path) -> int:
    """Train the tokenizer into `folder`; return its number of tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "additional_special_tokens": list(SPECIAL_TOKENS[3:]),
        "model_max_length": CONTEXT_LENGTH,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return tokenizer.get_vocab_size()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model's tokenizer.")
    parser.add_argument("--output", type=Path, default=MODEL_FOLDER)
    arguments = parser.parse_args()
    print(f"{write(arguments.output)} tokens in {arguments.output}")


if __name__ == "__main__":
    main()
