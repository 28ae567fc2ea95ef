"""Models as specs: families that compile configs, the decoder, weights, and the runner over paged KV."""

from outrider.model.decoder import Attend, Decoder, Hidden
from outrider.model.families import LlamaShape, compile_spec, read_spec
from outrider.model.load import (
    LoadOptions,
    check_model,
    is_hub_id,
    load_decoder,
    locate,
    open_decoder,
    save_decoder,
    write_config,
)
from outrider.model.rotary import Rope
from outrider.model.runner import Feed, Growth, PendingChains, Rows, Runner, lay_out
from outrider.model.spec import ModelSpec

__all__ = [
    "Attend",
    "Decoder",
    "Feed",
    "Growth",
    "Hidden",
    "LlamaShape",
    "LoadOptions",
    "ModelSpec",
    "PendingChains",
    "Rope",
    "Rows",
    "Runner",
    "check_model",
    "compile_spec",
    "is_hub_id",
    "lay_out",
    "load_decoder",
    "locate",
    "open_decoder",
    "read_spec",
    "save_decoder",
    "write_config",
]
