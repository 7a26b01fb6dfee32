"""Optional parts of common/: each is imported where an option or a file asks for it.

A part may be deleted. A script that does not ask for it runs as before, and an option that asks for it ends the run in
one line. tests/core/test_optional.py has the list.
"""

import importlib
from pathlib import Path
from types import ModuleType

COMMON = Path(__file__).parent


def optional_part(name: str, asked_by: str) -> ModuleType:
    """The module or package common.NAME, "run.tracking" for example. asked_by: the option, as a message names it.

    Raises:
        ValueError: in one line that begins with `asked_by`: the part is not there.
    """
    require_part(name, asked_by)
    return importlib.import_module(f"common.{name}")


def require_part(name: str, asked_by: str) -> None:
    """Raises optional_part's ValueError where common.NAME is not there, and imports nothing."""
    place = COMMON / name.replace(".", "/")
    files = (place.with_suffix(".py"), place / "__init__.py")
    if not any(file.is_file() for file in files):
        raise ValueError(f"{asked_by}: needs {files[0]}, or a folder of that name, which is not in this checkout")
