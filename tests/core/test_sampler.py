"""The group sampler, and the shares of an evaluation."""

import json
import re

from common.data import GroupSampler, PromptSet, gather_shares, share_eval_images, share_of_rank
from common.files.checkpoints import save_checkpoint, saved_checkpoints
from common.files.pictures import StoredImage
from common.models.family import Family
from common.run.checks import report_shared_prompts
from common.run.inputs import Inputs
from common.sde import image_seed

import pytest
import torch

pytestmark = pytest.mark.fast


# ---- GroupSampler, invariant 13 --------------------------------------------------------------------------------------
def group_sampler(*args, rank=0, world_size=1, **options):
    """A sampler that asks no process group which rank it is."""
    return GroupSampler(*args, rank=rank, world_size=world_size, **options)


SETTINGS = {"num_prompts": 20, "prompts_per_step": 4, "group_size": 6, "seed": 5}  # 24 images a step


@pytest.mark.parametrize("num_mini_batches", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_groups_and_shards(world_size, num_mini_batches):
    samplers = [
        group_sampler(**SETTINGS, num_mini_batches=num_mini_batches, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    alone = group_sampler(**SETTINGS)
    for _ in range(7):
        expected_rows = alone.draw()[0]
        draws = [sampler.draw() for sampler in samplers]
        assert all(len(image) == 24 // world_size for _, _, image in draws)
        shards = [set(image.tolist()) for _, _, image in draws]
        assert sum(len(shard) for shard in shards) == 24  # disjoint
        assert set().union(*shards) == set(range(24))  # covering
        for rows, prompt, image in draws:
            assert torch.equal(rows[prompt], expected_rows[image // 6])  # groups are consecutive
            assert prompt.unique().tolist() == list(range(len(rows)))  # no prompt but those of its own images
        for update in range(num_mini_batches):  # each optimizer step sees the same images on any number of ranks
            size = 24 // num_mini_batches
            mini_batch = torch.cat([image.chunk(num_mini_batches)[update] for _, _, image in draws])
            assert mini_batch.tolist() == list(range(update * size, (update + 1) * size))


@pytest.mark.parametrize(("num_prompts", "prompts_per_step"), [(20, 4), (7, 3), (3, 5), (1, 2)])
def test_every_epoch_is_a_permutation(num_prompts, prompts_per_step):
    sampler = group_sampler(num_prompts, prompts_per_step, 2, seed=0)
    stream = torch.cat([sampler.draw()[0] for _ in range(4 * num_prompts)]).tolist()
    epochs = [stream[i : i + num_prompts] for i in range(0, len(stream), num_prompts)]
    assert len(epochs) == 4 * prompts_per_step
    assert all(sorted(epoch) == list(range(num_prompts)) for epoch in epochs)
    if num_prompts == 20:
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs)  # a new order each time
        assert list(range(20)) not in epochs


def test_new_draw_each_step_and_seeds_matter():
    sampler = group_sampler(**SETTINGS)
    first, second = sampler.draw()[0].tolist(), sampler.draw()[0].tolist()
    assert not set(first) & set(second)
    assert group_sampler(**SETTINGS).draw()[0].tolist() == first
    assert group_sampler(**{**SETTINGS, "seed": 6}).draw()[0].tolist() != first


@pytest.mark.parametrize("drawn", [0, 1, 4, 5, 11])  # 5 draws are an epoch
def test_resume_continues_the_draws(drawn):
    sampler = group_sampler(**SETTINGS, num_mini_batches=2, rank=1, world_size=2)
    for _ in range(drawn):
        sampler.draw()
    state = json.loads(json.dumps(sampler.state_dict()))
    resumed = group_sampler(**SETTINGS, num_mini_batches=2, rank=1, world_size=2)
    resumed.draw()  # a state it must forget
    resumed.load_state_dict(state)
    for _ in range(8):
        for a, b in zip(sampler.draw(), resumed.draw(), strict=True):
            assert torch.equal(a, b)
    assert sampler.state_dict() == resumed.state_dict()


@pytest.mark.parametrize(("num_steps", "expected"), [(0, 0), (1, 4), (3, 12), (5, 20), (9, 20)])
def test_the_prompts_of_the_first_draws_are_known_before_them(num_steps, expected):
    prompts = [f"prompt {row}" for row in range(20)]
    sampler = group_sampler(**SETTINGS)
    drawn = [prompts[row] for _ in range(num_steps) for row in sampler.draw()[0]]
    found = PromptSet(prompts, [{}] * 20).first_drawn(num_steps * 4, SETTINGS["seed"]).prompts
    assert len(found) == expected and found == drawn[:expected] and set(found) == set(drawn)


def test_held_out_prompts_that_are_trained_on_are_counted_in_a_line(capfd):
    """An edit is the same where its pictures are."""
    pictures = [StoredImage("a", b"one"), StoredImage("b", b"two"), StoredImage("c", b"one")]
    trained = PromptSet(["a", "b", "edit", "edit"], [{}, {}, {"image": pictures[:1]}, {}])
    held_out = PromptSet(
        ["b", "c", "edit", "edit"], [{"tag": 1}, {}, {"image": pictures[1:2]}, {"image": pictures[2:]}]
    )
    report_shared_prompts("--train_prompts", trained, held_out)
    (line,) = capfd.readouterr().err.splitlines()
    assert re.match("--eval_prompts: 2 of its 4 .*--train_prompts .*'b'", line)
    report_shared_prompts("--train_prompts", trained, held_out.select([1, 2]))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("before", "now"), [(4, 2), (2, 4), (4, 4), (4, 1)])
def test_the_prompts_of_a_resumed_run_are_those_from_its_checkpoint_on(before, now, tmp_path):
    """It may draw fewer in a step than before: its draws lie further on than those of a whole run of that size."""
    prompt_set = PromptSet([f"prompt {row}" for row in range(20)], [{}] * 20)
    sampler = group_sampler(**SETTINGS | {"prompts_per_step": before})
    sampler.draw()
    sampler.draw()
    save_checkpoint(tmp_path, 2, {"step": 2, "sampler": sampler.state_dict()}, 1)
    resumed = group_sampler(**SETTINGS | {"prompts_per_step": now})
    resumed.load_state_dict(sampler.state_dict())
    drawn = {prompt_set.prompts[row] for _ in range(2) for row in resumed.draw()[0]}
    (checkpoint,) = saved_checkpoints(tmp_path)
    inputs = Inputs(Family, {}, {}, prompt_set, PromptSet([], []), lora=None, checkpoint=checkpoint)
    prepared = inputs.drawn_prompts(4, now, SETTINGS["seed"])
    assert drawn <= set(prepared) and len(set(prepared) - {""}) == 2 * (before + now)  # and the empty negative ones


SHARED = SETTINGS | {"num_prompts": [(7, 2), (3, 3), (10, 1)]}  # rows 0 to 6, 7 to 9 and 10 to 19


def test_files_take_turns_by_their_shares_each_in_epochs_of_its_own():
    """Over 180 prompts: of every 6 in a row 2, 3 and 1, not file after file; another order in each epoch of a file."""
    sampler = group_sampler(**SHARED)
    stream = torch.cat([sampler.draw()[0] for _ in range(45)]).tolist()
    files = ["abc"[(row > 6) + (row > 9)] for row in stream]
    turns = {"".join(files[start : start + 6]) for start in range(175)}
    assert {"".join(sorted(turn)) for turn in turns} == {"aabbbc"} and "babbac" not in turns and len(turns) == 6
    assert "".join(files[:6]) == "babcab"
    for file, first, count in (("a", 0, 7), ("b", 7, 3), ("c", 10, 10)):
        rows = [row for row, of in zip(stream, files, strict=True) if of == file]
        epochs = [rows[start : start + count] for start in range(0, len(rows) - count, count)]
        assert all(sorted(epoch) == list(range(first, first + count)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1
    assert sampler.epoch == 9 and stream != torch.cat([group_sampler(**SETTINGS).draw()[0] for _ in range(45)]).tolist()
    twins = group_sampler(**SETTINGS | {"num_prompts": [(20, 1), (20, 1)]})
    both = torch.cat([twins.draw()[0] for _ in range(10)]).view(20, 2)
    assert (both[:, 0] + 20 != both[:, 1]).any()  # files of one length have orders of their own


@pytest.mark.parametrize("parts", [20, SHARED["num_prompts"]])
def test_without_a_seed_prompts_come_in_the_order_of_their_file_on_every_rank_and_after_a_resume(parts):
    """--shuffle False. 60 draws have each of 20 prompts three times; of three files with shares each its own."""
    settings = SETTINGS | {"num_prompts": parts, "seed": None, "num_mini_batches": 2}
    alone = group_sampler(**settings)
    stream = [row for _ in range(15) for row in alone.draw()[0].tolist()]
    for first, count in ((0, 20),) if parts == 20 else ((0, 7), (7, 3), (10, 10)):
        rows = [row - first for row in stream if first <= row < first + count]
        assert rows == [place % count for place in range(len(rows))] and len(rows) >= 10
    prompts = PromptSet([f"prompt {row}" for row in range(20)], [{}] * 20, shares=[] if parts == 20 else parts)
    known = prompts.first_drawn(12, None).prompts
    assert known == [f"prompt {row}" for row in dict.fromkeys(stream[:12])]
    ranks = [group_sampler(**settings, rank=rank, world_size=2) for rank in (0, 1)]
    for rank in ranks:
        rank.load_state_dict({"position": 8})
    drawn = [[rank.draw()[0].tolist() for rank in ranks] for _ in range(3)]
    assert [sorted({*one, *two}) for one, two in drawn] == [sorted(stream[8 + 4 * k : 12 + 4 * k]) for k in range(3)]


def test_one_file_is_drawn_as_without_shares():
    whole, one, shared = (group_sampler(**SETTINGS | {"num_prompts": n}) for n in (20, [(20, 1)], [(20, 5)]))
    for _ in range(20):
        assert whole.draw()[0].tolist() == one.draw()[0].tolist() == shared.draw()[0].tolist()
    assert PromptSet(["p"] * 20, [{}] * 20).parts == [(20, 1)]


@pytest.mark.parametrize("num_steps", [0, 1, 3, 10, 15, 40])
def test_draws_by_shares_are_known_before_them_on_every_rank_and_after_a_resume(num_steps):
    prompts = [f"prompt {row}" for row in range(20)]
    sampler = group_sampler(**SHARED)
    rows = [row for _ in range(num_steps) for row in sampler.draw()[0].tolist()]
    known = PromptSet(prompts, [{}] * 20, shares=SHARED["num_prompts"]).first_drawn(num_steps * 4, SHARED["seed"])
    assert known.prompts == [f"prompt {row}" for row in dict.fromkeys(rows)]
    assert (len(known) == 20) == (num_steps in (15, 40))  # 60 draws have the ten prompts of the last file
    ranks = [group_sampler(**SHARED, num_mini_batches=2, rank=rank, world_size=2) for rank in (0, 1)]
    for rank in ranks:
        rank.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    upcoming = sampler.upcoming(num_steps)
    rows = [row for _ in range(num_steps) for row in sampler.draw()[0].tolist()]
    of_ranks = [row for _ in range(num_steps) for rank in ranks for row in rank.draw()[0].tolist()]
    assert upcoming == set(rows) == set(of_ranks)


def test_state_does_not_depend_on_the_number_of_ranks():
    one, two = group_sampler(**SETTINGS), group_sampler(**SETTINGS, rank=1, world_size=2)
    one.draw(), two.draw()
    assert one.state_dict() == two.state_dict()


@pytest.mark.parametrize(
    "sizes", [{"num_mini_batches": 5}, {"world_size": 5}, {"num_mini_batches": 4, "world_size": 4}]
)
def test_sizes_that_do_not_divide(sizes):
    with pytest.raises(ValueError, match="4 .* x 6 "):
        group_sampler(**SETTINGS, **sizes)


@pytest.mark.parametrize("total", [1, 6, 7])
@pytest.mark.parametrize(("world_size", "ranks_per_image"), [(1, 1), (2, 1), (4, 1), (4, 2), (6, 3)])
def test_a_share_is_as_large_on_every_rank_and_gathered_in_order(monkeypatch, total, world_size, ranks_per_image):
    """The ranks of a sequence group have the same share."""
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: world_size)
    monkeypatch.setattr("common.distributed._ranks_per_image", ranks_per_image)
    shares = []
    for rank in range(world_size):
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        shares.append(share_of_rank(total))
    assert {len(share) for share in shares} == {-(-total // (world_size // ranks_per_image))}
    assert all(shares[rank] == shares[rank - rank % ranks_per_image] for rank in range(world_size))
    assert set(sum(shares, [])) == set(range(total))
    rows = torch.tensor(shares)[..., None] * torch.tensor([1, 10])  # (world size, B, 2)
    monkeypatch.setattr("common.data.gather", lambda tensor: rows)
    assert gather_shares(rows[0], total).tolist() == [[place, 10 * place] for place in range(total)]


def test_the_seeds_of_a_files_prompts_do_not_depend_on_other_files(one_rank):
    """Three prompts of one file before two of another, two images each: those of the second count from 0 again."""
    of_files = [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1)]
    both = PromptSet(list("vwxyz"), [{}] * 5, files=[name for name, _ in of_files])
    places, prompts, seeds = share_eval_images(both, 2)
    assert places == list(range(10)) and prompts.prompts == list("vvwwxxyyzz")
    assert seeds == [image_seed("eval", image, row) for _, row in of_files for image in range(2)]
    _, _, alone = share_eval_images(PromptSet(["y", "z"], [{}] * 2), 2)
    assert alone == seeds[6:]
