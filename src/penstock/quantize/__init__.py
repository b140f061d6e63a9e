"""Makes quantised checkpoints in public layouts; `penstock quantize` is its command."""
