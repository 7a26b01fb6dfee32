"""Images to train on: preference pairs, and records of an image and its prompt; files, made pairs, cached latents."""

from common.pairs.made_pairs import rows_to_make, save_pair, write_pairs
from common.pairs.pair_files import Pairs, pair_prompts, read_pairs
from common.pairs.pairs import encode_pairs, load_pairs
from common.pairs.record_files import ImageRecord, read_image_records
from common.pairs.records import EncodedRecord, encode_records, load_records

__all__ = [
    "EncodedRecord",
    "ImageRecord",
    "Pairs",
    "encode_pairs",
    "encode_records",
    "load_pairs",
    "load_records",
    "pair_prompts",
    "read_image_records",
    "read_pairs",
    "rows_to_make",
    "save_pair",
    "write_pairs",
]
