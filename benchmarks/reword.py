"""Do the tests hold the sentences of messages? Rewords messages drawn at random, in a copy of the checkout.

    python benchmarks/reword.py --out FOLDER                  # 50 messages of seed 1; prints what it changed, as JSON
    python benchmarks/reword.py --out FOLDER --seed 2 --run   # then every test there, and the number that fail
    python benchmarks/reword.py --out FOLDER --count 100000   # all messages, to find the tests that hold one

A message is a string of common/, contrib/, tools/ or a script at the top level that ends in a raised exception, in
SystemExit, or in print_message or print_once: it stands there, or is followed back from there through names, returned
values and arguments. One text is one message, wherever its copies stand. Its plain words of at least four letters are
spelled backwards. Options, paths, numbers, quoted parts, {fields}, names with a capital, a dot or an underscore, and a
place at the beginning ("transformer: ") stay, because a test may pin those.
"""

import argparse
import ast
import io
import json
import random
import re
import shutil
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS = ("common", "contrib", "tools")
PRINTED = ("print_message", "print_once", "SystemExit")
FIELD = r"\{\{|\}\}|\{(?:[^{}]|\{[^{}]*\})*\}"  # of an f-string
QUOTED = r"`[^`]*`|\"[^\"]*\"|(?<![\w\ue000])'[^']*'(?!\w)"
COMMAND = r"(?:pip|apt) install [\w+.=\ue000-]+|--\w+ [\w,]+(?: or \w+)*"  # or an option and its value
KEPT = "\ue000"  # in the place of each letter that stays
WORD = re.compile(r"[(\[]?([A-Za-z]+(?:[-'][A-Za-z]+)*)[)\]]?[.,:;?!]*")  # between blanks: a plain word

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Literal(NamedTuple):
    """A string or an f-string of a file, by bytes."""

    file: str
    line: int
    start: int
    end: int
    before: str  # its source
    after: str


# ---- which strings are messages --------------------------------------------------------------------------------------
class Project:
    """The syntax trees of all files, and how a text gets from one place to another."""

    def __init__(self, root: Path) -> None:
        paths = sorted([*root.glob("*.py"), *(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))])
        self.sources = {path.relative_to(root).as_posix(): path.read_text() for path in paths}
        self.functions: dict[str, list[tuple[str, Function]]] = defaultdict(list)  # by name: file, function
        self.calls: dict[str, list[tuple[str, Function | None, ast.Call]]] = defaultdict(list)  # and who calls it
        self.raised: list[tuple[str, Function | None, ast.expr]] = []
        self.modules: dict[str, ast.Module] = {}
        self.in_fields: set[int] = set()  # what stands in an f-string stays
        self.holders: set[str] = set()  # classes that are never raised: what their objects hold is a name, and stays
        self._held: dict[ast.AST, dict[str, list[ast.expr]]] = {}
        self._ends: dict[ast.AST, list[ast.expr]] = {}  # what a function returns or yields
        for file, source in self.sources.items():
            self.modules[file] = ast.parse(source)
            self._read(file, self.modules[file], None)
            self.holders |= {node.name for node in self.modules[file].body if isinstance(node, ast.ClassDef)}
        raised = [node.func for _, _, node in self.raised if isinstance(node, ast.Call)]
        self.holders -= {getattr(function, "attr", getattr(function, "id", "")) for function in raised}

    def _read(self, file: str, node: ast.AST, function: Function | None) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function):
                self.functions[child.name].append((file, child))
                self._read(file, child, child)
                continue
            if isinstance(child, ast.Call):
                name = getattr(child.func, "attr", getattr(child.func, "id", ""))
                self.calls[name].append((file, function, child))
                if name in PRINTED:
                    self.raised += [(file, function, argument) for argument in child.args]
            elif isinstance(child, ast.Raise) and child.exc:
                self.raised.append((file, function, child.exc))
            elif isinstance(child, ast.JoinedStr):
                self.in_fields |= {id(part) for part in ast.walk(child) if part is not child}
            self._read(file, child, function)

    def messages(self) -> Iterator[tuple[str, ast.expr]]:
        """Yields (file, literal) for each string that ends in an exception or in a printed line."""
        seen: set[int] = set()
        waiting = list(self.raised)
        while waiting:
            file, function, node = waiting.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            is_text = isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)
            if is_text and id(node) not in self.in_fields and "{0}" not in ast.unparse(node):  # a template of prompts
                yield file, node
            waiting += self._sources_of(file, function, node)

    def _sources_of(
        self, file: str, function: Function | None, node: ast.expr
    ) -> Iterator[tuple[str, Function | None, ast.expr]]:
        """What the text of an expression is made of."""
        if isinstance(node, ast.JoinedStr):
            fields = [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
            yield from ((file, function, field) for field in fields)
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in self.holders:
                return
            yield from ((file, function, value) for value in [*node.args, *(word.value for word in node.keywords)])
            if isinstance(node.func, ast.Attribute):
                yield file, function, node.func.value
            for of_file, called in self.functions[name]:
                if called not in self._ends:
                    ends = [part for part in ast.walk(called) if isinstance(part, (ast.Return, ast.Yield))]
                    self._ends[called] = [part.value for part in ends if part.value]
                yield from ((of_file, called, value) for value in self._ends[called])
        elif isinstance(node, ast.Name):
            yield from self._values_of(file, function, node.id)
        elif isinstance(node, ast.IfExp):
            yield from ((file, function, value) for value in (node.body, node.orelse))
        elif isinstance(node, ast.Dict):
            yield from ((file, function, value) for value in node.values)
        elif not isinstance(node, (ast.Compare, ast.Constant, ast.Attribute, ast.Lambda)):
            parts = [node.value] if isinstance(node, ast.Subscript) else ast.iter_child_nodes(node)
            for part in parts:
                if isinstance(part, ast.comprehension):
                    yield file, function, part.iter
                elif isinstance(part, ast.expr):
                    yield file, function, part

    def _held_by_names(self, tree: ast.AST) -> dict[str, list[ast.expr]]:
        """What the names of a function or module are assigned, loop over, or get appended."""
        if tree not in self._held:
            held = self._held[tree] = defaultdict(list)
            for node in ast.walk(tree):
                targets: list[ast.expr] = []
                value: ast.expr | None = None
                if isinstance(node, ast.Assign):
                    targets, value = node.targets, node.value
                elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
                    targets, value = [node.target], node.value
                elif isinstance(node, ast.For):
                    targets, value = [node.target], node.iter
                elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                    targets, value = [node.func.value], node.args[0] if node.func.attr in ("append", "extend") else None
                if value is not None:
                    for part in (part for target in targets for part in ast.walk(target)):
                        if isinstance(part, ast.Name):
                            held[part.id].append(value)
        return self._held[tree]

    def _values_of(
        self, file: str, function: Function | None, name: str
    ) -> Iterator[tuple[str, Function | None, ast.expr]]:
        """What a name can hold, also passed by a caller."""
        held = self._held_by_names(function or self.modules[file]).get(name, [])
        yield from ((file, function, value) for value in held)
        if function is None or held:
            return
        parameters = [argument.arg for argument in [*function.args.posonlyargs, *function.args.args]]
        by_name = [argument.arg for argument in function.args.kwonlyargs]
        if name not in parameters + by_name:
            yield from self._values_of(file, None, name)
            return
        for of_file, caller, call in self.calls[function.name]:
            yield from ((of_file, caller, word.value) for word in call.keywords if word.arg == name)
            place = parameters.index(name) - (parameters[0] in ("self", "cls")) if name in parameters else -1
            if 0 <= place < len(call.args):
                yield of_file, caller, call.args[place]


# ---- other words -----------------------------------------------------------------------------------------------------
def reworded(source: str) -> str:
    """The source of a string, with its plain words backwards."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    done, end = "", 0
    is_first = True
    for token in tokenize.generate_tokens(io.StringIO(f"({source}\n)").readline):
        if token.type == tokenize.STRING:
            (row, column), (last_row, last_column) = token.start, token.end
            begin = starts[row - 1] + column - (row == 1)
            until = starts[last_row - 1] + last_column - (last_row == 1)
            prefix, quote, body = re.fullmatch(r"(\w*)('''|\"\"\"|'|\")(.*)\2", token.string, re.S).groups()  # type: ignore[union-attr]
            done += source[end:begin] + prefix + quote + reworded_body(body, "f" in prefix.lower(), is_first) + quote
            end, is_first = until, False
    return done + source[end:]


def reworded_body(body: str, is_f_string: bool, is_first: bool) -> str:
    masked = body
    for pattern in (r"\\[nt]", r"\\.", *([FIELD] if is_f_string else []), QUOTED, COMMAND):
        filler = " " if pattern == r"\\[nt]" else KEPT
        masked = re.sub(pattern, lambda match, filler=filler: filler * len(match[0]), masked)  # type: ignore[misc]
    letters = list(body)
    for chunk in re.finditer(r"\S+", masked):
        match = WORD.fullmatch(chunk[0])
        before = masked[: chunk.start()].rstrip()
        if not match or (is_first and not before and chunk[0].endswith(":")):
            continue  # "transformer: " at the beginning is a place
        is_start = before.endswith((".", "?", "!")) or (is_first and not before)
        if not (match[1][1:] if is_start else match[1]).islower():
            continue  # a name
        for word in re.finditer(r"[A-Za-z]+", match[1]):
            plain = word[0].lower()
            if len(plain) >= 4:
                start = chunk.start() + match.start(1) + word.start()
                other = plain[::-1]
                letters[start : start + len(plain)] = other.capitalize() if plain != word[0] else other
    return "".join(letters)


def literals(project: Project) -> Iterator[Literal]:
    """All messages of the project that have two plain words or more."""
    for file, node in project.messages():
        source = project.sources[file]
        lines = source.encode().splitlines(keepends=True)
        start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
        end = sum(map(len, lines[: (node.end_lineno or 0) - 1])) + (node.end_col_offset or 0)
        before = source.encode()[start:end].decode()
        after = reworded(before)
        changed = [a for a, b in zip(before.split(), after.split(), strict=True) if a != b]
        if len(changed) >= 2:
            yield Literal(file, node.lineno, start, end, before, after)


# ---- a changed tree --------------------------------------------------------------------------------------------------
def draw(count: int, seed: int) -> list[Literal]:
    """The literals of `count` messages, in the order of the files."""
    by_text = defaultdict(set)
    for literal in literals(Project(ROOT)):
        by_text[" ".join(literal.before.split())].add(literal)
    texts = sorted(by_text)
    random.Random(seed).shuffle(texts)
    return sorted(literal for text in texts[:count] for literal in by_text[text])


def write(chosen: list[Literal], tree: Path) -> None:
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", "runs", "cache", "__pycache__", ".*_cache"))
    for literal in sorted(chosen, reverse=True):  # from each file's end, so that the places before hold
        path = tree / literal.file
        source = path.read_bytes()
        path.write_bytes(source[: literal.start] + literal.after.encode() + source[literal.end :])
        compile(path.read_text(), str(path), "exec")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder that is not there yet, for the changed copy")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--run", action="store_true", help="pytest -n 2 --all in the copy")
    options = parser.parse_args()
    chosen = draw(options.count, options.seed)
    write(chosen, options.out)
    for literal in chosen:
        before, after = (" ".join(text.split()) for text in (literal.before, literal.after))
        print(json.dumps({"file": literal.file, "line": literal.line, "before": before, "after": after}))
    if options.run:
        command = [sys.executable, "-m", "pytest", "-n", "2", "--all", "-q", "-p", "no:cacheprovider"]
        done = subprocess.run(command, cwd=options.out, stdout=subprocess.PIPE, text=True, check=False)
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        print("\n".join([*failed, f"{len(failed)} tests failed"]))


if __name__ == "__main__":
    main()
