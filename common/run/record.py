"""What a run keeps of what it was made of, beside its options: the user's own code, digests of what it reads, and git.

It stays in the run's folder, and in its checkpoints, by which a resumed run notices what has changed.
"""

import functools
import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from common.distributed import on_rank_0
from common.files import FORMAT, atomic_file, digest_records, glob_stars, read_records, split_source, writing
from common.models import known_folder
from common.run.lock import check_unchanged, lock_run
from common.run.recorded_options import from_root
from common.user_code import code_file
from common.weights import LORA_FILES

import torch

COMMON = Path(__file__).parents[1]
PACKAGES = (
    *("torch", "diffusers", "transformers", "peft", "safetensors"),
    *("numpy", "pillow", "torchao", "vllm", "vllm-omni"),
)
# options that name files or folders
DATA = ("model", "lora_path", "student", "teachers", "train_prompts", "eval_prompts", "pairs", "records")
# of a folder; not its images
READ = {".json", ".jsonl", ".csv", ".parquet", ".txt", ".safetensors", ".bin", ".pt", ".pth", ".model"}
PIECE = 2**20  # bytes
NUM_PIECES = 64  # of a large file
LONGEST_DIFF = 2**20  # bytes
# beside common/: a user's file in the same folder may have neighbours that a tool has imported
OURS = (
    *("assets", "benchmarks", "contrib", "docs", "tests", "tools"),
    *("flow_grpo.py", "grpo_guard.py", "mix_grpo.py", "dpo_offline.py", "diffusion_nft.py"),
    "nano_flow_grpo.py",
)
MOST_UNTRACKED = 1000  # names
Contents = dict[str, str]  # what is read -> its size and digest


# ---- what a run is made of -------------------------------------------------------------------------------------------
def find_contents(options: dict[str, Any], code: Iterable[str] = (), script: Path | str | None = None) -> Contents:
    """Size and digest of all that options name: {"--eval_prompts signs.txt": ..., "code/mine.py": ...}.

    code: those of their values that name code. script: the run's, for what it imports. With --eval_only, without what
    training alone would read.
    """
    found: Contents = {}
    scores = user_code(code, options)
    named = {f"code/{name}": file for name, file in scores.items()}
    if script:  # what it imports is of it, as the script itself
        of_script = user_code(code, options, script)
        named |= {f"source {name}": file for name, file in of_script.items() if file not in scores.values()}
    for option in DATA:
        if options.get("eval_only") and option in ("train_prompts", "pairs", "records", "teachers"):
            continue
        for value in values_of(options.get(option)):
            path = Path(value.partition("=")[2] if option == "teachers" else value)
            key = f"--{option} {from_root(value)}"
            if option.endswith("_prompts") or option == "records":
                path, field = split_source(value)
                if path.suffix == ".py" and field:  # its code is in code/; what it returns may change without that
                    records = [record for _, record in read_records(value)]
                    found[key] = f"{len(records)} records, blake2b {digest_records(records)}"
                    continue
            named[key] = path
            if option == "model" and not path.is_dir() and (snapshot := known_folder(path)):  # more of it comes later
                found[key] = f"commit {snapshot.name}"
    named |= {f"{variable}={file}": file for variable, file in setting_files(options) if not is_question(variable)}
    for name, path in named.items():
        with suppress(OSError):  # what cannot be read is refused where it is needed
            if path.name in LORA_FILES.values():  # a file of two has the other beside it
                found[name] = digest(sorted(file for file in path.parent.iterdir() if file.name in LORA_FILES.values()))
            elif "*" in str(path):  # a pattern
                found[name] = digest(glob_stars(path))
            elif path.is_dir():
                found[name] = digest(sorted(file for file in path.rglob("*") if file.suffix in READ))
            elif path.is_file():
                found[name] = digest([path])
    return found


def setting_files(options: dict[str, Any]) -> list[tuple[str, Path]]:
    """The files and folders that settings of rewards name, such as a judge's question, with their variables."""
    settings = [setting for of_reward in options.get("reward_settings", {}).values() for setting in of_reward.items()]
    return [(variable, Path(value)) for variable, value in settings if value and os.path.exists(value)]


def is_question(variable: str) -> bool:
    """Whether a setting names a file that is text, and kept."""
    return variable.endswith("_PROMPT")


def find_sources(script: Path | str) -> Contents:
    """Size and digest of the script, and of common/: {"source flow_grpo.py": ..., "source common/": ...}."""
    script = Path(script)
    files = [file for file in COMMON.rglob("*") if file.suffix in (".py", ".txt")]  # .txt: the questions of a judge
    return {f"source {script.name}": digest([script]), "source common/": digest(sorted(files))}


def script_source(contents: Contents) -> str | None:
    """Which of a record's contents is the script, "source flow_grpo.py": find_sources names it behind all that it
    imports. None where a record names none."""
    return next((name for name in reversed(contents) if name.startswith("source ") and name.endswith(".py")), None)


def own_code(contents: Contents) -> Contents:
    """What a record has of the script and the user's own files; not of common/, which changes with every pull."""
    is_own = {name: name.startswith(("source ", "code/")) and name != "source common/" for name in contents}
    return {name: content for name, content in contents.items() if is_own[name]}


def user_code(code: Iterable[str], options: dict[str, Any], script: Path | str | None = None) -> dict[str, Path]:
    """By name the files of `code`, file.py:function each, what these and the script have imported from beside them, and
    the judge's question, which options name. Names are paths from the checkout's root, otherwise from the working
    directory."""
    files = {file.resolve() for file in map(code_file, code) if file}
    folders = {file.parent for file in files}
    if script:  # a recipe starts mine/my_grpo.py with the root on the path
        folders |= {imports_from(script), COMMON.parent.resolve()}
    is_beside: dict[str, bool] = {}  # by a module's first name: whether it lies in one of the folders
    for module in list(sys.modules.values()) if folders else []:  # thousands, of which few are a user's
        names = getattr(module, "__dict__", {})
        parts = str(names.get("__name__")).split(".")
        if parts[0] not in is_beside:
            in_folders = [folder / parts[0] for folder in folders]
            is_beside[parts[0]] = any(path.exists() or path.with_suffix(".py").exists() for path in in_folders)
        if not is_beside[parts[0]]:
            continue
        file = Path(names.get("__file__") or "/").resolve()
        beside = {folder.joinpath(*parts).with_suffix(".py") for folder in folders}
        beside |= {folder.joinpath(*parts, "__init__.py") for folder in folders}
        if file in beside and is_own(file):
            files.add(file)
    files |= {file.resolve() for variable, file in setting_files(options) if is_question(variable)}
    by_name: dict[str, Path] = {}
    for file in sorted(file for file in files if file.is_file()):
        for root in (COMMON.parent.resolve(), Path.cwd(), Path("/")):
            if file.is_relative_to(root) and str(file.relative_to(root)) not in by_name:
                by_name[str(file.relative_to(root))] = file
                break
    return dict(sorted(by_name.items()))


def imports_from(script: Path | str) -> Path:
    """From where the script imports files of its own: its folder, or what holds mine/ for `python -m mine.my_grpo`."""
    main = sys.modules["__main__"]
    package = [name for name in (is_main(script) and main.__package__ or "").split(".") if name]
    return Path(script).resolve().parents[len(package)]


def is_main(script: Path | str) -> bool:
    """Whether Python was started with the script, and not with another program that runs it."""
    return Path(getattr(sys.modules["__main__"], "__file__", None) or "/").resolve() == Path(script).resolve()


def command_of(script: Path | str) -> str:
    """What Python was started with: the script, or `-m mine.my_grpo`, for which sys.argv has the module's file. That
    file alone would not find common/."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return shlex.join(["-m", spec.name, *sys.argv[1:]] if spec and is_main(script) else sys.argv)


def is_own(file: Path) -> bool:
    """Whether a module's file is neither CleanFlow's, which git has, nor the script, nor installed."""
    main = getattr(sys.modules["__main__"], "__file__", None)
    is_known = "site-packages" in file.parts or any(file.is_relative_to(folder) for folder in folders_of_others(COMMON))
    return not is_known and file != Path(main or "/").resolve()


@functools.cache
def folders_of_others(common: Path) -> list[Path]:
    """CleanFlow's folders and Python's."""
    python = [Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()]
    return [common, *(common.parent / name for name in OURS), *python]


def values_of(value: object) -> list[str]:
    """The strings of an option's value."""
    return [text for text in (value if isinstance(value, list | tuple) else [value]) if isinstance(text, str)]


def digest(files: list[Path]) -> str:
    """Size and BLAKE2b of files: of all their bytes, but of 64 pieces, evenly spread, where one is above 64 MiB."""
    total = 0
    hashed = hashlib.blake2b(digest_size=16)
    for path in files:
        if not path.is_file():  # a dangling link
            continue
        size = path.stat().st_size
        total += size
        hashed.update(f"{path.name} {size}\n".encode(errors="surrogateescape") if len(files) > 1 else b"")
        with open(path, "rb") as file:
            whole = size <= NUM_PIECES * PIECE
            for i in range(1 if whole else NUM_PIECES):
                file.seek(i * (size - PIECE) // (NUM_PIECES - 1) if i else 0)
                hashed.update(file.read(size if whole else PIECE))
    return f"{total} bytes, blake2b {hashed.hexdigest()}"


def changed_contents(saved: Contents, now: Contents) -> Iterator[tuple[str, bool]]:
    """(What has other contents than a checkpoint's run had, whether scores depend on it; of ours that is not known)."""
    for name in sorted(saved.keys() & now.keys()):
        if saved[name] != now[name]:
            of_training = ("--train_prompts", "--pairs", "--records", "--lora_path", "--student", "--teachers")
            yield name, not name.startswith((*of_training, "source "))


# ---- the record ------------------------------------------------------------------------------------------------------
def create_run_folder(
    folder: Path,
    config: dict,
    script: Path | str,
    checkpoint: Path | None = None,
    contents: Contents | None = None,
    code: Iterable[str] = (),
) -> dict[Path, bytes]:
    """Lock `folder`, and make it with args.json (the options, the command, CleanFlow's git hash, the machine),
    uncommitted.diff, a copy of the script as source.py, and the user's code in code/. Rank 0 does all this. A script in
    a repository of its own has that one's commit too, as script_git_hash.

    A resumed run keeps the first ones. Its own stand beside them under the checkpoint's name, once it has begun: they
    are returned, {file: content}, for write_record. A resume that is refused is then no record. code: the values of
    options that name code.

    Raises:
        RunError: another process writes to the folder or has just written to it, or it cannot be written.
    """
    if not on_rank_0():
        return {}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    commit, diff, untracked = git_state(COMMON.parent)
    beside = Path(script).resolve().parent
    is_of_another = repository_of(beside) not in (None, repository_of(COMMON.parent))
    args = {
        "command": command_of(script),
        "git_hash": commit,
        **({"script_git_hash": git_state(beside)[0]} if is_of_another else {}),
        "untracked": untracked,
        "device": device,
        "format": FORMAT,
        "versions": {"python": platform.python_version(), **versions()},
        "contents": contents or {},
        "args": config,
    }
    with writing(folder):
        lock_run(folder)
        check_unchanged(folder, checkpoint)
        suffix = f"_{checkpoint.stem}" if checkpoint and (folder / "args.json").exists() else ""
        for old in folder.glob("traceback_rank*.txt"):  # of an earlier end
            old.unlink()
        # read now: while a run loads, its files may be edited
        record = {folder / f"args{suffix}.json": f"{json.dumps(args, indent=1, default=str)}\n".encode()}
        if diff:
            record[folder / f"uncommitted{suffix}.diff"] = diff
        record[folder / f"source{suffix}.py"] = Path(script).read_bytes()
        for name, file in user_code(code, config, script).items():
            record[folder / f"code{suffix}" / name] = file.read_bytes()
    if suffix:
        return record
    write_record(record)
    return {}


def rename_record(record: Mapping[Path, bytes], folder: Path, before: str, now: str) -> dict[Path, bytes]:
    """A record under the name of the checkpoint that was loaded (`now`), where the newest one (`before`) is damaged."""
    renamed = {}
    for file, content in record.items():
        first, *others = file.relative_to(folder).parts
        renamed[folder.joinpath(first.replace(f"_{before}", f"_{now}"), *others)] = content
    return renamed


def write_record(record: Mapping[Path, bytes]) -> None:
    """Write the files of a record, {file: content}. RunError: one cannot be written."""
    for file, content in record.items():
        with atomic_file(file) as temporary:
            temporary.write_bytes(content)


def versions() -> dict[str, str]:
    """The versions of those main packages that are installed."""
    found = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def run_git(folder: Path, *command: str) -> bytes:
    """What a command of git prints in a folder; b"" where it fails."""
    try:
        done = subprocess.run(["git", "--no-optional-locks", *command], cwd=folder, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # no git, or no repository
        return b""
    return done.stdout


def repository_of(folder: Path) -> str | None:
    """The root of the repository that a folder is in."""
    return os.fsdecode(run_git(folder, "rev-parse", "--show-toplevel")).strip() or None


def git_state(folder: Path) -> tuple[str | None, bytes, list[str]]:
    """The commit, with "-dirty" where files differ from it or are not in it; the difference; and the names of the files
    that git does not have, of at most 1,000. (None, b"", []) outside of a repository."""
    commit = run_git(folder, "rev-parse", "HEAD").decode().strip()
    if not commit:
        return None, b"", []
    diff = run_git(folder, "diff", "--no-ext-diff", "--no-color", "HEAD")
    others = run_git(folder, "ls-files", "--others", "--exclude-standard", "--full-name", ":/")
    names = others.decode(errors="replace").splitlines()
    dirty = "-dirty" if diff or names else ""
    if len(diff) > LONGEST_DIFF:
        diff = diff[:LONGEST_DIFF] + f"\n{len(diff) - LONGEST_DIFF} more bytes are left out\n".encode()
    if len(names) > MOST_UNTRACKED:
        names[MOST_UNTRACKED:] = [f"and {len(names) - MOST_UNTRACKED} more"]
    return commit + dirty, diff, names
