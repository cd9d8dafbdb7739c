"""The systems that are compared: Quire, and the paper's baselines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.engine.capacity import Capacity
from quire.engine.config import PreemptionMode
from quire.engine.hashing import BlockHasher
from quire.engine.schedule.preemption import PreemptionPolicy
from quire.engine.schedule.scheduler import WATERMARK, Scheduler
from quire.loadtest.simulator.baselines import Memory, Padded, RequestLevel, Reserved, Unreserved
from quire.loadtest.simulator.paper_admission import PaperAdmission
from quire.loadtest.simulator.virtual_runner import VOCAB

Kind = Literal["paged", "max", "pow2", "oracle", "request-level", "padded"]
NAMES: dict[Kind, str] = {
    "paged": "Quire",
    "oracle": "Orca (Oracle)",
    "pow2": "Orca (Pow2)",
    "max": "Orca (Max)",
    "request-level": "FasterTransformer, nothing padded",
    "padded": "FasterTransformer",
}


@dataclass(frozen=True, slots=True)
class System:
    """One way to manage `slots` tokens of KV memory."""

    kind: Kind
    slots: int
    max_model_len: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2560  # of a step
    prefix_caching: bool = False
    host_slots: int = 0
    preemption: PreemptionMode = "recompute"
    # New requests come in once all that were preempted are back, or, as in the paper, have completed.
    admission: Literal["back", "completed"] = "back"

    @property
    def name(self) -> str:
        return NAMES[self.kind]

    def memory(self) -> Memory:
        if self.kind == "paged":
            return Unreserved(self.block_size)
        if self.kind == "request-level":
            return RequestLevel(self.slots, self.max_model_len)
        if self.kind == "padded":
            return Padded(self.slots, self.max_model_len)
        return Reserved(self.slots, self.kind, self.max_model_len)

    @property
    def num_blocks(self) -> int:
        """Return the scheduler's blocks. A baseline's are never short: its reservations are what is."""
        if self.kind == "paged":
            return self.slots // self.block_size
        # Of every sequence one block in part, one for a copy on write; and what admission keeps back.
        return round(self.slots / self.block_size * (1 + 2 * WATERMARK)) + 4 * self.max_num_seqs

    def scheduler(self, vocab_size: int = VOCAB) -> Scheduler:
        paged = self.kind == "paged"
        capacity = Capacity(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            vocab_size=vocab_size,
        )
        rule = PaperAdmission if self.admission == "completed" else Scheduler
        return rule(
            capacity,
            self.max_num_batched_tokens,
            hasher=BlockHasher(self.block_size, seed=0) if paged and self.prefix_caching else None,
            num_host_blocks=self.host_slots // self.block_size if paged else 0,
            policy=PreemptionPolicy(mode=self.preemption),
        )
