"""Captures the CUDA graphs of a rank and hands them to its runner."""

import torch

from penstock import log
from penstock.config.run import RunConfig
from penstock.layers.decoder import Decoder
from penstock.runtime.graphs import ChunkGraphs, DecodeGraphs, GraphPool
from penstock.runtime.input_batch import Rows
from penstock.runtime.model_runner import ModelRunner
from penstock.runtime.timeline import Timeline

_log = log.get(__name__)


def captures_chunks(model: Decoder) -> bool:
    """Whether every layer can run a chunk of a prompt in a graph."""
    return all(layer.captures_chunks for layer in model.cache_layers())


def capture_graphs(
    runner: ModelRunner,
    rows: Rows,
    model: Decoder,
    config: RunConfig,
    max_kv_len: int,
    planned_bytes: int,
    timeline: Timeline,
) -> None:
    """Graphs of the largest batch first: the smaller ones live in its memory."""
    token_sizes = config.graph_token_sizes if captures_chunks(model) else ()
    num_graphs = len(config.graph_batch_sizes) + len(token_sizes)
    with timeline.phase(f"capture {num_graphs} graphs"):
        before, pool = torch.cuda.memory_reserved(), GraphPool()
        chunk_graphs = None
        if token_sizes:
            chunk_graphs = ChunkGraphs(runner.chunk_step(max_kv_len), token_sizes, rows)
            chunk_graphs.capture(pool)
        graphs = DecodeGraphs(
            runner.decode_step(max_kv_len), config.graph_batch_sizes, config.graph_padding, rows
        )
        graphs.capture(pool)
        runner.use_graphs(graphs, chunk_graphs)
        taken = torch.cuda.memory_reserved() - before
    _log.info("graphs took %.2f GiB, %.2f GiB were planned", taken / 2**30, planned_bytes / 2**30)
