"""Post-training quantization (PTQ) to public checkpoint layouts; `penstock quantize` runs it."""
