"""Speculative decoding: the part of `resolve` about where drafts come from, and whether the model
and the draft's checkpoint can have them so."""

from penstock.config.choices import Choices
from penstock.config.resolve_formats import quantization_of
from penstock.config.run import (
    Drafting,
    EagleDrafting,
    ModelDrafting,
    MTPDrafting,
    NGramDrafting,
    StateSaving,
    ThinkingDrafts,
    TypicalDrafts,
    UserDrafting,
)
from penstock.config.schema import EngineConfig
from penstock.config.speculative import DRAFT_LENS, FINAL_STATE, SpeculativeConfig
from penstock.errors import ConfigError
from penstock.types.device import DeviceInfo
from penstock.types.model_spec import DraftModel, ModelSpec


def drafting_of(
    config: EngineConfig,
    spec: ModelSpec,
    device: DeviceInfo,
    kind_of_device: str,
    choices: Choices,
    draft: DraftModel | None,
) -> Drafting | None:
    asked = config.speculative_config
    if asked is None:
        return None
    kind, num_heads = str(asked.decoding_type), spec.num_nextn_predict_layers
    if kind == "AUTO":
        kind, why = ("MTP", "the model has an MTP head") if num_heads else ("NGram", "it has none")
        choices.add("decoding_type", (kind, why))
    if kind == "SaveState":
        return _state_saving(config, asked, spec)
    max_drafts, most = asked.max_draft_len or DRAFT_LENS[kind], asked.max_concurrency
    adaptive = asked.adaptive_draft_len
    if kind == "MTP":
        if not num_heads:
            raise ConfigError(
                "speculative_config.decoding_type is MTP, but the model has no MTP head "
                "(num_nextn_predict_layers); set it to NGram, or leave speculative_config out"
            )
        return MTPDrafting(
            max_drafts=max_drafts,
            max_decodes=most,
            is_adaptive=adaptive,
            relaxed=_relaxed_thinking(asked, spec),
        )
    if kind in ("Draft_Target", "Eagle3"):
        assert draft is not None, "given by the engine"
        _check_draft_model(draft, spec)
        quantization = quantization_of(
            "speculative_config.quantization",
            asked.quantization,
            draft.spec,
            device,
            kind_of_device,
            draft.path,
        )
        if kind == "Draft_Target":
            return ModelDrafting(
                model_path=draft.path,
                quantization=quantization,
                max_drafts=max_drafts,
                max_decodes=most,
                is_adaptive=adaptive,
            )
        layers = tuple(asked.eagle3_layers_to_capture or _captured_layers(spec.num_layers))
        if max(layers) >= spec.num_layers or draft.spec.hidden_size != spec.hidden_size:
            raise ConfigError(
                f"the Eagle3 head in '{draft.path}' was not made for this model: it reads layers "
                f"{list(layers)} of hidden size {draft.spec.hidden_size}, the model has "
                f"{spec.num_layers} of {spec.hidden_size}"
            )
        return EagleDrafting(
            model_path=draft.path,
            quantization=quantization,
            layers=layers,
            max_drafts=max_drafts,
            max_decodes=most,
            is_adaptive=adaptive,
            relaxed=None
            if asked.posterior_threshold is None
            else TypicalDrafts(threshold=asked.posterior_threshold),
        )
    if kind == "User_Provided":
        assert asked.drafter is not None
        return UserDrafting(
            entry_point=asked.drafter,
            max_drafts=max_drafts,
            max_decodes=most,
            is_adaptive=adaptive,
        )
    return NGramDrafting(
        max_drafts=max_drafts,
        max_decodes=most,
        is_adaptive=adaptive,
        max_size=asked.max_matching_ngram_size,
        use_oldest=asked.is_keep_all and asked.is_use_oldest,
    )


def _state_saving(config: EngineConfig, asked: SpeculativeConfig, spec: ModelSpec) -> StateSaving:
    if config.kv_cache_config.enable_block_reuse:
        raise ConfigError(
            "speculative_config.decoding_type SaveState saves what is computed, and a prefix that "
            "is reused is not; set kv_cache_config.enable_block_reuse to false"
        )
    others = config.data_parallel_size, config.pipeline_parallel_size
    if config.enable_attention_dp or max(others) > 1:
        raise ConfigError(
            "speculative_config.decoding_type SaveState: rank 0 writes the files, of all prompts "
            "and layers; leave enable_attention_dp, data_parallel_size and pipeline_parallel_size "
            "out"
        )
    layers = asked.eagle3_layers_to_capture
    if layers is None:
        layers = [*_captured_layers(spec.num_layers)]
    if max(layers) >= spec.num_layers:
        raise ConfigError(
            f"speculative_config.eagle3_layers_to_capture is {layers}, but the model has "
            f"{spec.num_layers} layers, counted from 0"
        )
    assert asked.output_directory is not None
    return StateSaving(
        max_drafts=0,
        layers=tuple(sorted({*layers} - {FINAL_STATE})),
        directory=asked.output_directory,
        interval=asked.write_interval,
        prefix=asked.file_prefix,
    )


def _relaxed_thinking(asked: SpeculativeConfig, spec: ModelSpec) -> ThinkingDrafts | None:
    if not asked.use_relaxed_acceptance_for_thinking:
        return None
    tokens = asked.begin_thinking_phase_token, asked.end_thinking_phase_token
    if max(tokens) >= spec.vocab_size:
        raise ConfigError(
            f"begin_thinking_phase_token and end_thinking_phase_token are {tokens}, but the model "
            f"has {spec.vocab_size} tokens; set them to those that open and close its thinking, or "
            "leave use_relaxed_acceptance_for_thinking out"
        )
    begin, end = tokens
    return ThinkingDrafts(top_k=asked.relaxed_topk, delta=asked.relaxed_delta, begin=begin, end=end)


def _check_draft_model(draft: DraftModel, spec: ModelSpec) -> None:
    """It shares the blocks of layers that keep every token."""
    what = f"speculative_config.speculative_model '{draft.path}'"
    if draft.spec.vocab_size != spec.vocab_size:
        raise ConfigError(
            f"{what} has a vocabulary of {draft.spec.vocab_size} tokens, the model one of "
            f"{spec.vocab_size}; a draft model needs the same"
        )
    if draft.spec.delta is not None or draft.spec.window or any(draft.spec.layer_windows):
        raise ConfigError(
            f"{what} has layers with windows or a recurrent state, which no draft model may have; "
            "choose one that attends to all tokens"
        )


def _captured_layers(num_layers: int) -> tuple[int, ...]:
    """Behind which layers Eagle3 heads are trained to read hidden states."""
    layers = (1, num_layers // 2 - 1, num_layers - 4)
    return tuple(min(max(layer, 0), num_layers - 1) for layer in layers)
