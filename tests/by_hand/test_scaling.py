"""benchmarks/scaling.py: its rows are runs that the scripts take."""

from benchmarks.scaling import UPDATES, with_micro_batch, workloads
from common.data import fit_micro_batch

import pytest

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("name", workloads())
def test_a_row_is_a_run_that_starts(name, monkeypatch):
    w = with_micro_batch(workloads()[name])
    monkeypatch.setenv("WORLD_SIZE", str(w.ranks))
    assert fit_micro_batch(w.num_images, UPDATES, w.micro_batch_images) == w.micro_batch_images
    assert int(name.split()[0]) == w.ranks
