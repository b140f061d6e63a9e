"""Names of TensorRT-LLM that scripts import, backed by Penstock."""

from penstock import LLM, SamplingParams, __version__

__all__ = ["LLM", "SamplingParams", "__version__"]
