"""Bring imports from common/ in a fork or in a reward of your own to where the names are now.

    python -m tools.move_imports my_grpo.py my_rewards.py

Prints each line that it changes. `python -m tools.diff --update` does the same before it merges. CHANGELOG.md says what
has changed beside its place.
"""

import argparse
import ast
import sys
from pathlib import Path

# {module: {where its names are now: names}} since commit fec671c; "" stands for all names
MOVED = {
    "common.checkpoints": {
        "common.files": "atomic_file checkpoint_step load_checkpoint save_checkpoint saved_checkpoints sync writing",
    },
    "common.command_line": {"common.run": "parse_args"},
    "common.data": {
        "common.files": "count_sources digest_records read_prompts read_records source_name split_source without_nan",
        "common.run.checks": "check_sources",
    },
    "common.engine.client": {"common.engine": "VLLMEngine launch"},
    "common.engine.launch": {"common.engine": "check_engine"},
    "common.evaluation": {
        "common.metrics": "count_failed detail_metrics eval_metrics gather_values metrics_by_field reward_metrics",
        "common.run": "evaluate_samples log_rollout",
        "common.run.evaluation": "add_origin sample_records",
    },
    "common.images": {
        "common.files.pictures": "DECODING StoredImage check_header find_images find_pictures warn_stretched",
        "common.run.plots": "show_sources",
    },
    "common.inputs": {
        "common.rewards": "try_rewards",
        "common.run": "Inputs check_inputs choose_sizes",
    },
    "common.models.family": {"common.models": "hash_bits"},
    "common.parquet": {
        "common.files": "check_prompt find_shards glob_stars",
        "common.files.parquet": "read_chats read_rows",
    },
    "common.plots": {"common.run.plots": ""},
    "common.recorded_options": {"common.run.recorded_options": ""},
    "common.resuming": {"common.run.resuming": ""},
    "common.run_record": {"common.run.record": ""},
    "common.scoring": {"common.rewards": "built_in_rewards find_reward load_rewards reward_settings"},
    "common.stop_rules": {"common.run.stop_rules": ""},
    "common.tracking": {"common.run.tracking": ""},
    "common.watch": {
        "common.metrics": "diversity norm_ratio rms_difference rollout_diversity small_pictures",
        "common.run.watch": "base_samples watch_metrics",
    },
    "common.weights.adapter_files": {"common.weights": "LoRA check_modules"},
    "common.weights.base_weights": {"common.weights": "linear_layers"},
    "common.weights.prompt_cache": {"common.models": "encoders_key", "common.weights.start": "prepare_prompts"},
    "common.weights.training_state": {"common.weights": "load_training_state training_state"},
}


def now_in(module: str, name: str) -> str:
    """The module that has a name which `module` had."""
    for place, names in MOVED.get(module, {}).items():
        if not names or name in names.split():
            return place
    return module


def move_imports(source: str) -> str:
    """A Python source with its imports from common/ brought up to date. SyntaxError: it is none."""
    lines = source.splitlines(keepends=True)
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.module in MOVED]
    for node in sorted(found, key=lambda node: -node.lineno):  # from the end, so that lines keep their numbers
        places: dict[str, list[str]] = {}
        for alias in node.names:
            places.setdefault(now_in(node.module or "", alias.name), []).append(ast.unparse(alias))
        if set(places) != {node.module}:
            first, last = lines[node.lineno - 1].encode(), lines[(node.end_lineno or node.lineno) - 1].encode()
            indent, rest = first[: node.col_offset].decode(), last[node.end_col_offset :].decode()
            new = [f"{indent}from {place} import {', '.join(names)}" for place, names in sorted(places.items())]
            lines[node.lineno - 1 : node.end_lineno] = ["\n".join(new) + rest]
    return "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    for file in parser.parse_args().files:
        try:
            before = file.read_text(encoding="utf-8")
            after = move_imports(before)
        except (OSError, ValueError, SyntaxError) as error:
            sys.exit(f"{file}: {error}")
        for line in after.splitlines():
            if line not in before.splitlines():
                print(f"{file}: {line.strip()}")
        file.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
