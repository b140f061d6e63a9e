"""`/health`, `/health_generate`, `/version`, `/metrics` and `/prometheus/metrics`."""

import asyncio
from contextlib import aclosing

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import penstock
from penstock.errors import BackendError
from penstock.metrics.prometheus import exposition
from penstock.server.generations import Generations
from penstock.server.state import state_of
from penstock.types.pooling import Pooling, Task
from penstock.types.request import GenerateInput
from penstock.types.sampling import SamplingParams
from penstock.types.tenant import HEALTH_CHECK

_PROBE_TIMEOUT_S = 30


async def health(request: Request) -> Response:
    """200 only while the engine makes progress."""
    if not state_of(request).pipeline.client.is_healthy():
        raise BackendError("the engine does not make progress")
    return _json({"status": "ok"})


async def health_generate(request: Request) -> Response:
    """Runs one token through the engine, in a place of its own. Where all rows are taken it need
    not come to its turn: that tokens of others come says the same."""
    state = state_of(request)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, ignore_eos=True)
    client = state.pipeline.client
    pooling = Pooling() if client.info.task is Task.EMBED else None
    probe = GenerateInput(token_ids=(0,), sampling=sampling, tenant=HEALTH_CHECK, pooling=pooling)
    num_before = client.counters.generated_tokens
    generations = await Generations.start(state.pipeline, [probe], lambda event: None, stream=False)
    async with aclosing(generations):
        collecting = asyncio.create_task(generations.collect())
        try:
            for _ in range(_PROBE_TIMEOUT_S):
                await asyncio.wait((collecting,), timeout=1)
                if collecting.done():
                    collecting.result()
                    break
                if client.counters.generated_tokens > num_before:
                    break
            else:
                raise BackendError(f"no token within {_PROBE_TIMEOUT_S} s")
        finally:
            collecting.cancel()
    return _json({"status": "ok"})


async def version(request: Request) -> Response:
    state = state_of(request)
    info = state.pipeline.client.info
    reply = _json(
        {
            "version": penstock.__version__,
            "model": state.model_name,
            "device": info.device,
            "limits": {
                "max_seq_len": info.max_seq_len,
                "max_num_tokens": info.max_num_tokens,
                "max_batch_size": info.max_batch_size,
                "max_queued": info.max_queued,
                "max_queued_tokens": info.max_queued_tokens,
            },
            "default_sampling": info.default_sampling,
            "config": info.config,
            "choices": [
                {"setting": one.name, "value": one.value, "reason": one.reason}
                for one in (*info.choices, *state.choices)
            ],
            "memory": info.memory,
            "rank_weight_bytes": info.rank_weight_bytes,
            "startup": [{"phase": phase, "seconds": seconds} for phase, seconds in info.timeline],
        }
    )
    if "text/html" in request.headers.get("accept", ""):  # a person reads it, in a browser
        reply = Response(msgspec.json.format(bytes(reply.body)), media_type="application/json")
    return reply


async def metrics(request: Request) -> Response:
    """Iterations since the last call as JSON; Prometheus text for whoever accepts text."""
    accept = request.headers.get("accept", "")
    if "text/plain" in accept or "openmetrics" in accept:
        return await prometheus_metrics(request)
    return _json(state_of(request).metrics.iterations.take())


async def prometheus_metrics(request: Request) -> Response:
    measured = state_of(request).metrics
    measured.iterations.refresh()
    text, content_type = exposition(measured.registry, request.headers.get("accept", ""))
    return Response(text, headers={"content-type": content_type})


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
