"""The engine's process: answers the trainer's calls over a pipe, until the trainer is gone.

`client.py` runs it as `python -m common.engine.server FD PARENT`, with the pipe's file descriptor and the trainer's
process id. The calls themselves are in `omni.py`. Where an engine is split over several workers, multiprocessing runs
this file in each of them too, under another name, before it imports vLLM there. Until vLLM is imported, this process
does not see that the trainer is gone.
"""

import contextlib
import os
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection

from common.cpu import repair_torchvision
from common.engine import messages
from common.errors import truncate

repair_torchvision()  # before vLLM is imported, which imports torchvision
# vLLM-Omni would take FlashAttention 3, which it installs, before 2, which the trainer takes. They round differently
sys.modules["fa3_fwd_interface"] = sys.modules["flash_attn_interface"] = None  # type: ignore[assignment]  # not there

from common.engine import omni  # noqa: E402


def serve(connection: Connection) -> None:
    """Load the engine, then answer one call after another. A call that fails is reported; only after a failed
    `generate`, at which vLLM-Omni closes itself, the engine takes no other.

    A call is (number, operation, args, kwargs); its answer (number, whether it succeeded, the value or one line about
    the failure), and the traceback of a failure goes to stderr, our log. The number of the start is 0.
    """
    options, num_workers = messages.receive(connection)
    try:
        engine = omni.load_engine(options, num_workers)
    except Exception as error:
        traceback.print_exc()
        messages.send(connection, (0, False, one_line(error)))
        return
    with contextlib.suppress(EOFError, ConnectionError):  # the trainer has closed its end
        messages.send(connection, (0, True, None))
        while True:
            number, operation, args, kwargs = messages.receive(connection)
            try:
                answer = (number, True, omni.answer(engine, operation, *args, **kwargs))
            except Exception as error:
                traceback.print_exc()
                answer = (number, False, one_line(error))
            messages.send(connection, answer)
            del args, kwargs, answer  # the tensors of a push would otherwise stay in memory until the next call
    engine.close()


def one_line(error: Exception) -> str:
    """An exception's kind and text, for the trainer's screen."""
    return truncate(" ".join(f"{type(error).__name__}: {error}".split()))


def exit_with_parent(parent: int) -> None:
    """End this process, whatever it is doing, once `parent` is no longer its parent."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=exit_with_parent, args=(int(sys.argv[2]),), daemon=True).start()
    serve(Connection(int(sys.argv[1])))
