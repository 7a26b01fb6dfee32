"""How dense a Python file reads, in numbers:  python tests/density.py flow_grpo.py common/sde.py [--check]

The bounds say how much may stand on a line and in a statement. When a file breaks one, say the thing more plainly, cut
it or move it. A code line is neither blank nor comment nor docstring. Lines of logic are the code lines outside imports
and dataclasses. `--check` exits with 1 where a bound is broken. How much of the project a reader of one script has to
know is measured by tests/house.py.
"""

import argparse
import ast
import statistics
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeGuard

ROOT = Path(__file__).parents[1]
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
NOT_COUNTED = (ast.expr_context, ast.operator, ast.cmpop, ast.boolop, ast.unaryop)  # they belong to their parent


class Bound(NamedTuple):
    limit: float
    meaning: str
    of_common: bool = True  # whether the files of common/ are held to it as well as the scripts
    is_minimum: bool = False

    def holds(self, value: float) -> bool:
        return value >= self.limit if self.is_minimum else value <= self.limit


BOUNDS = {
    "lines": Bound(700, "lines of the file", of_common=False),
    "tokens": Bound(5600, "tokens, whatever the layout", of_common=False),
    "tokens/line": Bound(11, "tokens of a code line, in the mean", of_common=False),
    "nodes/stmt": Bound(9, "AST nodes of a statement, in the mean"),
    "max_stmt": Bound(45, "AST nodes of the largest statement"),
    ">100cols%": Bound(13, "lines of logic beyond 100 columns, per cent"),
    "packed": Bound(0, "assignments `a, b = x, y` that are not a swap"),
    "bool_arith": Bound(0, "comparisons or and/or used as a factor"),
    "positional": Bound(5, "positional arguments of a call, at most"),
    "locals": Bound(35, "local names of a function, at most", of_common=False),
    "function": Bound(60, "lines of the longest function except main"),
    "main": Bound(80, "lines of main"),
    "comments": Bound(0.15, "comment lines per code line", of_common=False, is_minimum=True),
}


# ---- statements ------------------------------------------------------------------------------------------------------
def is_docstring(node: ast.AST) -> TypeGuard[ast.Expr]:
    """Whether a statement is a string by itself: the docstring of a module, class or function, or of a field."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def is_dataclass(node: ast.AST) -> TypeGuard[ast.ClassDef]:
    return isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(d) for d in node.decorator_list)


def own_parts(statement: ast.stmt) -> Iterator[ast.AST]:
    """The parts of a statement, without the statements inside it: the condition of an `if`, the head of a `def`."""
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield child


def statement_size(statement: ast.stmt) -> int:
    """How many AST nodes a statement has."""
    nodes = [node for part in own_parts(statement) for node in ast.walk(part)]
    return sum(not isinstance(node, NOT_COUNTED) for node in nodes)


def is_packed(statement: ast.stmt) -> bool:
    """Whether it is `a, b = x, y`, where x and y are not a and b in another order."""
    if not isinstance(statement, ast.Assign):
        return False
    target = statement.targets[0]
    if not (isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple)):
        return False
    names = sorted(ast.unparse(element) for element in target.elts)
    values = sorted(ast.unparse(element) for element in statement.value.elts)
    return names != values


# ---- expressions and functions ---------------------------------------------------------------------------------------
def is_bool_arithmetic(node: ast.AST) -> bool:
    """Whether it is a product with a comparison, or with an and/or, as a factor."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
        return False
    return isinstance(node.left, ast.Compare | ast.BoolOp) or isinstance(node.right, ast.Compare | ast.BoolOp)


def count_locals(function: ast.FunctionDef) -> int:
    """How many names are assigned in a function. Names of the functions inside it are theirs."""
    inside: set[ast.AST] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.FunctionDef | ast.Lambda) and node is not function:
            inside.update(ast.walk(node))
    own = {n.id for n in set(ast.walk(function)) - inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return len(own)


def line_range(node: ast.stmt | ast.expr) -> range:
    """The numbers of a node's lines."""
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


# ---- a file ----------------------------------------------------------------------------------------------------------
def measure(path: str | Path) -> dict[str, float]:
    """{name of a quantity: its value} for a Python file: the quantities of BOUNDS, and `code`, its code lines."""
    lines = Path(path).read_text().splitlines()
    tree = ast.parse(Path(path).read_text())
    with open(path, encoding="utf-8") as file:
        tokens = list(tokenize.generate_tokens(file.readline))
    nodes = list(ast.walk(tree))

    docstring_lines = {line for node in nodes if is_docstring(node) for line in line_range(node)}
    code_tokens = [t for t in tokens if t.type not in LAYOUT and t.start[0] not in docstring_lines]
    code_lines = {line for t in code_tokens for line in range(t.start[0], t.end[0] + 1)} - docstring_lines
    declarations = [n for n in nodes if isinstance(n, ast.Import | ast.ImportFrom) or is_dataclass(n)]
    logic_lines = code_lines - {line for node in declarations for line in line_range(node)}
    num_comments = sum(t.type == tokenize.COMMENT for t in tokens)

    statements = [n for n in nodes if isinstance(n, ast.stmt) and n.lineno in logic_lines and not is_docstring(n)]
    sizes = [statement_size(statement) for statement in statements]
    num_long = sum(len(lines[line - 1]) > 100 for line in logic_lines)
    calls = [n for n in nodes if isinstance(n, ast.Call)]
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef)]
    return {
        "lines": len(lines),
        "code": len(code_lines),
        "tokens": len(code_tokens),
        "tokens/line": len(code_tokens) / max(1, len(code_lines)),
        "nodes/stmt": statistics.mean(sizes or [0]),
        "max_stmt": max(sizes, default=0),
        ">100cols%": 100 * num_long / max(1, len(logic_lines)),
        "packed": sum(is_packed(statement) for statement in statements),
        "bool_arith": sum(is_bool_arithmetic(node) for node in nodes),
        "positional": max((len(call.args) for call in calls), default=0),
        "locals": max((count_locals(function) for function in functions), default=0),
        "function": max((len(line_range(f)) for f in functions if f.name != "main"), default=0),
        "main": max((len(line_range(f)) for f in functions if f.name == "main"), default=0),
        "comments": num_comments / max(1, len(code_lines)),
    }


def broken_bounds(path: str | Path) -> list[str]:
    """A line for every bound that a file breaks, which names the file, the quantity, its value and the bound."""
    in_common = Path(path).resolve().is_relative_to(ROOT / "common")
    broken = []
    for name, value in measure(path).items():
        bound = BOUNDS.get(name)
        if bound is None or (in_common and not bound.of_common):
            continue
        if not bound.holds(value):
            side = "below" if bound.is_minimum else "above"
            broken.append(f"{path}: {name} {value:.4g} is {side} {bound.limit} ({bound.meaning})")
    return broken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--check", action="store_true", help="exit with 1, and say why, where a bound is broken")
    args = parser.parse_args()
    rows = {path: measure(path) for path in args.files}
    names = list(rows[args.files[0]])
    print("file".ljust(36), *(name.rjust(11) for name in names))
    for path, row in rows.items():
        values = [f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()]
        print(path[-36:].ljust(36), *(value.rjust(11) for value in values))
    broken = [line for path in args.files for line in broken_bounds(path)]
    if args.check and broken:
        sys.exit("\n".join(broken))


if __name__ == "__main__":
    main()
