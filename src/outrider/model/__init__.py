"""One decoder for the Llama family: configuration, weights, and the runner over paged KV."""

from outrider.model.config import ModelConfig, Rope
from outrider.model.decoder import Attend, Decoder, Hidden
from outrider.model.load import LoadOptions, check_model, is_hub_id, load_decoder, locate, save_decoder, write_config
from outrider.model.runner import Feed, PendingChains, Rows, Runner, lay_out

__all__ = [
    "Attend",
    "Decoder",
    "Feed",
    "Hidden",
    "LoadOptions",
    "ModelConfig",
    "PendingChains",
    "Rope",
    "Rows",
    "Runner",
    "check_model",
    "is_hub_id",
    "lay_out",
    "load_decoder",
    "locate",
    "save_decoder",
    "write_config",
]
