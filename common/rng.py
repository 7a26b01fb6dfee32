"""The global random generators, which a reward may draw from: seeded, saved in a checkpoint, and put back."""

import random

import numpy as np
import torch


def set_seed(seed):
    """Seed this process's global generators: Python's, NumPy's, and torch's on every device. seed: 0 to 2^32 - 1."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  (a reward may use it)
    torch.manual_seed(seed)


def rng_states():
    """States of this process's global generators: Python's, NumPy's, torch's on the CPU and on its current GPU."""
    algorithm, keys, *position = np.random.get_state()  # noqa: NPY002  (a reward may use it)
    states = {
        "python": random.getstate(),
        # as a tensor, because a checkpoint holds no arrays; torch has no arithmetic for uint32
        "numpy": [algorithm, torch.from_numpy(keys.astype(np.int64)), *position],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_rng_states(states):
    """Undo what was drawn since rng_states(); a GPU's state does nothing on a machine without one."""
    algorithm, keys, *position = states["numpy"]
    random.setstate(states["python"])
    np.random.set_state((algorithm, keys.numpy().astype(np.uint32), *position))  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
