"""Bring imports from common/ in a fork or in a reward of your own to where the names are now.

    python -m tools.move_imports my_grpo.py my_rewards.py

Prints each line that it changes, and what is not there any more. `python -m tools.diff --update` changes the same lines
before it merges. CHANGELOG.md says what has changed beside its place.
"""

import argparse
import ast
import sys
from pathlib import Path

from common.errors import RunError
from common.files import atomic_file

ROOT = Path(__file__).parents[1]

# {module: {where its names are now: names}} since commit fec671c; "" stands for all names
MOVED = {
    "common.checkpoints": {
        "common.files": (
            "FORMAT atomic_file checkpoint_path checkpoint_step load_checkpoint remove_checkpoint remove_stale "
            "save_checkpoint saved_checkpoints shards_of sync writing"
        ),
    },
    "common.command_line": {"common.run": "parse_args", "common.run.command_line": "check_options"},
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
    "common.models.family": {"common.models": "hash_bits", "common.models.fingerprints": "hash_code"},
    "common.parquet": {
        "common.files": "check_prompt find_shards glob_stars",
        "common.files.parquet": "read_chats read_rows",
    },
    "common.plots": {"common.run.plots": ""},
    "common.profiling": {"common.run.profiling": "profiled_step", "common.run.utilisation": "Utilisation"},
    "common.recorded_options": {"common.run.recorded_options": ""},
    "common.resuming": {"common.run.resuming": ""},
    "common.run_record": {"common.run.record": ""},
    "common.scoring": {"common.rewards": "built_in_rewards find_reward load_rewards reward_settings"},
    "common.shared_state": {"common.user_code.shared_state": ""},
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
    """A Python source with its imports from common/ brought up to date.

    Raises:
        SyntaxError: it is none.
        ValueError: naming the line: an import that has moved shares it with other code.
    """
    lines = source.split("\n")  # as ast counts them; str.splitlines knows more ends of lines
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.module in MOVED]
    for node in sorted(found, key=lambda node: -node.lineno):  # from the end, so that lines keep their numbers
        places: dict[str, list[str]] = {}
        for alias in node.names:
            places.setdefault(now_in(node.module or "", alias.name), []).append(ast.unparse(alias))
        if set(places) == {node.module}:
            continue
        end = node.end_lineno or node.lineno
        indent = lines[node.lineno - 1].encode()[: node.col_offset].decode()
        rest = lines[end - 1].encode()[node.end_col_offset :].decode()
        if indent.strip() or rest.strip()[:1] not in ("", "#"):
            raise ValueError(f"line {node.lineno}: write its import on a line of its own")
        new = [f"{indent}from {place} import {', '.join(names)}" for place, names in sorted(places.items())]
        lines[node.lineno - 1 : end] = [*new[:-1], new[-1] + rest]
    return "\n".join(lines)


def not_there(source: str) -> list[str]:
    """["line 3: common.data has no NAME", ...]: what a source imports from common/ that is not there."""
    missing = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            wanted = [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            wanted = [(alias.name, "") for alias in node.names]
        else:
            continue
        for module, name in wanted:
            if module.split(".")[0] == "common" and not has_name(module, name):
                missing.append(f"line {node.lineno}: {module} " + (f"has no {name}" if name else "is not there"))
    return missing


def has_name(module: str, name: str) -> bool:
    """Whether a module of common/ is there and, unless it is "" or "*", has this name or a file of this name."""
    place = ROOT / module.replace(".", "/")
    file = place.with_suffix(".py") if place.with_suffix(".py").is_file() else place / "__init__.py"
    if not file.is_file():
        return False
    known = {"", "*", *(path.stem for path in place.glob("*.py"))}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            known |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            known.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            known.add(node.id)
    return name in known


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    missing = []
    for file in parser.parse_args().files:
        try:
            before = file.read_bytes().decode()
            after = move_imports(before)
            if after != before:
                with atomic_file(file) as temporary:
                    temporary.write_bytes(after.encode())
        except (OSError, ValueError, SyntaxError, RunError) as error:
            sys.exit(f"{file}: {error}")
        for line in after.split("\n"):
            if line not in before.split("\n"):
                print(f"{file}: {line.strip()}")
        missing += [f"{file}: {told}" for told in not_there(after)]
    if missing:
        sys.exit("\n".join([*missing, "CHANGELOG.md says what has changed"]))


if __name__ == "__main__":
    main()
