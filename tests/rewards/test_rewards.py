"""Rewards against hand numbers, a real OCR network, and real JPEG files."""

import builtins
import io
import math
import re
import sys
import threading
from dataclasses import replace

import flow_grpo
from common import rewards as room
from common.data import GroupSampler, PromptSet, share_eval_images
from common.distributed import gather_objects, gather_rows
from common.errors import RolloutError, RunError
from common.metrics import eval_metrics, reward_metrics
from common.models.stable_diffusion_3 import StableDiffusion3
from common.rewards import _loading
from common.rewards._loading import built_in_rewards, load_rewards
from common.rewards.jpeg_compressibility import jpeg_compressibility
from common.rewards.jpeg_incompressibility import jpeg_incompressibility
from common.rewards.ocr import levenshtein, ocr, ocr_score, quoted_text, recognize
from common.rewards.ocr_contains import ocr_contains
from common.run.evaluation import evaluate_samples, sample_records
from common.run.inputs import Inputs
from common.scoring import Scorer, score_images
from tests.conftest import checked, new_run, on_ranks

import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

pytestmark = pytest.mark.fast


# ---- OCR -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [
        ("", "", 0),
        ("", "abc", 3),
        ("abc", "", 3),
        ("abc", "abc", 0),
        ("abc", "abd", 1),
        ("abc", "ab", 1),
        ("bc", "abc", 1),
        ("kitten", "sitting", 3),
        ("saturday", "sunday", 3),
        ("flaw", "lawn", 2),
        ("12", "21", 2),
        ("intention", "execution", 5),
        ("4711", "1174", 4),
        ("aaaa", "a", 3),
    ],
)
def test_levenshtein(a, b, distance):
    assert levenshtein(a, b) == levenshtein(b, a) == distance


@pytest.mark.parametrize(
    ("recognized", "target", "plain", "contains"),
    [
        ("4711", "4711", 1.0, 1.0),
        ("4718", "4711", 0.75, 0.75),
        ("47", "4711", 0.5, 0.5),
        ("", "4711", 0.0, 0.0),
        ("kitten", "sitting", 4 / 7, 4 / 7),
        ("a4711", "4711", 0.75, 1.0),  # the exemption
        ("471147114711", "4711", 0.0, 1.0),  # repeated text: 8 deletions, capped at 4
        ("9876543210", "ab", 0.0, 0.0),  # capped at len(target)
        ("4 7\t1\n1", "4711", 1.0, 1.0),
        ("\u3000HeLLo World\u00a0", "helloworld", 1.0, 1.0),
        ("\uff14\uff17\uff11\uff11", "4711", 1.0, 1.0),  # full-width digits, which the network has as well
        ("4711", "\uff14\uff17\uff11\uff11", 1.0, 1.0),
        ("\uff28\uff25\uff2c\uff2c\uff2f\uff01", "hello!", 1.0, 1.0),
        ("\u00b2\u2460", "21", 1.0, 1.0),  # superscripts and digits in circles
    ],
)
def test_ocr_score(recognized, target, plain, contains):
    assert ocr_score(recognized, target) == pytest.approx(plain, abs=1e-15)
    assert ocr_score(recognized, target, contains=True) == pytest.approx(contains, abs=1e-15)


def test_quoted_text():
    assert quoted_text('a sign "47 11" by "someone"') == "4711"
    assert quoted_text('"New\tYork\u00a0 CITY"') == "newyorkcity"
    assert quoted_text('"\uff14\uff17"') == "47"
    for prompt in ("a sign", 'a sign "12', 'a sign ""', 'a sign " \t"', ""):
        with pytest.raises(ValueError, match=f"OCR .*: {prompt}$"):
            quoted_text(prompt)


def sign(text, ink="black", ground="white"):
    image = Image.new("RGB", (96, 32), ground)
    ImageDraw.Draw(image).text((8, 2), text, fill=ink, font=ImageFont.load_default(size=24))
    return image


@pytest.fixture(scope="module")
def signs():
    blank = Image.new("RGB", (96, 32), "grey")
    return [sign("4711"), sign("305", "navy", "khaki"), blank, sign("88", "white", "darkgreen")]


def test_ocr_reads_an_image(signs):
    prompts = ['a sign "4711"', 'a sign "47 11"', 'a sign "4718"', 'a sign "471"', 'a sign "71"', 'a sign "ab"']
    images = [signs[0]] * len(prompts)
    # Levenshtein 0, 0, 1 of 4, 1 of 3, 2 of 2, 4 capped at 2
    for reward, expected in ((ocr, [1, 1, 3 / 4, 2 / 3, 0, 0]), (ocr_contains, [1, 1, 3 / 4, 1, 1, 0])):
        scored = reward(images, prompts, [{}] * 6)
        assert [one["score"] for one in scored] == pytest.approx(expected, abs=1e-12)
        assert [one["read"] for one in scored] == ["4711"] * 6
    with pytest.raises(ValueError, match="OCR .*: a sign$"):
        ocr(images[:1], ["a sign"], [{}])
    with pytest.raises(ValueError):  # a prompt for each image
        ocr(images[:2], prompts[:1], [{}])


def test_ocr_is_deterministic_and_depends_on_no_neighbour(signs):
    together = recognize(signs)
    assert together[0] == "4711"
    assert len(together) == 4
    assert recognize(signs) == together
    assert [recognize([image])[0] for image in signs] == together
    assert recognize(signs[::-1]) == together[::-1]
    wide = sign("305", "navy", "khaki").resize((384, 32))
    assert recognize([wide, signs[0]])[1] == "4711"  # a long line next to it pads nothing


def test_ocr_checks_prompts():
    for reward in load_rewards(["ocr", "ocr_contains"], [1, 1]).values():
        reward.check('a sign "1"')
        with pytest.raises(ValueError):
            reward.check("a sign")


@pytest.mark.parametrize("name", ["ocr", "ocr_contains", "ocr_scene", "ocr_scene_contains"])
def test_a_broken_ocr_is_refused_before_the_model_loads(name, tmp_path, monkeypatch):
    """RapidOCR imports OpenCV, which needs libraries of the system."""
    (tmp_path / "cv2.py").write_text("raise ImportError('libGL.so.1: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cv2", raising=False)
    with pytest.raises(ValueError, match=rf"^--reward {name}: .*RapidOCR: libGL\.so\.1: ") as refused:
        load_rewards([name], [1])
    assert "\n" not in str(refused.value)


# ---- JPEG ------------------------------------------------------------------------------------------------------------
def test_jpeg_rewards():
    generator = torch.Generator().manual_seed(0)
    noise = Image.fromarray(torch.randint(0, 256, (64, 64, 3), generator=generator, dtype=torch.uint8).numpy())
    images = [noise, Image.new("RGB", (64, 64), "red"), sign("4711").convert("RGBA")]
    expected = []
    for image in images:
        file = io.BytesIO()
        image.convert("RGB").save(file, "JPEG", quality=95)
        expected.append(-len(file.getvalue()) / 500_000)
    scores = jpeg_compressibility(images, [""] * 3, [{}] * 3)
    assert scores == pytest.approx(expected, rel=1e-12)
    assert scores[0] < scores[1] < 0  # small files score high
    assert -0.03 < scores[0] < -0.006  # 4096 pixels of noise: about 2 bytes each
    negatives = [-score for score in expected]
    assert jpeg_incompressibility(images, [""] * 3, [{}] * 3) == pytest.approx(negatives, rel=1e-12)


# ---- load_rewards ----------------------------------------------------------------------------------------------------
def test_load_rewards_by_name():
    assert load_rewards(["ocr"], [1]) == {"ocr": ocr}
    both = load_rewards(["jpeg_incompressibility", "ocr_contains"], [1, 1])
    assert list(both.items()) == [("jpeg_incompressibility", jpeg_incompressibility), ("ocr_contains", ocr_contains)]


@pytest.mark.parametrize(("text", "told"), [("import nosuch", "nosuch.*:1"), ("def other(): ...", "no function mine")])
def test_a_file_among_the_built_in_ones_that_cannot_be_used_is_told_in_a_line(text, told, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(f"{text}\n")
    monkeypatch.setattr(_loading, "REWARDS", tmp_path)
    monkeypatch.setattr(room, "__path__", [str(tmp_path)])
    with pytest.raises(ValueError, match=f"^--reward mine: .*{told}"):
        load_rewards(["mine"], [1.0])
    sys.modules.pop("common.rewards.mine", None)


def test_built_in_rewards_are_the_files_of_their_folder():
    names = ["jpeg_compressibility", "jpeg_incompressibility", "ocr", "ocr_contains"]
    assert set(names) <= set(built_in_rewards())  # beside what a user adds
    assert [function.__name__ for function in load_rewards(names, [1] * 4).values()] == names


def test_a_new_file_is_a_new_reward_and_nothing_else_changes(tmp_path, monkeypatch):
    (tmp_path / "redness.py").write_text("def redness(images, prompts, metadata):\n    return [0.5] * len(images)\n")
    monkeypatch.setattr(_loading, "REWARDS", tmp_path)  # which is listed
    monkeypatch.setattr(room, "__path__", [str(tmp_path)])  # from which files are imported
    assert built_in_rewards() == ["redness"]
    assert score_images(load_rewards(["redness"], [1]), IMAGES, PROMPTS).tolist() == [[0.5], [0.5]]
    del sys.modules["common.rewards.redness"]


def test_unknown_reward_lists_the_names():
    with pytest.raises(ValueError) as error:
        load_rewards(["ocr", "ocrr"], [1, 1])
    for word in ("ocrr", "ocr_contains", "jpeg_compressibility", "jpeg_incompressibility", "path/to/file.py:function"):
        assert word in str(error.value)


def test_load_a_users_function(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text("number = 3\n\ndef width(images, *_):\n    return [number * image.width for image in images]\n")
    rewards = load_rewards([f"{path}:width", "ocr"], [1, 1])
    assert list(rewards) == ["width", "ocr"]
    assert rewards["width"]([sign("1")], [""], [{}]) == [288]
    for name in (f"{path}:height", f"{path}:number", f"{path}:"):
        with pytest.raises(ValueError) as error:
            load_rewards([name], [1])
        assert str(path) in str(error.value) and name.rpartition(":")[2] in str(error.value)
    with pytest.raises(ValueError, match="^--reward .*:width: .*/nowhere.py$"):
        load_rewards([f"{tmp_path}/nowhere.py:width"], [1])


def test_the_ranks_gpu_is_set_before_a_users_file_is_imported_and_in_the_thread_that_scores(tmp_path, monkeypatch):
    """A file may load a network to "cuda"."""
    events = []
    told = "threading.current_thread().name"
    for user in ("common.rewards._loading", "common.scoring"):
        monkeypatch.setattr(f"{user}.use_own_gpu", lambda: events.append(f"gpu, {threading.current_thread().name}"))
    monkeypatch.setattr(builtins, "events", events, raising=False)
    file = tmp_path / "network.py"
    file.write_text(
        f"import threading\nevents.append(f'import, {{{told}}}')\n\n\ndef network(images, prompts, metadata):\n"
        f"    events.append(f'score, {{{told}}}')\n    return [0.0] * len(images)\n"
    )
    rewards = load_rewards([f"{file}:network"], [1.0])
    thread = events[0].removeprefix("gpu, ")
    assert thread != "MainThread" and events == [f"gpu, {thread}", f"import, {thread}"]
    scorer = Scorer(rewards, PromptSet(["a"], [{}]))
    scorer.add([0], [Image.new("RGB", (8, 8))])
    scorer.scores()
    assert events[2:] == [f"gpu, {thread}", f"score, {thread}"]


def test_two_rewards_of_one_name(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def ocr(images, prompts, metadata):\n    return [0.0] * len(images)\n")
    for names in (["ocr", "ocr"], ["ocr", f"{path}:ocr"]):
        with pytest.raises(ValueError, match="^--reward ocr .+:.*ocr$"):
            load_rewards(names, [1] * len(names))


# ---- score_images ----------------------------------------------------------------------------------------------------
def reward(*scores):
    return lambda images, prompts, metadata: list(scores)


IMAGES = [sign("1"), sign("2")]
PROMPTS = PromptSet(["first", "second"], [{"n": 1}, {"n": 2}])


def test_several_rewards_are_columns_in_order():
    rewards = {"b": reward(0.1, 2), "a": reward(3, 4), "c": lambda *_: torch.tensor([5.0, 6.0])}
    scores = score_images(rewards, IMAGES, PROMPTS)
    assert scores.dtype == torch.float64
    assert scores.tolist() == [[0.1, 3, 5], [2, 4, 6]]


def test_rewards_are_given_images_prompts_and_metadata():
    seen = []
    score_images({"a": lambda *args: seen.append(args) or [0, 0]}, IMAGES, PROMPTS)
    assert seen == [(IMAGES, ["first", "second"], [{"n": 1}, {"n": 2}])]


def test_no_reward_sees_what_another_does_to_an_image_or_a_frame():
    def paints(images, prompts, metadata):
        for image in images:
            for frame in image if isinstance(image, list) else [image]:
                frame.putpixel((0, 0), (9, 9, 9))
        return [0.0] * len(images)

    def looks(images, prompts, metadata):
        frames = [image[0] if isinstance(image, list) else image for image in images]
        return [frame.getpixel((0, 0))[0] for frame in frames]

    video = [Image.new("RGB", (4, 4)), Image.new("RGB", (4, 4))]
    prompt_set = PromptSet(["a", "b"], [{}, {}])
    scores = score_images({"paints": paints, "looks": looks}, [Image.new("RGB", (4, 4)), video], prompt_set)
    assert scores[:, 1].tolist() == [0, 0]


@pytest.mark.parametrize("bad", [reward(1.0), reward(1.0, 2.0, 3.0), reward([1.0], [2.0]), lambda *_: 1.0])
def test_wrong_number_of_scores(bad):
    with pytest.raises(RunError, match=" broken: "):
        score_images({"fine": reward(1, 2), "broken": bad}, IMAGES, PROMPTS)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_score_that_is_not_finite(value):
    with pytest.raises(RunError) as error:
        score_images({"fine": reward(1, 2), "broken": reward(1.0, value)}, IMAGES, PROMPTS)
    assert " broken: " in str(error.value)
    assert re.search(r" 1 \(.* second\)", str(error.value))


def test_a_reward_that_raises_is_never_a_score():
    def fails(images, prompts, metadata):
        raise ConnectionError("the judge is down")

    told = r" broken .*ConnectionError: the judge is down \(.*test_rewards.py:\d+\)$"
    with pytest.raises(RunError, match=told):
        score_images({"fine": reward(1, 2), "broken": fails}, IMAGES, PROMPTS)


# ---- Scorer ----------------------------------------------------------------------------------------------------------
FIVE = [sign(str(i)) for i in range(5)]
FIVE_PROMPTS = PromptSet([f"p{i}" for i in range(5)], [{"n": i} for i in range(5)])


def brightness(images, prompts, metadata):
    return [
        image.resize((1, 1)).getpixel((0, 0))[0] / 255 + data["n"] for image, data in zip(images, metadata, strict=True)
    ]


@pytest.mark.parametrize("batches", [[[0, 1, 2, 3, 4]], [[0], [1, 2], [3, 4]], [[3, 4], [0, 1], [2]]])
def test_batches_get_the_scores_of_one_call(batches):
    rewards = {"first": brightness, "last": lambda *given: [-score for score in brightness(*given)]}
    scorer = Scorer(rewards, FIVE_PROMPTS)
    for rows in batches:
        scorer.add(rows, [FIVE[row] for row in rows])
    scores = scorer.scores()
    assert torch.equal(scores, score_images(rewards, FIVE, FIVE_PROMPTS)) and scores.dtype == torch.float64


@pytest.mark.parametrize(("world_size", "num_mini_batches"), [(1, 1), (1, 4), (2, 1), (2, 4), (4, 2)])
@pytest.mark.parametrize("num_frames", [1, 2])
def test_a_whole_group_reward_gets_each_group_once_whatever_the_ranks(
    monkeypatch, world_size, num_mini_batches, num_frames
):
    """Two draws of one prompt, and another's: groups of four cut between ranks and mini-batches."""
    levels = [7, 90, 3, 41, 60, 61, 5, 200, 1, 30, 20, 2, 9, 8, 11, 10]
    prompts = PromptSet(["p", "p", "q", "r"], [{"n": 0}, {"n": 1}, {"n": 2}, {"n": 3}])
    calls = []

    def share_of_wins(images, texts, metadata):
        frames = [image if num_frames == 1 else image[-1] for image in images]
        reds = [frame.getpixel((0, 0))[0] for frame in frames]
        calls.append((metadata[0]["n"], texts, reds))
        scores = [{"score": sum(red > other for other in reds) / 3, "red": red} for red in reds]
        return [ValueError("odd") if red == 200 else score for red, score in zip(reds, scores, strict=True)]

    share_of_wins.whole_group = True
    rewards = {"first": lambda images, *_: [0.5] * len(images), "wins": share_of_wins}

    def on_rank(rank):
        sampler = GroupSampler(4, 4, 4, num_mini_batches, seed=0)
        scorer = Scorer(rewards, prompts.select(sampler.image_index // 4), "mask")
        for row, level in enumerate(levels[i] for i in sampler.image_index):
            image = Image.new("RGB", (4, 2), (level, 0, 0))
            scorer.add([row], [image if num_frames == 1 else [FIVE[0].resize((4, 2)), image]])
        scores = scorer.scores(sampler.image_index, 4)
        return gather_rows(scores, sampler.image_index), gather_objects(scorer.details)

    found, _ = on_ranks(monkeypatch, world_size, on_rank)
    groups = [levels[i : i + 4] for i in range(0, 16, 4)]
    assert sorted(calls) == [(n, [text] * 4, group) for n, (text, group) in enumerate(zip("ppqr", groups, strict=True))]
    wins = [sum(level > other for other in group) / 3 for group in groups for level in group]
    wins[7] = math.nan
    for scores, of_ranks in found:
        torch.testing.assert_close(scores[:, 1], torch.tensor(wins, dtype=torch.float64), equal_nan=True)
        assert (scores[:, 0] == 0.5).all()
        reds = [detail["wins"]["red"] for details in of_ranks for detail in details if detail]
        assert sorted(reds) == sorted({*levels} - {200})


def test_groups_of_an_evaluation_are_its_prompts_images(monkeypatch):
    """Three prompts of three images, dealt to two ranks one by one, of which one is made twice."""
    sizes = []

    def size(images, prompts, metadata):
        sizes.append(len(images))
        return [image.getpixel((0, 0))[0] + 100 * len(set(prompts)) for image in images]

    size.whole_group = True

    def on_rank(rank):
        places, prompts, _ = share_eval_images(PromptSet(["a", "b", "c"], [{}] * 3), 3)
        scorer = Scorer({"size": size}, prompts)
        scorer.add(range(len(places)), [Image.new("RGB", (4, 2), (place, 0, 0)) for place in places])
        return scorer.scores(places, 3)[:, 0].tolist()

    found, _ = on_ranks(monkeypatch, 2, on_rank)
    assert found == [[100, 102, 104, 106, 108], [101, 103, 105, 107, 100]] and sizes == [3, 3, 3]


@pytest.mark.parametrize("whole_group", [False, True])
def test_an_error_of_one_rank_is_raised_on_all(monkeypatch, whole_group):
    """None waits for another in a collective, and one alone tells why."""

    def judge(images, prompts, metadata):
        if prompts[0] == "b":  # the second rank's
            raise TimeoutError("no answer")
        return [0.5] * len(images)

    judge.whole_group = whole_group

    def on_rank(rank):
        scorer = Scorer({"judge": judge}, PromptSet(["ab"[rank]] * 2, [{}, {}]))
        scorer.add(range(2), [Image.new("RGB", (4, 2))] * 2)
        with pytest.raises(RolloutError) as caught:
            scorer.scores([2 * rank, 2 * rank + 1], 2)
        return re.findall(r" judge .* (\w+): no answer", str(caught.value))

    assert on_ranks(monkeypatch, 2, on_rank)[0] == [[], ["TimeoutError"]]


def test_images_are_scored_while_others_are_sampled():
    """The reward of the first batch begins before the second is handed over, and ends after it."""
    began = threading.Event()
    may_end = threading.Event()

    def waits(images, prompts, metadata):
        began.set()
        assert may_end.wait(30)
        return [1.0] * len(images)

    scorer = Scorer({"waits": waits}, FIVE_PROMPTS)
    scorer.add(range(2), FIVE[:2])
    assert began.wait(30)
    scorer.add(range(2, 5), FIVE[2:])
    may_end.set()
    assert scorer.scores().tolist() == [[1.0]] * 5
    assert scorer.thread.daemon  # a reward that hangs does not keep a failed run from ending


def test_a_reward_that_fails_beside_the_rollout_ends_it_when_scores_are_asked_for():
    calls = []

    def fails(images, prompts, metadata):
        calls.append(prompts)
        raise ConnectionError("the judge is down")

    scorer = Scorer({"broken": fails}, FIVE_PROMPTS)
    scorer.add([0, 1], FIVE[:2])
    scorer.add([2, 3, 4], FIVE[2:])
    with pytest.raises(RunError, match=" broken .*ConnectionError: the judge is down") as error:
        scorer.scores()
    assert calls == [["p0", "p1"]]
    assert isinstance(error.value.__cause__, ConnectionError)  # for the traceback in the run folder


# ---- relative rewards ------------------------------------------------------------------------------------------------
def test_a_relative_reward_trains_and_scores_no_evaluation(tmp_path):
    wins = "def wins(images, prompts, metadata):\n    pass\n\n\nwins.relative = True\n"
    (tmp_path / "mine.py").write_text(f"{wins}wins.whole_group = True\n")
    mine = f"{tmp_path}/mine.py:wins"
    rewards = load_rewards([mine, "ocr"], [2, 1])
    assert [*load_rewards(["ocr_contains"], option="--eval_reward", trained=rewards)] == ["ocr", "ocr_contains"]
    with pytest.raises(ValueError, match="^--eval_reward .*:wins:"):
        load_rewards([mine], option="--eval_reward", trained={})
    (tmp_path / "of_batches.py").write_text(wins)
    with pytest.raises(ValueError, match="^--reward .*:wins:.*whole_group = True$"):
        load_rewards([f"{tmp_path}/of_batches.py:wins"], [1])
    scores = torch.tensor([[1, 0], [0, 5], [1, 5], [0, 5]], dtype=torch.float64)
    metrics = reward_metrics(scores, scores[:, 0], rewards, (2, 1), 2)  # totals 2, 5 | 7, 5
    assert metrics["critic/rewards/mean"] == 15 / 4 and metrics["critic/rewards/max"] == 5
    assert metrics["critic/rewards/std_mean"] == 1.25 and metrics["critic/rewards/wins/mean"] == 0.5
    metrics = reward_metrics(scores[:, :1], scores[:, 0], {"wins": rewards["wins"]}, (2,), 2)
    assert "critic/rewards/mean" not in metrics and metrics["critic/rewards/std_mean"] == 1


@pytest.mark.parametrize("watched", [(), ("light",)])
def test_an_evaluation_of_relative_rewards_has_no_total(watched, one_rank, tmp_path):
    run = new_run(tmp_path, num_steps=4)
    rewards = dict.fromkeys(watched, lambda images, *_: [0.25] * len(images))
    scorer = Scorer(rewards, PROMPTS)
    scorer.add([0, 1], IMAGES)
    args = replace(run.args, reward=("mine.py:wins",))
    scores = scorer.scores([0, 1], 1)
    metrics, grid = evaluate_samples(args, run, scorer, places=[0, 1], seeds=[1, 2], scores=scores)
    means = {name: float(value) for name, value in metrics.items() if name.endswith("/mean")}
    assert means == {f"val/{name}/mean": 0.25 for name in watched} and len(grid) == 2


@pytest.mark.parametrize(
    ("attributes", "options", "told"),
    [
        ({"whole_group": True}, {}, ".* wins .*--eval_images_per_prompt is 1"),
        ({"relative": True}, {"best_by": "val/wins/mean"}, "--best_by val/wins/mean: wins "),
    ],
)
def test_what_an_evaluation_cannot_score_is_refused(attributes, options, told):
    def wins(images, prompts, metadata):
        return [0.5] * len(images)

    vars(wins).update(attributes)
    eval_rewards = {} if attributes.get("relative") else {"wins": wins}
    inputs = Inputs(StableDiffusion3, {"wins": wins}, eval_rewards, PROMPTS, PROMPTS, lora=None, checkpoint=None)
    with pytest.raises(ValueError, match=f"^{told}"):
        checked(flow_grpo.Args(rollout="local", **options), inputs)


@pytest.mark.parametrize("eval_only", [False, True])
def test_a_run_without_a_best_adapter_says_so(eval_only, capfd):
    rewards = {"wins": relative_reward}
    inputs = Inputs(StableDiffusion3, rewards, {}, PROMPTS, PROMPTS, lora=None, checkpoint=None)
    checked(flow_grpo.Args(rollout="local", reward=("wins",), eval_only=eval_only), inputs)
    told = "best_adapter.*--reward.*--eval_reward"
    assert bool(re.search(told, capfd.readouterr().err)) != eval_only


def relative_reward(images, prompts, metadata):
    return [0.5] * len(images)


relative_reward.relative = relative_reward.whole_group = True


# ---- reward_metrics --------------------------------------------------------------------------------------------------
def test_reward_metrics_by_hand():
    scores = torch.tensor([[1, 0], [0, 1], [0, 0], [0, 2], [0.5, 0], [0.25, 0.25]], dtype=torch.float64)
    # totals 1, 1 | 0, 2 | 0.5, 0.5: population deviations 0, 1, 0
    metrics = reward_metrics(scores, scores[:, 0], dict.fromkeys("ab"), (1, 1), 2)
    metrics = {name: float(value) for name, value in metrics.items()}
    assert metrics == pytest.approx(
        {
            "critic/rewards/mean": 5 / 6,
            "critic/rewards/max": 2,
            "critic/rewards/min": 0,
            "critic/rewards/group_size": 2,
            "critic/rewards/skipped_groups": 0,
            "critic/rewards/std_mean": 1 / 3,
            "critic/rewards/zero_std_ratio": 2 / 3,
            "critic/advantages/mean": 1.75 / 6,
            "critic/advantages/max": 1,
            "critic/advantages/min": 0,
            "critic/rewards/a/failed": 0,
            "critic/rewards/a/mean": 1.75 / 6,
            "critic/rewards/b/failed": 0,
            "critic/rewards/b/mean": 3.25 / 6,
        },
        abs=1e-12,
    )
    weighted = reward_metrics(scores, scores[:, 0], dict.fromkeys("ab"), (2, -1), 2)  # totals 2, -1 | 0, -2 | 1, 0.25
    assert weighted["critic/rewards/mean"].item() == pytest.approx(0.25 / 6, abs=1e-12)
    assert weighted["critic/rewards/min"].item() == -2 and weighted["critic/rewards/max"].item() == 2
    assert weighted["critic/rewards/b/mean"].item() == pytest.approx(3.25 / 6, abs=1e-12)  # without its weight


@pytest.mark.parametrize("value", [0.1, 0.7, 1 / 3])
@pytest.mark.parametrize("num_prompts", [1, 2, 16])
@pytest.mark.parametrize("group_size", [3, 8, 24])
def test_a_group_of_equal_rewards_counts_whatever_the_value(value, num_prompts, group_size):
    scores = torch.full((num_prompts * group_size, 3), value, dtype=torch.float64)
    scores[::2] += 1e-8  # round-off
    for names, reward_weights in (("a", (1,)), ("abc", (0.3, 1.7, -0.9))):
        scores_of_these = scores[:, : len(names)]
        metrics = reward_metrics(scores_of_these, scores[:, 0], dict.fromkeys(names), reward_weights, group_size)
        assert metrics["critic/rewards/zero_std_ratio"] == 1


# ---- evaluation ------------------------------------------------------------------------------------------------------
def test_evaluation_by_hand(monkeypatch):
    """Three prompts of two images: two ranks take the images in turn, and each prompt counts once."""
    scores = torch.tensor([[0, 5], [1, 5], [2, 5], [4, 5], [0, 5], [0, 5]], dtype=torch.float64)  # means 0.5, 3, 0
    monkeypatch.setattr("common.metrics.gather", lambda places: torch.tensor([[0, 2, 4], [1, 3, 5]]))
    monkeypatch.setattr("common.data.gather", lambda of_rank_0: torch.stack([scores[0::2], scores[1::2]]))
    metrics = eval_metrics(scores[0::2], ["a", "b"], (2, -1), [0, 2, 4], images_per_prompt=2)
    variance = ((0.5 - 3.5 / 3) ** 2 + (3 - 3.5 / 3) ** 2 + (0 - 3.5 / 3) ** 2) / 3
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        {
            "val/a/failed": 0,
            "val/b/failed": 0,
            "val/a/mean": 3.5 / 3,
            "val/a/stderr": (variance / 3) ** 0.5,
            "val/b/mean": 5,
            "val/b/stderr": 0,
            "val/weighted_total/mean": 2 * 3.5 / 3 - 5,
            "val/weighted_total/stderr": 2 * (variance / 3) ** 0.5,
        },
        abs=1e-12,
    )


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("aesthetic", "AESTHETIC"), ("clip_score", "CLIP_SCORE"), ("pickscore", "PICKSCORE")]
    + [("geneval", "GENEVAL"), ("hpsv2", "HPSV2")]
    + [("http_scorer", "HTTP_SCORER"), ("vlm_judge", "VLM_JUDGE")],
)
def test_the_variables_that_a_file_documents_are_its_rewards_settings(name, prefix):
    """Except the variables that change when and how a score comes, and not its value."""
    function = _loading.find_reward(name)
    documented = set(re.findall(rf"\b{prefix}_[A-Z_]+\b", sys.modules[function.__module__].__doc__))
    examples = re.compile("_(RED|STYLE|TEXT)_")  # of vlm_judge:style and the like
    documented = {variable for variable in documented if not examples.search(variable)}
    of_the_way = {
        f"{prefix}_{end}" for end in ("BATCH_SIZE", "CONCURRENCY", "TIMEOUT_S", "RETRIES", "API_KEY", "SERVE", "SLEEP")
    }
    assert documented and set(function.settings) == documented - of_the_way


def test_records_of_samples():
    scores = torch.tensor([[0.5, 1], [0.25, 2]], dtype=torch.float64)
    assert sample_records(PROMPTS, [7, 8], scores, ["a", "b"]) == [
        {"prompt": "first", "seed": 7, "a": 0.5, "b": 1.0},
        {"prompt": "second", "seed": 8, "a": 0.25, "b": 2.0},
    ]


@pytest.mark.parametrize("name", ["pickscore", "clip_score", "aesthetic"])
@pytest.mark.parametrize("value", ["true", "2"])
def test_another_value_of_reward_offload_is_refused_before_the_network_is_read(name, value, tmp_path, monkeypatch):
    for variable in ("PICKSCORE_MODEL", "CLIP_SCORE_MODEL", "AESTHETIC_CLIP"):
        monkeypatch.setenv(variable, str(tmp_path / "nowhere"))
    monkeypatch.setenv("REWARD_OFFLOAD", value)
    with pytest.raises(ValueError, match=f"^--reward {name}: REWARD_OFFLOAD={value}: "):
        load_rewards([name], [1])
    for good in ("", "0", "1"):
        monkeypatch.setenv("REWARD_OFFLOAD", good)
        with pytest.raises(ValueError, match=f"^--reward {name}:"):
            load_rewards([name], [1])
