"""LoRA adapters over HTTP: their entries in /v1/models, and the endpoints that load and unload adapters while the server runs.

The endpoints have vLLM's paths, bodies and answers. They are off unless the server has an API key or --allow-lora-updates,
because whoever may load an adapter names a folder of this machine.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.responses import PlainTextResponse

from outrider.errors import InvalidParameter, ModelError
from outrider.serve.errors import ApiError
from outrider.serve.fairness import client_of
from outrider.serve.requests import PreparedRequest
from outrider.serve.schemas import LoadLoraRequest, UnloadLoraRequest
from outrider.serve.service import Service

__all__ = ["PLAIN", "adapter_cards", "check_adapter", "load_lora_adapter", "unload_lora_adapter"]

PLAIN: dict[str, Any] = {"response_class": Response, "responses": {200: {"content": {"text/plain": {}}}}}


def adapter_cards(service: Service, card: dict[str, Any]) -> list[dict[str, Any]]:
    """An entry of /v1/models for each adapter, made from that of the model."""
    loras = service.ready().loras
    return [card | {"id": name, "root": str(folder), "parent": card["id"]} for name, folder in loras.items()]


def check_adapter(service: Service, name: str | None, prepared: PreparedRequest) -> str:
    """The model that an answer names. Fails where the adapter was unloaded while its request was prepared."""
    adapter = prepared.jobs[0][0][0].adapter
    if adapter is not None:
        return adapter.name
    if name is not None and name not in service.settings.names:
        raise ApiError(404, f"the adapter {name!r} was unloaded", "model", "model_not_found")
    return service.settings.model_name


async def load_lora_adapter(request: Request, body: LoadLoraRequest) -> Response:
    service = _allowed(request)
    llm = service.ready()
    if body.lora_name in service.settings.names:
        raise ApiError(400, f"lora_name: {body.lora_name!r} is the name of the model; choose another", "lora_name")
    try:
        work = partial(llm.load_lora, body.lora_name, body.lora_path, replace=body.load_inplace)
        await service.off_loop(work, client_of(request.scope))
    except ModelError as error:
        raise ApiError(400, str(error), "lora_path", "invalid_adapter") from None
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_lora_adapter(request: Request, body: UnloadLoraRequest) -> Response:
    """Requests that run with the adapter go on to their end; its memory is free after the last of them."""
    service = _allowed(request)
    try:
        service.ready().unload_lora(body.lora_name)
    except InvalidParameter as error:
        raise ApiError(404, str(error), "lora_name", error.code) from None
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _allowed(request: Request) -> Service:
    service: Service = request.app.state.service
    if not service.settings.needs_key and not service.settings.allow_lora_updates:
        raise ApiError(
            403, "adapters are not loaded over HTTP by this server; start it with --api-key, or with --allow-lora-updates",
            code="lora_updates_off",
        )  # fmt: skip
    return service
