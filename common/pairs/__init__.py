"""Preference pairs of offline DPO: files, made pairs, cached latents."""

from common.pairs.made_pairs import rows_to_make, save_pair, write_pairs
from common.pairs.pair_files import Pairs, pair_prompts, read_pairs
from common.pairs.pairs import encode_pairs, load_pairs

__all__ = [
    "Pairs",
    "encode_pairs",
    "load_pairs",
    "pair_prompts",
    "read_pairs",
    "rows_to_make",
    "save_pair",
    "write_pairs",
]
