"""What a rank has to do does not grow with the number of ranks."""

from benchmarks.ranks import count_largest

import pytest


def test_a_rank_of_1024_has_the_work_and_memory_of_a_rank_of_8():
    """Within 10 % (places of all images are 0.8 MB), counted by running each part as a rank of both worlds.

    A draw also keeps 16 bytes for each prompt of all ranks: its row, and the rollout that made its group.
    """
    # a mini-batch's 6 images of a rank are of two groups of 4, so that groups meet from several ranks
    sizes = {"images": 12, "group_size": 4, "num_mini_batches": 2, "side": 96, "num_prompts": 4096}
    few = count_largest(8, **sizes)
    many = count_largest(1024, **sizes)
    of_all_prompts = 16 * (1024 - 8) * sizes["images"] // sizes["group_size"]  # bytes, of many more than of few
    many["draw"]["written"] -= of_all_prompts
    many["draw"]["peak"] -= min(of_all_prompts, many["draw"]["peak"] - few["draw"]["peak"])
    assert few["encode"]["prompts"] == 4 and few["cache, filled"]["prompts"] == 3  # 12 images / 4
    assert few["diversity"]["pairs"] == 4 * 6
    for part, counts in few.items():
        assert counts["written"] > 1000 and counts["peak"] > 1000
        for name, value in counts.items():
            assert many[part][name] == pytest.approx(value, rel=0.1), (part, name)
