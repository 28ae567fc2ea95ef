"""Draft networks on a frozen target, one definition for training and serving, and their files."""

from outrider.heads.block import BlockConfig, BlockHead, Convolution, KeyValue, Selector, in_block, spread_taps
from outrider.heads.block_files import load_block, save_block
from outrider.heads.block_runner import BlockCandidates, BlockRanker, BlockRows, BlockRunner
from outrider.heads.borrowed import Borrowed
from outrider.heads.eagle import EAGLE1, EAGLE3, MTP, EagleConfig, EagleHead, default_taps
from outrider.heads.eagle_files import load_eagle, save_eagle
from outrider.heads.exit import ExitAdapter, ExitConfig, load_exit, save_exit
from outrider.heads.medusa import MedusaConfig, MedusaHeads
from outrider.heads.medusa_files import load_medusa, save_medusa
from outrider.heads.mtp_files import drafts_by_mtp, holds_mtp, load_mtp, save_mtp
from outrider.heads.runners import EagleNetwork, EagleRunner, Growth, MedusaNetwork, MedusaRunner, eagle_network, medusa_network
from outrider.heads.stored import SaveOptions

__all__ = [
    "EAGLE1",
    "EAGLE3",
    "MTP",
    "BlockCandidates",
    "BlockConfig",
    "BlockHead",
    "BlockRanker",
    "BlockRows",
    "BlockRunner",
    "Borrowed",
    "Convolution",
    "EagleConfig",
    "EagleHead",
    "EagleNetwork",
    "EagleRunner",
    "ExitAdapter",
    "ExitConfig",
    "Growth",
    "KeyValue",
    "MedusaConfig",
    "MedusaHeads",
    "MedusaNetwork",
    "MedusaRunner",
    "SaveOptions",
    "Selector",
    "default_taps",
    "drafts_by_mtp",
    "eagle_network",
    "holds_mtp",
    "in_block",
    "load_block",
    "load_eagle",
    "load_exit",
    "load_medusa",
    "load_mtp",
    "medusa_network",
    "save_block",
    "save_eagle",
    "save_exit",
    "save_medusa",
    "save_mtp",
    "spread_taps",
]
