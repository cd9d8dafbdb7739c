"""A paged engine as tutorials write it: plain torch, a list of free blocks, one of several ways to attend.

It runs a Qwen2 model of transformers, module by module, over its own cache, and generates greedily.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM, apply_rotary_pos_emb


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens of one sequence in a step: `count` queries, the last of `length` tokens in its blocks."""

    table: list[int]
    count: int
    length: int


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's keys and values in blocks, [blocks, block size, KV heads, D] each."""

    keys: Tensor
    values: Tensor

    @property
    def block_size(self) -> int:
        return self.keys.shape[1]


# Attend with q [T, H, D], whose rows are the segments' queries in turn; return the same shape.
Attend = Callable[[Tensor, Layer, Sequence[Segment]], Tensor]


def for_query_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat KV heads for the queries of their group: [tokens, KV heads, D] to [heads, tokens, D]."""
    groups = heads // x.shape[1]
    return x.transpose(0, 1)[:, None].expand(-1, groups, -1, -1).flatten(0, 1)


def sees(segment: Segment, first: int, last: int, device: torch.device) -> Tensor:
    """Return [queries, last - first]: whether a query sees the keys at these positions."""
    queries = torch.arange(segment.length - segment.count, segment.length, device=device)
    return torch.arange(first, last, device=device) <= queries[:, None]


def concatenated(q: Tensor, layer: Layer, segments: Sequence[Segment]) -> Tensor:
    """Attend sequence by sequence: join its blocks, then attend as ever."""
    outs = []
    for own, segment in zip(q.split([each.count for each in segments]), segments, strict=True):
        keys, values = (
            for_query_heads(torch.cat([blocks[i] for i in segment.table])[: segment.length], q.shape[1])
            for blocks in (layer.keys, layer.values)
        )
        mask = sees(segment, 0, segment.length, q.device)
        outs.append(F.scaled_dot_product_attention(own.transpose(0, 1), keys, values, attn_mask=mask))
    return torch.cat([out.transpose(0, 1) for out in outs])


def online_softmax(q: Tensor, layer: Layer, segments: Sequence[Segment]) -> Tensor:
    """Attend block by block with a running maximum and sum, in float32."""
    outs = []
    for own, segment in zip(q.split([each.count for each in segments]), segments, strict=True):
        queries = own.transpose(0, 1)
        most = torch.full((*queries.shape[:2], 1), -torch.inf, device=q.device)
        total, out = torch.zeros_like(most), torch.zeros_like(queries, dtype=torch.float32)
        for i, block in enumerate(segment.table):
            scores, seen = block_scores(queries, layer, segment, i, block)
            higher = torch.maximum(most, scores.amax(-1, keepdim=True))
            weights = (scores - higher).exp() * seen
            shrink = (most - higher).exp()
            total = total * shrink + weights.sum(-1, keepdim=True)
            out = out * shrink + weights @ for_query_heads(layer.values[block], q.shape[1]).float()
            most = higher
        outs.append((out / total).to(q.dtype).transpose(0, 1))
    return torch.cat(outs)


def two_passes(q: Tensor, layer: Layer, segments: Sequence[Segment]) -> Tensor:
    """Find maximum and sum in a first pass over the blocks; compute the scores again in a second one."""
    outs = []
    for own, segment in zip(q.split([each.count for each in segments]), segments, strict=True):
        queries = own.transpose(0, 1)
        most = torch.full((*queries.shape[:2], 1), -torch.inf, device=q.device)
        total = torch.zeros_like(most)
        for i, block in enumerate(segment.table):
            scores, seen = block_scores(queries, layer, segment, i, block)
            higher = torch.maximum(most, scores.amax(-1, keepdim=True))
            total = total * (most - higher).exp() + ((scores - higher).exp() * seen).sum(-1, keepdim=True)
            most = higher
        out = torch.zeros_like(queries, dtype=torch.float32)
        for i, block in enumerate(segment.table):
            scores, seen = block_scores(queries, layer, segment, i, block)
            weights = (scores - most).exp() * seen / total
            out += weights @ for_query_heads(layer.values[block], q.shape[1]).float()
        outs.append(out.to(q.dtype).transpose(0, 1))
    return torch.cat(outs)


def block_scores(
    queries: Tensor, layer: Layer, segment: Segment, index: int, block: int
) -> tuple[Tensor, Tensor]:
    """Return the scores [H, queries, block size] of a sequence's index-th block, and which are seen.

    Those that are not are the least that there is, not infinite, so that a block of none does no harm.
    """
    first = index * layer.block_size
    seen = sees(segment, first, first + layer.block_size, queries.device)
    keys = for_query_heads(layer.keys[block], len(queries))
    scores = (queries @ keys.mT).float() * queries.shape[-1] ** -0.5
    return scores.masked_fill(~seen, torch.finfo(torch.float32).min), seen


def padded(q: Tensor, layer: Layer, segments: Sequence[Segment]) -> Tensor:
    """Attend all sequences in one call, each padded to the longest: to the most queries, and blocks."""
    most = max(each.count for each in segments)
    width = max(len(each.table) for each in segments)
    tables = torch.tensor([[*each.table, *[0] * (width - len(each.table))] for each in segments])
    keys, values = (
        blocks[tables.to(q.device)].flatten(1, 2) for blocks in (layer.keys, layer.values)
    )  # [batch, tokens, KV heads, D]
    queries = q.new_zeros(len(segments), most, *q.shape[1:])
    mask = torch.zeros(len(segments), 1, most, keys.shape[1], dtype=torch.bool, device=q.device)
    for i, (own, segment) in enumerate(
        zip(q.split([each.count for each in segments]), segments, strict=True)
    ):
        queries[i, : segment.count] = own
        mask[i, 0, : segment.count] = sees(segment, 0, keys.shape[1], q.device)
        mask[i, 0, segment.count :, 0] = True  # a row that sees nothing would be NaN
    out = F.scaled_dot_product_attention(
        queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask, enable_gqa=True
    ).transpose(1, 2)
    return torch.cat([each[: segment.count] for each, segment in zip(out, segments, strict=True)])


def ragged(q: Tensor, layer: Layer, segments: Sequence[Segment]) -> Tensor:
    """Attend all sequences in one call without padding: one row of keys, of which each query sees its own."""
    blocks = torch.tensor([i for each in segments for i in each.table], device=q.device)
    keys, values = (each[blocks].flatten(0, 1) for each in (layer.keys, layer.values))
    mask = torch.zeros(len(q), len(keys), dtype=torch.bool, device=q.device)
    row = column = 0
    for segment in segments:
        slots = len(segment.table) * layer.block_size
        mask[row : row + segment.count, column : column + slots] = sees(segment, 0, slots, q.device)
        row, column = row + segment.count, column + slots
    heads = q.shape[1]
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1), for_query_heads(keys, heads), for_query_heads(values, heads), attn_mask=mask
    )
    return out.transpose(0, 1)


@dataclass(slots=True)
class _Sequence:
    number: int
    tokens: list[int]
    end: int  # how many tokens it has in the end
    computed: int = 0
    table: list[int] = field(default_factory=list)


class SimpleEngine:
    """Runs at most `most` sequences at once, with as many blocks as they need."""

    def __init__(self, model: Qwen2ForCausalLM, attend: Attend, most: int, block_size: int = 16) -> None:
        self.model, self.attend, self.most, self.block_size = model, attend, most, block_size

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Return `count` greedy tokens for each prompt."""
        waiting = deque(_Sequence(i, list(each), len(each) + count) for i, each in enumerate(prompts))
        blocks_of = [-(-each.end // self.block_size) for each in waiting]
        layers = self._layers(sum(sorted(blocks_of)[-self.most :]))
        free = list(range(len(layers[0].keys)))
        running: list[_Sequence] = []
        answers: list[list[int]] = [[] for _ in prompts]
        while waiting or running:
            while waiting and len(running) < self.most:
                running.append(waiting.popleft())
            for token, sequence in zip(self._step(running, layers, free), list(running), strict=True):
                sequence.tokens.append(token)
                if len(sequence.tokens) == sequence.end:
                    answers[sequence.number] = sequence.tokens[-count:]
                    free += sequence.table
                    running.remove(sequence)
        return answers

    def _layers(self, blocks: int) -> list[Layer]:
        config: Any = self.model.config
        head_dim = config.hidden_size // config.num_attention_heads
        shape = (blocks, self.block_size, config.num_key_value_heads, head_dim)
        weight = self.model.lm_head.weight
        return [
            Layer(weight.new_zeros(shape), weight.new_zeros(shape)) for _ in range(config.num_hidden_layers)
        ]

    def _step(self, running: Sequence[_Sequence], layers: list[Layer], free: list[int]) -> list[int]:
        """Compute what each sequence has not computed yet; return its next token."""
        segments: list[Segment] = []
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for sequence in running:
            length = len(sequence.tokens)
            while len(sequence.table) * self.block_size < length:
                sequence.table.append(free.pop())
            new = range(sequence.computed, length)
            tokens += sequence.tokens[sequence.computed :]
            positions += new
            slots += [
                sequence.table[at // self.block_size] * self.block_size + at % self.block_size for at in new
            ]
            segments.append(Segment(sequence.table, len(new), length))
            sequence.computed = length
        device = self.model.lm_head.weight.device
        hidden = self._forward(
            *(torch.tensor(each, device=device) for each in (tokens, positions, slots)),
            layers=layers,
            segments=segments,
        )
        last = torch.tensor([each.count for each in segments], device=device).cumsum(0) - 1
        found: list[int] = self.model.lm_head(hidden[last]).argmax(-1).tolist()
        return found

    def _forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        *,
        layers: list[Layer],
        segments: list[Segment],
    ) -> Tensor:
        """Return the hidden states [T, hidden]; the tokens' keys and values go to their slots."""
        inner = self.model.model
        hidden = inner.embed_tokens(tokens)
        cos, sin = inner.rotary_emb(hidden, positions[None])
        for module, cache in zip(inner.layers, layers, strict=True):
            attention, x = module.self_attn, module.input_layernorm(hidden)
            q, k, v = (
                project(x).unflatten(-1, (-1, attention.head_dim))
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            q, k = (each[0] for each in apply_rotary_pos_emb(q[None], k[None], cos, sin, unsqueeze_dim=2))
            cache.keys.flatten(0, 1)[slots] = k
            cache.values.flatten(0, 1)[slots] = v
            hidden = hidden + attention.o_proj(self.attend(q, cache, segments).flatten(1))
            hidden = hidden + module.mlp(module.post_attention_layernorm(hidden))
        return inner.norm(hidden)
