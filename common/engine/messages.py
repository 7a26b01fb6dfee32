"""What passes between trainer and engine: pickled objects, whose tensors lie in memory that both processes map.

The memory is memfd_create's, which has no name: it is gone with the last process that has it, however that one ends,
and nothing is left in /dev/shm. Its file descriptor goes through the pipe, which is a socket.
"""

import io
import math
import mmap
import os
import pickle
import socket
from multiprocessing.reduction import recvfds, sendfds

import torch

ALIGNMENT = 64  # bytes, at a multiple of which each tensor begins
HASHED_AT_ONCE = 1 << 24  # elements: torch.hash_tensor makes a float64 copy of them


class Memory:
    """Bytes to lay tensors in, one after another, for another process."""

    def __init__(self, num_bytes):
        self.descriptor = os.memfd_create("cleanflow", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, num_bytes)
            self.bytes = mmap.mmap(self.descriptor, num_bytes)
        except (OSError, ValueError):
            os.close(self.descriptor)
            raise
        self.begins = torch.frombuffer(self.bytes, dtype=torch.uint8).data_ptr()
        self.end = 0  # where the next tensor goes

    def put(self, tensor, dtype=None):
        """The tensor, copied here from whatever device, and cast to `dtype` on the way."""
        dtype = dtype or tensor.dtype
        placed = lay(self.bytes, self.end, dtype, tensor.shape)
        placed.copy_(tensor)
        self.end += padded(placed.nbytes)
        return placed

    def close(self):
        """Nobody else gets it any more; the tensors in it live on, here and where it was sent."""
        os.close(self.descriptor)


def padded(num_bytes):
    """The bytes that a tensor of num_bytes takes up in a Memory."""
    return math.ceil(num_bytes / ALIGNMENT) * ALIGNMENT


def lay(memory, offset, dtype, shape):
    """The tensor that lies at `offset` of a buffer."""
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)


class TensorPickler(pickle.Pickler):
    """Leaves the tensors out, and keeps them in the order in which it met them."""

    def __init__(self, file):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors = []

    def persistent_id(self, value):
        if not isinstance(value, torch.Tensor):
            return None
        self.tensors.append(value)
        return len(self.tensors) - 1


class TensorUnpickler(pickle.Unpickler):
    """Puts in the tensors that TensorPickler left out."""

    def __init__(self, file, tensors):
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, number):
        return self.tensors[number]


def send(connection, value, memory=None):
    """Send any value that pickle takes. With `memory` all of its tensors lie there, and are not copied once more."""
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
    # of each: where it begins, and what it is
    layout = []
    for tensor in tensors:
        offset = tensor.data_ptr() - memory.begins if tensor.numel() else 0
        layout.append((offset, tensor.dtype, tensor.shape))
    connection.send_bytes(pickle.dumps((num_bytes, layout, file.getvalue()), protocol=pickle.HIGHEST_PROTOCOL))
    if num_bytes:
        with as_socket(connection) as pipe:
            sendfds(pipe, [memory.descriptor])
    if own_memory is not None:
        own_memory.close()


def receive(connection):
    """The value that was sent next; its tensors lie in the sender's memory, and may be written to.

    Raises:
        EOFError: the other end is closed.
    """
    num_bytes, layout, data = pickle.loads(connection.recv_bytes())
    memory = None
    if num_bytes:
        with as_socket(connection) as pipe:
            (descriptor,) = recvfds(pipe, 1)
        memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        os.close(descriptor)
    tensors = [lay(memory, offset, dtype, shape) for offset, dtype, shape in layout]
    return TensorUnpickler(io.BytesIO(data), tensors).load()


def as_socket(connection):
    """The socket that multiprocessing's Pipe is made of."""
    return socket.socket(fileno=os.dup(connection.fileno()))


def fingerprint(tensor):
    """The xor of the bits of all elements as float64: of the same numbers the same, in whatever dtype they are held.

    Zeros count for nothing, so that padding is no matter. One element that differs shows; two that changed places, or
    a sign turned in an even number of them, do not.
    """
    value = 0
    for part in tensor.detach().flatten().split(HASHED_AT_ONCE):
        value ^= torch.hash_tensor(part).item()
    return value
