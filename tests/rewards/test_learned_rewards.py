"""PickScore, CLIPScore and the aesthetic predictor against their published formulas, on tiny random CLIPs made here."""

import re
import socket
import subprocess
import sys

from common.data import PromptSet
from common.errors import RunError
from common.rewards import _networks as networks
from common.rewards._clip import CHUNK, embed_images, embed_prompts
from common.rewards._loading import load_rewards
from common.rewards._networks import own_device
from common.rewards.aesthetic import aesthetic
from common.rewards.clip_score import clip_score
from common.rewards.pickscore import pickscore
from common.scoring import Scorer, score_images
from common.user_code.loading import load_function
from tests.conftest import ROOT, TINY, assert_one_line, few_eval_prompts, read_metrics, run_here
from tests.tiny_models import CLIP_PIXELS, CLIP_WIDTH, PublishedMLP, make_clip

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, CLIPModel

NAMES = ["pickscore", "clip_score", "aesthetic"]
REWARDS = {"pickscore": pickscore, "clip_score": clip_score, "aesthetic": aesthetic}
SIZE = CLIP_PIXELS
WIDTH = CLIP_WIDTH


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two CLIPs, `a` and `b`, and the weights of a predictor."""
    folder = tmp_path_factory.mktemp("weights")
    make_clip(folder / "a", seed=1)
    make_clip(folder / "b", seed=2)
    torch.manual_seed(3)
    torch.save(PublishedMLP().state_dict(), folder / "aesthetic-model.pth")
    return folder


@pytest.fixture(autouse=True)
def weights(folder, monkeypatch):
    monkeypatch.setenv("PICKSCORE_MODEL", str(folder / "a"))
    monkeypatch.setenv("PICKSCORE_PROCESSOR", str(folder / "b"))
    monkeypatch.setenv("CLIP_SCORE_MODEL", str(folder / "b"))
    monkeypatch.setenv("AESTHETIC_CLIP", str(folder / "a"))
    monkeypatch.setenv("AESTHETIC_MODEL", str(folder))


def picture(number, width, height):
    pixels = np.random.default_rng(number).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


LONG = "a very long line " * 40  # 640 letters: more than 77 tokens of any tokenizer
IMAGES = [picture(i, 48 + 8 * i, 96 - 4 * i) for i in range(11)]
PROMPTS = [f"picture {i}, {'a sign that says 47 ' * (i % 3)}" for i in range(10)] + [LONG]
NOTHING = [{}] * len(IMAGES)


# ---- the formulas ----------------------------------------------------------------------------------------------------
def reference_pixels(image):
    """CLIP's own preprocessing: resize the shorter side to SIZE (PIL's bicubic), cut out the middle, normalise."""
    size = [SIZE * side // min(image.size) for side in image.size]
    small = image.convert("RGB").resize(size, Image.Resampling.BICUBIC)
    left = (size[0] - SIZE) // 2
    upper = (size[1] - SIZE) // 2
    cut = small.crop((left, upper, left + SIZE, upper + SIZE))
    mean = np.array([0.48145466, 0.4578275, 0.40821073])
    deviation = np.array([0.26862954, 0.26130258, 0.27577711])
    pixels = (np.asarray(cut) / 255 - mean) / deviation
    return torch.from_numpy(pixels).permute(2, 0, 1).float()  # (3, SIZE, SIZE)


@torch.no_grad()
def reference_features(folder):
    """Embeddings of images and prompts, (B, WIDTH) each, and logit_scale. One call each, without padding."""
    model = CLIPModel.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    images = []
    texts = []
    for image, prompt in zip(IMAGES, PROMPTS, strict=True):
        seen = model.vision_model(pixel_values=reference_pixels(image)[None])
        images.append(model.visual_projection(seen.pooler_output))
        tokens = tokenizer([prompt], truncation=True, max_length=77, return_tensors="pt")
        read = model.text_model(**tokens)
        texts.append(model.text_projection(read.pooler_output))
    return torch.cat(images), torch.cat(texts), model.logit_scale.detach()


def test_pickscore_is_flow_grpos(folder):
    images, texts, logit_scale = reference_features(folder / "a")
    images = images / images.norm(p=2, dim=-1, keepdim=True)
    texts = texts / texts.norm(p=2, dim=-1, keepdim=True)
    expected = (logit_scale.exp() * (texts @ images.T)).diag() / 26
    scores = pickscore(IMAGES, PROMPTS, NOTHING)
    assert scores == pytest.approx(expected.tolist(), abs=1e-4)
    assert max(scores) - min(scores) > 0.05  # they differ


def test_clip_score_is_torchmetrics(folder):
    images, texts, _ = reference_features(folder / "b")
    expected = torch.nn.functional.cosine_similarity(images, texts)
    assert expected.min() < -0.05 and expected.max() > 0.05
    scores = clip_score(IMAGES, PROMPTS, NOTHING)
    assert scores == pytest.approx([100 * max(cosine, 0) for cosine in expected.tolist()], abs=1e-4)


def test_aesthetic_is_the_published_predictors(folder, monkeypatch):
    images, _, _ = reference_features(folder / "a")
    mlp = PublishedMLP().eval()
    mlp.load_state_dict(torch.load(folder / "aesthetic-model.pth"))
    with torch.no_grad():
        expected = mlp.layers(images / torch.linalg.vector_norm(images, dim=-1, keepdim=True)).squeeze(1)
    scores = aesthetic(IMAGES, PROMPTS, NOTHING)
    assert scores == pytest.approx(expected.tolist(), abs=1e-4)
    assert max(scores) - min(scores) > 1e-2
    assert aesthetic(IMAGES, [""] * 11, NOTHING) == scores  # whatever the prompts
    monkeypatch.setenv("AESTHETIC_MODEL", str(folder / "aesthetic-model.pth"))  # the file itself
    assert aesthetic(IMAGES, PROMPTS, NOTHING) == scores


def test_a_prompt_is_cut_to_77_tokens_and_keeps_its_end():
    """The tokenizer cuts it: text behind the cut changes nothing, text before it does."""
    model, processor = clip_score.load()
    tokens = processor.tokenizer(LONG, truncation=True, max_length=77)["input_ids"]
    assert len(tokens) == 77 and tokens[-1] == processor.tokenizer.eos_token_id
    cut, longer, other = embed_prompts(model, processor, [LONG, LONG + "x y z", "b" + LONG])
    assert torch.equal(cut, longer) and not torch.equal(cut, other)


def test_networks_are_in_fp32_frozen_and_read_once_for_all_rewards(folder, monkeypatch):
    half = CLIPModel.from_pretrained(folder / "a", dtype=torch.float16)
    half.save_pretrained(folder / "half")
    monkeypatch.setenv("PICKSCORE_MODEL", str(folder / "half"))
    model, _ = pickscore.load()
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert not model.training and not any(weight.requires_grad for weight in model.parameters())
    monkeypatch.setenv("CLIP_SCORE_MODEL", str(folder / "a"))
    assert clip_score.load()[0] is aesthetic.load()[0] is clip_score.load()[0]


# ---- neighbours ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_a_score_depends_on_no_neighbour(name):
    """To the bit, in fp32 on a CPU, at every place in a call and in calls of any size."""
    reward = REWARDS[name]
    scores = reward(IMAGES, PROMPTS, NOTHING)
    assert len(IMAGES) > CHUNK and len(set(scores)) > 1
    assert reward(IMAGES[::-1], PROMPTS[::-1], NOTHING) == scores[::-1]
    for i in range(len(IMAGES)):
        assert reward(IMAGES[i : i + 1], PROMPTS[i : i + 1], [{}]) == scores[i : i + 1]
    assert reward(IMAGES[:3], PROMPTS[:3], [{}] * 3) == scores[:3]


def test_every_forward_pass_has_the_same_number_of_rows(monkeypatch):
    model, processor = clip_score.load()
    sizes = []
    hooks = [
        part.register_forward_pre_hook(
            lambda _, given, named: sizes.append(len(next(iter([*given, *named.values()])))), with_kwargs=True
        )
        for part in (model.vision_model, model.text_model)
    ]
    embed_images(model, processor, IMAGES)
    embed_prompts(model, processor, PROMPTS[:1])
    for hook in hooks:
        hook.remove()
    assert sizes == [CHUNK] * 3  # 11 images in two passes, one prompt in one


def test_scores_of_batches_are_those_of_all_at_once():
    """The rollout hands images over in batches."""
    prompt_set = PromptSet(PROMPTS, NOTHING)
    scorer = Scorer(REWARDS, prompt_set)
    for rows in ([0, 1, 2], [5, 4, 3], [6], [7, 8, 9, 10]):
        scorer.add(rows, [IMAGES[row] for row in rows])
    assert torch.equal(scorer.scores(), score_images(REWARDS, IMAGES, prompt_set))


# ---- refusals --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["pickscore", "clip_score"])
def test_nan_in_the_weights_is_no_score(name, folder, tmp_path, monkeypatch):
    model = CLIPModel.from_pretrained(folder / "a")
    model.visual_projection.weight.data[:] = torch.nan
    make_clip(tmp_path, seed=1)
    model.save_pretrained(tmp_path)
    monkeypatch.setenv("PICKSCORE_MODEL", str(tmp_path))
    monkeypatch.setenv("CLIP_SCORE_MODEL", str(tmp_path))
    with pytest.raises(RunError, match=f" {name}: .* 0 .*nan"):
        score_images({name: REWARDS[name]}, IMAGES, PromptSet(PROMPTS, NOTHING))


def broken_weights(case, folder, tmp_path):
    """The path that the variable gets, and a part of the refusal."""
    if case == "nowhere":
        return tmp_path / "nowhere", "nowhere"
    make_clip(tmp_path / case, seed=1)
    file = tmp_path / case / "model.safetensors"
    if case == "truncated":
        file.write_bytes(file.read_bytes()[:1000])
        return file.parent, ""
    tensors = load_file(file)
    del tensors["text_projection.weight"], tensors["logit_scale"]
    save_file(tensors, file, metadata={"format": "pt"})
    return file.parent, " CLIP: 2 "


@pytest.mark.parametrize("case", ["nowhere", "truncated", "incomplete"])
@pytest.mark.parametrize(
    ("name", "variable"),
    [("pickscore", "PICKSCORE_MODEL"), ("clip_score", "CLIP_SCORE_MODEL"), ("aesthetic", "AESTHETIC_CLIP")],
)
def test_weights_that_are_not_there_are_refused_in_a_line(name, variable, case, folder, tmp_path, monkeypatch):
    path, told = broken_weights(case, folder, tmp_path)
    monkeypatch.setenv(variable, str(path))
    with pytest.raises(ValueError) as refused:
        load_rewards(["ocr", name], [1, 1])
    line = str(refused.value)
    assert re.match(f"--reward {name}: .*{variable}={path}, ", line)
    assert told in line and "\n" not in line
    assert list(load_rewards(["ocr", name], [1, 1], load=False)) == ["ocr", name]


@pytest.mark.parametrize("variable", ["PICKSCORE_MODEL", "PICKSCORE_PROCESSOR"])
def test_without_a_network_a_hub_id_is_refused_at_once(variable, folder, tmp_path, monkeypatch):
    """By one question; libraries of the hub would ask for more than a minute."""
    with socket.socket() as taken:  # of a port where nobody listens
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}/config.json"
        asked = []
        monkeypatch.setattr(networks, "hf_hub_url", lambda *given: asked.append(given) or address)
        monkeypatch.setattr(networks.constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("asks again"))
        for name in ("PICKSCORE_MODEL", "PICKSCORE_PROCESSOR"):
            monkeypatch.setenv(name, "an/id" if name == variable else str(folder / "a"))
        with pytest.raises(ValueError, match=rf"^--reward pickscore: .*{variable}=an/id, .* 127\.0\.0\.1 "):
            load_rewards(["pickscore"], [1])
    assert asked == [("an/id", "config.json")]


def test_a_predictor_that_is_not_one_is_refused_in_a_line(folder, tmp_path, monkeypatch):
    torch.save({"layers.0.weight": torch.zeros(4, WIDTH), "layers.0.bias": torch.zeros(4)}, tmp_path / "wide.pth")
    torch.save({"layers.0.weight": torch.zeros(1, 9), "layers.0.bias": torch.zeros(1)}, tmp_path / "narrow.pth")
    torch.save({"weight": torch.zeros(1, WIDTH)}, tmp_path / "other.pth")
    (tmp_path / "text.pth").write_text("no weights")
    told = {
        "wide.pth": " one ",
        "narrow.pth": f"AESTHETIC_CLIP={folder / 'a'}: ",
        "other.pth": " AESTHETIC_MODEL=",
        "text.pth": " AESTHETIC_MODEL=",
        "nowhere.pth": " AESTHETIC_MODEL=",
    }
    for name, reason in told.items():
        monkeypatch.setenv("AESTHETIC_MODEL", str(tmp_path / name))
        with pytest.raises(ValueError) as refused:
            load_rewards(["aesthetic"], [1])
        assert str(refused.value).startswith("--reward aesthetic: ") and reason in str(refused.value)
    with pytest.raises(FileNotFoundError):
        torch.load(tmp_path / "nowhere.pth")


def test_published_weights_that_cannot_be_fetched_are_refused_before_a_model_loads(tmp_path):
    """The script itself, without a network, ends with one line that names the reward, the variable and its default."""
    command = [sys.executable, str(ROOT / "flow_grpo.py"), "--rollout", "local", "--reward", "pickscore"]
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "", "WORLD_SIZE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=120)
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert_one_line(line)
    assert re.search("--reward pickscore:.*PICKSCORE_MODEL=yuvalkirstain/PickScore_v1", line)
    assert "Traceback" not in done.stderr and not (tmp_path / "runs").exists()


# ---- a run -----------------------------------------------------------------------------------------------------------
def test_a_run_with_all_three(tmp_path):
    options = [*TINY, "--rollout", "local", "--num_steps", 1, "--name", "three", *few_eval_prompts(tmp_path)]
    options += ["--reward", *NAMES, "--reward_weights", 1, 0.01, 0.1]
    assert run_here(tmp_path, "flow_grpo.py", *options) is None
    rows = read_metrics(tmp_path / "runs" / "three")
    for row in rows:
        for name in NAMES:
            assert np.isfinite(row[f"val/{name}/mean"]) and row[f"val/{name}/stderr"] > 0
    assert rows[1]["critic/rewards/zero_std_ratio"] == 0


# ---- between rollouts ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("asked", [False, True])
def test_networks_leave_the_gpu_after_a_rollout_if_asked(asked, monkeypatch):
    """There is no GPU here: every move is recorded instead. A reward moves its network to the GPU when it is called."""
    monkeypatch.setenv("REWARD_OFFLOAD", str(int(asked)))
    model, _ = clip_score.load()
    monkeypatch.setattr(networks, "LOADED", {(networks.weights_of("CLIP_SCORE_MODEL", "")[1], "read_clip"): model})
    moves = []
    monkeypatch.setattr(model, "to", lambda device: moves.append(str(device)) or model)
    monkeypatch.setattr(networks, "own_device", lambda: "the GPU")
    scorer = Scorer({"clip_score": clip_score}, PromptSet(PROMPTS[:2], [{}] * 2))
    scorer.add([0], IMAGES[:1])
    scorer.add([1], IMAGES[1:2])
    scorer.scores([0, 1], 2)
    assert moves == ["the GPU"] * 2 + ["cpu"] * asked
    assert own_device() == torch.device("cpu")


COUNTING = """
import numpy

calls = []


def brightness(images, prompts, metadata):
    calls.append(len(images))
    return [numpy.asarray(image).mean() / 255 for image in images]


brightness.offload = lambda: calls.append("offload")
"""


def test_dpo_offlines_rewards_are_offloaded_once_the_pairs_and_each_evaluation_are_scored(tmp_path):
    path = tmp_path / "counting.py"
    path.write_text(COUNTING)
    options = ["--reward", f"{path}:brightness", "--num_pair_prompts", 3, "--group_size", 2, "--num_pairs", 2]
    options += ["--num_steps", 1, "--eval_num_inference_steps", 1, *few_eval_prompts(tmp_path, 4)]
    assert run_here(tmp_path, "dpo_offline.py", *options) is None
    calls = load_function(f"{path}:brightness", "--reward").__globals__["calls"]
    # the trial, three pairs, and evaluations of four prompts
    assert calls == [1, "offload", 2, 2, 2, "offload", 4, "offload", 4, "offload"]


# ---- a reward of one's own -------------------------------------------------------------------------------------------
def test_the_load_of_ones_own_reward_is_called_once_before_all_else(tmp_path):
    path = tmp_path / "loads.py"
    path.write_text(
        "calls = []\n\ndef mine(images, prompts, metadata):\n    return [len(calls)] * len(images)\n\n"
        "mine.load = lambda: calls.append(1)\n\ndef fails(images, prompts, metadata):\n    return []\n\n"
        'def weights():\n    raise RuntimeError("no weights,\\nset MY_WEIGHTS")\n\nfails.load = weights\n'
    )
    assert load_rewards([f"{path}:mine"], [1], load=False)["mine"](IMAGES[:1], [""], [{}]) == [0]
    assert load_rewards([f"{path}:mine"], [1])["mine"](IMAGES[:1], [""], [{}]) == [1]
    with pytest.raises(ValueError, match=r"^--reward fails: no weights,\\nset MY_WEIGHTS$"):
        load_rewards([f"{path}:mine", f"{path}:fails"], [1, 1])
