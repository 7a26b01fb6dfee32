"""Model families: a file each, found by the pipeline's name. family.py says what a family is."""

from common.models.family import (
    ENCODERS,
    PROMPTS_AT_ONCE,
    Conditioning,
    Config,
    Family,
    Schedule,
    Shapes,
    on_device,
    pin_encoders,
    pinned_bytes,
)
from common.models.fingerprints import encoders_key, hash_bits, settings_of
from common.models.loading import (
    check_reachable,
    check_schedules,
    downloaded,
    family_class,
    find_family,
    has_two_transformers,
    known_folder,
    load_model,
    pipeline_without_weights,
    plain_weights,
)
from common.models.long_prompts import count_long_prompts, report_alike_prompts
from common.models.vae import PIXELS_AT_ONCE, quantize, to_unit_range

__all__ = [
    "Conditioning",
    "Config",
    "ENCODERS",
    "Family",
    "PIXELS_AT_ONCE",
    "PROMPTS_AT_ONCE",
    "Schedule",
    "Shapes",
    "check_reachable",
    "check_schedules",
    "count_long_prompts",
    "downloaded",
    "encoders_key",
    "family_class",
    "find_family",
    "has_two_transformers",
    "hash_bits",
    "known_folder",
    "load_model",
    "on_device",
    "pin_encoders",
    "pinned_bytes",
    "pipeline_without_weights",
    "plain_weights",
    "quantize",
    "report_alike_prompts",
    "settings_of",
    "to_unit_range",
]
