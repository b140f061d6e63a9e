"""Names of TensorRT-LLM that scripts import, backed by Penstock."""

from penstock import LLM, GuidedDecodingParams, LoRARequest, SamplingParams, __version__

__all__ = ["LLM", "GuidedDecodingParams", "LoRARequest", "SamplingParams", "__version__"]
