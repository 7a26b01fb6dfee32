"""Preference pairs: files, cached latents, and pairs that a run makes."""

import io
import json
import math
import os
import re
from types import SimpleNamespace

from common.data import PromptSet
from common.errors import RunError
from common.files.pictures import StoredImage
from common.pairs import made_pairs, pair_files
from common.pairs import pairs as pairs_on_disk
from common.pairs.pair_files import read_pairs
from common.pairs.pairs import encode_pairs
from dpo_offline import flow_matching_errors
from tests.conftest import assert_same, brightness_reward, embedded_model, few_eval_prompts, on_ranks, run_here

import pyarrow
import pyarrow.parquet
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from PIL.ImageFile import ImageFile

pytestmark = pytest.mark.fast


@pytest.fixture
def folder(tmp_path):
    for name, colour in (("a", "red"), ("b", "blue")):
        Image.new("RGB", (16, 16), colour).save(tmp_path / f"{name}.png")
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "cut.png").write_bytes((tmp_path / "a.png").read_bytes()[:40])
    Image.effect_noise((64, 64), 50).save(tmp_path / "whole.jpg")
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "whole.jpg").read_bytes()[:900])

    def write(*records):
        lines = ["", *(r if isinstance(r, str) else json.dumps({"prompt": "p", **r}) for r in records)]
        (tmp_path / "pairs.jsonl").write_text("\n".join(lines) + "\n")
        return tmp_path

    return write


GOOD = {"chosen": "a.png", "rejected": "b.png", "chosen_score": 0.9, "rejected_score": 0.1}


def test_pairs_are_read_from_a_file_and_a_folder(folder):
    path = folder(GOOD, {"chosen": "b.png", "rejected": "a.png", "prompt": "q"})
    pairs = read_pairs(path)
    assert pairs == read_pairs(str(path / "pairs.jsonl"))
    found = [(prompt, chosen.content, rejected.content) for prompt, chosen, rejected, _ in pairs]
    assert found == [("p", path / "a.png", path / "b.png"), ("q", path / "b.png", path / "a.png")]


@pytest.mark.parametrize(
    "record,message",
    [
        ({"chosen": "a.png"}, '"rejected"'),
        ({**GOOD, "rejected": "none.png"}, "none.png: "),
        ({**GOOD, "rejected": "text.png"}, "text.png: .* PNG"),
        ({**GOOD, "chosen": "cut.png"}, "cut.png: .* PNG"),  # in its header
        ({**GOOD, "chosen_score": 0.05}, " 0.05, .* 0.1$"),
        ({**GOOD, "chosen_score": 0.1}, " 0.1, .* 0.1$"),
        ({**GOOD, "rejected_score": math.nan}, ", nan"),
        ({**GOOD, "chosen_score": "0.9"}, " 0.9, "),
        ("{", "JSON"),
    ],
)
def test_a_bad_record_is_named_by_its_line(folder, record, message):
    path = folder(GOOD, record)  # after an empty line and a good one
    with pytest.raises((ValueError, RunError), match=message) as caught:
        read_pairs(path)
    assert "pairs.jsonl:3:" in str(caught.value)


def test_no_image_is_decoded_before_it_is_drawn(folder, tmp_path, monkeypatch):
    decoded = []
    own = ImageFile.load
    monkeypatch.setattr(ImageFile, "load", lambda image: decoded.append(image.filename) or own(image))
    path = folder(GOOD, {"chosen": "cut.jpg", "rejected": "b.png"})
    assert len(read_pairs(path)) == 2
    assert decoded == []


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_the_look_at_the_images(folder, monkeypatch, world_size):
    """And the rank that finds a fault prints it: other ranks do not know of it."""
    path = folder(*[GOOD] * 4, {**GOOD, "rejected": "text.png"}, GOOD)
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    looked = []
    own = pair_files.check_header
    monkeypatch.setattr(pair_files, "check_header", lambda image, name: looked.append(image) or own(image, name))
    found = []
    for rank in range(world_size):
        monkeypatch.setenv("RANK", str(rank))
        try:
            found.append(len(read_pairs(path)))
        except RunError as error:
            found.append(str(error).rpartition("text.png: ")[0])
    fault = f"{path}/pairs.jsonl:6: rejected: {path}/"
    assert found == [fault if rank == 4 % world_size else 6 for rank in range(world_size)]
    assert len(looked) == {1: 2 * 5, 2: 2 * (3 + 3), 3: 2 * (2 + 2 + 2)}[world_size]


@pytest.mark.parametrize(
    ("record", "line"),
    [
        ({**GOOD, "rejected": "cut.jpg"}, r"{1}/cut.jpg: .*\(image file is truncated"),
        ({**GOOD, "rejected": "red.bmp"}, "{0}:3: chosen: {1}/a.png: "),
    ],
)
def test_a_fault_that_only_decoding_shows_is_named_where_the_pair_is_encoded(one_rank, folder, tmp_path, record, line):
    Image.new("RGB", (16, 16), "red").save(tmp_path / "red.bmp")
    pairs = read_pairs(folder(GOOD, record))
    place = {"folder": tmp_path / "cache", "image_size": (32, 96), "max_sequence_length": 16}
    model = embedded_model()
    assert len(encode_pairs(model, pairs, {0}, **place)) == 1  # the other pair is not drawn
    with pytest.raises(RunError) as error:
        encode_pairs(model, pairs, {0, 1}, **place)
    assert re.match(line.format(tmp_path / "pairs.jsonl", tmp_path), str(error.value))


def test_ranks_share_the_drawn_pairs_and_encode_each_once(folder, tmp_path, monkeypatch):
    """Rows 0, 2 and 3 of five are drawn; 0 and 3 are the same pair."""
    other = {"chosen": "b.png", "rejected": "a.png"}
    pairs = read_pairs(folder(GOOD, {**GOOD, "chosen": "cut.jpg"}, other, GOOD, other))
    read = []
    encoded = []
    own = StoredImage.read_bytes
    monkeypatch.setattr(StoredImage, "read_bytes", lambda image: read.append(image) or own(image))
    write = lambda model, pair, file, *sizes: encoded.append(pair) or file.write_bytes(b"")
    monkeypatch.setattr(pairs_on_disk, "encode_pair", write)
    (tmp_path / "cache").mkdir()
    left = tmp_path / "cache" / ".1.pt.99.new"
    left.touch()
    os.utime(left, (0, 0))
    place = {"folder": tmp_path / "cache", "image_size": (32, 96), "max_sequence_length": 16}
    pipe = SimpleNamespace(components={}, config={}, vae=SimpleNamespace(config={}))
    model = SimpleNamespace(picture_tensors=lambda: [torch.ones(2)], pipe=pipe)
    found, _ = on_ranks(monkeypatch, 2, lambda rank: encode_pairs(model, pairs, {0, 2, 3}, **place))
    assert found[0] == found[1] and found[0].keys() == {0, 2, 3}
    assert found[0][0] == found[0][3] != found[0][2]
    assert not left.exists()
    assert len(read) == 6 and sorted(map(repr, encoded)) == sorted(map(repr, [pairs[0], pairs[2]]))


# ---- pick-a-pic, with the columns that its dataset card names --------------------------------------------------------
STRINGS = ["best_image_uid", "caption", "model_0", "model_1"]
STRINGS += ["image_0_uid", "image_0_url", "image_1_uid", "image_1_url"]
NUMBERS = ["ranking_id", "user_id", "num_example_per_prompt", "__index_level_0__"]
COLUMNS = dict.fromkeys(STRINGS, "string") | dict.fromkeys(NUMBERS, "int64")
COLUMNS |= {"are_different": "bool", "has_label": "bool", "created_at": pyarrow.timestamp("ns")}
COLUMNS |= {"jpg_0": "binary", "jpg_1": "binary", "label_0": "float64", "label_1": "float64"}
PICK_A_PIC = pyarrow.schema(dict(sorted(COLUMNS.items())))


def jpg(colour, size=(96, 32)):
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, "jpeg")
    return buffer.getvalue()


def pick(label_0, label_1, **changes):
    """A row of pick-a-pic's: of a red image and a blue one, unless `changes` say otherwise."""
    row = {"caption": "a mug", "jpg_0": jpg("red"), "jpg_1": jpg("blue"), "label_0": label_0, "label_1": label_1}
    return {"ranking_id": 1, "has_label": True, "model_0": "one", **row, **changes}


def write_picks(path, *rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows), PICK_A_PIC), path)
    return path


def test_pairs_of_pick_a_pic(tmp_path, capfd):
    rows = [pick(1, 0), pick(0.5, 0.5), pick(0, 1, caption="a cup"), pick(0.5, 0.5, jpg_1=jpg("red"))]
    path = write_picks(tmp_path / "train-00000-of-00002.parquet", *rows)
    write_picks(tmp_path / "train-00001-of-00002.parquet", *[pick(1, 0, caption=f"{i}") for i in range(70)])
    pairs = read_pairs(str(path))
    assert re.fullmatch(rf"{path}: 2 of its 4 .*\n", capfd.readouterr().err)
    assert len(pairs) == 2
    for _ in range(2):  # in every pass
        (first, chosen, rejected, _), (second, better, worse, _) = pairs
        assert (first, second) == ("a mug", "a cup")
        assert chosen.read_bytes() == worse.read_bytes() == jpg("red")
        assert rejected.read_bytes() == better.read_bytes() == jpg("blue")
        assert str(better) == f"{path}, row 2: jpg_1"
    pattern = tmp_path / "train-*.parquet"
    both = read_pairs(pattern)
    taken = f"{path.name}, train-00001-of-00002.parquet"
    assert capfd.readouterr().err.startswith(f"{pattern}: takes {taken}\n")
    assert [pair.prompt for pair in read_pairs(tmp_path)] == [pair.prompt for pair in both]
    assert len(both) == 72 and [pair.prompt for pair in both][:3] == ["a mug", "a cup", "0"]
    with pytest.raises(ValueError, match=r"none-\*.parquet: "):
        read_pairs(tmp_path / "none-*.parquet")
    path.rename(tmp_path / "test-00000-of-00001.parquet")
    for mixed in (tmp_path, tmp_path / "*.parquet"):
        with pytest.raises(ValueError) as error:
            read_pairs(mixed)
        patterns = f"'{tmp_path}/test-*.parquet' or '{tmp_path}/train-*.parquet'"
        assert str(error.value).startswith(f"{mixed}: ") and str(error.value).endswith(f": {patterns}")
    (tmp_path / "pairs.jsonl").write_text("{")  # a folder of ours
    with pytest.raises(ValueError, match=r"pairs\.jsonl:1: .*JSON"):
        read_pairs(tmp_path)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (pick(1, 1), "label_0 1.0, label_1 1.0: "),
        (pick(None, None), "label_0 None, label_1 None: "),
        (pick(math.nan, 1), "label_0 nan, label_1 1.0: "),
        (pick(0.5, 1), "label_0 0.5, label_1 1.0: "),
        (pick(1, 0, caption=None), "caption: "),
        (pick(1, 0, caption=" "), "caption: "),
        (pick(1, 0, jpg_1=None), "jpg_1: "),
        (pick(1, 0, jpg_0=b""), "jpg_0: "),
        (pick(1, 0, jpg_0=b"no image"), "jpg_0: "),
    ],
)
def test_a_bad_row_of_pick_a_pic_is_named(tmp_path, row, reason):
    path = write_picks(tmp_path / "train.parquet", pick(1, 0), row)
    with pytest.raises((ValueError, RunError)) as error:
        read_pairs(path)
    assert str(error.value).startswith(f"{path}, row 1: {reason}")


def test_labels_that_are_text_are_shown_as_text(tmp_path):
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([pick("1", "0")]), path)
    with pytest.raises(ValueError, match="row 0: label_0 '1', label_1 '0': "):
        read_pairs(path)


@pytest.mark.parametrize("stored", [lambda image: image, lambda image: {"bytes": image, "path": None}])
def test_pairs_of_trls_columns(tmp_path, stored):
    """Images as bytes, or as Hugging Face's datasets store them."""
    rows = [{"prompt": "a mug", "chosen": stored(jpg("red")), "rejected": stored(jpg("blue")), "source": "me"}] * 2
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    pairs = read_pairs(path)
    (first, _) = pairs
    assert first[0] == "a mug" and first[1].read_bytes() == jpg("red") and first[2].read_bytes() == jpg("blue")
    assert str(first[1]) == f"{path}, row 0: chosen"
    for changes, fault in {
        "chosen": "chosen: .* PNG",
        "rejected": "rejected: .* PNG",
    }.items():
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([rows[0], rows[0] | {changes: stored(b"no")}]), path)
        with pytest.raises(RunError, match=f"^{path}, row 1: {fault}"):
            read_pairs(path)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([rows[0] | {"prompt": " "}]), path)
    with pytest.raises(ValueError, match=f"^{path}, row 0: prompt: "):
        read_pairs(path)


def test_a_parquet_without_pairs_is_named(tmp_path):
    faults = {write_picks(tmp_path / "ties.parquet", pick(0.5, 0.5)): "no pairs"}
    faults[write_picks(tmp_path / "none.parquet")] = "no pairs"
    prompts = tmp_path / "prompts.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a mug"], "tag": ["x"]}), prompts)
    columns = "prompt, chosen, rejected or caption, jpg_0, jpg_1, label_0, label_1"
    faults[prompts] = f".* {columns}; .* prompt, tag"
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(write_picks(tmp_path / "good.parquet", pick(1, 0)).read_bytes()[:-20])
    faults[cut] = "Parquet magic bytes not found"
    for path, fault in faults.items():
        with pytest.raises(ValueError) as error:
            read_pairs(path)
        assert re.match(f"{path}: {fault}", str(error.value)) and "\n" not in str(error.value)


def test_pick_a_pic_is_encoded_as_the_same_images_in_files_are(one_rank, tmp_path, monkeypatch):
    model = embedded_model()
    place = {"folder": tmp_path / "cache", "image_size": (32, 96), "max_sequence_length": 16}
    path = write_picks(tmp_path / "train.parquet", pick(0, 1), pick(0.5, 0.5), pick(1, 0))
    for colour in ("red", "blue"):
        (tmp_path / f"{colour}.jpg").write_bytes(jpg(colour))
    lines = []
    for chosen, rejected in (("blue", "red"), ("red", "blue")):
        lines.append({"prompt": "a mug", "chosen": f"{chosen}.jpg", "rejected": f"{rejected}.jpg"})
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    files = encode_pairs(model, read_pairs(path), {0, 1}, **place)
    assert files == encode_pairs(model, read_pairs(tmp_path / "pairs.jsonl"), {0, 1}, **place)
    latents = torch.load(files[0], weights_only=True)["latents"]
    expected = model.encode_images([Image.open(tmp_path / "blue.jpg"), Image.open(tmp_path / "red.jpg")], 32, 96)
    assert len(files) == 2 and torch.equal(latents, expected)
    with monkeypatch.context() as patch:  # latents depend on how pictures are decoded
        patch.setattr("common.pairs.pairs.DECODING", "on white")
        assert not set(encode_pairs(model, read_pairs(path), {0, 1}, **place).values()) & set(files.values())
    model.pipe.tokenizer.chat_template = "a photo of {{ messages }}"  # embeddings depend on it
    assert not set(encode_pairs(model, read_pairs(path), {0, 1}, **place).values()) & set(files.values())

    whole = io.BytesIO()
    Image.effect_noise((96, 32), 50).save(whole, "jpeg")
    cut = write_picks(tmp_path / "cut.parquet", pick(1, 0), pick(1, 0, jpg_1=whole.getvalue()[:900]))
    pairs = read_pairs(cut)  # whose headers are fine
    with pytest.raises(RunError, match=f"^{cut}, row 1: jpg_1: .*image file is truncated"):
        encode_pairs(model, pairs, {0, 1}, **place)


def test_errors_by_hand():
    """One element, a model that answers x + 1: sigma 1/4, noise 4, x0 (0, 2): x (1, 2.5), target (4, 2), v (2, 3.5)."""
    asked = []

    def predict_velocity(x, timesteps, conditioning):
        asked.append((timesteps.tolist(), conditioning["prompt"].tolist()))
        return x + 1

    model = SimpleNamespace(predict_velocity=predict_velocity)
    latents = torch.tensor([0.0, 2.0]).view(2, 1, 1)  # chosen, rejected
    conditioning = {"prompt": torch.tensor([7])}
    errors, v = flow_matching_errors(model, conditioning, latents, torch.tensor([0.25]), torch.tensor([[4.0]]))
    assert errors.tolist() == [[4.0], [2.25]] and v.flatten().tolist() == [2.0, 3.5]
    assert asked == [([250.0, 250.0], [7, 7])]


def test_encoded_pairs_hold_chosen_first_and_cannot_tell_a_colour_mode(one_rank, folder, tmp_path):
    model = embedded_model()
    place = {"folder": tmp_path / "cache", "image_size": (32, 96), "max_sequence_length": 16}
    Image.new("L", (96, 32), 90).save(tmp_path / "grey.png")
    pairs = read_pairs(folder({"chosen": "a.png", "rejected": "grey.png"}, {"chosen": "a.png", "rejected": "grey.png"}))
    first, second = encode_pairs(model, pairs, {0, 1}, **place).values()
    assert first == second  # one pair, given twice
    cached = torch.load(first, weights_only=True)
    for latents, colour in zip(cached["latents"], ("red", (90, 90, 90)), strict=True):
        image = Image.new("RGB", (96, 32), colour)
        torch.testing.assert_close(latents[None], model.encode_images([image], 32, 96), rtol=0, atol=1e-3)
    assert torch.equal(cached["prompt_embeds"], model.encode_prompts(["p"], 16)["prompt_embeds"])
    whole = first.read_bytes()
    first.write_bytes(whole[:100])  # what a failing disk has left of it
    encode_pairs(model, pairs, {0, 1}, **place)
    assert_same(torch.load(first, weights_only=True), cached)
    # a family of one's own, from another file, may encode otherwise
    model.__class__ = type("Mine", (type(model),), {"__module__": __name__})
    assert encode_pairs(model, pairs, {0}, **place)[0] != first


# ---- made pairs that an interrupted start has begun ------------------------------------------------------------------
OPTIONS = {**dict.fromkeys(made_pairs.DECIDING, 1), "reward": ["my.py:mine"], "reward_settings": {}}
CONTENTS = {"--train_prompts signs.txt": "9 bytes, blake2b 7", "--eval_prompts other.txt": "9 bytes, blake2b 7"}


def rows_to_make(folder, num_prompts, options, contents):
    """With a script's own options in the place of all that it samples by."""
    return made_pairs.rows_to_make(folder, num_prompts, options, contents, {"group": options.get("group_size", 2)})


def compare(folder, rows, scores):
    for row in rows:
        images = [Image.new("RGB", (16, 16), (row, i, 0)) for i in range(len(scores))]
        made_pairs.save_pair(folder, row, PromptSet([f"prompt {row}"], [{}]), images, torch.tensor(scores))


def test_pairs_that_were_made_are_not_made_again(one_rank, tmp_path, capfd):
    """The first start compares two of four prompts, one of whose images all score the same; the next the others."""
    rows = rows_to_make(tmp_path, 4, OPTIONS, CONTENTS)
    compare(tmp_path, [next(rows)[0]], [0.5, 0.25, math.nan])
    compare(tmp_path, [next(rows)[0]], [1.0, 1.0, 1.0])
    capfd.readouterr()
    (tmp_path / "pairs" / ".00002.json.99.new").touch()  # left by a kill
    assert [*rows_to_make(tmp_path, 4, OPTIONS, CONTENTS)] == [(2, True), (3, True)]
    assert not [*tmp_path.glob("pairs/.*.new")]
    said = capfd.readouterr().err
    assert re.match(".* 4 .* 2 .*\n", said)
    compare(tmp_path, [2, 3], [0.0, 1.0])
    assert re.fullmatch("3 .* 4 .*; .* 1 .*", made_pairs.write_pairs(tmp_path, 4))
    pairs = read_pairs(tmp_path)
    assert [pair.prompt for pair in pairs] == ["prompt 0", "prompt 2", "prompt 3"]
    assert [pair.chosen.decode().getpixel((0, 0)) for pair in pairs[:2]] == [(0, 0, 0), (2, 1, 0)]
    assert [*rows_to_make(tmp_path, 4, OPTIONS, CONTENTS)] == []


@pytest.mark.parametrize(
    ("options", "contents"),
    [
        ({"group_size": 3}, {}),
        ({"reward_settings": {"mine": {"JUDGE_MODEL": "another"}}}, {}),
        ({}, {"--train_prompts signs.txt": "9 bytes, blake2b 8"}),
    ],
)
def test_pairs_of_other_options_settings_or_contents_are_made_again(options, contents, one_rank, tmp_path, capfd):
    compare_first = rows_to_make(tmp_path, 2, OPTIONS, CONTENTS)
    compare(tmp_path, [next(compare_first)[0]], [0.0, 1.0])
    assert [row for row, _ in rows_to_make(tmp_path, 2, OPTIONS | options, CONTENTS | contents)] == [0, 1]
    assert not made_pairs.record_file(tmp_path, 0).exists()
    assert capfd.readouterr().err.count(f"{tmp_path}/pairs: ") == 1


def test_pairs_that_no_checkpoint_was_trained_on_are_held_against_the_options(tmp_path):
    """Those of a run that ended before its first checkpoint: a changed option makes them again."""
    options = ["--name", "run", "--num_steps", 0, "--num_pair_prompts", 2, "--group_size", 2, "--num_pairs", 2]
    options += ["--num_inference_steps", 2, "--eval_num_inference_steps", 1, *few_eval_prompts(tmp_path, 1)]
    options += ["--reward", brightness_reward(tmp_path)]
    pictures = lambda: [file.read_bytes() for file in sorted((tmp_path / "runs/run/pairs").glob("*.png"))]
    assert run_here(tmp_path, "dpo_offline.py", *options) is None
    made = pictures()
    assert run_here(tmp_path, "dpo_offline.py", *options, "--resume", "latest") is None
    assert pictures() == made
    assert run_here(tmp_path, "dpo_offline.py", *options, "--resume", "latest", "--seed", 7) is None
    assert len(pictures()) == len(made) and pictures() != made


def test_a_reward_s_server_that_moved_leaves_the_pairs(one_rank, tmp_path):
    settings = lambda url: {"reward_settings": {"mine": {"JUDGE_URL": url}, "other": {"MODEL": url}}}
    compare(tmp_path, [next(rows_to_make(tmp_path, 2, OPTIONS | settings("a"), CONTENTS))[0]], [0.0, 1.0])
    assert [row for row, _ in rows_to_make(tmp_path, 2, OPTIONS | settings("b"), CONTENTS)] == [1]


def test_ranks_compare_the_same_number_of_prompts_each_its_own_once(tmp_path, monkeypatch):
    """Two ranks, three prompts: the second samples the first rank's prompt again, and does not compare it."""
    found = {}
    monkeypatch.setattr(made_pairs, "on_rank_0", lambda: dist.get_rank() == 0)
    on_ranks(monkeypatch, 2, lambda rank: found.update({rank: [*rows_to_make(tmp_path, 3, OPTIONS, CONTENTS)]}))
    assert found == {0: [(0, True), (2, True)], 1: [(1, True), (0, False)]}
