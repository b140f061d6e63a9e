"""Models and devices that are made up, and what `resolve` makes of settings on them."""

from penstock.config.resolve import resolve
from penstock.config.run import RunConfig
from penstock.config.schema import EngineConfig
from penstock.types.device import DeviceInfo
from penstock.types.model_spec import DeltaSpec, ModelSpec, MoeSpec, RopeSpec

GIB = 2**30


def make_spec(**changes) -> ModelSpec:
    fields = {
        "architecture": "LlamaForCausalLM",
        "model_type": "llama",
        "vocab_size": 1000,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_layers": 4,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_size": 64,
        "max_position": 4096,
        "norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope": RopeSpec(),
        "tie_embeddings": False,
        "dtype": "bfloat16",
    }
    return ModelSpec(**fields | changes)


def make_device(kind: str = "cuda", **changes) -> DeviceInfo:
    fields = {
        "kind": kind,
        "name": "H200" if kind == "cuda" else "x86_64",
        "arch": 90 if kind == "cuda" else 0,
        "num_devices": 1,
        "total_bytes": 140 * GIB if kind == "cuda" else 24 * GIB,
        "free_bytes": 20 * GIB,
        "host_bytes": 128 * GIB if kind == "cuda" else 24 * GIB,
        "num_sms": 132,
        "num_threads": 16,
        "torch_version": "2.11",
        "triton_version": "3.6",
        "cuda_version": "13.0",
    }
    return DeviceInfo(**fields | changes)


CPU, GPU = make_device("cpu"), make_device("cuda")
EIGHT_GPUS = make_device(num_devices=8)


def run(machine: DeviceInfo = GPU, spec: ModelSpec | None = None, **settings) -> RunConfig:
    return resolve(EngineConfig(model="m", **settings), spec or make_spec(), machine, "/models/m")


def reason(config: RunConfig, name: str) -> str:
    return next(choice.reason for choice in config.choices if choice.name == name)


EXPERTS = MoeSpec(layers=(True,) * 4, num_experts=8, num_active=2, intermediate_size=64)
DELTA = DeltaSpec(
    layers=(True, True, True, False), num_key_heads=2, num_value_heads=4, key_size=64,
    value_size=64, conv_width=4,
)  # fmt: skip
