"""Whether a text follows a grammar, as the engine would have it."""

from __future__ import annotations

from llguidance import LLMatcher

from quire.engine.sequences.grammar import load_vocabulary
from quire.service.text.structured import lark_grammar
from quire.service.text.tokenizer import Tokenizer


def accepts(tokenizer: Tokenizer, rules: str, text: str) -> bool:
    return accepts_grammar(tokenizer, lark_grammar(rules), text)


def accepts_grammar(tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    eos = tokenizer.encode("<|end|>", add_special_tokens=False)[0]
    matcher = LLMatcher(load_vocabulary(tokenizer.to_json(), 330, (eos,)), grammar, log_level=0)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
