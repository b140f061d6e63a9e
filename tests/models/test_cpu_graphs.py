"""Decode steps in CPU graphs give what the model gives; only native ops are recorded."""

from dataclasses import replace

import pytest
import torch
from gguf_models import QUANT, write_gguf
from paged_driver import CPU
from tiny_models import make_checkpoint, reference_model

from penstock.kernels import native
from penstock.kernels.attention.backend import get_backend
from penstock.models.registry import build_model
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.quantization.choose import choose_schemes
from penstock.runtime.cpu_graphs import DecodeCpuGraphs
from penstock.runtime.input_batch import Rows
from penstock.weights.load import load_weights

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler")
BLOCK_SIZE, MAX_BLOCKS, NUM_ROWS = 16, 4, 5
MAX_LEN = BLOCK_SIZE * MAX_BLOCKS


def load(folder, kind):
    """A model as the engine runs it, with cache and rows of random contents."""
    torch.manual_seed(0)
    path = folder / "model.gguf"
    fields = {"tie_word_embeddings": True, "vocab_size": 384}
    write_gguf(path, reference_model(make_checkpoint(folder / "hf", "qwen3", **fields)), kind)
    spec, mesh = parse_model_spec(path), RankMesh.single()
    schemes = choose_schemes(None, path, torch.float32, CPU)
    model = build_model(spec, mesh, torch.float32, CPU, get_backend("sdpa"), schemes)
    load_weights(model, path, spec, mesh, progress=False)
    rows = Rows(NUM_ROWS, MAX_BLOCKS, BLOCK_SIZE, CPU)
    rows.last_tokens_R.random_(0, spec.vocab_size)
    rows.lengths_R.random_(0, MAX_LEN - 10)
    table_RM = rows.block_tables[0]
    table_RM.view(-1).copy_(torch.randperm(table_RM.numel()) + 1)
    with torch.inference_mode():
        model.finish()
        for layer in model.cache_layers():
            planes = layer.cache_spec().planes(BLOCK_SIZE)
            layer.bind_cache(*(torch.randn(table_RM.numel() + 1, *p.shape) for p in planes))
    return model, rows


def graphs_of(model):
    return DecodeCpuGraphs(lambda batch: model.logits(model(batch)), MAX_LEN)


@pytest.fixture(params=[1, 3])
def threads(request):
    native.set_num_threads(request.param)
    yield
    native.set_num_threads(torch.get_num_threads())


@torch.inference_mode()
def test_a_graph_gives_the_logits_of_the_model(tmp_path, threads):
    model, rows = load(tmp_path, QUANT.Q4_1)
    graphs, ran = graphs_of(model), []
    run = type(model).forward

    class Counted(type(model)):
        def forward(self, batch):
            ran.append(batch.num_entries)
            return run(self, batch)

    model.__class__ = Counted
    sizes = (1, 3, 1, 5, 3, 3, 1)
    for size in sizes:
        batch = rows.decode_batch(torch.randperm(NUM_ROWS, dtype=torch.int32)[:size], MAX_LEN)
        found = graphs.run(batch)
        assert found is not None
        found = found.clone()
        expected = model.logits(model(replace(batch, plans={})))
        assert torch.equal(found, expected)
        rows.accept(batch.rows_N.long(), found.argmax(-1))
    # Each size was recorded once; the rest are the comparisons above.
    assert sorted(ran) == sorted((*set(sizes), *sizes))


@torch.inference_mode()
def test_a_model_with_an_op_of_torch_is_left_to_it(tmp_path):
    model, rows = load(tmp_path, QUANT.F16)
    graphs = graphs_of(model)
    batch = rows.decode_batch(torch.tensor([2, 0], dtype=torch.int32), MAX_LEN)
    expected = model.logits(model(replace(batch, plans={})))
    assert graphs.run(batch) is None and graphs.run(batch) is None
    torch.testing.assert_close(model.logits(model(replace(batch, plans={}))), expected)
