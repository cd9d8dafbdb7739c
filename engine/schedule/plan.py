"""The seam between scheduler and device: the StepPlan, what comes of it, and the runner between the two.

No Sequence and no tensor crosses here, so the scheduler is tested without a model, and the same plan
could be sent to another rank as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec

from quire.engine.arrays import Int32, Logprobs, Vectors, empty_int32
from quire.engine.messages import SamplingParams

NOT_FINITE = -1  # instead of a token
NOTHING = empty_int32()
NO_PAIRS: Int32 = NOTHING.reshape(0, 2)
NO_MASKS: Int32 = NOTHING.reshape(0, 0)


@dataclass(frozen=True, slots=True)
class RowStart:
    """A device row is (re)assigned to a sequence: its sampling state, laid down before the forward."""

    row: int
    index: int  # sequence index within its group: the second Philox key
    params: SamplingParams
    num_prompt: int
    stop_tokens: frozenset[int]  # not to be sampled before min_tokens
    prompt: list[int]  # empty unless a penalty looks at it; read-only
    output: list[int]  # tokens generated before a recompute, ditto
    num_candidates: int  # of a beam: how many of the best tokens it wants at each step
    unpooled: int = 0  # tokens at the prompt's beginning that its vector is not of


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """A run of prompt tokens whose log-probabilities are wanted."""

    first: int  # index in 0..T-1 of the token that predicts targets[0]; the next one predicts targets[1] …
    targets: Int32
    k: int  # how many of the best candidates to report


class StepPlan(msgspec.Struct, frozen=True):
    """One step. Shapes: R rows that compute tokens (decodes first), T tokens, S sampled tokens.

    A decode row computes one token, the one its device row sampled last; a prefill row computes
    `query_lens[r]` tokens whose ids are in `prefill_tokens`, in row order.
    """

    rows: Int32  # [R] device row of each
    num_decodes: int  # the first num_decodes of the R rows are decodes
    query_lens: Int32  # [R] tokens computed in this step
    context_lens: Int32  # [R] tokens in the cache once this step is done
    prefill_tokens: Int32  # [T - num_decodes]
    starts: tuple[RowStart, ...] = ()
    override_rows: Int32 = NOTHING  # [G] rows that decode on from a token of which the host knows better
    override_tokens: Int32 = NOTHING  # [G]
    # [K] block_table[table_rows, table_columns] = table_blocks, before the forward
    table_rows: Int32 = NOTHING
    table_columns: Int32 = NOTHING  # [K]
    table_blocks: Int32 = NOTHING  # [K]
    copies: Int32 = NO_PAIRS  # [C, 2] (source, destination) blocks, before the forward
    swap_out: Int32 = NO_PAIRS  # [., 2] (device, host) blocks; reads what all earlier steps wrote
    swap_in: Int32 = NO_PAIRS  # [., 2] (host, device) blocks; both may take longer than the step
    sample_rows: Int32 = NOTHING  # [S] device row that each sampled token belongs to
    # [S] index in 0..T-1 of the token whose logits it is drawn from, its row's newest
    sample_tokens: Int32 = NOTHING
    sample_positions: Int32 = NOTHING  # [S] position that the sampled token takes in its sequence
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    masked_samples: Int32 = NOTHING  # [M] which of the S samples have a mask
    masks: Int32 = NO_MASKS  # [M, ceil(V / 32)], see Constraint

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + len(self.prefill_tokens)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The device's answer to a plan."""

    tokens: Int32  # [S]; NOT_FINITE where the logits were not
    logprob_samples: Int32  # [N] which of the S samples `logprobs` describes
    logprobs: Logprobs | None  # of the samples whose requests asked for them; None when N is 0
    prompt_logprobs: tuple[Logprobs, ...]  # as in the plan
    vectors: Vectors | None = None  # [S, D], instead of tokens, of a model that pools


class StepHandle(Protocol):
    """A launched step."""

    def wait(self) -> StepResult:
        """Block until the device has computed it, and return what it gave."""
        ...

    def has_moved(self, *, wait: bool = False) -> bool:
        """Return whether its blocks between the tiers are where they go; `wait`: block until they are."""
        return True


class Runner(Protocol):
    """Executes plans in the order in which they are launched."""

    def launch(self, plan: StepPlan) -> StepHandle:
        """Start a step without waiting for it or for those before it.

        Once one has raised, here or when it is waited for, those launched after it raise too, until `settle`.
        MemoryError: the device has not enough memory for it.
        """
        ...

    def settle(self) -> None:
        """Wait, after a step has raised, until nothing is under way.

        Raises if no step can be computed any more, which is so for a runner that does not say otherwise.
        """
        raise RuntimeError("this runner computes no steps after one that raised")

    @property
    def graphs_left(self) -> int:
        """Return how many step sizes would be quicker if they were captured."""
        return 0

    def capture(self, *, missed: bool = False) -> None:
        """Capture one step size, if any is left; with `missed`, only if steps have been of such a size."""
        return
