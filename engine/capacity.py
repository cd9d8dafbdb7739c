"""The limits of an engine, and the refusal of requests that it could never run."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from quire.engine.errors import FieldError
from quire.engine.messages import Request

if TYPE_CHECKING:
    from quire.engine.arrays import Int32


@dataclass(frozen=True, slots=True)
class Capacity:
    """Fixed at start. Both ends of the seam refuse by it, so that no impossible request is ever queued."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_model_len: int
    vocab_size: int
    windows: tuple[int, ...] = ()  # tokens that each cache group keeps whose layers have windows
    keeps_all: bool = True  # whether there is another one before these, which keeps all tokens
    step_tokens: int = 0  # of a sequence at most, in a step: they may be there beside a window
    pools: bool = False  # whether prompts give vectors, and not text
    padding: int | None = None  # the token that prompts to be classified are computed without, at their end

    @property
    def pages(self) -> int:
        """KV blocks that the tokens of one block take: one in each cache group."""
        return self.keeps_all + len(self.windows)

    def blocks(self, full: int, lengths: Sequence[int], behind: int = 0) -> int:
        """Return the most KV blocks that sequences of so many tokens need at once, in all cache groups.

        full: what they need in a group that keeps all tokens, and so no more in one with a window. behind:
        blocks behind its window that such a group keeps for one of them.
        """
        windows = (behind + sum(self._kept(window, tokens) for tokens in lengths) for window in self.windows)
        return self.keeps_all * full + sum(min(full, each) for each in windows)

    def _kept(self, window: int, tokens: int) -> int:
        """Return the most blocks that so many tokens of a sequence need at once in a group with a window."""
        # What a chunk of `step_tokens` reads and writes may begin and end within a block.
        most = -(-(window - 1 + self.step_tokens) // self.block_size) + 1
        return min(-(-tokens // self.block_size), most)

    def without_padding(self, request: Request) -> Request:
        """Return the request as it is computed: transformers classifies by the last token that is no padding.

        It takes the first token where all are.
        """
        prompt, padding = request.prompt, self.padding
        if padding is None or not prompt or prompt[-1] != padding:
            return request
        end = max((i + 1 for i, token in enumerate(prompt) if token != padding), default=1)
        return replace(request, prompt=prompt[:end])

    def check(self, request: Request) -> Int32:
        """Return the prompt [N]. Raise FieldError, with the numbers, when the request could never run."""
        params, prompt = request.params, len(request.prompt)
        if self.pools != (request.pooling is not None):
            what = "pools prompts and gives no text" if self.pools else "gives text and does not pool prompts"
            raise FieldError("model", f"this model {what} (--runner)")
        if prompt == 0:
            raise FieldError("prompt", "the prompt is empty; it needs at least one token")
        unpooled = request.pooling.unpooled if request.pooling is not None else 0
        if not 0 <= unpooled < prompt:
            raise FieldError(
                "prompt", f"the prompt has {prompt} tokens, of which {unpooled} are no part of its vector"
            )
        tokens = self._tokens("prompt", request.prompt)
        self._tokens("stop_token_ids", params.stop_token_ids)
        self._tokens("logit_bias", params.logit_bias)
        for name, k in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if k is not None and k > self.vocab_size:
                raise FieldError(name, f"{name} is {k}, but the vocabulary has {self.vocab_size} tokens")
        name = "the beam width" if params.beam_width else "n"
        if params.num_sequences > self.max_num_seqs:
            raise FieldError(
                "n",
                f"{name} is {params.num_sequences}, but at most {self.max_num_seqs} sequences run at "
                "once (--max-num-seqs)",
            )
        if prompt + request.max_new_tokens > self.max_model_len:
            both = f" and max_tokens is {params.max_tokens}: together {prompt + params.max_tokens}"
            raise FieldError(
                "prompt",
                f"the prompt has {prompt} tokens{both if request.max_new_tokens else ''}, more than the "
                f"{self.max_model_len} of --max-model-len",
                "context_length_exceeded",
            )
        needed = self._blocks_needed(prompt, params.max_tokens, params.num_sequences)
        if needed > self.num_blocks:
            raise FieldError(
                "prompt",
                f"the request needs up to {needed} KV blocks ({prompt} prompt tokens and "
                f"{params.num_sequences} × {params.max_tokens} new ones, {self.block_size} to a block), but "
                f"there are only {self.num_blocks}",
                "context_length_exceeded",
            )
        return tokens

    def _tokens(self, name: str, ids: Collection[int]) -> Int32:
        """Return the ids [N]. Raise FieldError, which names one, where some are none of the vocabulary's."""
        from quire.engine.arrays import as_int32  # with it numpy, which a server's port does not wait for

        try:
            tokens = as_int32(ids)
            known = not len(tokens) or (tokens.min() >= 0 and tokens.max() < self.vocab_size)
        except OverflowError:
            known = False
        if not known:
            wrong = next(token for token in ids if not 0 <= token < self.vocab_size)
            message = f"{name} has token id {wrong}; the vocabulary has 0 to {self.vocab_size - 1}"
            raise FieldError(name, message)
        return tokens

    def room(self, prompt: int, n: int) -> int:
        """Return the most new tokens of each of n sequences after a prompt of so many; below 1: not even one.

        It depends on nothing that runs: all of them fit at once when the cache is empty.
        """
        if self.windows:
            return self._room_beside_windows(prompt, n)
        shared = prompt // self.block_size
        blocks = shared + (self.num_blocks - shared) // n  # of one sequence
        own = blocks * self.block_size + (n > 1)  # the last is not kept; of one alone it is not asked for
        return min(own, self.max_model_len) - prompt

    def _blocks_needed(self, prompt: int, max_tokens: int, n: int) -> int:
        """Return the most blocks of n sequences if only a prompt's full ones are shared (section 4.4)."""
        shared = prompt // self.block_size
        tokens = prompt + max_tokens - 1
        full = shared + n * (-(-tokens // self.block_size) - shared)
        # When n are computed again, the first keeps what the others go on from behind the prompt.
        behind = -(-max_tokens // self.block_size) if n > 1 else 0
        return self.blocks(full, [tokens] * n, behind)

    def _room_beside_windows(self, prompt: int, n: int) -> int:
        new = range(1, self.max_model_len - prompt + 1)
        return bisect_right(new, self.num_blocks, key=lambda tokens: self._blocks_needed(prompt, tokens, n))
