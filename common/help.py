"""--help and docs/options.md: the options of a script, from the fields, comments and docstrings of its Args."""

import ast
import inspect
import re
import textwrap
from dataclasses import MISSING, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

ROOT = Path(__file__).parents[1]

# the options that people set first, for --help; --help_all shows the others
FIRST = (
    *("name", "model", "image_size", "train_prompts", "eval_prompts", "pairs", "reward", "rollout"),
    *("num_steps", "num_prompts", "group_size", "learning_rate"),
)


class Option(NamedTuple):
    """An option as --help shows it."""

    group: str
    values: str  # "INT", "vllm|local", "STR ..."
    default: str
    help: str


def read_options(args_class: type) -> dict[str, Option]:
    """The options of a dataclass by name, from its fields and from the comments and docstrings of its source."""
    hints = get_type_hints(args_class)
    groups: dict[str, str] = {}
    texts: dict[str, str] = {}
    for part in reversed(args_class.__mro__[:-1]):
        source = textwrap.dedent(inspect.getsource(part))
        lines = source.splitlines()
        (class_node,) = ast.parse(source).body
        assert isinstance(class_node, ast.ClassDef)
        for statement, below in zip(class_node.body, [*class_node.body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                titles = re.findall(r"^    # ---- (\w+)$", "\n".join(lines[: statement.lineno]), re.MULTILINE)
                groups[statement.target.id] = titles[-1] if titles else "algorithm"
                if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                    texts[statement.target.id] = " ".join(str(below.value.value).split())
    options = {}
    for field in fields(args_class):
        default = "" if field.default is MISSING else _shown(field.default)
        values = _values(hints[field.name])
        options[field.name] = Option(groups[field.name], values, default, texts.get(field.name, ""))
    return options


def _values(hint: type) -> str:
    """A type hint as --help shows it: INT, FLOAT FLOAT, STR ..., True|False, or the choices."""
    parts = [part for part in get_args(hint) if part is not NoneType]
    if get_origin(hint) is Literal:
        return "|".join(map(str, parts))
    if get_origin(hint) in (Union, UnionType):
        return "|".join(map(_values, parts))
    if get_origin(hint) is tuple:
        return f"{_values(parts[0])} ..." if parts[-1] is Ellipsis else " ".join(map(_values, parts))
    return "True|False" if hint is bool else str(getattr(hint, "__name__", hint)).upper()


def _shown(default: tuple | str | float | None) -> str:
    """A default as one would type it; a path inside the checkout relative to it."""
    if isinstance(default, tuple):
        return " ".join(map(str, default)) or "none"
    return str(default).replace(f"{ROOT}/", "")


def help_text(args_class: type, description: str, *, first_only: bool) -> str:
    """The text of --help: the script's header and its options, one below the other."""
    options = read_options(args_class)
    lines = [description.strip(), ""]
    group = ""
    order = [name for name in FIRST if name in options]
    if not first_only:
        order = sorted(options, key=lambda name: list(_groups(options)).index(options[name].group))
    for name in order:
        option = options[name]
        if not first_only and option.group != group:
            group = option.group
            lines += [f"---- {group}", ""]
        lines.append(f"--{name} {option.values}  (default: {option.default})")
        lines += [*textwrap.wrap(option.help, 100, initial_indent="    ", subsequent_indent="    "), ""]
    if first_only:
        lines.append(f"--help_all shows all {len(options)} options.")
    return "\n".join(lines)


def _groups(options: dict[str, Option]) -> dict[str, None]:
    """The groups of --help_all in the order of the five scripts' titles."""
    usual = ("run", "model", "policy", "data", "reward", "rollout", "algorithm", "optimization", "evaluation")
    return dict.fromkeys([*usual, *(option.group for option in options.values())])
