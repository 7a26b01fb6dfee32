"""A user's own function, path/to/file.py:function: a reward or a kind of sampling step; and its errors."""

import functools
import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType


def built_in_module(name: str) -> ModuleType:
    """The module common.NAME, of a family or a reward that a run names."""
    return importlib.import_module(f"common.{name}")


def code_file(text: str) -> Path | None:
    """The .py file of "path/to/file.py:NAME"; None where a text names no code."""
    path = Path(text.rpartition(":")[0])
    return path if path.suffix == ".py" else None


@functools.cache
def load_function(location: str, option: str) -> Callable:
    """The function that `location`, "path/to/file.py:function", names.

    The file is imported under its own name, as a script's neighbour would be: dataclasses and pickling find it, and it
    can import the files beside it.

    Raises:
        ValueError: in one line that begins with `option` ("--reward"): the file or the function is not there, or the
            file cannot be imported.
    """
    path, _, name = location.rpartition(":")
    if not path:
        raise ValueError(f"{option} {location}: must be path/to/file.py:NAME")
    if not Path(path).is_file():
        raise ValueError(f"{option} {location}: no such file {path}")
    if Path(path).suffix != ".py":
        raise ValueError(f"{option} {location}: {path} is not a .py file")
    file = Path(path).resolve()
    try:
        module = _import_file(file)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{option} {location}: {describe(error, file.parent)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{option} {location}: {path} has no function {name}")
    return function


@functools.cache
def _import_file(path: Path) -> ModuleType:
    """The module of a file, imported once, its folder last on the path: what is installed comes first."""
    name = path.stem
    is_taken = name in sys.modules or not name.isidentifier()
    if not is_taken:
        installed = importlib.util.find_spec(name)
        is_taken = installed is not None and installed.origin != str(path)
    if is_taken:  # the file must not stand in for what is installed, or loaded, under its name
        name = f"user_file_{hashlib.blake2b(os.fsencode(path), digest_size=4).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader  # it is a .py file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit):
        del sys.modules[name]
        raise
    return module


def own_folder(function: Callable) -> Path | None:
    """The folder of the file that a user's function, or callable object, comes from; None where that is not known."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    return Path(file).parent if file else None


def describe(error: BaseException, folder: Path | None) -> str:
    """One line of some 500 letters: the error, and the innermost line of the user's own files, those in `folder`."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if folder and Path(frame.filename).is_relative_to(folder)]
    at = (own or frames)[-1]
    place = f"{at.filename}:{at.lineno}"
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{error.filename}:{error.lineno}"
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if len(text) > 400:
        text = text[:400] + " ..."
    return f"{text} ({place})"
