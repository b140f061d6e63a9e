"""Captures the CUDA graphs of a rank and hands them to its runner."""

import torch

from penstock import log
from penstock.config.run import RunConfig
from penstock.layers.decoder import Decoder
from penstock.runtime.graphs import DecodeGraphs, GraphPool
from penstock.runtime.input_batch import Rows
from penstock.runtime.mixed_graphs import MixedGraphs, shapes_at_start, shapes_when_idle
from penstock.runtime.model_runner import ModelRunner
from penstock.runtime.timeline import Timeline

_log = log.get(__name__)
_LEAST_FREE_BYTES = 1 << 30  # on the device, for a graph that can wait


def capture_graphs(
    runner: ModelRunner,
    rows: Rows,
    model: Decoder,
    config: RunConfig,
    max_kv_len: int,
    planned_bytes: int,
    timeline: Timeline,
) -> None:
    """Graphs of the largest step first: the smaller ones live in its memory."""
    drafting = runner.drafting
    has_plain = rows.decode_width > 1 or drafting.reads_hidden
    plain_sizes = plain_graph_sizes(config) if has_plain else ()
    num_graphs = len(config.graph_batch_sizes) + len(plain_sizes) + len(shapes_at_start(config))
    num_graphs *= len(rows.graph_kinds)
    with timeline.phase(f"capture {num_graphs} graphs"):
        before, pool = _taken_bytes(), GraphPool()
        mixed = mixed_graphs(runner, rows, model, config, max_kv_len, pool)
        mixed.capture()
        graphs = DecodeGraphs(
            runner.decode_step(max_kv_len), config.graph_batch_sizes, config.graph_padding, rows
        )
        graphs.capture(pool)
        plain = None
        if plain_sizes:
            step = runner.decode_step(max_kv_len, is_plain=True)
            plain = DecodeGraphs(step, plain_sizes, config.graph_padding, rows, is_plain=True)
            plain.capture(pool)
        drafting.capture(pool, config, max_kv_len)
        runner.use_graphs(graphs, mixed, plain)
        if config.mesh.size == 1:  # ranks would have to capture at the same time
            runner.when_idle = IdleCapture(mixed).turn
        taken = _taken_bytes() - before
    _log.info("graphs took %.2f GiB, %.2f GiB were planned", taken / 2**30, planned_bytes / 2**30)


def plain_graph_sizes(config: RunConfig) -> tuple[int, ...]:
    """Of steps without drafts."""
    return tuple(size for size in config.graph_batch_sizes if size <= config.max_batch_size)


def _taken_bytes() -> int:
    """Of the device, without what torch keeps of memory that was freed: what the steps before had,
    which a capture gives back. With what is not torch's, as the nodes of graphs."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def mixed_graphs(
    runner: ModelRunner,
    rows: Rows,
    model: Decoder,
    config: RunConfig,
    max_kv_len: int,
    pool: GraphPool,
) -> MixedGraphs:
    prefixes = [layer.max_captured_prefix for layer in model.cache_layers()]
    return MixedGraphs(
        lambda shape: runner.padded_step(shape, max_kv_len),
        shapes_at_start(config),
        shapes_when_idle(config),
        rows,
        pool,
        model.shortened,
        min((most for most in prefixes if most is not None), default=None),
    )


class IdleCapture:
    """One graph a turn, for as long as there is memory for more; tells whether to go on."""

    def __init__(self, graphs: MixedGraphs) -> None:
        self._graphs = graphs
        self._is_done = False

    def turn(self) -> bool:
        if self._is_done:
            return False
        free, _ = torch.cuda.mem_get_info()
        if free < _LEAST_FREE_BYTES:
            self._is_done = True
            _log.info("no more graphs are captured: %.2f GiB are free", free / 2**30)
            return False
        try:
            self._is_done = not self._graphs.capture_next()
        except torch.OutOfMemoryError as error:
            self._is_done = True
            _log.warning("no more graphs are captured: %s", error)
        return not self._is_done
