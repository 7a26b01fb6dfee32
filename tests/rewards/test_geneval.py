"""geneval: the published rules by hand, and from pictures to scores on tiny random networks.

benchmarks/geneval_pairs.py compares the rules with the published code.
"""

import json

from common.files.prompts import read_prompts
from common.rewards import geneval as geneval_file
from common.rewards._geneval_rules import CLASSES, COLOURS, Detection, is_right, kept, places_of
from common.rewards._loading import load_rewards
from common.rewards.geneval import geneval
from tests.conftest import TINY, read_metrics, run_here
from tests.tiny_models import make_clip

import pytest
import torch
from PIL import Image

BIRD = Detection((0, 40, 20, 60), 0.9)  # centre 10, 50
COUCH = Detection((80, 40, 120, 60), 0.8)  # centre 100, 50


def test_classes_are_cocos_in_order():
    assert len(CLASSES) == len(set(CLASSES)) == 80
    assert (CLASSES[0], CLASSES[9], CLASSES[64], CLASSES[79]) == (
        "person",
        "traffic light",
        "computer mouse",
        "toothbrush",
    )


# ---- the rules -------------------------------------------------------------------------------------------------------
def test_places_by_hand():
    """Offset -90, sizes 20 + 40: shortened by 6 to -84, which is 0.93 of the way. Nearer than the margin is nowhere."""
    assert places_of(BIRD, COUCH) == {"left of"} and places_of(COUCH, BIRD) == {"right of"}
    high = Detection((0, 0, 20, 10), 0.9)  # centre 10, 5: 45 above, shortened by 3
    assert places_of(high, BIRD) == {"above"} and places_of(BIRD, high) == {"below"}
    slanted = Detection((100, 100, 120, 120), 0.9)  # 100 right, 60 below: .86 and .50 of 116.6, less the margins
    assert places_of(slanted, BIRD) == {"right of"}
    assert places_of(Detection((70, 110, 90, 130), 0.9), BIRD) == {"right of", "below"}  # 70 each way
    assert places_of(Detection((3, 40, 23, 60), 0.9), BIRD) == set()  # 3 right, within .1 x 40
    assert places_of(BIRD, BIRD) == set()


def test_clauses_by_hand():
    red = lambda name, found: ["red"] * len(found)
    two = {"include": [{"class": "bird", "count": 1}, {"class": "couch", "count": 1}]}
    assert is_right(two, {"bird": [BIRD], "couch": [COUCH]}, red)
    assert not is_right(two, {"bird": [BIRD]}, red)
    counted = {"include": [{"class": "bird", "count": 2}], "exclude": [{"class": "bird", "count": 3}]}
    for number, expected in ((1, False), (2, True), (3, False)):
        assert is_right(counted, {"bird": [BIRD] * number}, red) is expected
    coloured = {"include": [{"class": "bird", "count": 1, "color": "blue"}]}
    assert not is_right(coloured, {"bird": [BIRD]}, red)
    assert is_right(coloured, {"bird": [BIRD, COUCH]}, lambda name, found: ["blue"] * len(found))  # the surest alone
    placed = {"include": [{"class": "couch", "count": 1}, {"class": "bird", "count": 1, "position": ["left of", 0]}]}
    assert is_right(placed, {"bird": [BIRD], "couch": [COUCH]}, red)
    assert not is_right(placed, {"bird": [COUCH], "couch": [BIRD]}, red)
    assert not is_right(placed, {"bird": [BIRD]}, red)  # nothing to be left of


def test_kept_are_the_surest_above_the_threshold():
    many = [Detection((0, 0, 1, 1), 0.3 + i / 100) for i in range(30)]
    found = kept({"bird": many, "cup": [Detection((0, 0, 1, 1), 0.3)]}, 0.3)
    assert list(found) == ["bird"]
    assert [each.score for each in found["bird"]] == [many[i].score for i in range(29, 13, -1)]


@pytest.mark.fast
def test_counting_asks_for_surer_detections_than_other_prompts(monkeypatch):
    """The published 0.9, and 0.3 for the others."""
    clause = {"class": "bird", "count": 1}
    records = [{"tag": tag, "include": [clause]} for tag in ("counting", "colors")]
    images = [Image.new("RGB", (100, 100))] * 2
    for score, expected in ((0.2, [0, 0]), (0.5, [0, 1]), (0.95, [1, 1])):
        monkeypatch.setattr(geneval_file, "detect", lambda image, score=score: {"bird": [BIRD._replace(score=score)]})
        assert [each["score"] for each in geneval(images, ["a bird"] * 2, records)] == expected


@pytest.mark.fast
def test_a_colour_is_that_of_the_object_alone_on_grey(monkeypatch):
    """CLIP sees boxes, without what the first one's mask leaves out. Its stub calls the first red, the next blue."""
    crops = []
    embeddings = {"red": [1.0, 0.0], "blue": [0.0, 1.0]}  # of the others: as near to both
    monkeypatch.setattr(geneval_file, "load", lambda: (None, None, "a CLIP", None))
    monkeypatch.setattr(geneval_file, "embed_images", lambda model, processor, of: crops.extend(of) or torch.eye(2))

    def embed_prompts(model, processor, texts):
        named = [name for name in embeddings if all(name in text for text in texts)]
        return torch.tensor([embeddings[named[0]] if named else [1.0, 1.0]] * len(texts))

    monkeypatch.setattr(geneval_file, "embed_prompts", embed_prompts)
    geneval_file.colour_embeddings.cache_clear()
    image = Image.new("RGB", (60, 20), "green")
    image.paste("red", (0, 0, 15, 20))
    mask = Image.new("L", (60, 20))
    mask.paste(255, (0, 0, 15, 20))
    found = [Detection((0, 0, 40, 20), 0.9, mask), Detection((10, 5, 30, 15), 0.8)]
    assert geneval_file.colours_of(image, "bird", found) == ["red", "blue"]
    geneval_file.colour_embeddings.cache_clear()
    assert sorted(crops[0].getcolors()) == [(15 * 20, (255, 0, 0)), (25 * 20, (153, 153, 153))]
    assert sorted(crops[1].getcolors()) == [(5 * 10, (255, 0, 0)), (15 * 10, (0, 128, 0))]


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        ({"prompt": "a bird"}, '"tag".*"include"'),
        (
            {"prompt": "a", "tag": "colors", "include": [{"class": "dragon", "count": 1}]},
            "dragon",
        ),
        (
            {"prompt": "a", "tag": "counting", "include": [{"class": "bird", "count": 0}]},
            "bird .* 0",
        ),
        (
            {"prompt": "a", "tag": "colors", "include": [{"class": "bird", "count": 1, "color": "teal"}]},
            "'teal'",
        ),
        (
            {"prompt": "a", "tag": "position", "include": [{"class": "bird", "count": 1, "position": ["left of", 0]}]},
            "left of, right of, above, below",
        ),
        (
            {"prompt": "a", "tag": "position", "include": [{"class": "bird", "count": 1}] * 2, "exclude": "cat"},
            '"tag".*"include"',
        ),
        ({"prompt": "a", "tag": "colors", "include": ["bird"]}, '"tag".*"include"'),
        *(
            (
                {
                    "prompt": "a",
                    "tag": "position",
                    "include": [{"class": "cat", "count": 1}, {"class": "bird", "count": 1, "position": place}],
                },
                "bird .* left of, right of, above, below",
            )
            for place in ("left of", ["left of"], ["left-of", 0], ["left of", "0"], ["left of", 1])
        ),
    ],
)
def test_a_record_that_is_not_genevals_is_named(tmp_path, record, fault):
    (tmp_path / "mine.jsonl").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=f"mine.jsonl:1: .*{fault}"):
        read_prompts(tmp_path / "mine.jsonl", {"geneval": geneval})


def test_a_field_that_is_null_is_as_if_it_were_not_there():
    """As columns of a table have it."""
    clause = {"class": "bird", "count": 1, "color": None, "position": None}
    record = {"tag": "single_object", "include": [clause], "exclude": None}
    geneval_file.check_metadata(record)
    seen = {"bird": [Detection((0, 0, 1, 1), 0.9)]}
    assert is_right(record, seen, lambda name, found: [])


# ---- the networks ----------------------------------------------------------------------------------------------------
@pytest.fixture
def networks(tmp_path, monkeypatch):
    """A tiny random Mask2Former of 80 classes, and a tiny CLIP."""
    from transformers import (
        Mask2FormerConfig,
        Mask2FormerForUniversalSegmentation,
        Mask2FormerImageProcessor,
        SwinConfig,
    )

    backbone = SwinConfig(
        image_size=32, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=2,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    sizes = {"hidden_dim": 32, "feature_size": 32, "mask_feature_size": 32, "encoder_feedforward_dim": 32}
    sizes |= {
        "dim_feedforward": 16,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "num_attention_heads": 2,
        "num_queries": 6,
    }
    torch.manual_seed(0)
    detector = Mask2FormerForUniversalSegmentation(Mask2FormerConfig(backbone_config=backbone, num_labels=80, **sizes))
    detector.save_pretrained(tmp_path / "detector")
    Mask2FormerImageProcessor(size={"height": 32, "width": 96}, do_resize=True).save_pretrained(tmp_path / "detector")
    make_clip(tmp_path / "clip", seed=1)
    monkeypatch.setenv("GENEVAL_DETECTOR", str(tmp_path / "detector"))
    monkeypatch.setenv("GENEVAL_CLIP", str(tmp_path / "clip"))
    monkeypatch.setattr("common.rewards._networks.LOADED", {})
    geneval_file.colour_embeddings.cache_clear()


def test_from_a_picture_to_its_objects_and_colours(networks, monkeypatch):
    image = Image.linear_gradient("L").convert("RGB").resize((96, 32))
    objects = geneval_file.detect(image)
    every = [detection for found in objects.values() for detection in found]
    assert every and set(objects) <= set(CLASSES)
    for detection in every:
        assert 0 <= detection.score <= 1 and detection.mask.size == image.size
        assert detection.mask.getbbox() == detection.box
    name, found = next(iter(objects.items()))
    colours = geneval_file.colours_of(image, name, found)
    assert len(colours) == len(found) and set(colours) <= set(COLOURS)
    _, processor, *_ = geneval_file.load()
    nothing = [{"segmentation": torch.zeros(32, 96), "segments_info": []}]  # as transformers says it
    monkeypatch.setattr(processor, "post_process_instance_segmentation", lambda *outputs, **options: nothing)
    assert geneval_file.detect(image) == {}


def test_a_run_with_the_whole_reward(networks, tmp_path, monkeypatch):
    """Objects that a random detector sees, at whatever score: the run scores every image 0 or 1."""
    monkeypatch.setattr(geneval_file, "OTHER_THRESHOLD", 0.0)
    records = [{"prompt": f"a photo of a {name}", "tag": "single_object", "include": [{"class": name, "count": 1}]}
               for name in CLASSES[:8]]  # fmt: skip
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, records)))
    prompts = ["--train_prompts", "train.jsonl", "--eval_prompts", "train.jsonl", "--max_prompts", 2]
    rewards = ["--reward", "geneval", "geneval.soft", "--reward_weights", 1, 1]
    options = ["--rollout", "local", *TINY, "--num_steps", 1, *prompts, *rewards]
    assert run_here(tmp_path, "flow_grpo.py", *options) is None
    row = read_metrics(tmp_path / "runs" / "flow_grpo")[1]
    assert 0 <= row["critic/rewards/geneval/mean"] <= 1
    assert 0 <= row["critic/rewards/geneval.soft/mean"] <= 1
    assert load_rewards(["geneval"], [1.0])["geneval"] is geneval
