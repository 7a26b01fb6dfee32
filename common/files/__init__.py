"""Files: prompts and their pictures are read here, and checkpoints written so that a kill leaves them complete."""

from common.files.checkpoints import (
    FORMAT,
    check_format,
    checkpoint_path,
    checkpoint_step,
    load_checkpoint,
    remove_checkpoint,
    save_checkpoint,
    saved_checkpoints,
    shards_of,
)
from common.files.disk import atomic_file, remove_stale, sync, writing
from common.files.paths import find_shards, glob_stars, source_name, split_rewards, split_source
from common.files.prompts import count_sources, read_prompts, read_records
from common.files.records import check_prompt, digest_records, without_nan

__all__ = [
    "FORMAT",
    "atomic_file",
    "check_format",
    "check_prompt",
    "checkpoint_path",
    "checkpoint_step",
    "count_sources",
    "digest_records",
    "find_shards",
    "glob_stars",
    "load_checkpoint",
    "read_prompts",
    "read_records",
    "remove_checkpoint",
    "remove_stale",
    "save_checkpoint",
    "saved_checkpoints",
    "shards_of",
    "source_name",
    "split_rewards",
    "split_source",
    "sync",
    "without_nan",
    "writing",
]
