"""`EngineConfig`: everything a user may set, under TensorRT-LLM's YAML names.

Every field here does something. Names that TensorRT-LLM knows and Penstock does not have are judged
by `trtllm_fields`; what is left to decide automatically is decided by `resolve`.
"""

from typing import Any, Literal

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    field_validator,
    model_validator,
)

from penstock import log
from penstock.config.access import AccessConfig
from penstock.config.base import StrictModel, setting
from penstock.config.batching import SchedulerConfig
from penstock.config.generation import GenerationOverrides
from penstock.config.graphs import CudaGraphConfig
from penstock.config.http import HttpConfig
from penstock.config.kv_cache import KvCacheConfig
from penstock.config.launch import Launcher
from penstock.config.lora import LoraConfig
from penstock.config.messages import explain
from penstock.config.moe import MoeConfig
from penstock.config.parallel import (
    AttentionDpConfig,
    CpConfig,
    check_sizes,
    with_implied_sizes,
    with_launcher,
)
from penstock.config.speculative import SpeculativeConfig
from penstock.config.trtllm_fields import canonical, translate
from penstock.errors import ConfigError

DEFAULT_MODEL = "smollm2"  # of the catalog: answers sensibly, small enough for any CPU

_logger = log.get(__name__)

# Names of TensorRT-LLM and vLLM; `text/chat_format` says which are the same format.
ReasoningParser = (
    Literal[
        "auto",
        "none",
        "think",
        "qwen3",
        "deepseek-r1",
        "deepseek_r1",
        "deepseek_v3",
        "deepseek_v31",
        "glm45",
        "kimi_k2",
        "kimi_k25",
        "nano-v3",
        "nemotron_v3",
        "nemotron-v3",
        "harmony",
        "gpt_oss",
        "openai_gptoss",
    ]
    | None
)
ToolParser = (
    Literal[
        "auto",
        "none",
        "hermes",
        "qwen3",
        "qwen3_coder",
        "qwen3_xml",
        "llama3_json",
        "llama4_json",
        "pythonic",
        "llama4_pythonic",
        "deepseek_v3",
        "deepseek_v31",
        "mistral",
        "glm45",
        "glm4",
        "glm47",
        "kimi_k2",
        "harmony",
        "gpt_oss",
        "openai",
    ]
    | None
)


class EngineConfig(StrictModel):
    """However it is built: a wrong value, an unknown or a rejected name is a `ConfigError`."""

    # model and tokenizer
    model: str = setting(
        DEFAULT_MODEL,
        "Hub id, local folder or GGUF file of the checkpoint, or a name. "
        f"'{DEFAULT_MODEL}': SmolLM2-135M-Instruct, fetched on first use. 'tiny': a test "
        "model of 3.5 M parameters that comes with Penstock, for trying it out without a network.",
        min_length=1,
        max_length=4096,
    )
    tokenizer: str | None = setting(
        None,
        "Hub id or local folder of the tokenizer. null: the model's own.",
        min_length=1,
        max_length=4096,
    )
    skip_tokenizer_init: bool = setting(
        False, "Load no tokenizer: prompts must be token ids, and so are the outputs."
    )
    revision: str | None = setting(
        None,
        "Branch, tag or commit of the model on the hub. null: its main branch.",
        min_length=1,
        max_length=256,
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = setting(
        "auto",
        "Number format of weights and activations. auto: the checkpoint's on a GPU, float32 on a "
        "CPU. Codes of a GGUF file are multiplied as they are on a CPU: there a format of 16 bits "
        "means that GEMMs take 16 bits of their activations, which is faster and still finer.",
    )
    quantization: Literal["fp8", "fp8_block", "int8", "nf4"] | None = setting(
        None,
        "What the weights of a checkpoint that is not quantized become while they are loaded. fp8, "
        "int8: 8 bits with a scale per output, inputs of the same kind with one per token. "
        "fp8_block: a scale per 128 x 128 weights and per 128 inputs. nf4: 4 bits with a scale per "
        "64 weights, inputs as they are. null: nothing; what a checkpoint says of itself is used "
        "always.",
    )
    quantize_activations: Literal["auto", "always", "never"] = setting(
        "auto",
        "Whether activations are quantized where weights are NVFP4 (to NVFP4, which the checkpoint "
        "was made for), MXFP4 experts (to MXFP8) or INT4 of W4A8_AWQ (to FP8). auto: on GPUs whose "
        "tensor cores multiply those, sm_100 and newer, FP8 on sm_89 and newer. always: without "
        "such tensor cores, too, slowly, to see what it does to outputs. never: weights alone are "
        "quantized.",
        status="prototype",
    )
    load_format: Literal["auto", "dummy"] = setting(
        "auto",
        "auto: read the checkpoint. dummy: random weights; only config.json is read, and the "
        "tokenizer where there is one.",
    )
    model_kwargs: dict[str, Any] | None = setting(
        None,
        "Values that replace those of the checkpoint's config.json, such as a smaller "
        "num_hidden_layers.",
        status="beta",
        max_length=256,
    )
    task: Literal["auto", "generate", "embed", "score"] = setting(
        "auto",
        "What the model is served for. generate: tokens. embed: the hidden state of a text's last "
        "token, by /v1/embeddings, and its cosine by /v1/score and /v1/rerank. score: how likely "
        '"yes" is where a query and a document are judged, of models like Qwen3-Reranker. auto: '
        "embed where the model's folder has a modules.json (sentence-transformers), else generate.",
        status="prototype",
    )
    logits_processors: list[str] | None = setting(
        None,
        "Names of entry points (penstock.logits_processors) of installed packages that requests "
        "may use as logits processors. They run inside the engine. null: none.",
        status="prototype",
        max_length=8,
    )
    chat_template: str | None = setting(
        None,
        "Jinja chat template: a file, or the template itself. null: the tokenizer's own.",
        min_length=1,
        max_length=1_000_000,
    )
    trust_request_chat_template: bool = setting(
        False,
        "Requests may bring a chat_template. It runs in the sandbox, in a process that all such "
        "templates share, 5 s and 1 GiB at most; one that is slow delays the others. Reasoning and "
        "tool calls are found as those of the server's template.",
        status="beta",
    )
    reasoning_parser: ReasoningParser = setting(
        "auto",
        "How reasoning is told from the content of a chat: think (the same as qwen3, deepseek_v3, "
        "deepseek_v31, glm45, nano-v3, nemotron_v3), deepseek-r1 (a missing opening tag counts as "
        "given), kimi_k2 (a tool call ends it, too), harmony (gpt_oss). auto: as the chat template "
        "writes it. none: it stays in the content.",
    )
    tool_parser: ToolParser = setting(
        "auto",
        "How tool calls are found in a chat completion: hermes (qwen3), qwen3_coder (qwen3_xml), "
        "llama3_json (llama4_json), pythonic (llama4_pythonic), deepseek_v3 (deepseek_v31), "
        "mistral, glm45 (glm4, glm47), kimi_k2, harmony (gpt_oss, openai). auto: as the chat "
        "template writes them. none: they stay in the content.",
    )
    generation_config: str = setting(
        "auto",
        "Where the sampling parameters come from that a request leaves out: temperature, top_p, "
        "top_k, min_p, repetition_penalty, max_new_tokens (as max_tokens). auto: "
        "generation_config.json of the model, or the catalog's values for a model of it. "
        "vllm (trtllm means the same): neutral ones, temperature 1 and no cutoffs. Else a folder "
        "with a generation_config.json. Stop ids always come from the model's own.",
        min_length=1,
        max_length=4096,
    )
    override_generation_config: GenerationOverrides = setting(
        GenerationOverrides(), "Sampling parameters that replace those of generation_config."
    )
    seed: int | None = setting(
        None,
        "Start value of dummy weights and of requests that bring no seed. null: drawn anew.",
        ge=0,
        le=2**63 - 1,
    )

    # devices
    device: Literal["auto", "cuda", "cpu"] = setting(
        "auto", "Where the model runs. auto: on the GPU when there is one."
    )
    tensor_parallel_size: int = setting(
        1,
        "Number of devices that share each layer; each runs one process. Not given: "
        "moe_expert_parallel_size, where that is.",
        ge=1,
        le=1024,
    )
    enable_attention_dp: bool = setting(
        False,
        "Each of the tensor_parallel_size devices has requests and a KV cache of its own and all "
        "weights of attention; MLPs and experts stay sharded, and the tokens of all devices go "
        "through them. max_batch_size, max_num_tokens and the cache are then those of a device.",
    )
    attention_dp_config: AttentionDpConfig = setting(
        AttentionDpConfig(), "When prompts start, with enable_attention_dp."
    )
    pipeline_parallel_size: int = setting(
        1,
        "Number of stages into which the layers are split, each on tensor_parallel_size devices of "
        "its own. So many steps of other sequences are under way at a time.",
        ge=1,
        le=1024,
        status="beta",
    )
    context_parallel_size: int = setting(
        1,
        "Number of ranks that share the tokens of each sequence, a power of two: each runs a part "
        "of a prompt and holds such a part of the KV cache. Each of them is tensor_parallel_size "
        "devices.",
        ge=1,
        le=64,
        status="beta",
    )
    cp_config: CpConfig | None = setting(None, "How, with context_parallel_size.", status="beta")
    data_parallel_size: int = setting(
        1,
        "Number of engines behind this port, each with the whole model on tensor_parallel_size "
        "devices of its own. Requests go where their prefix is cached, or to the least busy one; "
        "one that dies is started again while the others answer. A launcher starts one process for "
        "each, on several nodes, too.",
        ge=1,
        le=32,
    )
    moe_expert_parallel_size: int | None = setting(
        None,
        "Number of sets into which these devices fall for layers of experts: each set has other "
        "experts, and those of a set share each of them. A divisor of tensor_parallel_size. null: "
        "one set, all devices share every expert.",
        ge=1,
        le=1024,
    )
    moe_tensor_parallel_size: int | None = setting(
        None,
        "The same said otherwise: number of devices that share an expert. null: "
        "tensor_parallel_size / moe_expert_parallel_size.",
        ge=1,
        le=1024,
    )
    num_threads: int | None = setting(
        None, "CPU threads of each engine process. null: the cores this machine has.", ge=1, le=1024
    )
    launcher: Launcher = setting(
        "auto",
        "Who starts the ranks: local (rank 0 does, on its machine), or one that starts 'penstock "
        "serve' once for each rank, on one or several nodes: torchrun, slurm (srun), mpi (mpirun); "
        "ray: rank 0 does, on the nodes of a Ray cluster. auto: the one whose environment this "
        "process has, if it has started several. The ranks "
        "of the three need PENSTOCK_RANK_SECRET in their environment (docs/scaling.md).",
        status="beta",
    )
    allreduce_strategy: Literal["AUTO", "NCCL", "ONESHOT"] = setting(
        "AUTO",
        "How ranks sum: AUTO and NCCL leave it to NCCL (on a CPU gloo). ONESHOT: up to 256 KiB "
        "each GPU of a node reads the parts of all others (symmetric memory), the sum behind "
        "attention fused with residual and norm; NCCL above. Runs with a single rank, too.",
        status="prototype",
    )
    orchestrator_type: Literal["rpc", "mpi", "ray"] | None = setting(
        None,
        "ray: the same as launcher: ray. rpc and mpi change nothing: ranks started from here need "
        "neither, and those of mpirun are known by their environment.",
        status="beta",
    )
    rank_interface: str | None = setting(
        None,
        "Network interface by which ranks of a launcher reach each other: rank 0 listens at its "
        "address alone, gloo and NCCL use it. null: the one with the address of MASTER_ADDR; NCCL "
        "finds its own. GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME win over it for these.",
        min_length=1,
        max_length=15,
        status="beta",
    )

    # limits
    max_batch_size: int | None = setting(
        None, "Most sequences in one step. null: 2048 on a GPU, 64 on a CPU.", ge=1, le=65536
    )
    max_num_tokens: int | None = setting(
        None,
        "Most tokens, of prompts and of outputs, in one step. null: 8192 on a GPU, 2048 on a CPU, "
        "and never less than max_batch_size.",
        ge=1,
        le=2**20,
    )
    max_seq_len: int | None = setting(
        None,
        "Most tokens of one request, prompt and output together. null: what the model was trained "
        "for. More than that is lowered to it.",
        ge=2,
        le=2**27,
    )
    max_queued_requests: int = setting(
        8192,
        "Most requests waiting or running at a time; one more is refused with status 429.",
        ge=1,
        le=2**20,
    )
    max_queued_tokens: int | None = setting(
        None,
        "Most prompt tokens of all requests waiting or running, those of each sample counted; what "
        "goes beyond is refused with status 429. null: 4096 for each of max_queued_requests, and "
        "at least 4 times max_seq_len.",
        ge=1,
        le=2**40,
    )

    # scheduling
    enable_chunked_prefill: bool = setting(
        True,
        "Compute long prompts in chunks between the decodes of others. Without it a prompt longer "
        "than max_num_tokens is refused.",
    )
    scheduler_config: SchedulerConfig = setting(SchedulerConfig(), "Queue order and admission.")
    disable_overlap_scheduler: bool | None = setting(
        None,
        "true: plan a step only after the one before it has ended. false: plan it while that one "
        "runs. null: false on a GPU, true on a CPU.",
    )
    stream_interval: int = setting(
        1,
        "Send a streamed chunk every so many tokens; the first and the last are sent at once.",
        ge=1,
        le=10000,
    )

    # cache, graphs, kernels
    kv_cache_config: KvCacheConfig = setting(KvCacheConfig(), "The cache of keys and values.")
    cuda_graph_config: CudaGraphConfig | None = setting(
        CudaGraphConfig(), "CUDA graphs of decode steps. null: none. Not used on a CPU."
    )
    attn_backend: str = setting(
        "auto",
        "Attention kernels: reference, sdpa or triton. auto and every other name (TRTLLM, "
        "FLASHINFER, ...): the one preferred on the device.",
        min_length=1,
        max_length=64,
    )

    moe_config: MoeConfig = setting(MoeConfig(), "Layers of experts, in models that have them.")
    speculative_config: SpeculativeConfig | None = setting(
        None,
        "Drafted tokens, several of which a step can check; the output stays the same. null: none.",
        status="beta",
    )

    enable_lora: bool = setting(
        False, "Low-rank adapters. A lora_config turns them on, too.", status="beta"
    )
    lora_config: LoraConfig | None = setting(
        None,
        "Low-rank adapters, one of which a request may choose by its model name or lora_request. "
        "null: none, unless enable_lora.",
        status="beta",
    )

    # statistics
    max_stats_len: int = setting(
        1000, "Most records kept between two reads; older ones are dropped.", ge=1, le=1_000_000
    )

    # server
    host: str = setting("localhost", "Address to listen on.", min_length=1, max_length=255)
    port: int = setting(8000, "Port to listen on. 0: a free one.", ge=0, le=65535)
    http_config: HttpConfig = setting(HttpConfig(), "Limits and time-outs of the HTTP server.")
    access_config: AccessConfig = setting(
        AccessConfig(), "API keys, and what each of them may have."
    )
    num_postprocess_workers: int | None = setting(
        None,
        "Processes that serve HTTP on the port, each turning prompts into tokens and tokens into "
        "events. 0 and 1: one. null: one, with a GPU one for every 4 CPUs and at most 4.",
        ge=0,
        le=64,
    )
    served_model_name: str | None = setting(
        None,
        "Name of the model in the API. null: the model as given.",
        min_length=1,
        max_length=256,
    )
    api_key: str | None = Field(
        default=None,
        description="Key that clients must send as 'Authorization: Bearer KEY' or "
        "'X-Api-Key: KEY'. null: no check. Never shown, and not passed on to the engine process.",
        min_length=1,
        max_length=4096,
        repr=False,
        exclude=True,
        json_schema_extra={"status": "stable"},
    )
    log_level: (
        Literal["internal_error", "error", "warning", "info", "verbose", "debug", "trace"] | None
    ) = setting(None, "Least important messages shown. null: PENSTOCK_LOG_LEVEL, or info.")

    @model_validator(mode="wrap")
    @classmethod
    def _judge_names(
        cls, values: Any, handler: ModelWrapValidatorHandler["EngineConfig"]
    ) -> "EngineConfig":
        if isinstance(values, cls):
            return values
        given = with_launcher(with_implied_sizes(canonical(values)))
        check_sizes(given)
        kept, warnings = translate(given)
        try:
            config = handler(kept)
        except ValidationError as error:
            raise ConfigError(explain(error, cls.model_fields)) from None
        for line in warnings:
            _logger.warning("%s", line)
        return config

    @property
    def num_ranks(self) -> int:
        """Of one engine."""
        stage = self.tensor_parallel_size * self.context_parallel_size
        return stage * self.pipeline_parallel_size

    @property
    def lora(self) -> LoraConfig | None:
        """None: this run has no adapters."""
        return self.lora_config or (LoraConfig() if self.enable_lora else None)

    @field_validator("moe_expert_parallel_size", "moe_tensor_parallel_size", mode="before")
    @classmethod
    def _none_is_minus_one(cls, value: object) -> object:
        return None if value == -1 else value  # as TensorRT-LLM may write it

    @field_validator("model", "host")
    @classmethod
    def _not_blank(cls, value: str) -> str:
        if value != value.strip() or not value:
            raise ValueError("it must not begin or end with a space")
        return value
