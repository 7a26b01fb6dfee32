"""The engine's process: answers the trainer's calls over a pipe, until the trainer is gone.

`client.py` runs it as `python -m common.engine.server FD PARENT`, with the pipe's file descriptor and the trainer's
process id. The calls themselves are in `omni.py`, which imports vLLM-Omni and so is imported after `prepare`.
"""

import os
import queue
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection

from common.cpu import repair_torchvision, use_onednn
from common.engine import messages

Answer = tuple[int, bool, object]  # a call's number, whether it succeeded, and its value or one line about the failure
Answers = queue.SimpleQueue[Answer]
Calls = queue.SimpleQueue[tuple[int, str, tuple, dict] | None]  # number, operation, arguments; None: the trainer left


def prepare() -> None:
    """Two repairs for machines without a GPU. vLLM imports torchvision, so they come before vLLM."""
    repair_torchvision()
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":  # torch.compile has products of its own
        use_onednn()


def serve(connection: Connection) -> None:
    """Load the engine, then answer one call after another. A call that fails is reported, and the engine lives on."""
    start = time.time()
    calls: Calls = queue.SimpleQueue()
    answers: Answers = queue.SimpleQueue()
    threading.Thread(target=write_answers, args=(connection, answers), daemon=True).start()
    options, num_workers = messages.receive(connection)
    try:
        from common.engine import omni  # imports vLLM-Omni

        engine = omni.load_engine(options, num_workers)
    except Exception as error:
        traceback.print_exc()
        messages.send(connection, (0, False, one_line(error)))
        return
    answers.put((0, True, time.time() - start))
    threading.Thread(target=read_calls, args=(connection, calls), daemon=True).start()
    while True:
        call = calls.get()
        if call is None:
            break
        number, operation, args, kwargs = call
        try:
            answers.put((number, True, omni.answer(engine, operation, *args, **kwargs)))
        except Exception as error:
            traceback.print_exc()
            answers.put((number, False, one_line(error)))
        del call, args, kwargs  # the tensors of a push would otherwise stay in memory until the next call
    engine.close()


def read_calls(connection: Connection, calls: Calls) -> None:
    """Queue the trainer's calls while earlier ones are answered; None once the trainer has closed its end."""
    try:
        while True:
            calls.put(messages.receive(connection))
    except (EOFError, OSError):
        calls.put(None)


def write_answers(connection: Connection, answers: Answers) -> None:
    """Send the answers while the next call is under way. The traceback of a failure goes to stderr, our log."""
    while True:
        number, succeeded, value = answers.get()
        try:
            messages.send(connection, (number, succeeded, value))
        except (BrokenPipeError, ConnectionError):  # the trainer closed its end
            return
        except Exception as error:
            traceback.print_exc()
            messages.send(connection, (number, False, one_line(error)))


def one_line(error: Exception) -> str:
    """An exception's kind and text for the trainer's screen. Of a long text only the end is kept."""
    line = " ".join(f"{type(error).__name__}: {error}".split())
    if len(line) >= 400:
        line = f"... {line[-400:]}"
    return line


def exit_with_parent(parent: int) -> None:
    """End this process, whatever it is doing, once `parent` is no longer its parent."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__mp_main__":
    # a worker of an engine that is split: multiprocessing runs this file under this name before it imports vLLM
    prepare()

if __name__ == "__main__":
    threading.Thread(target=exit_with_parent, args=(int(sys.argv[2]),), daemon=True).start()
    prepare()
    serve(Connection(int(sys.argv[1])))
