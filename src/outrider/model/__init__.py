"""One decoder for the Llama family: configuration, weights, and the runner over paged KV."""

from outrider.model.config import ModelConfig, Rope
from outrider.model.decoder import Attend, Decoder, Hidden
from outrider.model.load import LoadOptions, load_decoder, locate, save_decoder, write_config
from outrider.model.runner import Drawing, Feed, Rows, Runner, lay_out

__all__ = [
    "Attend",
    "Decoder",
    "Drawing",
    "Feed",
    "Hidden",
    "LoadOptions",
    "ModelConfig",
    "Rope",
    "Rows",
    "Runner",
    "lay_out",
    "load_decoder",
    "locate",
    "save_decoder",
    "write_config",
]
