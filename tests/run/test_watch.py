"""The watch on hacking: diversity, drift from step 0, rewards that only score evaluations, and rules that end a run."""

import ast
import itertools
import json
import math
import re
from pathlib import Path

from assets.sign_colour import COLOURS, sign_colour
from common import metrics
from common.data import GroupSampler, PromptSet, share_of_rank
from common.files.prompts import read_prompts
from common.images import open_png, save_png
from common.metrics import eval_metrics
from common.rewards._loading import load_rewards
from common.run import watch
from common.run.evaluation import sample_records
from common.run.plots import drawn_metrics, plot_curves, save_samples
from common.run.run import Run
from common.run.stop_rules import check_stop_rules, read_stop_rules
from common.scoring import Reward
from tests.conftest import ROOT, TINY, assert_one_line, few_eval_prompts, new_run, on_ranks, read_metrics, run_here

import pytest
import torch
from PIL import Image

fast = pytest.mark.fast


def grey(level, size=(4, 2)):
    return Image.new("RGB", size, (level, level, level))


def half_red(level):
    """Every second pixel's red is `level`, all else is black: an RMS of level / 255 sqrt(1 / 6)."""
    image = grey(0)
    for x in (0, 2):
        for y in (0, 1):
            image.putpixel((x, y), (level, 0, 0))
    return image


# ---- pictures --------------------------------------------------------------------------------------------------------
@fast
def test_pictures_are_means_over_boxes_of_at_most_96_pixels_a_side():
    striped = Image.new("RGB", (194, 6))  # by 3: a side of 65
    striped.paste((90, 30, 0), (0, 0, 1, 6))
    small = metrics.small_pictures([striped]).view(2, 65, 3)
    assert small[:, 0].tolist() == [[30, 10, 0]] * 2 and not small[:, 1:].any()
    as_it_is = Image.frombytes("RGB", (96, 32), bytes(i % 256 for i in range(96 * 32 * 3)))
    assert bytes(metrics.small_pictures([as_it_is])[0].tolist()) == as_it_is.tobytes()


@fast
def test_pictures_of_a_video_are_its_first_middle_and_last_frame():
    video = [grey(level) for level in (10, 20, 30, 40)]
    assert metrics.small_pictures([video]).view(3, -1)[:, 0].tolist() == [10, 30, 40]


@fast
def test_rms_and_diversity_by_hand():
    pictures = metrics.small_pictures([grey(0), grey(255), half_red(153), half_red(153)])
    differences = metrics.rms_difference(pictures, metrics.small_pictures([grey(51), grey(0), grey(0), half_red(153)]))
    assert differences.tolist() == pytest.approx([0.2, 1, 0.6 / math.sqrt(6), 0], abs=1e-12)
    three = metrics.small_pictures([grey(0), grey(255), grey(0), grey(9), grey(9), grey(9)])
    found = metrics.diversity(three.view(2, 3, -1)).tolist()
    assert found == pytest.approx([2 / 3, 0], abs=1e-12)  # pairs 1, 0, 1 and 0, 0, 0
    two = metrics.small_pictures([grey(0), half_red(153), grey(51), grey(0)])
    assert metrics.diversity(two.view(2, 2, -1)).tolist() == pytest.approx([0.6 / math.sqrt(6), 0.2], abs=1e-12)


@fast
def test_norm_ratio_by_hand():
    """Norms 5 and 2 against 10 and 1."""
    v, v_ref = torch.tensor([[[3.0, 4.0]], [[0.0, 2.0]]]), torch.tensor([[[10.0, 0.0]], [[0.0, -1.0]]])
    assert metrics.norm_ratio(v.requires_grad_(), v_ref).item() == 1.25
    assert metrics.norm_ratio(torch.zeros(2, 3), torch.zeros(2, 3)).item() == 1  # a field that is 0 at the start


@fast
@pytest.mark.parametrize(
    ("world_size", "num_prompts", "group_size", "num_mini_batches"),
    [(1, 5, 3, 1), (2, 2, 2, 2), (2, 4, 6, 3), (3, 2, 6, 2), (4, 4, 2, 1), (6, 1, 6, 1), (6, 3, 4, 2)],
)
def test_diversity_of_a_rollout_is_over_all_ranks_each_with_its_share(
    monkeypatch, world_size, num_prompts, group_size, num_mini_batches
):
    """As of one rank that has all images, and no rank receives more pictures than its own groups lack."""
    generator = torch.Generator().manual_seed(1)
    levels = torch.randint(256, (num_prompts * group_size,), generator=generator).tolist()
    pairs = [list(itertools.combinations(levels[i : i + group_size], 2)) for i in range(0, len(levels), group_size)]
    means = [sum(abs(a - b) / 255 for a, b in group) / len(group) for group in pairs]

    def on_rank(rank):
        sizes = {"seed": 1, "num_mini_batches": num_mini_batches}
        sampler = GroupSampler(num_prompts, num_prompts, group_size, **sizes)
        return metrics.rollout_diversity([grey(levels[i]) for i in sampler.image_index], sampler).item()

    found, messages = on_ranks(monkeypatch, world_size, on_rank)
    assert found == pytest.approx([sum(means) / num_prompts] * world_size, abs=1e-12)
    assert len(set(found)) == 1
    pictures = [tensor for tensor in messages if tensor.dtype == torch.uint8]
    assert sum(map(len, pictures)) <= num_prompts * (group_size - 1)  # each travels once, or not at all
    if world_size == 1:
        assert messages == []


@fast
@pytest.mark.parametrize("image", [half_red(7), [half_red(7), half_red(9), half_red(9)]])
def test_open_png_reads_what_save_png_writes(image, tmp_path):
    save_png(tmp_path / "a.png", image)
    found = open_png(tmp_path / "a.png")
    assert isinstance(found, list) == isinstance(image, list)
    assert metrics.small_pictures([found]).tolist() == metrics.small_pictures([image]).tolist()


# ---- an evaluation ---------------------------------------------------------------------------------------------------
def evaluation(run, step, images, prompts=("p", "q"), images_per_prompt=1, **options):
    """The metrics of an evaluation with these images, of a run with these options; its args.json is the first one's."""
    folder = run / "samples" / f"{step:04d}"
    places = list(range(len(images)))
    records = [{"prompt": prompts[place // images_per_prompt], "seed": place, "ocr": 0.5} for place in places]
    save_samples(folder, places, images, records)
    if not (run / "args.json").exists():
        (run / "args.json").write_text(json.dumps({"args": {"resume": None, **options}}))
    return watch.watch_metrics(folder, places, images, images_per_prompt, options)


SAMPLED_BY = [
    "eval_num_inference_steps",
    "negative_prompt",
    "max_sequence_length",
    "dtype",
    "vae_dtype",
    "base_weights",
]


@fast
@pytest.mark.parametrize(
    ("changed", "is_compared"),
    [
        *(({name: "another"}, False) for name in SAMPLED_BY),
        ({"guidance_scale": 2.0}, False),
        ({"eval_guidance_scale": 2.0}, False),
        ({"eval_guidance_scale": 1.0, "guidance_scale": 2.0}, True),  # the rollouts' alone
        ({"learning_rate": 2.0}, True),
    ],
)
def test_images_of_another_sampling_have_not_drifted(one_rank, tmp_path, capfd, changed, is_compared):
    options = dict.fromkeys([*SAMPLED_BY, "learning_rate"], "one")
    options |= {"guidance_scale": 1.0, "eval_guidance_scale": None}
    evaluation(tmp_path, 0, [grey(0), grey(100)], **options)
    metrics = evaluation(tmp_path, 5, [grey(51), grey(100)], **(options | changed))
    assert metrics == (pytest.approx({"val/drift_from_base": 0.1}) if is_compared else {})
    assert ("no val/drift_from_base: " in capfd.readouterr().err) != is_compared


@fast
def test_drift_and_diversity_of_evaluations(one_rank, tmp_path):
    first = [grey(0), grey(100)]
    assert evaluation(tmp_path, 0, first) == {"val/drift_from_base": 0}
    assert evaluation(tmp_path, 5, [grey(51), grey(100)]) == pytest.approx({"val/drift_from_base": 0.1})
    assert evaluation(tmp_path, 10, first) == {"val/drift_from_base": 0}
    run = tmp_path / "several"
    assert evaluation(run, 0, [grey(0), grey(51)], "p", 2) == pytest.approx(
        {"val/drift_from_base": 0, "val/diversity": 0.2}
    )
    assert evaluation(run, 1, [grey(51), grey(51)], "p", 2) == pytest.approx(
        {"val/drift_from_base": 0.1, "val/diversity": 0}
    )


@fast
def test_drift_is_over_all_ranks_and_each_image_counts_once(one_rank, tmp_path, monkeypatch):
    """Three images moved by 0, 0.5, 0.4. Rank 1 has images 1 and, to have as many as rank 0, 0 again."""
    evaluation(tmp_path, 0, [grey(0)] * 3, "pqr")
    evaluation(tmp_path, 5, [grey(0), grey(51), grey(102)], "pqr")
    others = {torch.int64: torch.tensor([1, 0]), torch.float64: torch.tensor([0.5, 9.0], dtype=torch.float64)}
    both = lambda tensor: torch.stack([tensor, others[tensor.dtype]])
    monkeypatch.setattr(watch, "gather", both)
    monkeypatch.setattr("common.data.gather", both)
    found = watch.watch_metrics(tmp_path / "samples" / "0005", [0, 2], [grey(0), grey(102)], 1, {})
    assert found["val/drift_from_base"].item() == pytest.approx(0.3, abs=1e-12)


@fast
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_diversity_of_an_evaluation_is_over_all_ranks_and_each_image_counts_once(tmp_path, monkeypatch, world_size):
    """Three prompts of two images on ranks that take places in turn; several ranks repeat one, to have as many."""
    levels = [0, 51, 0, 102, 7, 7]

    def on_rank(rank):
        places = share_of_rank(len(levels))
        images = [grey(levels[place]) for place in places]
        return watch.watch_metrics(tmp_path / "samples" / "0005", places, images, 2, None)["val/diversity"].item()

    found, messages = on_ranks(monkeypatch, world_size, on_rank)
    assert found == pytest.approx([(0.2 + 0.4 + 0) / 3] * world_size, abs=1e-12)
    pictures = [tensor for tensor in messages if tensor.dtype == torch.uint8]
    assert sum(map(len, pictures)) == (0 if world_size == 1 else 3)  # of each prompt one image


@fast
def test_a_run_that_resumes_another_is_compared_with_that_runs_step_0(one_rank, tmp_path, monkeypatch):
    """Through two runs, by a checkpoint's file and a run's folder. `--resume latest` in the third changes nothing."""
    monkeypatch.chdir(tmp_path)
    first, second, third = (tmp_path / "runs" / name for name in ("first", "second", "third"))
    evaluation(first, 0, [grey(0), grey(0)])
    for run, resume in ((second, "runs/first/checkpoints/step_000005.pt"), (third, "runs/second")):
        run.mkdir(parents=True)
        (run / "args.json").write_text(json.dumps({"args": {"resume": resume}}))
    (third / "args_step_000010.json").write_text(json.dumps({"args": {"resume": "latest"}}))
    assert evaluation(third, 10, [grey(51), grey(51)]) == pytest.approx({"val/drift_from_base": 0.2})
    evaluation(second, 0, [grey(51), grey(51)])  # begun again, as --resume latest does without a checkpoint
    assert evaluation(third, 15, [grey(51), grey(51)]) == {"val/drift_from_base": 0}


@fast
@pytest.mark.parametrize("fault", ["no step 0", "circle", "prompts", "count", "size", "no image", "cut", "no record"])
def test_where_there_is_nothing_to_compare_with_a_line_says_so(one_rank, fault, tmp_path, capfd):
    run = tmp_path / "run"
    if fault != "no step 0":
        evaluation(run, 0, [grey(0)] * (3 if fault == "count" else 2), "pqr")
    base = run / "samples" / "0000"
    size = (4, 2)
    if fault == "circle":
        (base / "samples.jsonl").unlink()
        (run / "args.json").write_text(json.dumps({"args": {"resume": str(run)}}))
    elif fault == "no record":
        (base / "samples.jsonl").write_text('{"prompt": "p"}\n')
    elif fault == "size":
        size = (2, 4)  # as many pixels
    elif fault in ("no image", "cut"):
        file = base / "00001.png"
        file.write_bytes(file.read_bytes()[:45])
        if fault == "no image":
            file.unlink()
    prompts = "xy" if fault == "prompts" else "pq"
    assert evaluation(run, 5, [grey(9, size), grey(9, size)], prompts) == {}
    assert re.match(f"no val/drift_from_base: .* {run} ", capfd.readouterr().err)


# ---- rewards that only score evaluations -----------------------------------------------------------------------------
@fast
def test_rewards_that_only_watch_stand_behind_the_others_and_outside_the_total(one_rank):
    scores = torch.tensor([[0, 5, 10], [1, 5, 30]], dtype=torch.float64)
    metrics = eval_metrics(scores, ["a", "b", "watched"], (2, -1), [0, 1], images_per_prompt=1)
    found = {name: value.item() for name, value in metrics.items() if name.endswith("/mean")}
    expected = {"val/a/mean": 0.5, "val/b/mean": 5, "val/watched/mean": 20, "val/weighted_total/mean": 2 * 0.5 - 5}
    assert found == pytest.approx(expected)
    assert metrics["val/watched/stderr"].item() == pytest.approx(10 / math.sqrt(2))


def load_eval_rewards(names: list[str], trained: dict[str, Reward], num_frames: int = 1) -> dict[str, Reward]:
    """As every script's `prepare` loads them."""
    return load_rewards(names, None, num_frames, option="--eval_reward", trained=trained)


@fast
def test_rewards_of_evaluations_are_loaded_behind_the_trained_ones(tmp_path):
    (tmp_path / "mine.py").write_text("def ocr(*_):\n    return []\n\n\ndef mine(*_):\n    return []\n")
    trained = load_rewards(["ocr"], [1.0])
    assert list(load_eval_rewards([f"{tmp_path}/mine.py:mine"], trained)) == ["ocr", "mine"]
    assert load_eval_rewards([], trained) == trained
    for names, told in (
        ([f"{tmp_path}/mine.py:ocr"], f"{tmp_path}/mine.py:ocr: .* ocr$"),
        (["ocr"], "ocr: .* ocr$"),
        (["nonsense"], "unknown"),
        ([f"{tmp_path}/mine.py:none"], ":none: "),
        (["jpeg_compressibility", "jpeg_compressibility"], "jpeg_compressibility: .* jpeg_compressibility$"),
    ):
        with pytest.raises(ValueError, match=rf"^--eval_reward .*{told}"):
            load_eval_rewards(names, trained)
    assert list(trained) == ["ocr"]
    with pytest.raises(ValueError, match="^--eval_reward jpeg_compressibility: .*--num_frames 5; "):
        load_eval_rewards(["jpeg_compressibility"], {}, num_frames=5)


@fast
def test_all_scores_stand_in_the_caption(one_rank, tmp_path):
    names = ["ocr", "watched", "preservation"]  # which are too long for a line of a picture of 200 pixels
    for number, expected in [(1, "p  ocr 0.50"), (2, "p\nocr 0.50  watched 0.25")]:
        assert caption_of(names[:number], tmp_path / str(number)) == expected
    assert caption_of(names, tmp_path / "3") == "p\nocr 0.50\nwatched 0.25\npreservation 1.00"


def caption_of(names, folder):
    scores = torch.tensor([[0.5, 0.25, 1.0][: len(names)]], dtype=torch.float64)
    ((_, caption),) = save_samples(folder, [0], [grey(0)], sample_records(PromptSet(["p"], [{}]), [7], scores, names))
    return caption


# ---- --stop_if -------------------------------------------------------------------------------------------------------
@fast
@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("val/ocr/mean<0.5", ("val/ocr/mean", "<", 0.5)),
        (" val/drift_from_base > 1e-1 ", ("val/drift_from_base", ">", 0.1)),
        ("val/a-b/stderr<-.5", ("val/a-b/stderr", "<", -0.5)),
    ],
)
def test_stop_rules(text, rule):
    (found,) = read_stop_rules([text])
    assert found == rule
    assert found.holds(rule[2]) is False
    assert found.holds(rule[2] - 1) == (rule[1] == "<") and found.holds(rule[2] + 1) == (rule[1] == ">")


@fast
@pytest.mark.parametrize(
    "text",
    ["", "val/ocr/mean", "val/ocr/mean<", "<0.5", "val/ocr/mean=0.5", "val/ocr/mean<=0.5", "critic/rewards/mean<0.5"]
    + ["val/ocr/mean<nan", "val/ocr/mean<1e999", "val/ocr/mean<inf", "val/ocr/mean<0.5x", "val/ocr/mean<0.1<0.5"],
)
def test_a_malformed_stop_rule_is_refused(text):
    with pytest.raises(ValueError) as error:
        read_stop_rules(["val/ocr/mean<0.5", text])
    assert re.fullmatch(rf"--stop_if {re.escape(text)}: .*'val/ocr/mean<0\.5'.*", str(error.value))


def train(folder: Path, curve: dict[int, float], stop_if: list[str]) -> Run:
    """A run of four steps as the scripts make it, after evaluations at some steps, {step: val/a/mean}."""
    run = new_run(folder, num_steps=4, num_images=1, stop_if=tuple(stop_if))
    run.log({"val/a/mean": curve[0], "val/a/stderr": 0.0})
    for step in range(1, 5):
        run.begin_step(step)
        run.log({"loss": 1.0} | ({"val/a/mean": curve[step]} if step in curve else {}))
        if run.should_stop():
            break
    run.close()
    return run


@fast
def test_base_samples_are_found_from_a_bare_file_name(tmp_path, monkeypatch):
    """Of a run with `--resume step_000005.pt`, given in the folder of that file."""
    (tmp_path / "old" / "samples" / "0000").mkdir(parents=True)
    (tmp_path / "old" / "samples" / "0000" / "samples.jsonl").touch()
    checkpoints = tmp_path / "old" / "checkpoints"
    checkpoints.mkdir()
    run = tmp_path / "new"
    run.mkdir()
    (run / "args.json").write_text(json.dumps({"args": {"resume": "step_000005.pt"}}))
    monkeypatch.chdir(checkpoints)
    assert watch.base_samples(run) == tmp_path / "old" / "samples" / "0000"


@fast
def test_an_evaluation_that_meets_a_rule_ends_the_run(one_rank, tmp_path, capfd):
    rules = ["val/a/mean<0.5", "val/a/mean>3"]
    # the evaluation before training ends nothing, and a value at the limit does not meet the rule
    run = train(tmp_path, {0: 0.1, 2: 0.5, 3: 0.25}, rules)
    assert run.step == 3 and run.should_stop()
    last = capfd.readouterr().out.splitlines()[-1]
    assert re.search(r" 3 of 4: val/a/mean .* 0\.25 \(--stop_if val/a/mean<0\.5\); .*--resume latest", last)
    rows = read_metrics(tmp_path)
    marks = [[name for name in row if "stop_if" in name] for row in rows]
    assert marks == [[], [], [], ["training/stop_if/val/a/mean<0.5"]]
    assert rows[3]["training/stop_if/val/a/mean<0.5"] == 1


@fast
def test_several_rules_are_named_together(one_rank, tmp_path, capfd):
    run = train(tmp_path, {0: 0.1, 4: 0.25}, ["val/a/mean<0.5", "val/a/mean>3", "val/a/mean<0.75"])
    assert run.should_stop()
    rules = "val/a/mean is 0.25 (--stop_if val/a/mean<0.5), val/a/mean is 0.25 (--stop_if val/a/mean<0.75)"
    last = capfd.readouterr().out.splitlines()[-1]
    assert re.search(f" 4 .* {re.escape(rules)}; .*--resume latest .*--num_steps", last)
    assert sum("stop_if" in name for name in read_metrics(tmp_path)[-1]) == 2


@fast
def test_a_run_that_meets_no_rule_ends_after_its_last_step(one_rank, tmp_path, capfd):
    run = train(tmp_path, {0: 0.1, 2: 0.75, 4: 1.0}, ["val/a/mean<0.5"])
    assert run.step == 4 and not run.should_stop()
    assert capfd.readouterr().out.splitlines()[-1].startswith("finished all 4 ")


@fast
def test_a_rule_of_no_metric_is_refused():
    rewards = ["a", "b"]
    texts = ["val/a/mean<1", "val/b/stderr>1", "val/a/failed>0", "val/weighted_total/stderr>1", "val/drift_from_base>1"]
    check_stop_rules(texts, rewards, 1)
    with pytest.raises(ValueError) as error:
        check_stop_rules(["val/a/mean<1", "val/c/mean<0.5"], rewards, 1)
    known = "val/a/mean, val/b/mean, val/weighted_total/mean, val/drift_from_base"
    assert re.fullmatch(rf"--stop_if val/c/mean<0\.5: .* val/c/mean; .* {known}", str(error.value))
    with pytest.raises(ValueError, match="^--best_by val/c/mean: .* val/c/mean; "):
        check_stop_rules([], rewards, 1, best_by="val/c/mean")
    check_stop_rules(["val/diversity<0.1"], rewards, 2, best_by="val/diversity")
    check_stop_rules(["val/signs/a/best@2>0.5", "val/my signs/weighted_total/mean@2>0.5"], rewards, 2, "kind")
    for metric in ("val/signs/a/best@1", "val/signs/c/mean@1", "val/signs/a/mean@2", "val/a/mean@1"):
        with pytest.raises(ValueError, match=f"^--stop_if {metric}<1: .* {metric}; "):
            check_stop_rules([f"{metric}<1"], rewards, 1, "kind")
    check_stop_rules(["val/mine/sharpness<0.1"], ["my.py:mine"], 1)  # its file may return such a sub-score
    check_stop_rules(["val/vlm_judge/coherence<0.1"], ["vlm_judge"], 1, best_by="val/vlm_judge/style/mean")
    check_stop_rules(["val/style/coherence<0.1"], ["vlm_judge:style"], 1, best_by="val/style/mean")
    check_stop_rules(["val/geneval/soft<0.1"], ["geneval"], 1, best_by="val/geneval/soft")
    for name in ("http_scorer", "http_scorer:red"):  # which returns one number
        with pytest.raises(ValueError, match="^--best_by val/red/maen: "):
            check_stop_rules([], [name], 1, best_by="val/red/maen")
    check_stop_rules(["val/preservation/mean<0.5", "val/preservation/stderr>1"], rewards, 1)  # of edits
    with pytest.raises(ValueError, match="^--stop_if val/a/sharpness<0.1: "):
        check_stop_rules(["val/a/sharpness<0.1"], rewards, 1)
    with pytest.raises(ValueError, match="^--stop_if val/diversity<0.1: "):
        check_stop_rules(["val/diversity<0.1"], rewards, 1)


@fast
def test_a_rule_whose_metric_could_not_be_measured_is_named_in_a_line(one_rank, tmp_path, capfd):
    run = new_run(tmp_path, num_steps=8, num_images=1, stop_if=("val/drift_from_base>0.5", "val/a/mean<0.5"))
    for step in (6, 7):
        run.begin_step(step)
        run.log({"loss": 1.0} | ({"val/a/mean": 0.1} if step == 7 else {}))
        assert run.should_stop() == (step == 7)
    run.close()
    out = capfd.readouterr().out
    assert re.search(r" 7: --stop_if val/drift_from_base>0\.5 .* val/drift_from_base", out)
    assert "6: --stop_if" not in out
    assert re.search(r" 7 of 8: val/a/mean .* 0\.1 \(--stop_if val/a/mean<0\.5\)", out)


# ---- pictures of several rewards -------------------------------------------------------------------------------------
def metrics_row(step, **values):
    return {"training/global_step": step} | {f"val/{name}/mean": value for name, value in values.items()}


@fast
def test_curves_of_each_reward_and_of_their_total(tmp_path):
    both = [metrics_row(0, ocr=0.5, colour=0.9, weighted_total=1.4), metrics_row(5, ocr=0.6, colour=0.8)]
    assert "val/weighted_total/mean" in drawn_metrics(both, ("val/",))
    both[0] |= {"val/drift_from_base": 0.0, "val/diversity": 0.1, "critic/diversity": 0.1}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in both))
    plot_curves(tmp_path)
    assert Image.open(tmp_path / "curves.png").size == (1210, 385)  # two panels


# ---- the example of a reward of one's own ----------------------------------------------------------------------------
@fast
def test_sign_colours_are_those_of_the_embedded_model():
    tree = ast.parse((ROOT / "assets" / "make_embedded.py").read_text())
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    (colours,) = [node.value for node in assigned if ast.unparse(node.targets[0]) == "COLOURS"]
    assert ast.literal_eval(colours) == COLOURS
    for name in ("eval", "train"):
        read_prompts(ROOT / "assets" / f"{name}_prompts.txt", {"sign_colour": sign_colour})


@fast
def test_sign_colour_by_hand():
    def sign(*ground):
        image = Image.new("RGB", (96, 32), ground)
        image.paste((0, 0, 0), (0, 0, 47, 32))  # less than half of it
        return image

    prompts = ['a red sign that says "1"'] * 4 + ['A "blue-ish" sign, not red']
    images = [sign(196, 48, 44), sign(228, 80, 76), sign(196, 48, 108), sign(0, 255, 255), sign(48, 86, 184)]
    # off by 0; 32 in each channel; 64 in one of three; beyond 64
    assert sign_colour(images, prompts, [{}] * 5) == pytest.approx([1, 0.5, 2 / 3, 0, 1], abs=1e-12)
    with pytest.raises(ValueError, match="white, grey"):
        sign_colour.check("a sign in credit")


# ---- runs ------------------------------------------------------------------------------------------------------------
COLOUR = f"{ROOT / 'assets' / 'sign_colour.py'}:sign_colour"


@pytest.mark.parametrize("script", ["dpo_offline.py", "diffusion_nft.py"])
def test_a_run_is_watched_and_ends_by_a_rule(script, tmp_path, capfd):
    """It stops and saves after the second evaluation, and continues when asked. --eval_only ignores the rule."""
    options = ["--name", "run", "--num_steps", 3, "--eval_every", 1, "--eval_reward", COLOUR, "--learning_rate", 1e-2]
    options += ["--eval_images_per_prompt", 2, *few_eval_prompts(tmp_path, 2)]
    if script == "dpo_offline.py":
        options += ["--num_pair_prompts", 6, "--group_size", 4, "--num_pairs", 2]
    else:
        options += [*TINY, "--rollout", "local"]
    rule = "val/drift_from_base>1e-4"
    assert run_here(tmp_path, script, *options, "--stop_if", rule, "val/ocr/mean<-1") is None
    run = tmp_path / "runs" / "run"
    rows = read_metrics(run)
    assert [row["training/global_step"] for row in rows] == [0, 1]
    assert rows[0]["val/drift_from_base"] == 0 and rows[1]["val/drift_from_base"] > 1e-4
    assert rows[1]["training/stop_if/val/drift_from_base>0.0001"] == 1
    assert all(0 < row["val/diversity"] < 1 and 0.5 < row["val/sign_colour/mean"] < 1 for row in rows)
    assert all(row["val/weighted_total/mean"] == row["val/ocr/mean"] for row in rows)
    assert ("critic/diversity" in rows[1]) == (script != "dpo_offline.py")
    last = capfd.readouterr().out.splitlines()[-1]
    assert re.search(r" 1 of 3: val/drift_from_base .* \(--stop_if .+\); .*--resume latest", last)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000001.pt"]
    sample = json.loads((run / "samples" / "0001" / "samples.jsonl").read_text().splitlines()[0])
    assert {"ocr", "sign_colour"} < sample.keys()

    assert run_here(tmp_path, script, *options, "--resume", "latest") is None
    norms = [row["actor/velocity_norm"] for row in read_metrics(run)[1:]]
    assert norms == pytest.approx([1] * 3, abs=0.2) and norms[0] == pytest.approx(1, abs=1e-6) and norms[2] != norms[0]
    assert (
        run_here(tmp_path, script, "--name", "look", "--resume", run, "--eval_only", "True", "--trust_code", "True")
        is None
    )
    (looked,) = read_metrics(tmp_path / "runs" / "look")
    for name in ("val/drift_from_base", "val/sign_colour/mean"):
        assert looked[name] == pytest.approx(read_metrics(run)[3][name], abs=1e-9), name


def test_rules_are_refused_where_they_are_known_to_be_wrong(tmp_path):
    options = [*TINY, "--rollout", "local", *few_eval_prompts(tmp_path, 2)]
    line = run_here(tmp_path, "flow_grpo.py", *options, "--stop_if", "val/ocr/mean")
    assert_one_line(line)
    assert not (tmp_path / "runs").exists()
    line = run_here(tmp_path, "flow_grpo.py", *options, "--stop_if", "val/ocr<0.5")
    assert_one_line(line)
    known = "val/ocr/mean, val/weighted_total/mean, val/drift_from_base"
    assert re.search(f" val/ocr; .* {known}$", line)
    assert not (tmp_path / "runs").exists()
