"""Names of TensorRT-LLM that scripts import, backed by Penstock."""

from penstock import LLM, GuidedDecodingParams, SamplingParams, __version__

__all__ = ["LLM", "GuidedDecodingParams", "SamplingParams", "__version__"]
