"""What to say of a flag that there is not: vLLM's are explained, others may be misspelt."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_ALWAYS = "this is always so: leave it out"
_LORA = (
    "adapters that requests choose among are not there yet: --lora ADAPTER merges one into the model, for "
    "all requests"
)
OTHER_PARALLELISM = (
    "a server divides its model by --tensor-parallel-size only; for more requests run several servers "
    "behind quire route"
)
_PARALLEL = "--tensor-parallel-size divides a model over GPUs, and nothing else does: leave it out"
_ONE_MACHINE = f"all GPUs of a server are in one machine: {OTHER_PARALLELISM}"
_EXPERTS = "each rank has as many experts, and sums go through peers' memory or NCCL: leave it out"
_SPECULATION = "speculative decoding is not there yet: leave it out, the answers are the same"
_MULTIMODAL = "models of images, sound or video are not there yet"
_TOOLS = "tools are on for every model whose chat template has them, by the form it has: leave it out"
_TOKENIZER = "the tokenizer is the model folder's own: put the other one's files there"
_REMOTE_CODE = "no code of a model's folder is ever run: leave it out"

# vLLM's flags that are not Quire's, with what to do about it.
_OF_VLLM = {
    "--all2all-backend": _EXPERTS,
    "--allow-credentials": "pages of other sites bring their key themselves: name them with --cors-origin",
    "--allowed-headers": "every header is allowed to the sites that --cors-origin names",
    "--allowed-methods": "every method is allowed to the sites that --cors-origin names",
    "--allowed-origins": "it is called --cors-origin here, one site each time",
    "--async-scheduling": _ALWAYS,
    "--attention-backend": "kernels are chosen for each GPU: `quire doctor --plan` shows which",
    "--calculate-kv-scales": "each vector of the cache has a scale of its own: leave it out",
    "--chat-template-content-format": "contents are given as the template wants them: leave it out",
    "--compilation-config": "there is no torch.compile: --enforce-eager goes without CUDA graphs",
    "--cpu-offload-gb": "weights stay on the GPU; --swap-space moves KV blocks to host memory",
    "--data-parallel-address": _ONE_MACHINE,
    "--data-parallel-backend": OTHER_PARALLELISM,
    "--data-parallel-rank": OTHER_PARALLELISM,
    "--data-parallel-rpc-port": _ONE_MACHINE,
    "--data-parallel-size-local": OTHER_PARALLELISM,
    "--decode-context-parallel-size": OTHER_PARALLELISM,
    "--disable-log-requests": "logs never hold what is asked; --log-level warning leaves out its lines",
    "--disable-log-stats": "--log-level warning leaves them out",
    "--disable-uvicorn-access-log": "--log-level warning leaves out the requests",
    "--distributed-executor-backend": _PARALLEL,
    "--download-dir": "set HF_HOME to the folder where models are to be kept",
    "--enable-auto-tool-choice": _TOOLS,
    "--enable-chunked-prefill": _ALWAYS,
    "--enable-eplb": _EXPERTS,
    "--enable-log-requests": "logs never hold what is asked: leave it out",
    "--enable-lora": _LORA,
    "--enable-prefix-caching": f"{_ALWAYS} (--no-enable-prefix-caching switches it off)",
    "--enable-prompt-tokens-details": _ALWAYS,
    "--enable-request-id-headers": _ALWAYS,
    "--enable-server-load-tracking": "/metrics tells the load: leave it out",
    "--enable-sleep-mode": "a server keeps its memory until it ends: stop it instead",
    "--gpu-memory-utilisation": "it is spelt --gpu-memory-utilization",
    "--guided-decoding-backend": "llguidance enforces all grammars: leave it out",
    "--hf-token": "set HF_TOKEN, which no list of processes shows",
    "--kv-transfer-config": "replicas share no KV blocks; `quire route` sends requests to where theirs are",
    "--limit-mm-per-prompt": _MULTIMODAL,
    "--lora-modules": _LORA,
    "--master-addr": _ONE_MACHINE,
    "--master-port": _ONE_MACHINE,
    "--max-cpu-loras": _LORA,
    "--max-lora-rank": _LORA,
    "--max-loras": _LORA,
    "--max-log-len": "logs never hold what is asked: leave it out",
    "--max-logprobs": "requests may ask for 20 at each token: leave it out",
    "--max-num-partial-prefills": "as many prompts at once as fit in --max-num-batched-tokens: leave it out",
    "--max-parallel-loading-workers": _PARALLEL,
    "--max-seq-len-to-capture": "graphs are captured for all lengths: leave it out",
    "--middleware": "put a proxy before the server instead",
    "--mm-processor-kwargs": _MULTIMODAL,
    "--nnodes": _ONE_MACHINE,
    "--node-rank": _ONE_MACHINE,
    "--num-scheduler-steps": "steps overlap with the host's work already: leave it out",
    "--num-speculative-tokens": _SPECULATION,
    "--override-generation-config": "give these with each request",
    "--prefill-context-parallel-size": OTHER_PARALLELISM,
    "--ray-workers-use-nsight": _PARALLEL,
    "--response-role": "answers are the assistant's: leave it out",
    "--return-tokens-as-token-ids": "give return_tokens_as_token_ids with each request",
    "--revision": "download that revision (hf download MODEL --revision …), and serve its folder",
    "--root-path": "a proxy that serves under a path has to take it off the requests' paths",
    "--rope-scaling": "the scaling of config.json is used: change it there",
    "--rope-theta": "config.json has it: change it there",
    "--scheduling-policy": "first come, first served: leave it out",
    "--skip-tokenizer-init": "prompts may be token ids anyway: leave it out",
    "--speculative-config": _SPECULATION,
    "--speculative-model": _SPECULATION,
    "--ssl-certfile": "put a proxy that speaks TLS before the server",
    "--ssl-keyfile": "put a proxy that speaks TLS before the server",
    "--ssl-ca-certs": "put a proxy that speaks TLS before the server",
    "--convert": "--runner pooling embeds, or scores where the model has a head for it: leave it out",
    "--task": "for embeddings and scores give --runner pooling; for text leave it out",
    "--override-pooler-config": "the folder's 1_Pooling/config.json is used: change it there",
    "--pooler-config": "the folder's 1_Pooling/config.json is used: change it there",
    "--tokenizer": _TOKENIZER,
    "--tokenizer-mode": _TOKENIZER,
    "--tokenizer-revision": _TOKENIZER,
    "--tool-call-parser": _TOOLS,
    "--tool-parser-plugin": _TOOLS,
    "--trust-remote-code": _REMOTE_CODE,
    "--uvicorn-log-level": "it is called --log-level here",
    "--worker-cls": _PARALLEL,
    "--worker-extension-cls": _PARALLEL,
}
# Those that commands take, as long as they are 1, and that are no settings of `LLM`.
_NO_SETTINGS = ("--pipeline-parallel-size", "--data-parallel-size")
_SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-q": "--quantization",
}


def explain_unknown(word: str, names: Iterable[str], command: str) -> str:
    """Return what to do about a word that the command does not know; `names` are its flags."""
    given = word.partition("=")[0]
    if not given.startswith("-"):
        return f"{word!r} is one word too many: `quire {command} --help` tells what there may be"
    name = _SHORT.get(given, given)
    known = {*names, "--help", "--config"}
    if name not in known and name in _OF_VLLM:
        return f"{given}: {_OF_VLLM[name]}"
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]}?" if near else f"`quire {command} --help` lists those that there are"
    return f"there is no flag {given}: {hint}"


def of_vllm(setting: str) -> str | None:
    """Return what to do about a setting of vLLM's that is not Quire's; None: it is not vLLM's either."""
    name = f"--{setting.replace('_', '-')}"
    return OTHER_PARALLELISM if name in _NO_SETTINGS else _OF_VLLM.get(name)


def explain_key(key: str, names: Iterable[str], command: str) -> str:
    """Return the same of a key in a configuration, whose names have no dashes before them."""
    name = f"--{key.replace('_', '-')}"
    words = explain_unknown(name, [f"--{each}" for each in names], command)
    return words.replace(name, key).replace("flag ", "entry ").replace("did you mean --", "did you mean ")
