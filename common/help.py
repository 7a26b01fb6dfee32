"""The short --help of a script: its header, and the options that people set first. --help_all is tyro's own."""

import ast
import inspect
import textwrap
from dataclasses import fields, make_dataclass
from itertools import pairwise
from typing import Annotated, NoReturn, get_type_hints

import tyro

# the options that people set first
FIRST = (
    *("name", "model", "image_size", "train_prompts", "eval_prompts", "pairs", "reward", "rollout"),
    *("num_steps", "num_prompts", "group_size", "learning_rate"),
)


def read_docstrings(args_class: type) -> dict[str, str]:
    """{name: docstring} of a dataclass's options, from the source of the class and of its bases."""
    found = {}
    for part in reversed(args_class.__mro__[:-1]):
        (class_node,) = ast.parse(textwrap.dedent(inspect.getsource(part))).body
        assert isinstance(class_node, ast.ClassDef)
        for statement, below in pairwise(class_node.body):
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                found[statement.target.id] = " ".join(str(below.value.value).split())
    return found


def print_help(args_class: type, description: str) -> NoReturn:
    """Print the script's header and tyro's help of the options of FIRST that it has, and exit."""
    hints = get_type_hints(args_class, include_extras=True)
    texts = read_docstrings(args_class)
    defaults = {field.name: field.default for field in fields(args_class)}
    shown: list[tuple] = []
    for name in FIRST:
        if name in defaults:
            shown.append((name, Annotated[hints[name], tyro.conf.arg(help=texts[name])], defaults[name]))
    more = f"--help_all shows all {len(defaults)} options."
    first = make_dataclass(args_class.__name__, shown)
    tyro.cli(first, args=["--help"], description=f"{description.strip()}\n\n{more}", use_underscores=True)
    raise SystemExit(0)
