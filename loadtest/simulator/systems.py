"""The systems that are compared: Quire, and the paper's baselines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.admission import Capacity
from engine.preemption import PreemptionMode, PreemptionPolicy
from engine.prefix_cache import BlockHasher
from engine.scheduler import Scheduler
from loadtest.simulator.baselines import Memory, RequestLevel, Reserved, Unreserved
from loadtest.simulator.virtual_runner import VOCAB

Kind = Literal["paged", "max", "pow2", "oracle", "request-level"]
NAMES: dict[Kind, str] = {
    "paged": "Quire",
    "oracle": "Orca (Oracle)",
    "pow2": "Orca (Pow2)",
    "max": "Orca (Max)",
    "request-level": "FasterTransformer",
}
BASELINE_BLOCK = 16  # what tables count in where blocks play no role


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

    @property
    def name(self) -> str:
        return NAMES[self.kind]

    def memory(self) -> Memory:
        if self.kind == "paged":
            return Unreserved(self.block_size)
        if self.kind == "request-level":
            return RequestLevel(self.slots, self.max_model_len)
        return Reserved(self.slots, self.kind, self.max_model_len)

    def scheduler(self) -> Scheduler:
        paged = self.kind == "paged"
        block_size = self.block_size if paged else BASELINE_BLOCK
        enough = self.max_num_seqs * (-(-self.max_model_len // block_size) + 1) * 2
        capacity = Capacity(
            num_blocks=self.slots // block_size if paged else enough,
            block_size=block_size,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            vocab_size=VOCAB,
        )
        return Scheduler(
            capacity,
            self.max_num_batched_tokens,
            hasher=BlockHasher(block_size, seed=0) if paged and self.prefix_caching else None,
            num_host_blocks=self.host_slots // block_size if paged else 0,
            policy=PreemptionPolicy(mode=self.preemption),
        )
