"""Messages between trainer and engine: torch.save's files, in memory that both processes map.

`torch.load(weights_only=True)` reads them, so a message can neither import nor call anything; RolloutRequest is the one
class of ours that it may name. The engine's process runs vLLM's code on downloaded models.

The memory comes from memfd_create and has no name. It is freed with the last process that maps it, however that process
ends, so nothing is left in /dev/shm. Its file descriptor travels through the pipe, which is a socket.
"""

import os
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

from common.rollout import RolloutRequest

import torch

HASHED_AT_ONCE = 1 << 24  # elements: torch.hash_tensor makes a float64 copy of them


def send(connection: Connection, value: object) -> None:
    """Send tensors on the CPU, requests, and Python's numbers, texts and containers."""
    with open(os.memfd_create("cleanflow"), "wb") as file:
        torch.save(value, file)
        file.flush()
        send_handle(connection, file.fileno(), None)


def receive(connection: Connection) -> Any:  # whatever the other end has sent
    """The next value that was sent. Its tensors lie in the sender's memory; writing to them makes a copy.

    Raises:
        EOFError: the other end is closed.
        pickle.UnpicklingError: the value is something that `send` is not for.
    """
    descriptor = recv_handle(connection)
    try:
        with torch.serialization.safe_globals([RolloutRequest]):
            return torch.load(f"/proc/self/fd/{descriptor}", mmap=True, weights_only=True)
    finally:
        os.close(descriptor)


def fingerprint(tensor: torch.Tensor) -> int:
    """The xor of the bits of all elements as float64. Equal numbers give equal fingerprints in every dtype.

    Zeros count for nothing, so padding does not matter. A fingerprint shows one element that differs. It does not show
    two elements that changed places, or an even number of flipped signs.
    """
    value = 0
    for part in tensor.detach().flatten().split(HASHED_AT_ONCE):
        value ^= int(torch.hash_tensor(part).item())
    return value
