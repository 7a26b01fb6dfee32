"""Condition images: read by their headers, decoded where they are used, and held against the model."""

import io
import itertools
import json
import re

import dpo_offline
import flow_grpo
from common.data import PromptSet
from common.errors import RunError
from common.files.pictures import StoredImage, find_images, warn_stretched
from common.files.prompts import read_prompts
from common.models.flux2_klein import Flux2Klein
from common.models.flux_kontext import FluxKontext
from common.models.loading import family_class, load_model
from common.models.qwen_image_edit_plus import QwenImageEditPlus
from common.models.stable_diffusion_3 import StableDiffusion3
from common.pairs.pair_files import Pair, pair_prompts, read_pairs
from common.plan.memory import Blueprint
from common.process import print_once
from common.run.checks import check_sources
from common.run.evaluation import sample_records
from common.run.inputs import Inputs
from common.run.plots import show_sources
from common.scoring import score_images
from common.weights.lora import make_lora
from tests.conftest import ROOT, TINY, checked, read_metrics, run_and_resume, run_here, torchrun
from tests.tiny_models import make_checkpoint
from tools.convert import convert_pairs

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

ORIENTATION = 274  # the tag of EXIF; 6: turn it a quarter clockwise


def png(image, **options):
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return file.getvalue()


def gradient(width=32, height=20):
    """Red grows to the right, green downwards."""
    pixels = np.zeros((height, width, 3), dtype=np.uint8)
    pixels[..., 0] = np.linspace(0, 255, width)
    pixels[..., 1] = np.linspace(0, 255, height)[:, None]
    return Image.fromarray(pixels)


def prompt_file(folder, *records):
    path = folder / "edits.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


# ---- reading ---------------------------------------------------------------------------------------------------------
@pytest.mark.fast
def test_paths_are_relative_to_the_prompt_file(tmp_path):
    (tmp_path / "pictures").mkdir()
    gradient().save(tmp_path / "pictures/a.png")
    gradient(16, 16).save(tmp_path / "b.png")
    one = {"prompt": "make it red", "image": "pictures/a.png", "box": [0, 1]}
    two = {"prompt": "join them", "image": ["pictures/a.png", str(tmp_path / "b.png")]}
    prompts = read_prompts(prompt_file(tmp_path, one, two))
    assert [[str(source) for source in record["image"]] for record in prompts.metadata] == [
        ["pictures/a.png"],
        ["pictures/a.png", f"{tmp_path}/b.png"],
    ]
    sizes = [[image.size for image in images] for images in prompts.sources()]
    assert sizes == [[(32, 20)], [(32, 20), (16, 16)]]
    assert prompts.metadata[0]["box"] == [0, 1]


@pytest.mark.fast
def test_bytes_come_from_parquet_as_datasets_writes_them(tmp_path):
    row = {"bytes": png(gradient()), "path": "a.png"}
    table = pyarrow.table({"prompt": ["one", "two"], "image": [[row], [row, row]]})
    pyarrow.parquet.write_table(table, tmp_path / "edits.parquet")
    prompts = read_prompts(tmp_path / "edits.parquet")
    assert [len(images) for images in prompts.sources()] == [1, 2]
    assert np.array_equal(np.asarray(prompts.sources()[1][1]), np.asarray(gradient()))
    assert str(prompts.metadata[1]["image"][1]) == f"{tmp_path}/edits.parquet, row 1, image 1"


@pytest.mark.fast
def test_a_row_of_a_parquet_may_lack_a_picture(tmp_path):
    """It has every column, with null where another row alone has a picture or a mask."""
    table = pyarrow.table({"prompt": ["one", "two"], "image": [png(gradient()), None], "mask": [None, None]})
    pyarrow.parquet.write_table(table, tmp_path / "edits.parquet")
    one, two = read_prompts(tmp_path / "edits.parquet").metadata
    assert one.keys() == {"image"} and two == {}


@pytest.mark.fast
def test_verls_column_of_images_is_read(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "<image>make it red"}], "images": [{"bytes": png(gradient())}]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "edits.parquet")
    prompts = read_prompts(tmp_path / "edits.parquet")
    assert prompts.prompts == ["make it red"] and prompts.metadata[0].keys() == {"image"}
    other = {"media": "oil on canvas", "images": 7}  # anyone's metadata
    assert read_prompts(prompt_file(tmp_path, {"prompt": "x", **other})).metadata == [other]
    for record, message in (
        ({"image": "a.png", "images": ["a.png"]}, '"images": '),
        ({"image": None, "mask": "a.png"}, '"mask": .*"image"'),
    ):
        with pytest.raises(ValueError, match=f"edits.jsonl:1: {message}"):
            read_prompts(prompt_file(tmp_path, {"prompt": "x", **record}))


@pytest.mark.fast
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "(?!.* PNG)"),
        (b"no picture", " PNG"),
        (png(gradient())[:20], "Truncated File Read| PNG"),
    ],
)
def test_a_picture_that_cannot_be_used_is_refused_by_its_header(tmp_path, content, message):
    if content is not None:
        (tmp_path / "a.png").write_bytes(content)
    path = prompt_file(tmp_path, {"prompt": "first"}, {"prompt": "make it red", "image": "a.png"})
    with pytest.raises(ValueError, match=rf'^{path}:2: "image": {tmp_path}/a.png: ') as error:
        read_prompts(path)
    assert re.search(message, str(error.value)) and "\n" not in str(error.value)


@pytest.mark.fast
@pytest.mark.parametrize("value", [7, [], "", {"path": None}, [None]])
def test_a_field_that_names_no_picture_is_refused(tmp_path, value):
    path = prompt_file(tmp_path, {"prompt": "make it red", "image": value})
    with pytest.raises(ValueError, match=f'^{path}:1: "image":'):
        read_prompts(path)


@pytest.mark.fast
def test_a_picture_is_decoded_upright_as_rgb(tmp_path):
    turned = Image.Exif()
    turned[ORIENTATION] = 6
    files = {
        "turned.png": png(gradient(), exif=turned),
        "alpha.png": png(gradient().convert("RGBA")),
        "palette.png": png(gradient().quantize(256)),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    gradient().convert("CMYK").save(tmp_path / "cmyk.jpg")
    found = find_images("image", [*files, "cmyk.jpg"], tmp_path / "edits.jsonl", "edits.jsonl:1")
    decoded = [source.decode() for source in found]
    assert [image.mode for image in decoded] == ["RGB"] * 4
    assert np.array_equal(np.asarray(decoded[0]), np.asarray(gradient().transpose(Image.Transpose.ROTATE_270)))
    assert np.array_equal(np.asarray(decoded[1]), np.asarray(gradient()))
    half = gradient().convert("RGBA")
    half.putalpha(51)
    expected = 255 * 0.8 + 0.2 * np.asarray(gradient(), dtype=float)  # on white
    assert np.abs(np.asarray(StoredImage("half.png", png(half)).decode(), dtype=float) - expected).max() <= 1
    for close in decoded[2:]:
        assert np.abs(np.asarray(close, dtype=int) - np.asarray(gradient())).mean() < 12


@pytest.mark.fast
def test_pictures_of_another_shape_are_reported(capfd, monkeypatch):
    turned = Image.Exif()
    turned[ORIENTATION] = 6
    lying = StoredImage("lying.jpg", png(gradient(32, 20), exif=turned))  # 20 x 32 once it is upright
    wide = StoredImage("wide.png", png(gradient(32, 20)))
    near = StoredImage("near.png", png(gradient(20, 31)))  # 3 % less high: no one sees it
    assert (lying.size, wide.size) == ((20, 32), (32, 20)) and lying.decode().size == lying.size
    monkeypatch.setattr(Image.Image, "load", None)  # the sizes are those of headers
    warn_stretched("--train_prompts", [lying, wide, near], (64, 40))
    line = r"--train_prompts: 1 of 3 .* 40 .* 64 .*\(wide\.png .* 32 .* 20 .*\).*\n"
    assert re.fullmatch(line, capfd.readouterr().err)
    warn_stretched("--train_prompts", [lying, near], (64, 40))
    assert capfd.readouterr().err == ""


@pytest.mark.fast
def test_a_picture_that_is_damaged_behind_its_header_ends_the_run_by_its_name(tmp_path):
    (tmp_path / "a.png").write_bytes(png(gradient(64, 64))[:-60])
    (source,) = find_images("image", "a.png", tmp_path / "edits.jsonl", "edits.jsonl:1")
    with pytest.raises(RunError, match=rf"^{tmp_path}/a.png: .*\(.+\)$"):
        source.decode()


# ---- pairs of edits --------------------------------------------------------------------------------------------------
def pair_files(folder):
    """The same two pairs, whose sources differ, as a .jsonl, as TRL's columns and as pick-a-pic's."""
    pictures = [png(gradient(32, 32).rotate(angle)) for angle in (0, 90, 180)]
    for name, content in zip("abc", pictures, strict=True):
        (folder / f"{name}.png").write_bytes(content)
    a, b, c = pictures
    lines = [
        {"prompt": "turn it", "image": "a.png", "chosen": "b.png", "rejected": "c.png"},
        {"prompt": "turn it", "image": ["c.png"], "chosen": "b.png", "rejected": "c.png"},
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    stored = [{"bytes": a, "path": None}, {"bytes": c, "path": None}]
    trl = pyarrow.table({"prompt": ["turn it"] * 2, "image": stored, "chosen": [b, b], "rejected": [c, c]})
    pyarrow.parquet.write_table(trl, folder / "trl.parquet")
    picks = {"caption": ["turn it"] * 2, "jpg_0": [c, b], "jpg_1": [b, c], "label_0": [0, 1], "label_1": [1, 0]}
    pyarrow.parquet.write_table(pyarrow.table({**picks, "image": [a, c]}), folder / "picks.parquet")
    return [folder / name for name in ("pairs.jsonl", "trl.parquet", "picks.parquet")]


@pytest.mark.fast
def test_pairs_of_edits_are_read_from_every_kind_of_file(tmp_path):
    paths = pair_files(tmp_path)
    found = []
    for path in paths:
        pairs = read_pairs(path)
        images = [(pair.chosen, pair.rejected, *pair.sources) for pair in pairs]
        found.append([[image.read_bytes() for image in of_pair] for of_pair in images])
    a, b, c = ((tmp_path / f"{name}.png").read_bytes() for name in "abc")
    assert found == [[[b, c, a], [b, c, c]]] * 3
    convert_pairs(paths[1], tmp_path / "files")
    pair, _ = read_pairs(tmp_path / "files")
    assert [source.read_bytes() for source in pair.sources] == [a]


@pytest.mark.fast
def test_pairs_of_edits_may_name_pictures_as_verl_does(tmp_path):
    paths = pair_files(tmp_path)[:2]
    paths[0].write_text(paths[0].read_text().replace('"image": "a.png"', '"images": ["a.png"]'))
    rows = pyarrow.parquet.read_table(paths[1]).to_pylist()
    rows = [{"images": [row.pop("image")], **row} for row in rows]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), paths[1])
    for path in paths:
        assert [len(pair.sources) for pair in read_pairs(path)] == [1, 1]


@pytest.mark.fast
def test_a_pair_whose_source_cannot_be_used_is_named(tmp_path):
    path, trl, _ = pair_files(tmp_path)
    path.write_text(path.read_text().replace('["c.png"]', '"d.png"'))
    with pytest.raises(ValueError, match=f'^{path}:2: "image": {tmp_path}/d.png: '):
        read_pairs(path)
    rows = pyarrow.parquet.read_table(trl).to_pylist()
    rows[1]["image"]["bytes"] = b"no picture"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), trl)
    with pytest.raises(ValueError, match=f'^{trl}, row 1: "image": {trl}, row 1, image 0: '):
        read_pairs(trl)
    rows[1]["image"] = None
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), trl)
    assert [len(pair.sources) for pair in read_pairs(trl)] == [1, 0]  # which check_sources refuses by its number


# ---- the model -------------------------------------------------------------------------------------------------------
@pytest.mark.fast
def test_pairs_of_another_shape_are_reported_and_a_guidance_of_1_where_it_is_an_input(capfd, tmp_path):
    wide, high = (StoredImage(f"{name}.png", png(gradient(*size))) for name, size in (("w", (96, 32)), ("h", (32, 96))))
    prompts = PromptSet(["a"], [{}])
    inputs = Inputs(StableDiffusion3, {}, {}, prompts, prompts, None, None, pairs=[Pair("a", wide, high)])
    checked(dpo_offline.Args(), inputs)
    told = "--pairs: 1 of 2 .* 96 .* 32 "
    assert re.search(told, capfd.readouterr().err)
    for part, config in (("vae", {"block_out_channels": [1]}), ("transformer", {"guidance_embeds": True})):
        (tmp_path / part).mkdir()
        (tmp_path / part / "config.json").write_text(json.dumps(config))
    print_once.cache_clear()
    for scale, num_lines in ((3.5, 0), (1.0, 1), (1.0, 0)):  # a run checks several times, and says it once
        FluxKontext.check(tmp_path, 32, 32, 1, scale)
        assert capfd.readouterr().err.count("3.5") == num_lines


def edits(*counts):
    source = StoredImage("a.png", png(gradient()))
    return PromptSet([f"edit {i}" for i in range(len(counts))], [{"image": [source] * n} if n else {} for n in counts])


@pytest.mark.fast
def test_a_model_gets_as_many_pictures_as_it_takes():
    pairs = [Pair("edit 0", None, None, edits(1).metadata[0]["image"]), Pair("edit 1", None, None)]
    both = [("--train_prompts", edits(1, 1)), ("--pairs", pair_prompts(pairs[:1]))]
    assert check_sources(FluxKontext.num_sources, both) == 1
    for family in (StableDiffusion3, Flux2Klein):  # text alone
        assert check_sources(family.num_sources, [("--train_prompts", edits(0, 0))]) == 0
    for family in (Flux2Klein, QwenImageEditPlus):
        for count in (1, 4):
            sets = [("--train_prompts", edits(count, count)), ("--eval_prompts", edits(count))]
            assert check_sources(family.num_sources, sets) == count
    of = "--eval_prompts: .*"
    for family, prompts, line in (
        (StableDiffusion3, edits(0, 1), f"{of} 2, 'edit 1', .* 1 .*; (?!.* 1)"),
        (FluxKontext, edits(1, 0), f"{of} 2, 'edit 1', .*; .* 1$"),
        (FluxKontext, edits(2), f"{of} 1, 'edit 0', .* 2 .*; .* 1$"),
        (Flux2Klein, edits(5), f"{of} 1, 'edit 0', .* 5 .*; .* 0 to 4$"),
        (
            Flux2Klein,
            edits(1, 2),
            f"{of} 2, 'edit 1', .* 2 .*; .* 1, ",
        ),
        (
            Flux2Klein,
            edits(0, 1),
            f"{of} 2, 'edit 1', .* 1 .*; .* none, ",
        ),
        (QwenImageEditPlus, edits(5), f"{of} 1, 'edit 0', .* 5 .*; .* 1 to 4$"),
    ):
        with pytest.raises(ValueError, match=f"^{line}"):
            check_sources(family.num_sources, [("--eval_prompts", prompts)])
    with pytest.raises(ValueError, match="^--pairs: .* 2, 'edit 1', .*; .* 1$"):
        check_sources(FluxKontext.num_sources, [("--pairs", pair_prompts(pairs))])


@pytest.mark.fast
def test_the_images_of_a_prompt_share_a_decoded_picture_and_get_copies(monkeypatch):
    decoded = []
    decode = StoredImage.decode
    monkeypatch.setattr(StoredImage, "decode", lambda source, **how: decoded.append(source) or decode(source, **how))
    one, two, three = edits(1).select([0, 0, 0]).for_rewards()
    assert len(decoded) == 1
    one["image"][0].putpixel((0, 0), (1, 2, 3))
    assert two["image"][0].getpixel((0, 0)) == three["image"][0].getpixel((0, 0)) != (1, 2, 3)


@pytest.mark.fast
def test_rewards_get_the_pictures_and_samples_name_them():
    prompts = edits(1, 1)
    seen = []

    def darker(images, prompts, metadata):
        seen.append([record["image"][0].getpixel((31, 0)) for record in metadata])
        metadata[0]["image"].clear()  # its own copy
        return [0.0] * len(images)

    score_images({"darker": darker}, [gradient()] * 2, prompts)
    scores = score_images({"darker": darker}, [gradient()] * 2, prompts)
    assert seen == [[(255, 0, 0)] * 2] * 2
    records = sample_records(prompts, [3, 4], scores, ["darker"])
    image = gradient().rotate(180)
    record, picture = show_sources(records[1], image, image)
    assert record == {"prompt": "edit 1", "seed": 4, "image": ["a.png"], "darker": 0.0}
    assert picture.size == (64, 20) and picture.getpixel((31, 0)) == (255, 0, 0)  # the source stands to the left
    assert picture.getpixel((32, 19)) == (255, 0, 0)
    assert show_sources(records[1], None, image) == (record, None)
    frames = Image.new("RGB", (32, 60), "white")  # three frames of a video, one below the other
    _, picture = show_sources(records[1], frames, [image] * 5)
    assert picture.size == (64, 60) and picture.getpixel((31, 19)) == (255, 255, 0)  # in the shape of a frame


# ---- a run -----------------------------------------------------------------------------------------------------------
LIKE_THE_SOURCE = """
import numpy


def like_the_source(images, prompts, metadata):
    scores = []
    for image, record in zip(images, metadata, strict=True):
        image = image[-1] if isinstance(image, list) else image  # of a video its last frame
        source = numpy.asarray(record["image"][0].resize(image.size), dtype=float)
        scores.append(-numpy.abs(numpy.asarray(image) - source).mean() / 255)
    return scores
"""


@pytest.fixture(scope="module")
def kontext(tmp_path_factory):
    return make_checkpoint("flux_kontext", tmp_path_factory.mktemp("kontext"))


@pytest.fixture(scope="module")
def klein(tmp_path_factory):
    return make_checkpoint("flux2_klein", tmp_path_factory.mktemp("klein"))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return make_checkpoint("qwen_image_edit_plus", tmp_path_factory.mktemp("qwen"))


@pytest.fixture(params=["kontext", "klein", "qwen"])
def editor(request):
    """The checkpoint of a model that edits: one that takes a picture, and two that take several."""
    return request.getfixturevalue(request.param)


def takes_several(model):
    return max(family_class(model).num_sources) > 1


def options_of(folder, model):
    """Each record has one picture, or two if the model takes several."""
    (folder / "like.py").write_text(LIKE_THE_SOURCE)
    records = []
    for i in range(6):
        gradient(20 + 3 * i, 30).rotate(9 * i).save(folder / f"{i}.png")
        pictures = [f"{i}.png", f"{(i + 1) % 6}.png"]
        records.append({"prompt": f"edit {i}", "image": pictures if takes_several(model) else pictures[0]})
    path = prompt_file(folder, *records)
    options = ["--model", model, "--rollout", "local", *TINY[:6], "--num_inference_steps", 3, "--eval_every", 1]
    options += ["--max_sequence_length", 32, "--learning_rate", 1e-2, "--train_prompts", path, "--eval_prompts", path]
    return [*options, "--reward", f"{folder}/like.py:like_the_source"]


@pytest.mark.parametrize(
    ("script", "name"),
    [("flow_grpo.py", "kontext"), ("flow_grpo.py", "klein"), ("flow_grpo.py", "qwen"), ("diffusion_nft.py", "klein")],
)
def test_an_editing_model_trains_and_resumes_and_reports_pictures_of_another_shape(
    script, name, tmp_path, request, capfd
):
    editor = request.getfixturevalue(name)
    options = options_of(tmp_path, editor)
    if script == "flow_grpo.py":
        options += ["--guidance_scale", 2.5]
    whole, cut = (run / "adapter/pytorch_lora_weights.safetensors" for run in run_and_resume(tmp_path, script, options))
    assert whole.read_bytes() == cut.read_bytes()
    assert any(tensor.any() for name, tensor in load_file(whole).items() if "lora_B" in name)
    told = capfd.readouterr().err
    for option in ("--train_prompts", "--eval_prompts"):
        num_pictures = 12 if takes_several(editor) else 6
        assert re.search(f"{option}: {num_pictures} of {num_pictures} .* 96 .* 32 ", told)
    runs = tmp_path / "runs"
    (first, *_) = (runs / "whole/samples/0002/samples.jsonl").read_text().splitlines()
    pictures = ["0.png", "1.png"] if takes_several(editor) else ["0.png"]
    assert json.loads(first)["image"] == pictures
    width = 96 * (len(pictures) + 1)  # sources and result
    with Image.open(runs / "whole/grid_0002.png") as grid:
        assert grid.width == 6 * (width * max(1, 200 // width) + 4)  # a row of six images


def test_pairs_of_edits_train_a_model(editor, tmp_path):
    """The source counts: the same images with another source are another pair, and are encoded apart."""
    path, *_ = pair_files(tmp_path)
    options = ["--model", editor, "--max_sequence_length", 32, "--cache", tmp_path / "cache"]
    evaluated = prompt_file(tmp_path, {"prompt": "turn it", "image": "a.png"})
    options += ["--num_inference_steps", 2, "--eval_every", 2, "--eval_prompts", evaluated]
    options += ["--reward", "preservation", "--num_steps", 2, "--num_pairs", 2, "--micro_batch_size", 2]
    assert run_here(tmp_path, "dpo_offline.py", *options, "--pairs", path) is None
    encoded = [torch.load(file, weights_only=True) for file in (tmp_path / "cache").iterdir()]
    assert len(encoded) == 2 and torch.equal(encoded[0]["latents"], encoded[1]["latents"])
    assert not torch.equal(encoded[0]["source_latents"], encoded[1]["source_latents"])
    margins = [row["actor/margin"] for row in read_metrics(tmp_path / "runs/dpo_offline")[1:]]
    assert margins[0] == 0 and margins[1] > 0


@pytest.mark.parametrize("editor", ["kontext", "klein"], indirect=True)  # one that takes several is enough
def test_a_model_makes_pairs_of_edits(editor, tmp_path):
    options = ["--model", editor, "--max_sequence_length", 32, "--cache", tmp_path / "cache", "--eval_every", 2]
    options += options_of(tmp_path, editor)[-6:]  # its prompts, learning rate and reward
    options += ["--num_inference_steps", 2, "--num_pair_prompts", 3, "--group_size", 2]
    options += ["--num_steps", 1, "--num_pairs", 2, "--micro_batch_size", 2]
    assert run_here(tmp_path, "dpo_offline.py", *options) is None
    pairs = read_pairs(tmp_path / "runs/dpo_offline")
    names = ["1.png", "2.png"] if takes_several(editor) else ["1.png"]
    assert [len(pair.sources) for pair in pairs] == [len(names)] * 3
    for source, name in zip(pairs[1].sources, names, strict=True):
        assert np.array_equal(np.asarray(source.decode()), np.asarray(Image.open(tmp_path / name)))


def test_two_ranks_edit_as_one_does(qwen, tmp_path):
    """Each rank has the pictures of its own images. Qwen's reach the prompt's embedding, and the latents as well."""
    options = [
        *options_of(tmp_path, qwen),
        "--num_steps",
        1,
        "--num_prompts",
        2,
        "--micro_batch_size",
        4,
        "--guidance_scale",
        2.5,
    ]
    assert run_here(tmp_path, "flow_grpo.py", *options, "--name", "one") is None
    torchrun(tmp_path, "flow_grpo.py", *options, "--name", "two", nproc=2)
    one, two = (read_metrics(tmp_path / "runs" / name)[1] for name in ("one", "two"))
    for name in ("critic/rewards/mean", "actor/grad_norm", "val/like_the_source/mean"):
        assert two[name] == pytest.approx(one[name], rel=1e-3)


def test_a_run_without_pictures_is_refused_before_the_model_loads(kontext, tmp_path):
    prompts = ["--train_prompts", ROOT / "assets/train_prompts.txt"]
    line = run_here(tmp_path, "flow_grpo.py", *options_of(tmp_path, kontext), *prompts)
    assert line.startswith(f"flow_grpo.py: error: --train_prompts {prompts[1]}: ")
    assert line.endswith(" 1") and '("image")' in line
    assert not (tmp_path / "runs/flow_grpo").exists()


def test_records_with_different_numbers_of_pictures_are_refused_before_the_model_loads(klein, tmp_path):
    options = options_of(tmp_path, klein)
    path = prompt_file(tmp_path, {"prompt": "one", "image": "0.png"}, {"prompt": "two", "image": ["0.png", "1.png"]})
    line = run_here(tmp_path, "flow_grpo.py", *options)
    assert re.match(f"flow_grpo.py: error: --train_prompts {path}: .* 2, 'two', .* 2 .*; .* 1, ", line)
    assert not (tmp_path / "runs/flow_grpo").exists()


def test_the_plan_counts_the_pictures_of_a_record(editor):
    """The conditioning that it counts has the shapes that are encoded."""
    family = family_class(editor)
    lora = make_lora(family, rank=4, alpha=8)
    model = load_model(family, str(editor), torch.float32, "cpu")
    flops = []
    for count in (1, 2) if takes_several(editor) else (1,):
        blueprint = Blueprint(family, str(editor), lora, torch.float32, count)
        encoded = model.encode(edits(count), 100, (32, 48))
        assert {name: tensor.shape[1:] for name, tensor in encoded.items()} == blueprint.conditioning_shapes(
            100, (32, 48)
        )
        flops.append(blueprint.velocity((32, 48), 1, 100, 1.0).flops)
    assert flops == sorted(set(flops))


def test_each_picture_and_their_order_change_the_image(editor):
    model = load_model(family_class(editor), str(editor), torch.float32, "cpu")
    args = flow_grpo.Args(rollout="local", image_size=(32, 48), max_sequence_length=32)
    one, other = gradient(), gradient().rotate(180)
    latents = []
    for pictures in ([one, one], [one, other], [other, one]) if takes_several(editor) else ([one], [other]):
        sources = [StoredImage("a.png", png(picture)) for picture in pictures]
        prompts = PromptSet(["edit"], [{"image": sources}])
        with torch.no_grad():
            drawn = prompts
            request = flow_grpo.make_request(args, model, drawn, torch.tensor([0]), [3])
        latents.append(flow_grpo.rollout(args, model, None, request).latents)
    of_order = 1e-4 if isinstance(model, Flux2Klein) else 1e-3  # klein sees an order in positions alone
    for i, j in itertools.combinations(range(len(latents)), 2):
        assert (latents[i] - latents[j]).abs().max() > (of_order if (i, j) == (1, 2) else 1e-3)
