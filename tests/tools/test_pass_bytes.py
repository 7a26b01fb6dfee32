"""benchmarks/pass_bytes.py counts what a pass reads and writes by source: held by hand on a small model."""

from benchmarks.pass_bytes import count, table, total
from tests.conftest import EMBEDDED

import pytest

BLOCKS, WIDTH, HEADS_WIDTH = 4, 128, 32  # of the embedded model
IMAGES, TEXT, RANK = 3, 16, 4


@pytest.fixture(scope="module")
def counted():
    sizes = {"rank": RANK, "images": IMAGES, "size": (32, 96), "tokens": TEXT}
    ways = {"before": (False, False), "norms": (True, False), "both": (True, True)}
    return {way: count(EMBEDDED, **sizes, norms=norms, lora=lora) for way, (norms, lora) in ways.items()}


def test_norms_of_queries_and_keys(counted):
    """A kernel reads the input and the weight and writes the output; backward it reads two tensors and writes one."""
    height, width = 32 // 4 // 2, 96 // 4 // 2  # tokens: 4 pixels to a latent, 2 latents to a token
    rows = 2 * IMAGES * (height * width + 16 + 77)  # both branches of guidance; CLIP's 77 tokens beside T5's
    elements = BLOCKS * 2 * rows * WIDTH
    num_norms = 4 * BLOCKS  # q and k, of the image and of the text
    before, now = counted["before"], counted["norms"]
    assert before.operators["RMSNorm", False] == 8 * num_norms
    assert (now.operators["RMSNorm", False], now.operators["RMSNorm", True]) == (num_norms, num_norms)
    assert now.bytes["RMSNorm", False] == 2 * 2 * elements + num_norms * 2 * HEADS_WIDTH
    assert now.bytes["RMSNorm", True] == 3 * 2 * elements
    assert before.bytes["RMSNorm", False] > 8 * 2 * elements


def test_a_loras_scale_and_sum(counted):
    """peft's two kernels of a module forward are gone, and one of its backward pass is as wide as the rank alone."""
    modules = 8 * BLOCKS - 1  # nothing reads the text that comes out of the last block
    before, now = counted["norms"], counted["both"]
    assert before.operators["LoRALinear", False] + before.operators["Linear", False] >= 2 * modules
    assert before.operators["Linear", True] > 0  # gradients of an input, added
    assert now.operators["LoRALinear", False] < modules  # copies of what is no whole tensor
    assert now.bytes["LoRALinear", False] < 0.2 * before.bytes["LoRALinear", False]
    assert now.operators["matrix products", False] == before.operators["matrix products", False]
    assert total(now.operators) < total(before.operators) - modules
    assert now.bytes["GELU", True] == before.bytes["GELU", True]


def test_every_operator_is_in_the_table(counted):
    """The last row's first number of a way is the sum of its column."""
    *rows, last = [line.split("|")[1:-1] for line in table(counted)[2:]]
    for i, counter in enumerate(counted.values()):
        column = 1 + 2 * i
        listed = sum(int(number.replace(",", "")) for row in rows for number in row[column].split("/"))
        assert listed == total(counter.operators) == int(last[column].strip(" *").replace(",", ""))
