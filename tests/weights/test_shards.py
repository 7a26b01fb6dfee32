"""common/weights/shards.py: what ranks write of full weights is whole or not there, and read by any number of ranks."""

import random
from types import SimpleNamespace

from common.errors import NothingBegun, RunError
from common.files.checkpoints import checkpoint_path, load_checkpoint, save_checkpoint, saved_checkpoints, shards_of
from common.weights import shards
from common.weights.states import load_training_state, training_state
from tests.conftest import good_state

import pytest
import torch
from torch.distributed.fsdp import fully_shard

pytestmark = [pytest.mark.fast, pytest.mark.usefixtures("one_rank")]


class Half(torch.nn.Sequential):
    """Of its layers only the first one is used."""

    def forward(self, x):
        return self[0](x)


def tiny_model(seed, policies=("default", "ema"), width=4):
    """Full weights of two layers, the second of which feeds nothing, and their optimizer after one step."""
    torch.manual_seed(seed)
    model = SimpleNamespace(is_lora=False, policies={}, frozen_policies={"reference"}, device=torch.device("cpu"))
    model.num_updates = 1
    for name in policies:
        model.policies[name] = fully_shard(Half(torch.nn.Linear(3, width), torch.nn.Linear(width, 2)))
        model.policies[name].requires_grad_(name == "default")
    model.transformer = model.policies["default"]
    optimizer = torch.optim.AdamW(model.transformer.parameters(), lr=0.1)
    return model, optimizer


def step(model, optimizer):
    model.transformer(torch.ones(1, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def save(run, model, optimizer, number, keep=9):
    """The path of a checkpoint of step `number`."""
    path = checkpoint_path(run, number)
    state = good_state() | training_state(model, optimizer, path) | {"step": number}
    save_checkpoint(run, number, state, keep)
    return path


def whole(model, optimizer):
    """Every tensor by name, and how many optimizer steps each parameter has had."""
    found = {}
    for name, transformer in model.policies.items():
        found |= {f"{name} {key}": tensor.full_tensor() for key, tensor in transformer.state_dict().items()}
    for key, parameter in model.transformer.named_parameters():
        for moment, value in optimizer.state.get(parameter, {}).items():
            found[f"{moment} {key}"] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found


def load(path, model, optimizer):
    load_training_state(model, optimizer, load_checkpoint(path) | {"path": path})


# ---- saving and loading ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("file_bytes", [shards.FILE_BYTES, 20])
@pytest.mark.parametrize("has_stepped", [True, False])
def test_what_is_loaded_is_what_was_saved(tmp_path, monkeypatch, has_stepped, file_bytes):
    """Also moments, of the layer alone that has a gradient; and a run that has not stepped yet loads none."""
    monkeypatch.setattr(shards, "FILE_BYTES", file_bytes)
    model, optimizer = tiny_model(1)
    if has_stepped:
        step(model, optimizer)
    path = save(tmp_path, model, optimizer, 3)
    other, its_optimizer = tiny_model(2)
    load(path, other, its_optimizer)
    expected, found = whole(model, optimizer), whole(other, its_optimizer)
    assert expected.keys() == found.keys() and len(found) == (2 * 4 + 2 * 3 if has_stepped else 2 * 4)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    for each, of_each in ((model, optimizer), (other, its_optimizer)):  # and it goes on alike
        step(each, of_each)
    expected, found = whole(model, optimizer), whole(other, its_optimizer)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_policy_that_was_not_saved_begins_as_the_trained_one(tmp_path):
    model, optimizer = tiny_model(1, policies=["default"])
    path = save(tmp_path, model, optimizer, 3)
    other, its_optimizer = tiny_model(2, policies=["default", "ema", "reference"])
    reference = {name: tensor.full_tensor() for name, tensor in other.policies["reference"].state_dict().items()}
    load(path, other, its_optimizer)
    found = whole(other, its_optimizer)
    for name, tensor in whole(model, optimizer).items():
        assert torch.equal(found[name], tensor) and torch.equal(found[name.replace("default", "ema")], tensor)
    assert all(torch.equal(found[f"reference {name}"], tensor) for name, tensor in reference.items())


def test_weights_of_another_shape_are_named(tmp_path):
    path = save(tmp_path, *tiny_model(1), 3)
    with pytest.raises(NothingBegun, match=" default .* 0.bias "):
        load(path, *tiny_model(2, width=5))


def test_the_file_is_small_and_the_oldest_goes_with_its_shards(tmp_path):
    model, optimizer = tiny_model(1, width=40_000)
    for number in (1, 2, 3):
        path = save(tmp_path, model, optimizer, number, keep=2)
    assert path.stat().st_size < 40_000
    assert sum(file.stat().st_size for file in shards_of(path).iterdir()) > 2 * 4 * 5 * 40_000
    left = sorted(file.name for file in path.parent.iterdir())
    assert left == ["step_000002.pt", "step_000002.shards", "step_000003.pt", "step_000003.shards"]


def test_shards_without_their_file_are_no_checkpoint_and_go(tmp_path):
    """A kill has come between the two."""
    model, optimizer = tiny_model(1)
    first = save(tmp_path, model, optimizer, 1)
    training_state(model, optimizer, checkpoint_path(tmp_path, 2))
    assert saved_checkpoints(tmp_path) == [first]
    third = save(tmp_path, model, optimizer, 3)
    assert not shards_of(checkpoint_path(tmp_path, 2)).exists() and shards_of(third).exists()


# ---- damage ----------------------------------------------------------------------------------------------------------
def test_200_damaged_shards_are_200_named(tmp_path, monkeypatch):
    """Cut short, or with a flipped bit, at any place of any file."""
    monkeypatch.setattr(shards, "FILE_BYTES", 100)
    path = save(tmp_path, *tiny_model(1), 3)
    chance = random.Random(1)
    files = sorted(shards_of(path).iterdir())
    assert len(files) == 3  # of 232 bytes of tensors
    for number in range(200):
        file = chance.choice(files)
        content = file.read_bytes()
        place = chance.randrange(len(content))
        if number % 2:
            file.write_bytes(content[:place])
            with pytest.raises(ValueError, match=f"{file.name} "):
                load_checkpoint(path)
        else:
            flipped = bytearray(content)
            flipped[place] ^= 1 << chance.randrange(8)
            file.write_bytes(flipped)
            assert shards.find_fault(path, load_checkpoint(path)["shards"]).endswith(f"{file.name})")
        file.write_bytes(content)
    assert shards.find_fault(path, load_checkpoint(path)["shards"]) is None


def test_the_checkpoint_before_a_damaged_one_is_used(tmp_path, capfd):
    model, optimizer = tiny_model(1)
    paths = [save(tmp_path, model, optimizer, number) for number in (1, 2, 3)]
    for path in paths[1:]:
        [file] = shards_of(path).iterdir()
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    state = load_checkpoint(paths[2])
    found, its_state = shards.first_intact(paths[2], state, may_be_earlier=True)
    assert (found, its_state["step"]) == (paths[0], 1)
    lines = capfd.readouterr().err.splitlines()
    assert [line.rpartition(" ")[2] for line in lines] == ["step_000002.pt", "step_000001.pt"]
    paths[0].unlink()
    for path, may_be_earlier in ((paths[2], False), (paths[1], True)):  # with no advice to resume from one of them
        with pytest.raises(NothingBegun, match=rf": {path} .*\(bad CRC32 "):
            shards.first_intact(path, load_checkpoint(path), may_be_earlier)


def test_a_file_that_cannot_be_read_back_is_named_and_nothing_stays(tmp_path, monkeypatch):
    """DCP writes a number in front of the header, and says nothing."""
    model, optimizer = tiny_model(1)
    own = shards.own_tensors
    monkeypatch.setattr(shards, "own_tensors", lambda *args, **kwargs: own(*args, **kwargs) | {"optimizer/x/step": 3.0})
    monkeypatch.setattr(shards, "file_numbers", lambda tensors: None)
    path = checkpoint_path(tmp_path, 1)
    file = shards_of(path) / "shard-00001-model-00001-of-00001.safetensors"
    with pytest.raises(RunError, match=rf"^{file} .*\(Error while deserializing header"):
        training_state(model, optimizer, path)
    assert not shards_of(path).exists()


def test_a_disk_that_fails_is_named_and_nothing_stays(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    model, optimizer = tiny_model(1)
    monkeypatch.setattr(shards.HuggingFaceStorageWriter, "write_data", full)
    path = checkpoint_path(tmp_path, 1)
    with pytest.raises(RunError, match=rf"^{shards_of(path)} .*\(.*No space left on device"):
        training_state(model, optimizer, path)
    assert not shards_of(path).exists()
