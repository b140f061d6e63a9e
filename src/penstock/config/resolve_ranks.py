"""The ranks that settings ask for, or why there cannot be such: the part of `resolve` about
parallelism. Values come with their reasons."""

from penstock.config.choices import Reasoned
from penstock.config.launch import Place
from penstock.config.run import Drafting, PromptBalance
from penstock.config.schema import EngineConfig
from penstock.errors import ConfigError
from penstock.types.device import DeviceInfo
from penstock.types.expert_slots import ExpertSlots, check_num_slots, check_slots
from penstock.types.mesh import MeshShape, stage_layers
from penstock.types.model_spec import ModelSpec


def _check_place(config: EngineConfig, place: Place) -> None:
    """A launcher has to start the ranks that the settings want, and no others."""
    tp, pp, cp = (
        config.tensor_parallel_size,
        config.pipeline_parallel_size,
        config.context_parallel_size,
    )
    way_out = "set launcher to local to start the ranks from here"
    if place.rank:
        raise ConfigError(
            f"{place.launcher} has started this process as rank {place.rank} of {place.size}, and "
            "rank 0 has the engine: start 'penstock serve' on all ranks, or the program by "
            f"'trtllm-llmapi-launch'; or {way_out}"
        )
    if config.num_ranks != place.size:
        raise ConfigError(
            f"{place.launcher} has started {place.size} ranks, but tensor_parallel_size {tp} x "
            f"pipeline_parallel_size {pp}{f' x context_parallel_size {cp}' if cp > 1 else ''} = "
            f"{config.num_ranks}; make them equal, or {way_out}"
        )


def check_ranks(
    config: EngineConfig, spec: ModelSpec, device: DeviceInfo, kind: str, place: Place | None
) -> None:
    """More ranks than GPUs cannot start; on a CPU ranks are processes, for those who ask for it."""
    size = config.num_ranks
    if place is not None:
        _check_place(config, place)
    num_gpus = device.num_devices if device.kind == "cuda" else 0
    on_asked_cpu = kind == "cpu" and config.device == "cpu"
    if place is not None and place.local_size > num_gpus and not on_asked_cpu:
        raise ConfigError(
            f"{place.launcher} has started {place.local_size} ranks on this node, but it has "
            f"{num_gpus} GPUs; start at most one rank per GPU, or set device to cpu"
        )
    by_ray = config.launcher == "ray"  # which counts the GPUs of all nodes
    if by_ray and config.data_parallel_size > 1:
        raise ConfigError(
            f"data_parallel_size is {config.data_parallel_size}, and Ray starts the ranks of one "
            "engine; start one server per replica, or leave launcher and orchestrator_type out"
        )
    if place is None and not by_ray and size > 1 and size > num_gpus and not on_asked_cpu:
        asked = f"tensor_parallel_size is {size}"
        if (tp := config.tensor_parallel_size) < size:
            names = ("pipeline_parallel_size", "context_parallel_size")
            sizes = [f"{name} {n}" for name in names if (n := getattr(config, name)) > 1]
            asked = " x ".join([f"tensor_parallel_size {tp}", *sizes]) + f" = {size} ranks"
        raise ConfigError(
            f"{asked}, but there are {num_gpus} GPUs; lower it to {max(num_gpus, 1)}"
            + ("" if num_gpus else ", or set device to cpu to run the ranks as CPU processes")
        )
    num_engines = config.data_parallel_size
    if num_engines > 1 and num_gpus < size and not on_asked_cpu:  # of the GPUs that are this one's
        raise ConfigError(
            f"data_parallel_size is {num_engines}, which takes {num_engines * size} GPUs, "
            f"{size} for each engine; lower it"
            + ("" if num_gpus else ", or set device to cpu to run the engines on the CPU")
        )
    _check_stages(config, spec)
    _check_context(config, spec)
    size = config.tensor_parallel_size
    if config.enable_attention_dp:
        return
    if spec.num_heads % size:
        raise ConfigError(
            f"tensor_parallel_size is {size}, which does not divide the {spec.num_heads} attention "
            "heads of the model"
        )
    if spec.num_kv_heads % size and size % spec.num_kv_heads:
        raise ConfigError(
            f"tensor_parallel_size is {size}, which is neither a divisor nor a multiple of the "
            f"{spec.num_kv_heads} KV heads of the model"
        )
    if spec.delta is not None and spec.delta.num_key_heads % size:
        raise ConfigError(
            f"tensor_parallel_size is {size}, which does not divide the {spec.delta.num_key_heads} "
            "key heads of the model's recurrent layers"
        )


def _check_stages(config: EngineConfig, spec: ModelSpec) -> None:
    num_stages = config.pipeline_parallel_size
    if num_stages == 1:
        return
    if num_stages > spec.num_layers:
        raise ConfigError(
            f"pipeline_parallel_size is {num_stages}, but the model has {spec.num_layers} layers; "
            "a stage has one at least"
        )

    def remembered(layers: range) -> set[int | str | None]:
        has_state = spec.delta.layers if spec.delta is not None else (False,) * spec.num_layers
        return {"state" if has_state[layer] else spec.window_of(layer) for layer in layers}

    for number, layers in enumerate(stage_layers(spec.num_layers, num_stages)):
        if remembered(layers) != remembered(range(spec.num_layers)):
            raise ConfigError(
                f"pipeline_parallel_size is {num_stages}: of {spec.num_layers} layers stage "
                f"{number} has {len(layers)}, which do not have all kinds of cache that the model "
                "has; use fewer stages"
            )


def check_drafting_stages(config: EngineConfig, spec: ModelSpec, drafting: Drafting | None) -> None:
    num_stages = config.pipeline_parallel_size
    if num_stages == 1 or drafting is None or config.speculative_config is None:
        return
    if spec.delta is not None:
        raise ConfigError(
            f"pipeline_parallel_size {num_stages} and speculative_config "
            f"({config.speculative_config.decoding_type}) cannot be combined yet: recurrent layers "
            "of earlier stages would go on before it is known which drafts count; leave one of the "
            "two out"
        )


def _check_context(config: EngineConfig, spec: ModelSpec) -> None:
    size, here = config.context_parallel_size, config.kv_cache_config.tokens_per_block
    asked = config.cp_config and config.cp_config.tokens_per_block
    if asked not in (None, here):
        raise ConfigError(
            f"cp_config.tokens_per_block is {asked}, but kv_cache_config.tokens_per_block is "
            f"{here}; give one of the two"
        )
    if size == 1:
        if config.cp_config is not None:
            raise ConfigError(
                "cp_config is given, but context_parallel_size is 1, so that no rank shares a "
                "sequence; set context_parallel_size (--cp_size), or leave cp_config out"
            )
        return
    if size & (size - 1):
        raise ConfigError(
            f"context_parallel_size is {size}; use a power of two, so that blocks fall into equal "
            "parts"
        )
    if config.enable_attention_dp and config.tensor_parallel_size > 1:
        raise ConfigError(
            f"context_parallel_size {size} and enable_attention_dp cannot be combined: one shares "
            "a sequence among ranks, the other gives ranks sequences of their own; leave one of "
            "the two out"
        )
    if spec.delta is not None:
        raise ConfigError(
            f"context_parallel_size is {size}, but the model has recurrent layers, whose states "
            "cannot be split by tokens; use tensor_parallel_size"
        )
    if all(spec.window_of(layer) is not None for layer in range(spec.num_layers)):
        raise ConfigError(
            f"context_parallel_size is {size}, but all layers of the model see a window only, "
            "whose cache is not split; use tensor_parallel_size"
        )


def one_shot_sums(config: EngineConfig, kind: str) -> bool:
    if config.allreduce_strategy != "ONESHOT":
        return False
    if kind != "cuda":
        raise ConfigError(
            "allreduce_strategy is ONESHOT, which needs GPUs that read each other's memory; leave "
            "it out on a CPU"
        )
    return True


def num_ranks_here(config: EngineConfig, place: Place | None) -> int:
    """Of all engines, on this machine."""
    if place is not None:
        return place.local_size
    return config.num_ranks * config.data_parallel_size


def all_to_all(config: EngineConfig, mesh: MeshShape) -> Reasoned[bool]:
    if config.moe_config.backend != "WIDEEP":
        return False, "moe_config.backend is not WIDEEP"
    if mesh.dp == 1 or mesh.dp < mesh.stage_size:
        return False, "ranks have the same tokens: that is otherwise with enable_attention_dp"
    if mesh.ep < mesh.stage_size:
        return False, f"{mesh.etp} rank(s) share an expert: all of them need its tokens"
    return True, "WIDEEP: ranks have other tokens and other experts"


def expert_slots(config: EngineConfig, spec: ModelSpec, mesh: MeshShape) -> ExpertSlots | None:
    asked, name = config.moe_config.load_balancer, "moe_config.load_balancer"
    if asked is None:
        return None
    if (moe := spec.moe) is None:
        raise ConfigError(f"{name} is set, but {spec.architecture} has no experts; leave it out")
    if mesh.ep == 1:
        raise ConfigError(
            f"{name} is set, but no rank has other experts than another; set "
            "moe_expert_parallel_size (--ep_size) to the number of ranks, or leave it out"
        )
    if mesh.ep < mesh.stage_size or mesh.stage_size not in (mesh.dp, mesh.tp):
        raise ConfigError(
            f"{name} is set, and {mesh} is not one set of whole experts per rank; set "
            f"moe_expert_parallel_size to {mesh.stage_size}, or leave it out"
        )
    num_slots = moe.num_experts if asked.num_slots is None else asked.num_slots
    check_num_slots(num_slots, moe.num_experts, mesh.ep)
    initial = asked.initial_global_assignments or {}
    for layer, slots in initial.items():
        what = f"{name}.initial_global_assignments of layer {layer}"
        is_head = spec.num_layers <= layer < spec.num_layers + spec.num_nextn_predict_layers
        if not is_head and not (0 <= layer < spec.num_layers and moe.layers[layer]):
            raise ConfigError(f"{what} is given, but that is no layer of experts; leave it out")
        if len(slots) != num_slots:
            raise ConfigError(f"{what} has {len(slots)} slots, but num_slots is {num_slots}")
        check_slots(what, slots, moe.num_experts, mesh.ep)
    return ExpertSlots(
        num_slots=num_slots,
        layer_updates=asked.layer_updates_per_iter,
        initial=tuple((layer, tuple(slots)) for layer, slots in sorted(initial.items())),
    )


def expert_load_path(config: EngineConfig, spec: ModelSpec, mesh: MeshShape) -> str | None:
    path = config.moe_config.load_record_path
    if path is not None and (spec.moe is None or mesh.pp > 1):
        reason = "the model has no experts" if spec.moe is None else "rank 0 has one stage's layers"
        raise ConfigError(f"moe_config.load_record_path is set, but {reason}; leave it out")
    return path


def _ep_size(config: EngineConfig, spec: ModelSpec) -> Reasoned[int]:
    """Sets of ranks with other experts; what is not given of the two sizes follows."""
    cp_size, asked = config.context_parallel_size, config.moe_expert_parallel_size
    tp_size = config.tensor_parallel_size * cp_size
    moe_tp_size = config.moe_tensor_parallel_size
    if spec.moe is None:
        for name in ("moe_expert_parallel_size", "moe_tensor_parallel_size"):
            if (getattr(config, name) or 1) > 1:
                raise ConfigError(
                    f"{name} is {getattr(config, name)}, but {spec.architecture} has no experts "
                    "that ranks could share; leave it out, and set tensor_parallel_size"
                )
        return 1, "the model has no experts"
    if asked is None and moe_tp_size is None:
        return 1, "all ranks share every expert"
    ep_size = asked or max(1, tp_size // (moe_tp_size or 1))
    moe_tp_size = moe_tp_size or max(1, tp_size // ep_size)
    if ep_size * moe_tp_size != tp_size:
        raise ConfigError(
            f"moe_expert_parallel_size {ep_size} x moe_tensor_parallel_size {moe_tp_size} = "
            f"{ep_size * moe_tp_size} ranks, but tensor_parallel_size "
            + (f"x context_parallel_size = {tp_size}" if cp_size > 1 else f"is {tp_size}")
            + "; give one of the two, a divisor of it"
        )
    if ep_size > spec.moe.num_experts:
        raise ConfigError(
            f"moe_expert_parallel_size is {ep_size}, but there are {spec.moe.num_experts} experts; "
            "use a smaller one"
        )
    name = "moe_tensor_parallel_size" if asked is None else "moe_expert_parallel_size"
    return ep_size, f"set by {name}; {moe_tp_size} rank(s) share an expert"


def mesh_of(config: EngineConfig, spec: ModelSpec) -> Reasoned[MeshShape]:
    size, (ep_size, experts) = config.tensor_parallel_size, _ep_size(config, spec)
    pp, cp = config.pipeline_parallel_size, config.context_parallel_size
    if config.enable_attention_dp:
        reason = "enable_attention_dp gives each of tensor_parallel_size ranks its own requests"
        return MeshShape(pp=pp, dp=size, cp=cp, ep=ep_size), f"{reason}; {experts}"
    mesh = MeshShape(pp=pp, cp=cp, tp=size, ep=ep_size)
    return mesh, f"set by tensor_parallel_size; {experts}"


def balance_of(config: EngineConfig) -> PromptBalance | None:
    asked = config.attention_dp_config
    if not asked.enable_balance:
        return None
    if not config.enable_attention_dp:
        raise ConfigError(
            "attention_dp_config.enable_balance is true, but enable_attention_dp is false, so that "
            "all ranks have the same prompts; set it to true, or leave attention_dp_config out"
        )
    return PromptBalance(batching_wait=asked.batching_wait_iters, timeout=asked.timeout_iters)
