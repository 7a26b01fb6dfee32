"""benchmarks/scaling.py: its rows, and those of the page that cites it, are runs that the scripts take."""

import re

from benchmarks.scaling import UPDATES, with_micro_batch, workloads
from common.data import fit_micro_batch
from tests.conftest import ROOT

import pytest

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("name", workloads())
def test_a_row_is_a_run_that_starts(name, monkeypatch):
    w = with_micro_batch(workloads()[name])
    monkeypatch.setenv("WORLD_SIZE", str(w.ranks))
    assert fit_micro_batch(w.num_images, UPDATES, w.micro_batch_images) == w.micro_batch_images
    assert int(name.split()[0]) == w.ranks


def test_the_pages_rows_are_the_records():
    """Images a rank, seconds of gathering and of a step of every row."""
    record = (ROOT / "docs/lab/records/scaling.txt").read_text()
    page = (
        (ROOT / "docs/lab/performance.md")
        .read_text()
        .split("## From 8 to 1,024 GPUs, modelled")[1]
        .split("Compute is")[0]
    )
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if re.match(r"\| .*\d", line)]
    found = [(cells[1], cells[3], cells[5]) for cells in rows]
    recorded = set()
    for line in record.splitlines():
        numbers = line[26:].split()
        if len(numbers) == 15 and numbers[0].isdigit():
            recorded.add((numbers[0], f"{float(numbers[6]):.1f}".replace("0.0", "0"), numbers[10]))
    assert len(found) > 10 and not [row for row in found if row not in recorded]
