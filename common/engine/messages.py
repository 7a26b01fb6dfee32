"""Messages between trainer and engine: plain data and requests, whose tensors lie in memory that both processes map.

The data is pickled, but a message can neither import nor call anything: the one class that it may name is
RolloutRequest. The engine's process runs vLLM's code on downloaded models, and the trainer reads its answers.

The memory comes from memfd_create and has no name. It is freed with the last process that maps it, however that process
ends, so nothing is left in /dev/shm. Its file descriptor travels through the pipe, which is a socket.
"""

import io
import math
import mmap
import os
import pickle
import socket
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recvfds, sendfds
from typing import Any

from common.errors import truncate
from common.rollout import RolloutRequest

import torch

ALIGNMENT = 64  # bytes: each tensor begins at a multiple of it
HASHED_AT_ONCE = 1 << 24  # elements: torch.hash_tensor makes a float64 copy of them
DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class Memory:
    """Bytes to lay tensors in, one after another, for another process."""

    def __init__(self, num_bytes: int) -> None:
        self.descriptor = os.memfd_create("cleanflow", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, num_bytes)
            self.bytes = mmap.mmap(self.descriptor, num_bytes)
        except (OSError, ValueError):
            os.close(self.descriptor)
            raise
        self.begins = torch.frombuffer(self.bytes, dtype=torch.uint8).data_ptr()
        self.end = 0  # where the next tensor goes

    def put(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Copy the tensor into this memory, from any device, and cast it to `dtype` on the way."""
        dtype = dtype or tensor.dtype
        placed = lay(self.bytes, self.end, dtype, tensor.shape)
        placed.copy_(tensor)
        self.end += padded(placed.nbytes)
        return placed

    def close(self) -> None:
        """Stop sharing. The tensors in the memory stay valid, here and in the process that received them."""
        os.close(self.descriptor)


def padded(num_bytes: int) -> int:
    """The bytes that a tensor of num_bytes takes up in a Memory."""
    return math.ceil(num_bytes / ALIGNMENT) * ALIGNMENT


def lay(memory: mmap.mmap | None, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """The tensor that begins at byte `offset` of the memory. An empty tensor needs no memory."""
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)


class TensorPickler(pickle.Pickler):
    """Pickles Python's own numbers, texts and containers, and requests. It collects tensors, in the order in which it
    meets them, and refuses everything else."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, value: object) -> int | None:
        if not isinstance(value, torch.Tensor):
            return None
        self.tensors.append(value)
        return len(self.tensors) - 1

    def reducer_override(self, value: object) -> Any:  # NotImplemented, whose type has no name here
        if value is not RolloutRequest and type(value) is not RolloutRequest:
            raise TypeError(f"{truncate(repr(value))} cannot be sent between trainer and engine: it is no plain data")
        return NotImplemented


class TensorUnpickler(pickle.Unpickler):
    """Puts the tensors back that TensorPickler left out, and refuses what it would not have pickled."""

    def __init__(self, data: bytes, tensors: Sequence[torch.Tensor] = ()) -> None:
        super().__init__(io.BytesIO(data))
        self.tensors = tensors

    def persistent_load(self, number: int) -> torch.Tensor:
        return self.tensors[number]

    def find_class(self, module: str, name: str) -> type[RolloutRequest]:
        if (module, name) != (RolloutRequest.__module__, RolloutRequest.__name__):
            raise pickle.UnpicklingError(f"a message names {module}.{name}, which is no plain data")
        return RolloutRequest


def send(connection: Connection, value: object, memory: Memory | None = None) -> None:
    """Send a value. If `memory` is given, all tensors of the value lie there and are not copied.

    Raises:
        TypeError: there is something else in it than plain data, requests and tensors.
    """
    file = io.BytesIO()
    pickler = TensorPickler(file)
    pickler.dump(value)
    tensors = [tensor.detach() for tensor in pickler.tensors]
    num_bytes = sum(padded(tensor.nbytes) for tensor in tensors)
    own_memory = None
    if memory is None and num_bytes:
        own_memory = Memory(num_bytes)
        memory = own_memory
        tensors = [memory.put(tensor) for tensor in tensors]
    layout: list[tuple[int, str, tuple[int, ...]]] = []  # per tensor: where it begins, its dtype and its shape
    for tensor in tensors:
        offset = tensor.data_ptr() - memory.begins if memory is not None and tensor.numel() else 0
        layout.append((offset, str(tensor.dtype), tuple(tensor.shape)))
    connection.send_bytes(pickle.dumps((num_bytes, layout, file.getvalue()), protocol=pickle.HIGHEST_PROTOCOL))
    if memory is not None and num_bytes:
        with as_socket(connection) as pipe:
            sendfds(pipe, [memory.descriptor])
    if own_memory is not None:
        own_memory.close()


def receive(connection: Connection) -> Any:  # whatever the other end has sent
    """The next value that was sent. Its tensors lie in the sender's memory, and may be written to.

    Raises:
        EOFError: the other end is closed.
        pickle.UnpicklingError: there is something in it that `send` would not have sent.
    """
    num_bytes, layout, data = TensorUnpickler(connection.recv_bytes()).load()
    memory = None
    if num_bytes:
        with as_socket(connection) as pipe:
            (descriptor,) = recvfds(pipe, 1)
        memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        os.close(descriptor)
    tensors = [lay(memory, offset, DTYPES[dtype], shape) for offset, dtype, shape in layout]
    return TensorUnpickler(data, tensors).load()


def as_socket(connection: Connection) -> socket.socket:
    """The socket behind an end of multiprocessing's Pipe."""
    return socket.socket(fileno=os.dup(connection.fileno()))


def fingerprint(tensor: torch.Tensor) -> int:
    """The xor of the bits of all elements as float64. Equal numbers give equal fingerprints in every dtype.

    Zeros count for nothing, so padding does not matter. A fingerprint shows one element that differs. It does not show
    two elements that changed places, or an even number of flipped signs.
    """
    value = 0
    for part in tensor.detach().flatten().split(HASHED_AT_ONCE):
        value ^= int(torch.hash_tensor(part).item())
    return value
