"""Do the fast tests see a changed line? Changes one line at a time, and runs the fast tests of its file.

    python benchmarks/mutants.py --list                                # the mutants, of the five scripts and of contrib
    python benchmarks/mutants.py --out mutants.jsonl                   # runs the tests with each; half an hour or more
    python benchmarks/mutants.py --out core.jsonl --core               # the core's
    python benchmarks/mutants.py --out mutants.jsonl --scripts mix_grpo.py --numbers 3 7    # of a script, by number

A mutant is one line: a sign, an index, a number, a comparison, another value of the same type, or a call that is
dropped. SEED draws from the files as they are, from `main`, `update`, `evaluate`, `rollout`, `accumulate_gradients` and
`optimizer_step` 12 for each of the five scripts and 20 for contrib's together, and 50 from the core (--core): the
losses and advantages of four scripts, common/sde.py, common/scoring.py and common/weights/policy.py. The tests of a
script are those of tests/algorithms/ that take it, without the comparison of copies, which sees any line that is
changed in one script only; TESTS has those of the core. Only fast ones run. A mutant that is in the file is not run
again.
"""

import argparse
import ast
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FIVE = ("flow_grpo.py", "grpo_guard.py", "mix_grpo.py", "dpo_offline.py", "diffusion_nft.py")
SEED = 1
OF_EACH, OF_CONTRIB = 12, 20
FUNCTIONS = ("main", "update", "evaluate", "rollout", "accumulate_gradients", "optimizer_step")
LOSSES = ("policy_loss", "kl_divergence", "compute_advantages", "combine_advantages", "policy_step", "nft_loss")
LOSSES += ("optimality", "old_policy_decay", "follow_trained", "dpo_loss", "flow_matching_errors")
CORE = {  # file -> (functions, None for all; how many mutants)
    "common/sde.py": (None, 18),
    "common/scoring.py": (None, 10),
    "common/weights/policy.py": (None, 10),
    "flow_grpo.py": (LOSSES, 4),
    "grpo_guard.py": (LOSSES, 2),
    "dpo_offline.py": (LOSSES, 3),
    "diffusion_nft.py": (LOSSES, 3),
}
TESTS = {  # of a file of common/
    "common/sde.py": ("core/test_sde.py", "algorithms/test_losses.py", "algorithms/test_flow_grpo.py"),
    "common/scoring.py": (
        "rewards/test_rewards.py",
        "rewards/test_failures.py",
        "rewards/test_details.py",
        "rewards/test_rewards_by_record.py",
        "user_code/test_users_files.py",
        "algorithms/test_losses.py",
    ),
    "common/weights/policy.py": ("weights/test_policy.py", "weights/test_lora.py", "algorithms/test_mains.py"),
}
SECONDS = 900  # at most, for the tests of a mutant
# values of one type, each in the other's place
SWAPS = [
    ("x", "x_next"),
    ("i", "w"),
    ("v_old", "v_ref"),
    ("prompt_index", "image_index"),
    ("prompt_rows", "image_index"),
    ("scores", "filled"),
    ("old", "recomputed"),
    ("num_prompts", "group_size"),
    ("eval_rewards", "rewards"),
    ("all_rewards", "eval_rewards"),
    ("rewards", "eval_rewards"),
    ("eval_set", "train_set"),
    ("eval_every", "save_every"),
    ("updates_per_rollout", "epochs_per_rollout"),
    ("log_probs", "sample_weights"),
    ("finite_passes", "passes"),
    ("learning_rate", "weight_decay"),
    ("weight_decay", "adam_eps"),
    ("errors", "ref_errors"),
    ("timesteps", "sigmas"),
    ("rows", "mini_batch"),
]
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.Mod: "//", ast.BitOr: None}
COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
SILENT = ("print_message", "timed")  # calls that no test is for


class Mutant(NamedTuple):
    """A part of a script's text, and what stands there instead."""

    script: str
    line: int
    start: int
    end: int
    text: str
    function: str


# ---- mutants ---------------------------------------------------------------------------------------------------------
def mutants_of(script: str, functions: tuple[str, ...] | None = FUNCTIONS) -> list[Mutant]:
    """All mutants of a file, in order. functions: those at its top; None: all, and methods."""
    source = (ROOT / script).read_text()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    encoded = source.encode()

    def place(node: ast.AST) -> tuple[int, int]:
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    found = []
    attributes = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    tree = ast.parse(source)
    for function in tree.body if functions else ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and (not functions or function.name in functions):
            known = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
            known |= {
                node.id
                for node in ast.walk(function)
                if isinstance(getattr(node, "ctx", None), ast.Store) and isinstance(node, ast.Name)
            }
            skipped = set()
            for node in ast.walk(function):
                call = node.value if isinstance(node, ast.Expr) else node
                is_silent = isinstance(call, ast.Call) and getattr(call.func, "attr", "") in SILENT
                if is_silent or isinstance(node, ast.JoinedStr) or node in (function.args, function.returns):
                    skipped |= set(ast.walk(node))
                elif isinstance(node, ast.AnnAssign):
                    skipped |= set(ast.walk(node.annotation))
            for node in ast.walk(function):
                if node not in skipped:
                    for part, text in changes_of(node, lambda part: encoded[slice(*place(part))].decode()):
                        start, end = place(part)
                        is_swap = isinstance(node, (ast.Attribute, ast.Name)) and text.isidentifier()
                        if isinstance(node, ast.Attribute) and "." in text:
                            is_known = text.rpartition(".")[2] in attributes
                        else:
                            is_known = not is_swap or text in known
                        if encoded[start:end].decode() != text and is_known:
                            found.append(Mutant(script, part.lineno, start, end, text, function.name))
    return sorted(set(found))


def changes_of(node: ast.AST, source_of) -> Iterator[tuple[ast.AST, str]]:
    """Yields (a part of the node, the text in its place)."""
    if isinstance(node, ast.BinOp):
        left, right = source_of(node.left), source_of(node.right)
        if sign := OPERATORS.get(type(node.op)):
            yield node, f"({left} {sign} {right})"
        elif isinstance(node.op, ast.BitOr):
            yield node, left
    elif isinstance(node, ast.Compare):
        values = [node.left, *node.comparators]
        for k, operator in enumerate(node.ops):
            if type(operator) in COMPARISONS:
                texts = [source_of(value) for value in values]
                signs = [COMPARISONS[type(o)] if j == k else sign_of(o) for j, o in enumerate(node.ops)]
                yield node, "".join(f"{t} {s} " for t, s in zip(texts, signs, strict=False)) + texts[-1]
    elif isinstance(node, ast.BoolOp):
        sign = " and " if isinstance(node.op, ast.Or) else " or "
        yield node, sign.join(source_of(value) for value in node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not)):
        yield node, source_of(node.operand)
    elif isinstance(node, (ast.If, ast.IfExp)):
        yield node.test, f"not ({source_of(node.test)})"
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield node, repr(node.value + 1)
    elif isinstance(node, ast.Subscript):
        index = source_of(node.slice)
        if isinstance(node.slice, ast.Tuple) and len(node.slice.elts) == 2:
            yield node.slice, f"{source_of(node.slice.elts[0])}, 0"
        elif isinstance(node.slice, ast.Name):
            yield node.slice, f"{index}.flip(0)" if index in ("rows", "image_index", "mini_batch") else index
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield node, "pass"
    elif isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id in ("gather_rows", "min", "mean_over_ranks"):
            yield node, source_of(node.args[0])
        if isinstance(node.func, ast.Attribute) and node.func.attr == "where":
            yield node, source_of(node.func.value)
        for keyword in node.keywords:
            if keyword.arg in ("sde_steps", "sample_weights", "in_engine"):
                yield node, source_of(node).replace(f", {source_of(keyword)}", "")
    elif isinstance(node, ast.Attribute):
        for pair in SWAPS:
            if node.attr in pair:
                yield node, f"{source_of(node.value)}.{pair[1 - pair.index(node.attr)]}"
        if node.attr == "evaluated_policy":
            yield node, '"default"'
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        if node.id == "eval_args":  # the reverse changes nothing in most places: two options alone differ
            yield node, "args"
        for pair in SWAPS:
            if node.id in pair:
                yield node, pair[1 - pair.index(node.id)]
    if isinstance(node, ast.Constant) and node.value in ("reference", "old", "ema"):
        yield node, '"default"'


def sign_of(operator: ast.cmpop) -> str:
    return ast.unparse(ast.Compare(ast.Name("a"), [operator], [ast.Name("b")])).split(" ", 1)[1].rsplit(" ", 1)[0]


def drawn_mutants() -> list[Mutant]:
    """The drawn mutants: each compiles, and no two of a script change one line alike."""
    chosen = []
    for script in FIVE:
        chosen += draw(mutants_of(script), OF_EACH, f"{SEED} {script}")
    contrib = sorted(f"contrib/{path.name}" for path in (ROOT / "contrib").glob("*.py"))
    everything = [mutant for script in contrib if "nano" not in script for mutant in mutants_of(script)]
    return chosen + draw(everything, OF_CONTRIB, f"{SEED} contrib")


def core_mutants() -> list[Mutant]:
    """The drawn mutants of the core."""
    drawn = []
    for file, (functions, count) in CORE.items():
        drawn += draw(mutants_of(file, functions), count, f"{SEED} core {file}")
    return drawn


def draw(mutants: list[Mutant], count: int, seed: str) -> list[Mutant]:
    usable = [mutant for mutant in mutants if compiles(mutated(mutant))]
    random.Random(seed).shuffle(usable)
    by_line = {(mutant.script, mutant.line): mutant for mutant in reversed(usable)}  # the first of each line
    return sorted(list(by_line.values())[-count:])


def mutated(mutant: Mutant) -> str:
    source = (ROOT / mutant.script).read_text().encode()
    return (source[: mutant.start] + mutant.text.encode() + source[mutant.end :]).decode()


def compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def describe(mutant: Mutant) -> dict[str, str | int]:
    source = (ROOT / mutant.script).read_text().encode()
    before = " ".join(source[mutant.start : mutant.end].decode().split())
    line = (ROOT / mutant.script).read_text().splitlines()[mutant.line - 1].strip()
    where = {"script": mutant.script, "function": mutant.function, "line": mutant.line}
    return where | {"code": line, "before": before, "after": " ".join(mutant.text.split())}


# ---- their tests -----------------------------------------------------------------------------------------------------
class OnlyOf:
    """A plugin of pytest: of tests that take a script, those of this one."""

    def __init__(self, script: str) -> None:
        self.script = script

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        def is_own(item: pytest.Item) -> bool:
            call = getattr(item, "callspec", None)
            return call is None or call.params.get("script", self.script) == self.script

        items[:] = [item for item in items if is_own(item)]


def run_tests(tree: Path, mutant: Mutant, log: Path) -> str:
    """Returns "seen", "survived" or what went wrong."""
    if mutant.script in TESTS:
        return run_in_a_new_process(tree, mutant, log)
    stem = Path(mutant.script).stem
    name = "test_contrib" if mutant.script.startswith("contrib/") else f"test_{stem}"
    tests = ["test_mains", "test_losses", "test_trained_steps", "test_references", name]
    files = [f"tests/algorithms/{name}.py" for name in tests if (tree / f"tests/algorithms/{name}.py").exists()]
    original = (tree / mutant.script).read_text()
    (tree / mutant.script).write_text(mutated(mutant))
    try:
        child = os.fork()
        if not child:
            os.setpgid(0, 0)
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for number in (1, 2):
                os.dup2(output, number)
            without = ["-k", "not changes_its_parent and not is_unread"]  # of copies, not of what they do
            options = ["-q", "-x", "-m", "fast", "-p", "no:cacheprovider", *without]
            os._exit(pytest.main([*options, *files], plugins=[OnlyOf(mutant.script)]))
        deadline = time.monotonic() + SECONDS
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                return {0: "survived", 1: "seen"}.get(code, f"pytest ended with {code}")
            if time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return "seen: no end"
            time.sleep(0.1)
    finally:
        (tree / mutant.script).write_text(original)


def run_in_a_new_process(tree: Path, mutant: Mutant, log: Path) -> str:
    """run_tests for a file of common/, which this process has imported."""
    original = (tree / mutant.script).read_text()
    (tree / mutant.script).write_text(mutated(mutant))
    files = [f"tests/{file}" for file in TESTS[mutant.script]]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "fast", "-p", "no:cacheprovider", *files]
    try:
        with open(log, "wb") as output:
            done = subprocess.run(command, cwd=tree, stdout=output, stderr=output, timeout=SECONDS)
        return {0: "survived", 1: "seen", 2: "seen: no import"}.get(done.returncode, f"pytest: {done.returncode}")
    except subprocess.TimeoutExpired:
        return "seen: no end"
    finally:
        (tree / mutant.script).write_text(original)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--core", action="store_true", help="the core's mutants")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--scripts", nargs="+", help="of the drawn mutants, those of these scripts")
    parser.add_argument("--numbers", nargs="+", type=int, help="of these numbers")
    options = parser.parse_args()
    numbered = [
        (number, mutant)
        for number, mutant in enumerate(core_mutants() if options.core else drawn_mutants(), 1)
        if (not options.scripts or mutant.script in options.scripts)
        and (not options.numbers or number in options.numbers)
    ]
    if options.list or not options.out:
        for number, mutant in numbered:
            print(json.dumps({"number": number} | describe(mutant)))
        return
    options.out = options.out.resolve()
    done = set()
    if options.out.exists():
        lines = map(json.loads, options.out.read_text().splitlines())
        done = {line["number"] for line in lines if "verdict" in line}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", "runs", "cache", "__pycache__", ".*_cache"))
        os.chdir(tree)
        sys.path[0] = str(tree)
        conftest = importlib.import_module("tests.conftest")
        for name in ("diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3", "peft", "tyro"):
            importlib.import_module(name)
        for number, mutant in numbered:
            if number in done:
                continue
            if conftest.warm_process().poll() is not None:  # a test that took too long has ended it
                conftest.warm_process.cache_clear()
                conftest.warm_process()
            began = time.monotonic()
            verdict = run_tests(tree, mutant, Path(folder) / "log.txt")
            line = {"number": number} | describe(mutant) | {"verdict": verdict}
            with open(options.out, "a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{number}: {verdict}, {time.monotonic() - began:.0f} s: {line}", flush=True)
            if verdict not in ("seen", "survived"):
                print((Path(folder) / "log.txt").read_text()[-3000:], flush=True)


if __name__ == "__main__":
    main()
