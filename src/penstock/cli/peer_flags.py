"""What users of vLLM, SGLang and llama.cpp know by its name there, and what it is called here."""

from collections.abc import Collection, Mapping

_SEQ_LEN, _BATCH_SIZE, _NUM_TOKENS = "--max_seq_len", "--max_batch_size", "--max_num_tokens"
_MEMORY = "--free_gpu_memory_fraction, of what the weights leave free"
_NO_REUSE = "--set kv_cache_config.enable_block_reuse=false"
_NO_GRAPHS = "--set cuda_graph_config=null"
_BLOCK_SIZE = "--set kv_cache_config.tokens_per_block=NUMBER"
_HERE: Mapping[str, str] = {
    "--max_model_len": _SEQ_LEN,
    "--context_length": _SEQ_LEN,
    "--ctx_size": _SEQ_LEN,
    "--max_num_seqs": _BATCH_SIZE,
    "--max_running_requests": _BATCH_SIZE,
    "--parallel": _BATCH_SIZE,
    "--max_num_batched_tokens": _NUM_TOKENS,
    "--chunked_prefill_size": _NUM_TOKENS,
    "--gpu_memory_utilization": _MEMORY,
    "--mem_fraction_static": _MEMORY,
    "--no_enable_prefix_caching": _NO_REUSE,
    "--disable_radix_cache": _NO_REUSE,
    "--enforce_eager": _NO_GRAPHS,
    "--disable_cuda_graph": _NO_GRAPHS,
    "--block_size": _BLOCK_SIZE,
    "--page_size": _BLOCK_SIZE,
    "--swap_space": "--set kv_cache_config.host_cache_size=BYTES",
    "--speculative_config": "--speculate",
    "--speculative_algorithm": "--speculate",
    "--model_draft": "--speculate draft=MODEL",
    "--tool_call_parser": "--tool_parser",
    "--disable_log_requests": "--no_access_log",
    "--threads": "--num_threads",
    "--alias": "--served_model_name",
}
_SAID: Mapping[str, str] = {
    "--model": "give the model without a flag",
    "--model_path": "give the model without a flag",
    "--enable_prefix_caching": "prefixes are reused without one",
    "--enable_auto_tool_choice": "tools are called without one",
}


def peer_hint(name: str, known: Collection[str]) -> str:
    """The end of a message about the unknown flag `name`, where a peer has it and `known` has what
    stands for it."""
    here = _HERE.get(name, "")
    if here and here.replace(",", " ").split()[0] in known:
        return f"; here it is {here}"
    return f"; {_SAID[name]}" if name in _SAID else ""
