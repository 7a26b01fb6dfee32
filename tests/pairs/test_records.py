"""Records of an image and a prompt: files, and their latents on disk."""

import io
import json
import re
from types import SimpleNamespace

from common.errors import RunError
from common.files.pictures import StoredImage
from common.pairs import encode_records, load_records, read_image_records
from common.pairs import records as records_on_disk
from tests.conftest import embedded_model, on_ranks

import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

pytestmark = pytest.mark.fast


@pytest.fixture
def folder(tmp_path):
    """Four images, of which one is damaged in its header and one behind it; returns a function that writes records."""
    for name, colour in (("a", "red"), ("b", "blue")):
        Image.new("RGB", (96, 32), colour).save(tmp_path / f"{name}.png")
    (tmp_path / "text.png").write_text("no image")
    Image.effect_noise((64, 64), 50).save(tmp_path / "whole.jpg")
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "whole.jpg").read_bytes()[:900])

    def write(*records):
        lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
        (tmp_path / "records.jsonl").write_text("\n" + "\n".join(lines) + "\n")
        return [tmp_path / "records.jsonl"]

    return write


A, B = {"prompt": "red", "image": "a.png"}, {"prompt": "blue", "image": "b.png"}


# ---- files -----------------------------------------------------------------------------------------------------------
def test_records_of_several_files_are_read_in_their_order(folder, tmp_path):
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "more.json").write_text(json.dumps([{"caption": "again", "image": ["../a.png"]}]))
    found = read_image_records([*folder(A, {**B, "mask": None}), f"{tmp_path}/deeper/more.json:caption"])
    assert [(record.prompt, record.image.content.name) for record in found] == [
        ("red", "a.png"),
        ("blue", "b.png"),
        ("again", "a.png"),
    ]
    assert found[2].image.content.is_file() and found[0].sources == () and found[0].images == (found[0].image,)


def test_images_are_beside_the_file_of_a_pattern_that_names_them(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (96, 32)).save(tmp_path / name / "0.png")
        (tmp_path / name / "train.jsonl").write_text(json.dumps({"caption": name, "image": "0.png"}) + "\n")
    found = read_image_records([f"{tmp_path}/*/train.jsonl:caption"])
    images = [(record.prompt, record.image.content) for record in found]
    assert images == [("one", tmp_path / "one" / "0.png"), ("two", tmp_path / "two" / "0.png")]


def test_bytes_of_a_folder_of_parquet_files_are_read(tmp_path):
    stored = io.BytesIO()
    Image.new("RGB", (96, 32), "red").save(stored, "PNG")
    for number in (0, 1):
        rows = [{"prompt": f"p{number}", "image": {"bytes": stored.getvalue(), "path": None}}]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"train-{number}.parquet")
    found = read_image_records([tmp_path])
    assert [record.prompt for record in found] == ["p0", "p1"]
    assert found[1].image.decode().getpixel((0, 0)) == (255, 0, 0)
    assert "train-1.parquet, row 0" in str(found[1].image)


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        ({"prompt": "p"}, '"image"'),
        ({"prompt": "p", "image": 3}, '"image"'),
        ({"prompt": "p", "image": ["a.png", "b.png"]}, "2 images"),
        ({"prompt": "p", "image": "none.png"}, "none.png: no such file"),
        ({"prompt": "p", "image": "text.png"}, "text.png: .* PNG"),
        ({"image": "a.png"}, '"prompt"'),
        ({"prompt": " ", "image": "a.png"}, '"prompt"'),
        ("{", "JSON"),
    ],
)
def test_a_bad_record_is_named_by_its_line(folder, record, fault):
    with pytest.raises(ValueError, match=rf"records\.jsonl:3: .*{fault}"):
        read_image_records(folder(A, record))


# ---- latents ---------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def model():
    return embedded_model()


def encode(model, records, rows, folder, image_size=(32, 96)):
    return encode_records(model, records, rows, folder=folder, image_size=image_size, max_sequence_length=16)


def test_latents_and_conditioning_are_the_models_own(one_rank, folder, tmp_path, model):
    records = read_image_records(folder(A, B, A))
    encoded = encode(model, records, {0, 1, 2}, tmp_path / "cache")
    latents, conditioning = load_records([encoded[row] for row in (1, 0, 1)], torch.device("cpu"))
    images = [record.image.decode() for record in records]
    for row, of in enumerate((1, 0, 1)):
        assert torch.equal(latents[row], model.encode_images([images[of]], 32, 96)[0])
        for name, tensor in model.encode_prompts([records[of].prompt], 16).items():
            torch.testing.assert_close(conditioning[name][row], tensor[0])
    assert encoded[0].row == encoded[2].row  # a record that stands twice is encoded once


def test_the_bits_of_a_record_do_not_depend_on_the_others(one_rank, folder, tmp_path, model):
    """Of 40 with other prompts, the last eight are a batch that is filled up."""
    records = read_image_records(folder(*({**A, "prompt": f"red {number}"} for number in range(40))))
    together = encode(model, records, range(40), tmp_path / "together")
    for row in (0, 33, 39):
        alone = encode(model, records, {row}, tmp_path / f"alone {row}")[row]
        assert len(alone.tensors["latents"]) == 1
        for name, tensor in together[row].tensors.items():
            assert torch.equal(tensor[together[row].row], alone.tensors[name][0]), name
    [file] = (tmp_path / "alone 0").rglob("*.pt")
    assert file.stat().st_size < 2 * sum(tensor.nbytes for tensor in alone.tensors.values()) + 5000  # one row of each


def test_a_record_is_encoded_again_only_where_it_or_the_size_has_changed(
    one_rank, folder, tmp_path, model, monkeypatch
):
    encoded = []
    own = records_on_disk.encode_part
    monkeypatch.setattr(
        records_on_disk,
        "encode_part",
        lambda model, part, *more: encoded.extend(part.values()) or own(model, part, *more),
    )
    records = read_image_records(folder(A, B, {**B, "prompt": "another"}))
    for rows, expected in (({0}, [records[0]]), ({0, 1, 2}, records[1:]), ({0, 1, 2}, [])):
        encode(model, records, rows, tmp_path / "cache")
        assert encoded == expected
        encoded.clear()
    Image.new("RGB", (96, 32), "green").save(tmp_path / "b.png")
    encode(model, records, {0, 1, 2}, tmp_path / "cache")
    assert encoded == records[1:]
    encoded.clear()
    encode(model, records, {0}, tmp_path / "cache", image_size=(32, 32))
    assert encoded == [records[0]]
    encoded.clear()
    other = type(model.pipe.vae.config)({**model.pipe.vae.config, "batch_norm_eps": 0.5})
    monkeypatch.setattr(model.pipe.vae, "_internal_dict", other)
    encode(model, records, {0}, tmp_path / "cache")
    assert encoded == [records[0]]


@pytest.mark.parametrize("damage", ["cut", "nan", "short"])
def test_a_damaged_file_is_encoded_again(one_rank, folder, tmp_path, model, damage):
    records = read_image_records(folder(A, B))
    before, _ = load_records(list(encode(model, records, {0, 1}, tmp_path / "cache").values()), torch.device("cpu"))
    before = before.clone()
    [file] = (tmp_path / "cache").rglob("*.pt")
    content = torch.load(file, weights_only=True)
    file.unlink()  # a mapped file must not be written to
    if damage == "nan":
        content["tensors"]["latents"][1, 0] = torch.nan
    if damage == "short":
        content["keys"].pop()
    torch.save(content, file)
    if damage == "cut":
        whole = file.read_bytes()
        file.unlink()
        file.write_bytes(whole[: len(whole) // 2])
    after, _ = load_records(list(encode(model, records, {0, 1}, tmp_path / "cache").values()), torch.device("cpu"))
    assert torch.equal(before, after)


def test_a_damaged_image_is_named_where_it_is_encoded(one_rank, folder, tmp_path, model):
    records = read_image_records(folder(A, {"prompt": "p", "image": "cut.jpg"}))
    assert len(encode(model, records, {0}, tmp_path / "cache")) == 1  # the other is not drawn
    with pytest.raises(RunError, match=re.escape(f"{tmp_path}/cut.jpg: ")):
        encode(model, records, {0, 1}, tmp_path / "cache")


def test_ranks_share_the_records_and_encode_each_once(folder, tmp_path, monkeypatch):
    """Rows 0, 2, 3 and 4 of five are drawn; 0 and 3 are the same. Two records fit in a file."""
    records = read_image_records(folder(A, {"prompt": "p", "image": "cut.jpg"}, B, A, {**A, "prompt": "q"}))
    read, encoded = [], []
    own_read = StoredImage.read_bytes
    monkeypatch.setattr(StoredImage, "read_bytes", lambda image: read.append(image) or own_read(image))
    monkeypatch.setattr(records_on_disk, "RECORDS_OF_A_FILE", 2)
    pipe = SimpleNamespace(components={}, config={}, vae=SimpleNamespace(config={}))
    fake = SimpleNamespace(picture_tensors=lambda: [torch.ones(2)], pipe=pipe)
    fake.encode_images = lambda images, *size: torch.full((1, 2), float(images[0].getpixel((0, 0))[0]))
    fake.encode = lambda prompts, *sizes: encoded.extend(set(prompts.prompts)) or {"c": torch.ones(len(prompts), 3)}
    monkeypatch.setattr(records_on_disk, "encoders_key", lambda model: "key")
    found, _ = on_ranks(monkeypatch, 2, lambda rank: encode(fake, records, {0, 2, 3, 4}, tmp_path / "cache"))
    assert found[0].keys() == found[1].keys() == {0, 2, 3, 4}
    assert len(read) == 4 and sorted(encoded) == ["blue", "q", "red"]
    for of_rank in found:
        latents, _ = load_records([of_rank[row] for row in (0, 2, 3, 4)], torch.device("cpu"))
        assert latents[:, 0].tolist() == [255, 0, 255, 255]
