"""ModelRunner: executes StepPlans on the device, and owns the device state of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from quire.engine.arrays import Int32, empty_int32
from quire.engine.device.graphs import (
    Captures,
    Record,
    mixed_sizes,
    seconds_saved,
)
from quire.engine.device.inputs import (
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
from quire.engine.device.limits import Limits, staging_words
from quire.engine.device.logit_processor import LogitProcessor
from quire.engine.device.pooler import Pooler, score_head
from quire.engine.device.row_sampling import RowState
from quire.engine.device.staging import Staging, sent
from quire.engine.device.step_batches import NO_CASCADES, StepBatches, spans_of
from quire.engine.device.step_graphs import StepGraphs, idle_steps, step_graphs
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
from quire.engine.models.projection_weights import ProjectionWeights
from quire.engine.schedule.plan import PromptLogprobs, StepPlan
from quire.kernels.attention.batch import ForwardBatch, Span
from quire.kernels.attention.latent.earlier import LEAST_QUERIES, seconds_of_knowing
from quire.kernels.backend import Backend

if TYPE_CHECKING:
    from quire.engine.models.general.model import GeneralModel

LOGPROB_SLICE = 256  # rows of logits that are held at once while prompt logprobs are computed


@dataclass(frozen=True, slots=True)
class _Sampled:
    """The logits [S, V / ranks] of a step and the tokens [S] drawn from them."""

    logits: Tensor
    tokens: Tensor
    prompt_logprobs: tuple[DeviceLogprobs, ...]


class ModelRunner:
    """Everything that happens on the device, in stream order, as the plans are launched.

    A row is a running sequence's place on the device: its block table, the last token it sampled and how
    it samples. Row max_num_seqs pads. Nothing here waits for the device.
    """

    def __init__(
        self,
        model: Model,
        backend: Backend,
        cache: KVCache,
        limits: Limits,
        device: torch.device,
        projections: Sequence[ProjectionWeights] = (),
    ) -> None:
        """projections: that vectors go through, of a model that pools."""
        self.model = model
        self.backend = backend
        self.cache = cache
        self.limits = limits
        self.device = device
        config = model.config
        rows = limits.max_num_seqs + 1
        self.batches = StepBatches(config, limits, cache.block_size, backend, device)
        self.staging = Staging(staging_words(limits, self.batches.blocks_of_row), device)
        self.row_state = RowState(rows, device, self.staging)
        self.vocabulary = VocabularyParts(config.vocab_size, backend, model.ranks)
        self.processor = LogitProcessor(rows, self.vocabulary, device, backend)
        self.pooler: Pooler | None = None
        if config.pooling is not None:
            head = score_head(config.pooling, model.head)
            self.pooler = Pooler(config.pooling, rows, config.hidden_size, head, projections, device)
        self.queue: CudaQueue | ThreadQueue = ThreadQueue()
        if device.type == "cuda":
            self.queue = CudaQueue(device)
        self.graphs: StepGraphs | None = None
        self.captures: Captures | None = None

    @property
    def mixed_sizes(self) -> list[int]:
        """Return the token counts of the mixed steps that are worth a graph."""
        return mixed_sizes(self.limits.max_num_batched_tokens, self.model.config.layer_weights)

    @property
    def attends_to_latents(self) -> bool:
        """Return whether there are layers that may attend to latents by keys and values of each head."""
        return any(each.latent and each.plain for each in self.model.config.attention)

    @property
    def keeps_states(self) -> bool:
        """Return whether there are layers that keep states."""
        return bool(self.model.config.states)

    @property
    def takes_pieces(self) -> bool:
        """Return whether such layers take chunks of prompts apart as the host knows them."""
        return getattr(self.model, "takes_pieces", False)

    @property
    def graphs_may_choose(self) -> bool:
        """Return whether the model has indexers, and kernels choose tokens for all of them."""
        return self.model.config.chosen_tokens > 0 and getattr(self.model, "knows_indexers", False)

    def _step_graphs(self) -> StepGraphs:
        """Return all sizes of steps that are worth a graph."""
        config, cascades = self.model.config, self.batches.cascades
        idle = idle_steps(
            self.limits,
            [] if self.takes_pieces else self.mixed_sizes,
            None if cascades is None else cascades.width,
            config.pooling,
            choosing=self.graphs_may_choose,
        )
        return step_graphs(idle, self._decode, self._forward, self.device)

    def warm_up(self) -> None:
        """Run steps of every size that is worth a graph, so that all is compiled and loaded."""
        for size in self._step_graphs().to_warm_up():
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

    def run_idle_decode(self) -> None:
        """Compute a decode of nobody."""
        inputs = idle_decode(1, self.limits.max_num_seqs)
        self._decode(DecodeInputs(*(sent(each.tolist(), torch.int32, self.device) for each in inputs)))

    def add_graphs(self, record: Record) -> None:
        """Have `capture` record all sizes, whose kernels a `warm_up` must have loaded."""
        self.graphs = self._step_graphs()
        self.captures = Captures(self.graphs.families, record)

    @property
    def graphs_left(self) -> int:
        """Return how many step sizes still run without a graph of theirs."""
        return 0 if self.captures is None else len(self.captures)

    def capture(self, *, missed: bool = False) -> None:
        """Record one more graph, beside what is launched; with `missed`, only if steps have missed one."""
        if self.captures is not None:
            self.captures.next(missed=missed)

    def drop_graphs(self) -> None:
        """Forget all graphs, once nothing is under way; steps run without."""
        if self.captures is not None:
            self.queue.settle()
            self.graphs = self.captures = None

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
        if self.pooler is not None:
            self.pooler.start(plan.starts)
        self.batches.note(plan)
        if plan.num_tokens == 0:  # blocks move, and nobody computes
            self._move(MoveInputs(*self.staging.upload(self.batches.moves(plan))))
            return DeviceResult(self.batches.last_tokens[:0], empty_int32(), None, ())
        if self.pooler is not None:
            return self._pooled(plan, self.pooler)
        sampled = self._decode_only(plan) if len(plan.prefill_tokens) == 0 else self._mixed(plan)
        tokens, last_tokens = sampled.tokens, self.batches.last_tokens
        self.processor.redraw(sampled.logits, tokens, plan, self.row_state.state, last_tokens)
        wanted, k = self.processor.wanted_logprobs(plan.sample_rows)
        return DeviceResult(
            tokens=tokens,
            logprob_samples=wanted,
            logprobs=self._logprobs(sampled.logits, tokens, wanted, k) if len(wanted) else None,
            prompt_logprobs=sampled.prompt_logprobs,
        )

    def _decode_only(self, plan: StepPlan) -> _Sampled:
        moves = self.batches.moves(plan)
        moved = self.staging.upload(moves) if any(map(len, moves)) else []
        spans = self._spans(plan)
        cascades = self.batches.cascades_of(plan) if spans is None else NO_CASCADES
        inputs = decode_inputs(plan, cascades)
        size = None if self.graphs is None else self.graphs.of_decodes(spans).load(inputs, self.staging)
        uploaded = self.staging.upload(inputs) if size is None else []
        if moved:
            self._move(MoveInputs(*moved))
        logits, tokens = self._decode(DecodeInputs(*uploaded), spans) if size is None else size.run()
        batch = len(plan.rows)
        return _Sampled(logits[:batch], tokens[:batch], ())

    def _decode(
        self, inputs: DecodeInputs[Tensor], spans: tuple[Span, ...] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute a step of decodes and sample it; return logits [B, V / ranks] and tokens [B].

        spans: as `StepBatches.decode` has them.
        """
        hidden = self._hidden(self.batches.decode(inputs, spans))
        logits = self.model.part_logits(hidden)
        return logits, self._sample(logits, inputs.rows, inputs.context_lens)

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
        return DeviceResult(self.batches.last_tokens[: len(vectors)], empty_int32(), None, (), vectors)

    def _compute(
        self, plan: StepPlan, extra: list[Int32], *, whole: bool
    ) -> tuple[Tensor, SampleInputs[Tensor], list[Tensor]]:
        """Return a mixed step's hidden states, what is drawn from them, and `extra` on the device.

        whole: of all tokens and not of each row's newest alone, for which no graph was recorded.
        """
        inputs, drawn_from, spans = [*mixed_inputs(plan)], plan.sample_tokens, self._spans(plan)
        graphs = None if self.graphs is None or self.takes_pieces else self.graphs.of_mixed(spans)
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
        arrays = iter(self.staging.upload([*samples, *self.batches.moves(plan), *extra]))
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
        """Compute a mixed step, as `StepBatches.mixed` takes it.

        Return the hidden states [R, H] of its newest tokens, or of all [T, H].
        """
        return self._hidden(self.batches.mixed(inputs, newest, max_query_len, spans, chunks))

    def _hidden(self, batch: ForwardBatch) -> Tensor:
        if self.cache.states is None:
            return self.model.forward(batch, self.cache.layers)
        model = cast("GeneralModel", self.model)  # no other keeps states
        return model.forward(batch, self.cache.layers, self.cache.states)

    # -- parts of a step ---------------------------------------------------------------------------------

    def _spans(self, plan: StepPlan) -> tuple[Span, ...] | None:
        """Return all rows where one has more tokens than indexers choose of them; else None."""
        chosen = self.model.config.chosen_tokens
        return spans_of(plan) if chosen and plan.context_lens.max() > chosen else None

    def _chunks(self, plan: StepPlan) -> tuple[Span, ...]:
        """Return what `PrefillBatch.spans` is to be, for layers that attend to latents or take pieces."""
        knows = self.attends_to_latents or self.takes_pieces
        return spans_of(plan, plan.num_decodes) if knows else ()

    def _move(self, moves: MoveInputs[Tensor]) -> None:
        self.batches.change_rows(moves)
        if len(moves.copies):
            self.cache.copy(moves.copies.view(-1, 2))

    def _sample(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        return self.vocabulary.sample(logits, rows, positions, self.row_state.state, self.batches.last_tokens)

    def _logprobs(self, logits: Tensor, tokens: Tensor, wanted: Int32, k: int) -> DeviceLogprobs:
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
