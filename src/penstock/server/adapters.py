"""Which adapter an HTTP request runs with, by its model name or `lora_request`; and loading and
unloading them while the server runs."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from penstock.errors import BackendError, ConfigError, RequestError, did_you_mean
from penstock.hub.adapter_config import read_adapter_config
from penstock.server.auth import tenant_of
from penstock.server.body import read_body
from penstock.server.openai.requests.lora import LoadLora, LoraChoice, UnloadLora
from penstock.server.openai.requests.schema import parse
from penstock.server.state import ServerState, state_of
from penstock.types.adapter import Adapter
from penstock.types.pooling import Pooling, Task
from penstock.types.request import FinishReason, GenerateInput
from penstock.types.sampling import SamplingParams
from penstock.types.tenant import Tenant


async def with_adapter(
    state: ServerState,
    inputs: Sequence[GenerateInput],
    model: str | None,
    lora_request: LoraChoice | None = None,
) -> tuple[ServerState, list[GenerateInput]]:
    """The inputs with the adapter that was asked for, and the state under its name."""
    adapter = None
    if lora_request is not None:
        adapter = await _chosen(state, lora_request)
    elif state.adapters.is_on and model is not None and model != state.model_name:
        adapter = state.adapters.find(model)
        if adapter is None:
            names = [state.model_name, *(one.name for one in state.adapters.all())]
            raise HTTPException(
                404,
                f"there is no model '{model[:256]}'{did_you_mean(model[:256], names)}; "
                "GET /v1/models lists those there are",
            )
    if adapter is None:
        return state, list(inputs)
    named = replace(state, model_name=adapter.name)
    return named, [replace(one, adapter=adapter) for one in inputs]


async def _chosen(state: ServerState, asked: LoraChoice) -> Adapter:
    registry = state.adapters
    if not registry.is_on:
        raise RequestError(
            "unsupported",
            "lora_request: this server takes no adapters; start it with enable_lora or a "
            "lora_config",
            "lora_request",
        )
    known = registry.find(asked.lora_name)
    given = asked.to_request().adapter if asked.lora_path else None
    if known is not None and (given is None or given.path == known.path):
        return known
    if given is None or known is not None or not registry.may_load:
        raise RequestError(
            "invalid_value",
            f"lora_request: '{asked.lora_name}' is no adapter of this server"
            + (" with that lora_path" if known else "")
            + "; GET /v1/models lists them, and lora_config.allow_runtime_updating lets clients "
            "name folders",
            "lora_request",
        )
    await _check_folder(given, "lora_request")
    return given


async def _check_folder(adapter: Adapter, param: str) -> None:
    try:
        await asyncio.to_thread(read_adapter_config, Path(adapter.path))
    except ConfigError as error:
        raise RequestError("invalid_value", str(error), param) from None


async def load_lora_adapter(request: Request) -> Response:
    """Serve an adapter from a folder of the server's machine."""
    state = _may_load(request)
    asked = await read_body(request, lambda body: parse(LoadLora, body))
    registry = state.adapters
    adapter = registry.new(asked.lora_name, asked.lora_path, asked.load_inplace)
    await _check_folder(adapter, "lora_path")
    await _try_it(state, adapter, tenant_of(request))
    registry.new(
        asked.lora_name, asked.lora_path, asked.load_inplace
    )  # others may have been quicker
    registry.add(adapter)
    return PlainTextResponse(f"Success: LoRA adapter '{adapter.name}' added successfully.")


async def unload_lora_adapter(request: Request) -> Response:
    """Serve an adapter no longer; requests that run with it go on."""
    state = _may_load(request)
    asked = await read_body(request, lambda body: parse(UnloadLora, body))
    if not state.adapters.remove(asked.lora_name):
        raise HTTPException(404, f"there is no adapter '{asked.lora_name[:256]}'")
    return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")


def _may_load(request: Request) -> ServerState:
    state = state_of(request)
    if not state.adapters.may_load:
        raise HTTPException(
            403,
            "adapters are not loaded or unloaded on request; start the server with "
            "lora_config.allow_runtime_updating: true, which lets clients name its folders",
        )
    return state


async def _try_it(state: ServerState, adapter: Adapter, tenant: Tenant) -> None:
    """One token with it: the engine has then read all of it, or says what is wrong."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
    pooling = Pooling() if state.pipeline.client.info.task is Task.EMBED else None
    ask = GenerateInput(
        token_ids=(0,), sampling=sampling, pooling=pooling, adapter=adapter, tenant=tenant
    )
    async with await state.pipeline.generate(ask, stream=False) as generation:
        async for delta in generation:
            if delta.finish is FinishReason.ERROR:
                why = delta.error or "the engine failed on it"
                if "cannot be used" not in why:
                    raise BackendError(why)
                raise RequestError("invalid_value", why, "lora_path")
