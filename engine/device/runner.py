"""ModelRunner: executes StepPlans on the device, and owns the device state of the rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice

import numpy as np
import torch
from torch import Tensor

from quire.engine.arrays import Int32, empty_int32
from quire.engine.device.graphs import (
    Captures,
    Graphs,
    Record,
    choosing_sizes,
    decode_sizes,
    mixed_sizes,
    seconds_saved,
    sharing_sizes,
)
from quire.engine.device.inputs import (
    PER_ROW,
    PER_TOKEN,
    DecodeInputs,
    MixedInputs,
    MoveInputs,
    NewestInputs,
    SampleInputs,
    decode_inputs,
    idle_decode,
    idle_mixed,
    mixed_inputs,
    newest_inputs,
    split_mixed,
)
from quire.engine.device.kv_cache import KVCache
from quire.engine.device.logit_processor import LogitProcessor
from quire.engine.device.pooler import Pooler, score_head
from quire.engine.device.row_sampling import RowState
from quire.engine.device.staging import ALIGNMENT, Staging, sent
from quire.engine.device.streams import (
    CudaHandle,
    CudaQueue,
    DeviceLogprobs,
    DeviceResult,
    ThreadHandle,
    ThreadQueue,
)
from quire.engine.device.vocabulary_parts import VocabularyParts
from quire.engine.models.loader import Model
from quire.engine.schedule.cascade import SMALLEST_CASCADE, Cascades
from quire.engine.schedule.plan import PromptLogprobs, StepPlan
from quire.engine.sequences.rows import table_stride
from quire.kernels.attention.batch import DecodeBatch, ForwardBatch, Newest, PrefillBatch, Span
from quire.kernels.attention.cascade import LANES, SharedPrefixes, rows_of_cascade, shared_lens
from quire.kernels.attention.gather import DecodeGather
from quire.kernels.attention.latent.earlier import LEAST_QUERIES, seconds_of_knowing
from quire.kernels.attention.splits import DecodeWorkspace
from quire.kernels.backend import Backend

LOGPROB_SLICE = 256  # rows of logits that are held at once while prompt logprobs are computed
TABLE_ENTRIES = 1 << 18  # of whole tables that a step sends: a hundred rows of 40,000 tokens


@dataclass(frozen=True, slots=True)
class _Sampled:
    """The logits [S, V / ranks] of a step and the tokens [S] drawn from them."""

    logits: Tensor
    tokens: Tensor
    prompt_logprobs: tuple[DeviceLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes that the runner's buffers are made for."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


class ModelRunner:
    """Everything that happens on the device, in stream order, as the plans are launched.

    A row is a running sequence's place on the device: its block table, the last token it sampled and how
    it samples. Row max_num_seqs pads. Nothing here waits for the device.
    """

    def __init__(
        self, model: Model, backend: Backend, cache: KVCache, limits: Limits, device: torch.device
    ) -> None:
        self.model = model
        self.backend = backend
        self.cache = cache
        self.limits = limits
        self.device = device
        config = model.config
        rows = limits.max_num_seqs + 1
        max_blocks = -(-limits.max_model_len // cache.block_size)
        self.group_of_layer = config.group_of_layer
        groups, stride = len(config.cache_groups), table_stride(limits.max_num_seqs)
        self.block_tables = torch.zeros(groups * stride, max_blocks, dtype=torch.int32, device=device)
        self.tables = self.block_tables.split(stride)  # of each cache group
        self.last_tokens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.staging = Staging(staging_words(limits, groups * max_blocks), device)
        self.row_state = RowState(rows, device, self.staging)
        self.vocabulary = VocabularyParts(config.vocab_size, backend, model.ranks)
        self.processor = LogitProcessor(rows, self.vocabulary, device, backend)
        self.pooler: Pooler | None = None
        if config.pooling is not None:
            head = score_head(config.pooling, model.head)
            self.pooler = Pooler(config.pooling, rows, config.hidden_size, head, device)
        self.workspaces: list[DecodeWorkspace | DecodeGather] = [DecodeGather() for _ in self.tables]
        self.queue: CudaQueue | ThreadQueue = ThreadQueue()
        self.cascades: Cascades | None = None
        if device.type == "cuda":
            # Each row reads latents for itself, and what is in its window.
            shares = any(not spec.latent and not spec.window for spec in config.cache_specs)
            workspace = DecodeWorkspace.allocate(
                rows, config.num_heads, config.attended_dim, device, shares=shares
            )
            self.workspaces = [workspace] * groups
            self.queue = CudaQueue(device)
            if shares:
                width = rows_of_cascade(config.largest_group)
                self.cascades = Cascades(rows, cache.block_size, width)
        self.decode_graphs: Graphs | None = None
        self.mixed_graphs: Graphs | None = None
        # Where a row may have more tokens than indexers choose of them.
        self.choosing_graphs: Graphs | None = None
        self.mixed_choosing_graphs: Graphs | None = None
        self.captures: Captures | None = None

    @property
    def mixed_sizes(self) -> list[int]:
        """Token counts of the mixed steps that are worth a graph."""
        return mixed_sizes(self.limits.max_num_batched_tokens, self.model.config.layer_weights)

    @property
    def attends_to_latents(self) -> bool:
        """Whether there are layers that may attend to latents by keys and values of each head."""
        return any(each.latent and each.plain for each in self.model.config.attention)

    @property
    def graphs_may_choose(self) -> bool:
        """Whether the model has indexers, and kernels choose tokens for all of them."""
        return self.model.config.chosen_tokens > 0 and getattr(self.model, "knows_indexers", False)

    def _step_sizes(self) -> tuple[Graphs, Graphs, Graphs, Graphs]:
        """Return all sizes that are worth a graph: decode steps by batch, and mixed ones by tokens.

        Behind them are those that choose tokens to attend to, if graphs may hold what chooses.
        """
        rows, at = self.limits.max_num_seqs, self.device
        decodes = [idle_decode(size, rows) for size in decode_sizes(rows)]
        mixed = [list(chain(*idle_mixed(size, rows))) for size in self.mixed_sizes]
        if self.pooler is not None:
            decodes = []
            mixed = [] if self.pooler.pooling.needs_all else mixed  # which give the newest tokens' states
        choosing, mixed_choosing = [], []
        if self.graphs_may_choose:
            choosing = decodes
            sizes = choosing_sizes(self.limits.max_num_batched_tokens)
            mixed_choosing = [list(chain(*idle_mixed(size, rows))) for size in sizes] if mixed else []
        if self.cascades is not None and decodes:
            shared = [idle_decode(size, rows, self.cascades.width) for size in sharing_sizes(rows)]
            decodes = sorted((*decodes, *shared), key=lambda inputs: len(inputs.rows))
        return (
            Graphs("decode", lambda arrays: self._decode(DecodeInputs(*arrays)), decodes, at),
            Graphs("mixed", lambda arrays: (self._forward(*split_mixed(arrays)),), mixed, at),
            Graphs("choosing decode", lambda arrays: self._decode(DecodeInputs(*arrays), ()), choosing, at),
            Graphs(
                "choosing mixed",
                lambda arrays: (self._forward(*split_mixed(arrays), spans=()),),
                mixed_choosing,
                at,
            ),
        )

    def warm_up(self) -> None:
        """Run steps of every size that is worth a graph, so that all is compiled and loaded."""
        decode, mixed, *choosing = self._step_sizes()
        # What takes longest to compile is asked for early: kernels of many tokens. Before it one decode: its
        # `token_places` is launched even where all else is only compiled, and should not have to wait. (The
        # other such kernel, `copy_pinned`'s, has been there since the runner was made.)
        others = [size for graphs in choosing for size in graphs.sizes]
        for size in (*decode.sizes[:1], *reversed(mixed.sizes), *decode.sizes[1:], *others):
            self.queue.run(torch.inference_mode()(size.warm_up))
        if self.attends_to_latents:
            self.queue.run(torch.inference_mode()(partial(self.run_idle, 1, expands=True)))

    def run_idle(self, tokens: int, *, expands: bool = False) -> Tensor:
        """Compute `tokens` of nobody as a mixed step would; return the hidden states of the newest.

        expands: by the kernel for what is before chunks of prompts, where layers attend to latents.
        """
        mixed, newest = idle_mixed(tokens, self.limits.max_num_seqs)
        inputs = [sent(array.tolist(), torch.int32, self.device) for array in (*mixed, *newest)]
        chunks = (Span(0, LEAST_QUERIES, LEAST_QUERIES + 1),) * len(mixed.chunk_rows) if expands else ()
        return self._forward(*split_mixed(inputs), chunks=chunks)

    def add_graphs(self, record: Record) -> None:
        """Have `capture` record all sizes, whose kernels a `warm_up` must have loaded."""
        families = self._step_sizes()
        self.decode_graphs, self.mixed_graphs, self.choosing_graphs, self.mixed_choosing_graphs = families
        self.captures = Captures([*families], record)

    @property
    def graphs_left(self) -> int:
        """Number of step sizes that still run without a graph of theirs."""
        return 0 if self.captures is None else len(self.captures)

    def capture(self, *, missed: bool = False) -> None:
        """Record one more graph, beside what is launched; with `missed`, only if steps have missed one."""
        if self.captures is not None:
            self.captures.next(missed=missed)

    def drop_graphs(self) -> None:
        """Forget all graphs, once nothing is under way; steps run without."""
        if self.captures is not None:
            self.queue.settle()
            self.decode_graphs = self.mixed_graphs = self.captures = None
            self.choosing_graphs = self.mixed_choosing_graphs = None

    def launch(self, plan: StepPlan) -> CudaHandle | ThreadHandle:
        """Start a step; return its handle, which its results are had from."""
        transfer = None
        if len(plan.swap_out) or len(plan.swap_in):
            transfer = partial(self.cache.swap, plan.swap_out, plan.swap_in)
        return self.queue.submit(lambda: self._execute(plan), transfer)

    def order_after(self, handle: CudaHandle | ThreadHandle) -> None:
        """Have steps that are launched from now on begin once the blocks of that one have moved."""
        if isinstance(handle, CudaHandle) and isinstance(self.queue, CudaQueue):
            self.queue.order_after(handle)

    def settle(self) -> None:
        """Wait, after a step has raised, until nothing is under way. Raises if the device cannot go on."""
        self.queue.settle()

    @torch.inference_mode()
    def _execute(self, plan: StepPlan) -> DeviceResult:
        self.row_state.start(plan.starts)
        self.processor.start(plan.starts)
        if self.cascades is not None:
            self.cascades.note(*self._first_tables(plan))
        if len(plan.override_rows):
            rows, tokens = self.staging.upload([plan.override_rows, plan.override_tokens])
            self.last_tokens[rows] = tokens
        if plan.num_tokens == 0:  # blocks move, and nobody computes
            self._move(MoveInputs(*self.staging.upload(self._moves(plan))))
            return DeviceResult(self.last_tokens[:0], empty_int32(), None, ())
        if self.pooler is not None:
            return self._pooled(plan, self.pooler)
        sampled = self._decode_only(plan) if len(plan.prefill_tokens) == 0 else self._mixed(plan)
        tokens, rows = sampled.tokens, plan.sample_rows.tolist()
        self.processor.redraw(sampled.logits, tokens, rows, plan, self.row_state.state, self.last_tokens)
        wanted, k = self.processor.wanted_logprobs(rows)
        return DeviceResult(
            tokens=tokens,
            logprob_samples=np.array(wanted, np.int32),
            logprobs=self._logprobs(sampled.logits, tokens, wanted, k) if wanted else None,
            prompt_logprobs=sampled.prompt_logprobs,
        )

    def _decode_only(self, plan: StepPlan) -> _Sampled:
        moves = self.staging.upload(self._moves(plan)) if len(plan.table_rows) or len(plan.copies) else []
        cascades = (empty_int32(), empty_int32())
        spans = self._spans(plan)
        if self.cascades is not None and spans is None:
            cascades = self.cascades.find(plan.rows, plan.context_lens)
        inputs = decode_inputs(plan, cascades)
        graphs = self.decode_graphs if spans is None else self.choosing_graphs
        size = None if graphs is None else graphs.load(inputs, self.staging)
        uploaded = self.staging.upload(inputs) if size is None else []
        if moves:
            self._move(MoveInputs(*moves))
        logits, tokens = self._decode(DecodeInputs(*uploaded), spans) if size is None else size.run()
        batch = len(plan.rows)
        return _Sampled(logits[:batch], tokens[:batch], ())

    def _decode(
        self, inputs: DecodeInputs[Tensor], spans: tuple[Span, ...] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute a step of decodes and sample it; return logits [B, V / ranks] and tokens [B].

        spans: as `_spans` gives them, or none of any rows.
        """
        rows, context_lens = inputs.rows, inputs.context_lens
        tokens, positions, slots = self._places(None, rows, inputs.positions)
        shared = None
        if self.cascades is not None and len(inputs.members):
            members = inputs.members.view(-1, self.cascades.width)
            lens = shared_lens(members, rows, context_lens, self.tables[0], self.cache.block_size)
            shared = SharedPrefixes(members, inputs.cascade_of, lens)
        batch = ForwardBatch(
            tokens=tokens,
            positions=positions,
            slots=slots,
            decode=self._decode_batch(0, rows, context_lens, inputs.order, shared),
            other_groups=tuple(
                ForwardBatch(
                    tokens=tokens,
                    positions=positions,
                    slots=self._places(None, rows, inputs.positions, group)[2],
                    decode=self._decode_batch(group, rows, context_lens, inputs.order),
                )
                for group in range(1, len(self.tables))
            ),
            group_of_layer=self.group_of_layer,
            token_rows=None if spans is None else rows,
            spans=spans or (),
        )
        logits = self.model.part_logits(self.model.forward(batch, self.cache.layers))
        return logits, self._sample(logits, rows, context_lens)

    def _mixed(self, plan: StepPlan) -> _Sampled:
        """Compute and sample prefill chunks, with or without decodes beside them.

        Prompt log-probabilities take all tokens' hidden states, which no graph was recorded to give.
        """
        wanted = [run.targets for run in plan.prompt_logprobs]
        hidden, drawn, arrays = self._compute(plan, wanted, whole=bool(wanted))
        logits = self.model.part_logits(hidden[drawn.hidden])
        tokens = self._sample(logits, drawn.rows, drawn.positions)
        prompt_logprobs = tuple(
            self._prompt_logprobs(hidden, run, targets)
            for run, targets in zip(plan.prompt_logprobs, arrays, strict=True)
        )
        return _Sampled(logits, tokens, prompt_logprobs)

    def _pooled(self, plan: StepPlan, pooler: Pooler) -> DeviceResult:
        """Compute prefill chunks, and the vectors of the prompts that they end."""
        whole = pooler.pooling.needs_all
        hidden, drawn, arrays = self._compute(plan, pooler.inputs(plan), whole=whole)
        vectors = pooler.vectors(hidden, drawn.hidden, arrays)
        return DeviceResult(self.last_tokens[: len(vectors)], empty_int32(), None, (), vectors)

    def _compute(
        self, plan: StepPlan, extra: list[Int32], *, whole: bool
    ) -> tuple[Tensor, SampleInputs[Tensor], list[Tensor]]:
        """Return a mixed step's hidden states, what is drawn from them, and `extra` on the device.

        whole: of all tokens and not of each row's newest alone, for which no graph was recorded.
        """
        inputs, drawn_from, spans = [*mixed_inputs(plan)], plan.sample_tokens, self._spans(plan)
        graphs = self.mixed_graphs if spans is None else self.mixed_choosing_graphs
        chunks = self._chunks(plan)
        config = self.model.config
        saved = seconds_of_knowing(chunks, config.num_heads)
        if spans is None and saved > seconds_saved(plan.num_tokens, config.layer_weights):
            graphs = None
        if not whole:
            newest = newest_inputs(plan)
            inputs += newest
            drawn_from = np.searchsorted(newest.tokens, drawn_from).astype(np.int32)
        samples = SampleInputs(plan.sample_rows, drawn_from, plan.sample_positions)
        arrays = iter(self.staging.upload([*samples, *self._moves(plan), *extra]))
        drawn = SampleInputs(*islice(arrays, len(SampleInputs._fields)))
        moves = MoveInputs(*islice(arrays, len(MoveInputs._fields)))
        size = None if graphs is None or whole else graphs.load(inputs, self.staging)
        uploaded = self.staging.upload(inputs) if size is None else []
        self._move(moves)
        if size is None:
            hidden = self._forward(*split_mixed(uploaded), int(plan.query_lens.max()), spans, chunks)
        else:
            (hidden,) = size.run()
        return hidden, drawn, list(arrays)

    def _forward(
        self,
        inputs: MixedInputs[Tensor],
        newest: NewestInputs[Tensor] | None,
        max_query_len: int | None = None,
        spans: tuple[Span, ...] | None = None,
        chunks: tuple[Span, ...] = (),
    ) -> Tensor:
        """Compute a mixed step; return the hidden states [R, H] of its newest tokens, or of all [T, H].

        `max_query_len`: of the longest chunk, if it is known; `chunks`: all of them, if they are. spans: as
        `_decode` has them.
        """
        batch, *others = [
            self._mixed_batch(group, inputs, newest, max_query_len, chunks)
            for group in range(len(self.tables))
        ]
        batch = replace(batch, other_groups=tuple(others), group_of_layer=self.group_of_layer)
        if spans is not None:
            batch = replace(batch, token_rows=inputs.token_rows, spans=spans)
        return self.model.forward(batch, self.cache.layers)

    def _mixed_batch(
        self,
        group: int,
        inputs: MixedInputs[Tensor],
        newest: NewestInputs[Tensor] | None,
        max_query_len: int | None,
        chunks: tuple[Span, ...],
    ) -> ForwardBatch:
        """Return a mixed step as the layers of a cache group take it."""
        ahead = None
        if newest is not None:
            decode = self._decode_batch(group, newest.rows, newest.context_lens, newest.order)
            ahead = Newest(newest.tokens, decode)
        tokens, positions, slots = self._places(inputs.token_ids, inputs.token_rows, inputs.positions, group)
        return ForwardBatch(
            tokens=tokens,
            positions=positions,
            slots=slots,
            decode=self._decode_batch(
                group, inputs.decode_rows, inputs.decode_context_lens, inputs.decode_order
            ),
            prefill=PrefillBatch(
                block_tables=self.tables[group],
                rows=inputs.chunk_rows,
                query_starts=inputs.query_starts,
                context_lens=inputs.chunk_context_lens,
                max_query_len=max_query_len or len(inputs.token_ids),
                spans=chunks,
            ),
            newest=ahead,
        )

    # -- parts of a step ---------------------------------------------------------------------------------

    def _spans(self, plan: StepPlan) -> tuple[Span, ...] | None:
        """Return all rows where one has more tokens than indexers choose of them; else None."""
        chosen = self.model.config.chosen_tokens
        if not chosen or plan.context_lens.max() <= chosen:
            return None
        each = (plan.rows, plan.query_lens, plan.context_lens)
        return tuple(map(Span, *(array.tolist() for array in each)))

    def _chunks(self, plan: StepPlan) -> tuple[Span, ...]:
        """Return what `PrefillBatch.spans` is to be, for layers that attend to latents and nothing more."""
        if not self.attends_to_latents:
            return ()
        each = (plan.rows, plan.query_lens, plan.context_lens)
        return tuple(map(Span, *(array[plan.num_decodes :].tolist() for array in each)))

    def _moves(self, plan: StepPlan) -> MoveInputs[Int32]:
        entries = plan.table_rows * self.block_tables.shape[1] + plan.table_columns
        return MoveInputs(entries, plan.table_blocks, plan.copies)

    def _move(self, moves: MoveInputs[Tensor]) -> None:
        if len(moves.entries):
            self.block_tables.view(-1)[moves.entries] = moves.blocks
        if len(moves.copies):
            self.cache.copy(moves.copies.view(-1, 2))

    def _first_tables(self, plan: StepPlan) -> tuple[Int32, Int32, Int32]:
        """Return the changes (rows, columns, blocks) of the first cache group's tables."""
        rows, columns, blocks = plan.table_rows, plan.table_columns, plan.table_blocks
        if len(self.tables) == 1:
            return rows, columns, blocks
        first = rows < len(self.tables[0])
        return rows[first], columns[first], blocks[first]

    def _decode_batch(
        self,
        group: int,
        rows: Tensor,
        context_lens: Tensor,
        order: Tensor,
        shared: SharedPrefixes | None = None,
    ) -> DecodeBatch:
        return DecodeBatch(self.tables[group], rows, context_lens, order, self.workspaces[group], shared)

    def _places(
        self, ids: Tensor | None, rows: Tensor, positions: Tensor, group: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.backend.token_places(
            ids, rows, positions, self.last_tokens, self.tables[group], self.cache.block_size
        )

    def _sample(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        return self.vocabulary.sample(logits, rows, positions, self.row_state.state, self.last_tokens)

    def _logprobs(self, logits: Tensor, tokens: Tensor, wanted: list[int], k: int) -> DeviceLogprobs:
        if len(wanted) < len(tokens):
            index = sent(wanted, torch.int64, self.device)
            logits, tokens = logits[index], tokens[index]
        return DeviceLogprobs(*self.vocabulary.logprobs(logits, tokens, k))

    def _prompt_logprobs(self, hidden: Tensor, run: PromptLogprobs, targets: Tensor) -> DeviceLogprobs:
        """Return those of the prompt tokens after hidden[run.first], slice by slice of the wide logits."""
        wanted = hidden[run.first : run.first + len(targets)]
        parts = [
            self.vocabulary.logprobs(self.model.part_logits(rows), tokens, run.k)
            for rows, tokens in zip(wanted.split(LOGPROB_SLICE), targets.split(LOGPROB_SLICE), strict=True)
        ]
        return DeviceLogprobs(*(torch.cat(column) for column in zip(*parts, strict=True)))


def staging_words(limits: Limits, max_blocks: int) -> int:
    """Return the int32 words that nearly every plan takes: its rows, tokens, targets and moves.

    A step names new blocks for the tokens it computes, two a row to spare, and whole tables for rows that
    fork, share or come back: of these so many as are usual at once, and more by more memory. Of rows that
    share prefixes it names those of a cascade to every four.
    """
    rows, tokens = limits.max_num_seqs + 1, limits.max_num_batched_tokens
    tables = min(rows * max_blocks, max(max_blocks, TABLE_ENTRIES))
    moves = 2 * (tokens + 2 * rows + tables) + 2 * rows
    words = (PER_ROW + LANES // SMALLEST_CASCADE) * rows + (PER_TOKEN + 1) * tokens + moves
    return words + ALIGNMENT * (32 + rows)
