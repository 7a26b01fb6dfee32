"""A user's own file, path/to/file.py:function: how it is imported, where it runs, and its errors.

Every user's file is imported in one thread, which lives as long as the process. Rewards run there as well: their
`load`, their checks, their trial, every call. What belongs to a thread, such as a connection to a database or an event
loop, can thus be made once. The trainer calls step kinds, families and `of_pixels` itself, in the main thread.

What the file changes of the process is put back after each of these (shared_state.py). Helpers of one name beside two
users' files are refused.
"""

import ast
import asyncio
import contextlib
import functools
import hashlib
import importlib.util
import inspect
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, wait
from importlib.machinery import PathFinder
from pathlib import Path
from types import CodeType, ModuleType
from typing import NoReturn, TypeVar

from common import process
from common.errors import RunError, message_of
from common.user_code.shared_state import kept

import torch

Result = TypeVar("Result")
ROOT = Path(__file__).resolve().parents[2]
# a user's file -> the folders in which it finds its helpers: its own, and what it puts on sys.path
_taken_in: dict[Path, list[Path]] = {}
_starting = threading.Lock()
LONG_S = 60  # that a call takes until a line tells of it
GRACE_S = 15  # of a call after a stop signal, where torchrun kills the run 30 s after it
NEVER_TRUE = ("__name__ == '__main__'", "TYPE_CHECKING", "typing.TYPE_CHECKING")  # of a file that is imported


# ---- the thread ------------------------------------------------------------------------------------------------------
def in_user_thread(function: Callable[[], Result], running: Callable[[], str] | None = None) -> Result:
    """What `function` returns or raises, run in the thread of users' files with as many threads of torch as here.

    A caller in another thread waits for what runs there already. running: says what the wait is for, where it may be
    long.

    Raises:
        RunError: naming what is running: it had not ended some seconds after a stop signal, and torchrun would kill
            the run before it could save.
    """
    with _starting:
        thread, jobs = _user_thread()
    if threading.current_thread() is thread:
        return function()
    future: Future[Result] = Future()
    jobs.put((future, function, torch.get_num_threads()))
    if running:
        _wait(future, running)
    return future.result()


def _wait(future: Future, running: Callable[[], str]) -> None:
    """Until a call has ended, or until it is given up."""
    began = time.monotonic()
    stopped: float | None = None  # when this wait first saw a stop signal
    is_told = False
    while not wait([future], timeout=1).done:
        now = time.monotonic()
        if not is_told and now - began > LONG_S:
            process.print_message(f"waiting for {running()}, {now - began:.0f} s so far")
            is_told = True
        if process.caught_signals:
            stopped = stopped or now
            if now - stopped > GRACE_S and process.is_killed_early():
                _user_thread.cache_clear()  # this one may hang for ever; what comes has another
                name = signal.Signals(process.caught_signals[0]).name
                raise RunError(
                    f"{running()} has not ended {GRACE_S} s after {name}, and torchrun kills a run after 30 s"
                )


def call_user_code(
    function: Callable[[], Result], subject: str, file: Path | None = None, *, beside_sampling: bool = False
) -> Result:
    """What `function` returns or raises, run in the thread of users' files; what it changes of the process is put back.

    subject: what the report of a change begins with. file: the user's file, where that is known. beside_sampling: the
    trainer may be sampling meanwhile.
    """

    def call() -> Result:
        began = Counter(sys.path)
        try:
            with kept(subject, beside_sampling=beside_sampling):
                return function()
        finally:
            if file and file in _taken_in:
                _taken_in[file] += [Path(entry).resolve() for entry in Counter(sys.path) - began]

    return in_user_thread(call)


@functools.cache
def _user_thread() -> tuple[threading.Thread, queue.SimpleQueue]:
    """The thread, started by the first call, and the queue of what it runs."""
    jobs: queue.SimpleQueue = queue.SimpleQueue()
    # a daemon: a reward that hangs must not keep a run from ending that has failed elsewhere
    thread = threading.Thread(target=_run_jobs, args=(jobs,), name="users' files", daemon=True)
    thread.start()
    return thread, jobs


def _forget_thread() -> None:
    """In a child that was forked, which has no other thread than the one that forked it."""
    global _starting
    _starting = threading.Lock()
    _user_thread.cache_clear()


os.register_at_fork(after_in_child=_forget_thread)


def _run_jobs(jobs: queue.SimpleQueue) -> NoReturn:
    owner = os.getpid()
    while True:
        future, function, num_threads = jobs.get()
        failure = None
        try:
            if torch.get_num_threads() != num_threads:  # each thread has its own number
                torch.set_num_threads(num_threads)
            _have_event_loop()  # opens files, of which there may be too many
            future.set_result(function())
        except BaseException as error:  # raised in the thread that waits for it
            failure = error
            future.set_exception(error)
        if os.getpid() != owner:  # a reward has forked, and its child has come back here
            os._exit(_exit_code(failure))
        del future, function, failure  # and the images with them


def _have_event_loop() -> None:
    """Let asyncio.get_event_loop find one, as it does in a main thread."""
    try:
        is_closed = asyncio.get_event_loop().is_closed()
    except RuntimeError:  # none was made yet, or asyncio.run took it away
        is_closed = True
    if is_closed:
        asyncio.set_event_loop(asyncio.new_event_loop())


def _exit_code(error: BaseException | None) -> int:
    """Of a process that ends with this error, or with the SystemExit that caused it."""
    while error and not isinstance(error, SystemExit) and error.__cause__:
        error = error.__cause__
    code = error.code if isinstance(error, SystemExit) else error and 1
    return code if isinstance(code, int) else int(code is not None)


# ---- imports ---------------------------------------------------------------------------------------------------------
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
        ValueError: in one line that begins with `option` ("--reward"): the file or the function is not there, the file
            cannot be imported, or one of its helpers has the name of another user's file's.
    """
    path, _, name = location.rpartition(":")
    if not path:
        raise ValueError(f"{option} {location}: must be path/to/file.py:NAME")
    if not Path(path).is_file():
        raise ValueError(f"{option} {location}: no such file {path}")
    if Path(path).suffix != ".py":
        raise ValueError(f"{option} {location}: {path} is not a .py file")
    file = Path(path).resolve()
    _taken_in.setdefault(file, [file.parent])
    try:
        module = call_user_code(functools.partial(_import_file, file), f"{option} {location}: importing it", file)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{option} {location}: {describe(error, file)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{option} {location}: {path} has no function {name}")
    if namesakes := find_namesakes():
        raise ValueError(f"{option} {location}: {namesakes}")
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


def own_file(function: Callable) -> Path | None:
    """The file that a user's function, or callable object, comes from; None where that is not known."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    return Path(file) if file else None


# ---- helpers of one name ---------------------------------------------------------------------------------------------
def find_namesakes() -> str:
    """What a message says of two helpers of one name, of which an `import` would give one user's file the other's; or
    "". All imports in the sources of users' files and of their helpers count, those in functions as well."""
    _subfolders.cache_clear()
    if len(_taken_in) < 2:
        return ""
    for file, folders in _taken_in.items():
        for name in sorted(_names_of(file)):
            for prefix in _prefixes(name):
                own, found = _places(file, folders, prefix), _importable(prefix)
                if not own or not found or (own & found and all(place.suffix for place in own & found)):
                    break  # no helper, or the right one
                if own & found:
                    continue  # folders without __init__.py, whose modules may have namesakes
                for other, its_folders in _taken_in.items():
                    if other != file and (taken := _places(other, its_folders, prefix) & found):
                        both = f"{min(taken)} (of {other.name}) and {min(own)} (of {file.name})"
                        return f"{both} are both imported as {prefix}, so both files would get one of them: rename one"
                break
    return ""


def _prefixes(name: str) -> list[str]:
    """a, a.b and a.b.c of a.b.c."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


def _names_of(file: Path) -> set[str]:
    """Dotted names that a user's file and its helpers import. Where a name is computed, those of its neighbours that
    are imported by now."""
    folders = _taken_in[file]
    names: set[str] = set()
    sources, read = [file], set()
    while sources:
        source = sources.pop()
        if source in read:
            continue
        read.add(source)
        imported = _imports(source)
        if "" in imported:
            beside = {path.stem for folder in folders for path in folder.iterdir()}
            imported |= {name for name in sys.modules if name.split(".")[0] in beside}
        names |= imported - {""}
        for name in imported - {""}:
            for prefix in _prefixes(name):
                sources += [place for place in _places(file, folders, prefix) if place.suffix == ".py"]
    return names


@functools.cache
def _imports(source: Path) -> frozenset[str]:
    """Dotted names that a source imports anywhere, when it is imported itself, and "" where one is computed."""
    try:
        nodes = _reached(ast.parse(source.read_bytes()))
    except (SyntaxError, ValueError, OSError):  # its import says so
        return frozenset()
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            given = node.args[0] if node.args else None
            names.add(str(given.value).lstrip(".") if isinstance(given, ast.Constant) else "")
    return frozenset(names)


def _reached(tree: ast.AST) -> list[ast.AST]:
    """All nodes, without what runs only where a file is a script, or is read by a type checker."""
    nodes = [tree]
    for node in nodes:  # grows meanwhile
        if isinstance(node, ast.If) and ast.unparse(node.test) in NEVER_TRUE:
            nodes += node.orelse
        else:
            nodes += ast.iter_child_nodes(node)
    return nodes


def _places(file: Path, folders: list[Path], name: str) -> set[Path]:
    """Where a user's file has a module of this dotted name: a source, the __init__.py of a package, or its folder."""
    inner = name.replace(".", "/")
    sources = [folder / f"{inner}{end}" for folder in folders for end in (".py", "/__init__.py")]
    found = {path.resolve() for path in sources if path.is_file()}
    if not found and name.split(".")[0] not in sys.stdlib_module_names:
        found = {folder / inner for folder in folders if any((folder / inner).glob("*.py"))}
    top = name.split(".")[0]
    if not found and top not in sys.stdlib_module_names and not _is_installed(top):
        # a folder beside the file may stand on sys.path only while the file is imported
        folders = _subfolders(file.parent).get(top, [])
        sources = [folder / f"{inner}{end}" for folder in folders for end in (".py", "/__init__.py")]
        found = {path.resolve() for path in sources if path.is_file()}
    return found


def _is_installed(name: str) -> bool:
    """Whether an import of this name gives what lies in no user's folder."""
    folders = {folder for of_file in _taken_in.values() for folder in of_file}
    places = _importable(name)
    return bool(places) and not any(place.is_relative_to(folder) for place in places for folder in folders)


@functools.cache  # for one comparison, as there may be many folders and many names
def _subfolders(folder: Path) -> dict[str, list[Path]]:
    """{name: the folders in `folder` that have a module or a folder of this name}."""
    found: dict[str, list[Path]] = {}
    for inner in folder.iterdir():
        with contextlib.suppress(NotADirectoryError, PermissionError, FileNotFoundError):
            for name in {entry.removesuffix(".py") for entry in os.listdir(inner)}:
                found.setdefault(name, []).append(inner)
    return found


def _importable(name: str) -> set[Path]:
    """What an import of this dotted name gives now: a file, or the folders of a package without __init__.py."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    spec = getattr(module, "__spec__", None)
    if not module:
        parent = sys.modules.get(name.rpartition(".")[0])
        if "." not in name or parent:
            spec = PathFinder.find_spec(name, getattr(parent, "__path__", None) if parent else None)
    if not spec:
        return {Path(file).resolve()} if file else set()
    if spec.has_location and spec.origin:
        return {Path(spec.origin).resolve()}
    return {Path(folder).resolve() for folder in spec.submodule_search_locations or ()}


# ---- errors ----------------------------------------------------------------------------------------------------------
def describe(error: BaseException, source: Callable | Path) -> str:
    """One line of some 500 letters: the error, and the innermost line of the user's own files, those in the folder
    of `source`, a user's function or its file. Where it has not come that far, as it takes other arguments: the
    function's own line.

    If that file imports something from beside it whose name CleanFlow has as well, the line says so.
    """
    file = source if isinstance(source, Path) else own_file(source)
    folder = file.parent if file else None
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if folder and Path(frame.filename).is_relative_to(folder)]
    at = (own or frames)[-1]
    place = f"{at.filename}:{at.lineno}"
    if not own and file:
        code = getattr(inspect.unwrap(source), "__code__", None) if callable(source) else None
        place = str(file)
        if isinstance(code, CodeType) and Path(code.co_filename) == file:
            place += f":{code.co_firstlineno}"
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{error.filename}:{error.lineno}"
    text = " ".join(f"{type(error).__name__}: {message_of(error)}".split())
    if len(text) > 400:
        text = text[:400] + " ..."
    if own and folder and Path(at.filename).is_file():
        names = {name.split(".")[0] for name in _imports(Path(at.filename))} - {""}
        beside = {folder.resolve(), Path(at.filename).resolve().parent} - {ROOT}
        for name in sorted(name for name in names if _is_in(ROOT, name)):
            if any(_is_in(where, name) for where in beside):
                text += f"; beside it is {name}, which CleanFlow has as well: rename yours"
    return f"{text} ({place})"


def _is_in(folder: Path, name: str) -> bool:
    return (folder / f"{name}.py").is_file() or any((folder / name).glob("*.py"))
