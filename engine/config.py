"""The configuration of an engine, and its description of itself once it runs."""

from __future__ import annotations

from typing import Literal

import msgspec

from quire.engine.capacity import Capacity
from quire.engine.models.generation_config import SamplingDefaults
from quire.engine.models.pooling import Pooling, Runner
from quire.engine.urls import check_redis_url, check_replica_url

MOST_RANKS = 64  # of one model
PreemptionMode = Literal["auto", "swap", "recompute"]
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
BLOCK_SIZE = 16  # unless a model needs another
ModelImpl = Literal["auto", "native", "transformers"]
QuantizedWeights = Literal["keep", "expand"]
Phase = Literal["download", "weights", "kernels", "memory", "warm-up", "graphs", "ready"]
KVCacheDtype = Literal[
    "auto", "model", "fp8_e4m3", "fp12_e4m7"
]  # rounded: `quire.kernels.formats.kv_format.SCALED`


# What vLLM and torch call values of settings, beside the names here.
OTHER_NAMES = {
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"fp8": "fp8_e4m3"},
}


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one engine. Raises ValueError that names the flag and what it may be."""

    model: str  # a folder that save_pretrained wrote, a GGUF file, or a Hub id
    device: Literal["auto", "cuda", "cpu"] = "auto"  # auto: cuda where there is one
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    kv_cache_dtype: KVCacheDtype = (
        "auto"  # model: its own; auto: `quire.engine.device.kv_cache.automatic_format`
    )
    load_format: Literal["auto", "dummy"] = "auto"
    quantized_weights: QuantizedWeights = "keep"  # keep: in few bits, where kernels multiply by them
    quantization: str | None = None  # the folder's method; of one without any fp8, to which it is rounded
    lora: str | None = None  # a folder that peft wrote, of an adapter that is merged into the model
    runner: Runner = "auto"  # generate: text; pooling: vectors of prompts; auto: as the model's folder says
    model_impl: ModelImpl = "auto"  # native: a decoder of Quire's; transformers: its modelling code
    generation_config: str = "auto"  # auto: the model's folder; vllm: none; else a folder
    max_model_len: int | None = None  # None: what the model and the KV cache allow
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None  # None: 64 for each multiprocessor of a GPU, 2048 on a CPU
    block_size: int | None = None  # None: 16; of a model that keeps states as these need
    gpu_memory_utilization: float = 0.9
    swap_space: float = 4.0  # GiB of host memory for KV blocks; 0: no host tier
    preemption_mode: PreemptionMode = "auto"
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None  # of each rank's device, for KV blocks; None: what is left
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    seed: int | None = None  # of dummy weights; None: 0
    cache_seed: str | None = None  # what block digests are seeded with; None: drawn at random
    tensor_parallel_size: int = 1  # ranks that the model is divided among, each with a device
    enable_expert_parallel: bool = False  # each rank has some experts whole, and not a part of all
    disable_custom_all_reduce: bool = False  # sums over GPUs are NCCL's alone

    def __post_init__(self) -> None:
        if self.block_size is not None and self.block_size not in BLOCK_SIZES:
            raise ValueError(f"--block-size must be one of {BLOCK_SIZES}, got {self.block_size}")
        if self.max_num_seqs < 1:
            raise ValueError(f"--max-num-seqs must be at least 1, got {self.max_num_seqs}")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be at least "
                f"--max-num-seqs ({self.max_num_seqs}): every running sequence takes a token each step"
            )
        if not 0.05 <= self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"--gpu-memory-utilization must be between 0.05 and 1, got {self.gpu_memory_utilization}"
            )
        if not 0 <= self.swap_space <= 1 << 20:
            raise ValueError(f"--swap-space must be between 0 and {1 << 20} GiB, got {self.swap_space}")
        if self.preemption_mode == "swap" and self.swap_space == 0:
            raise ValueError("--preemption-mode swap needs host memory: --swap-space must be more than 0")
        if self.num_gpu_blocks_override is not None and self.num_gpu_blocks_override < 1:
            raise ValueError(
                f"--num-gpu-blocks-override must be at least 1, got {self.num_gpu_blocks_override}"
            )
        if self.kv_cache_memory_bytes is not None:
            if self.kv_cache_memory_bytes < 1:
                raise ValueError(
                    f"--kv-cache-memory-bytes must be at least 1, got {self.kv_cache_memory_bytes}"
                )
            if self.num_gpu_blocks_override is not None:
                raise ValueError(
                    "--kv-cache-memory-bytes and --num-gpu-blocks-override both say how many KV blocks there "
                    "are; give one of them"
                )
        if self.seed is not None and self.load_format != "dummy":
            raise ValueError(
                f"--seed ({self.seed}) is of dummy weights and needs --load-format dummy; what is sampled is "
                "seeded by a request's own seed (--sampling-seed of quire generate)"
            )
        if self.lora is not None and self.load_format == "dummy":
            raise ValueError(
                f"--lora {self.lora} is merged into weights, and --load-format dummy reads none; leave out "
                "one of them"
            )
        if not 1 <= self.tensor_parallel_size <= MOST_RANKS:
            raise ValueError(
                f"--tensor-parallel-size must be between 1 and {MOST_RANKS}, got {self.tensor_parallel_size}"
            )
        if self.enable_expert_parallel and self.tensor_parallel_size == 1:
            raise ValueError(
                "--enable-expert-parallel gives each rank some of the experts, and there is one rank; give "
                "--tensor-parallel-size, too, or leave it out"
            )
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(
                f"--max-model-len must be at least 2, a token of prompt and one of output, got "
                f"{self.max_model_len}"
            )


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a started engine; a front end checks requests against it.

    Bytes, weights and widths are those of one rank: each holds and computes as much.
    """

    model: str
    architecture: str
    dtype: str
    kv_cache_dtype: str
    device: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int  # what the model and the flags allow
    block_size: int
    num_blocks: int
    num_host_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    bytes_per_block: int
    expanded_bytes: int = 0  # of a layer's keys and values as numbers, beside the blocks
    weight_bytes: int
    layer_weights: int  # elements of a layer's matrices
    query_width: int  # query heads × head dim
    latent_width: int = 0  # numbers that a layer keeps of a token for all heads; 0: each has keys and values
    chosen_tokens: int = 0  # that a token attends to, as indexers choose of those before it; 0: all
    index_width: int = 0  # numbers that a layer keeps of a token for that
    windows: tuple[int, ...]  # of attention, a layer each; 0: it sees all
    body_weight_bytes: int  # read for every token: all but embeddings and the output head
    head_weight_bytes: int  # read for every sampled token
    kept_bits: tuple[int, ...] = ()  # of weights that stay in few; others are of dtype
    keeps_experts: bool = False  # those are of experts alone, and not of a layer's products
    sampling_defaults: SamplingDefaults = SamplingDefaults()  # of requests that do not say
    has_grammars: bool = False  # whether a request may say what its text must be
    tensor_parallel_size: int = 1
    rank_memory_bytes: tuple[int, ...] = ()  # that each rank took of its device when it had started
    all_reduce_seconds: float = 0.0  # of one token's hidden states over the ranks; 0 with one
    group_layers: tuple[int, ...] = ()  # of each cache group
    group_windows: tuple[int, ...] = ()  # tokens that each cache group keeps whose layers have windows
    keeps_all: bool = True  # whether there is another one before these, which keeps all tokens
    state_groups: int = 0  # of the last of those, whose layers keep states and not tokens
    num_pinned_blocks: int = 0  # of num_blocks: never evicted, so no request can have them to itself
    vector_size: int = 0  # numbers of a vector that a model gives which embeds
    pooling: Pooling | None = None  # None: the model generates text
    merged: tuple[str, str] | None = None  # an adapter, and the model whose weights it was merged into

    @property
    def capacity(self) -> Capacity:
        return Capacity(
            num_blocks=self.num_blocks - self.num_pinned_blocks,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            windows=self.group_windows,
            keeps_all=self.keeps_all,
            step_tokens=min(self.max_num_batched_tokens, self.max_model_len),
            pools=self.pooling is not None,
            padding=None if self.pooling is None else self.pooling.padding,
        )

    def blocks_for(self, tokens: int) -> int:
        """Return how many KV blocks a request of so many tokens takes alone, in all cache groups."""
        return self.capacity.blocks(-(-tokens // self.block_size), [tokens])

    @property
    def max_request_tokens(self) -> int:
        """Return the longest prompt + output of one sequence: the model's limit or the whole KV cache."""
        if self.group_windows:
            return 1 + self.capacity.room(1, 1)
        return min(self.max_model_len, (self.num_blocks - self.num_pinned_blocks) * self.block_size)


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """A start-up phase as it goes; `done` and `total` are in `unit`."""

    phase: Phase
    done: int
    total: int
    unit: str
    seconds: float


class StepStats(msgspec.Struct, frozen=True, array_like=True):
    """State after a step and what the step did; counters are totals since start."""

    free_blocks: int
    active_blocks: int
    cached_blocks: int
    block_references: int
    tokens_filled: int  # in distinct active blocks
    running: int  # requests, as those below
    waiting: int  # for room, or for a grammar that is being compiled
    swapped: int
    preemptions_recompute: int
    preemptions_swap: int
    host_free_blocks: int
    host_active_blocks: int
    host_cached_blocks: int
    swap_out_blocks: int  # device to host since start, spilled cached blocks included
    swap_in_blocks: int
    block_allocations: int
    block_evictions: int
    copy_on_write: int
    prefill_tokens: int  # of this step
    decode_tokens: int  # of this step
    schedule_seconds: float
    launch_seconds: float
    wait_seconds: float
    commit_seconds: float
    graphs_left: int = 0  # CUDA graphs that are still to be captured
    requests_in_memory: int = 0  # ended ones too, until nothing holds them any more
    behind_window_blocks: int = 0  # that sequences in rows have given back, or never needed
    sequences_running: int = 0


class RegistryConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where to publish, and as whom. Raises ValueError that names the flag and what it may be."""

    redis_url: str
    advertise_url: str  # where the router reaches this replica; also its name in the registry
    lease: float = 15.0  # seconds after its last word for which a replica is believed

    def __post_init__(self) -> None:
        check_redis_url(self.redis_url)
        check_replica_url("--advertise-url", self.advertise_url)
        if not 0.3 <= self.lease <= 3600:
            raise ValueError(f"--registry-lease must be between 0.3 and 3600 seconds, got {self.lease}")


RegistryState = Literal["ok", "degraded"]


class RegistryReport(msgspec.Struct, frozen=True, array_like=True):
    """The state of publishing to the registry."""

    state: RegistryState
    blocks: int  # that the registry holds of this replica, as far as is known
    lag_seconds: float  # for which changes have been waiting
    dropped: int  # changes that found the buffer full, since start; all blocks were published again
    publish_seconds: list[float]  # of the publications since the last report


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where KV events go, with vLLM's keys. Raises ValueError that names the key and what it may be."""

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: str = "tcp://*:5557"  # tcp://* and ipc:// bind, tcp://host connects
    replay_endpoint: str | None = None  # where subscribers ask for what they missed; bound
    buffer_steps: int = 10_000  # batches that are kept for them
    hwm: int = 100_000  # messages that wait for a slow subscriber; more are lost to it
    max_queue_size: int = 100_000  # changes that wait for the publisher; more: it publishes everything anew
    topic: str = ""

    def __post_init__(self) -> None:
        endpoints = {"endpoint": self.endpoint, "replay_endpoint": self.replay_endpoint}
        for name, endpoint in endpoints.items():
            if endpoint is not None and not endpoint.startswith(("tcp://", "ipc://", "inproc://")):
                raise ValueError(
                    f"--kv-events-config: {name} must begin with tcp:// or ipc://, got {endpoint!r}"
                )
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"--kv-events-config: {name} must be at least 1, got {getattr(self, name)}")

    @property
    def enabled(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"
