"""The short --help of a script: its header, and the options that people set first. --help_all is tyro's own."""

import ast
import inspect
import textwrap
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

ROOT = Path(__file__).parents[1]

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


def _values(hint: type) -> str:
    """A type hint as --help shows it: INT, FLOAT FLOAT, STR ..., or the choices."""
    parts = [part for part in get_args(hint) if part is not NoneType]
    if get_origin(hint) is Literal:
        return "|".join(map(str, parts))
    if get_origin(hint) in (Union, UnionType):
        return "|".join(map(_values, parts))
    if get_origin(hint) is tuple:
        return f"{_values(parts[0])} ..." if parts[-1] is Ellipsis else " ".join(map(_values, parts))
    return str(getattr(hint, "__name__", hint)).upper()


def _shown(default: tuple | str | float | None) -> str:
    """A default as one would type it; a path inside the checkout relative to it."""
    shown = " ".join(map(str, default)) or "none" if isinstance(default, tuple) else str(default)
    return shown.replace(f"{ROOT}/", "")


def help_text(args_class: type, description: str) -> str:
    """The text of --help: the script's header and the options of FIRST that it has, one below the other."""
    hints = get_type_hints(args_class)
    texts = read_docstrings(args_class)
    defaults: dict[str, Any] = {field.name: field.default for field in fields(args_class)}
    lines = [description.strip(), ""]
    for name in FIRST:
        if name in defaults:
            lines.append(f"--{name} {_values(hints[name])}  (default: {_shown(defaults[name])})")
            lines += [*textwrap.wrap(texts[name], 100, initial_indent="    ", subsequent_indent="    "), ""]
    lines.append(f"--help_all shows all {len(defaults)} options.")
    return "\n".join(lines)
