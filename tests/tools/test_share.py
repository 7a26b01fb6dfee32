"""tools/share.py: a folder that loads as its card says, from a run of one step; what a card may not say is refused."""

import ast
import inspect
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

from common.run.record import digest
from common.weights.lora import LORA_FILES
from tests.conftest import EMBEDDED, ROOT, SMALL, brightness_reward, few_eval_prompts, one_rank_environment, run_here
from tools import bench, share

import diffusers
import httpx
import pytest
import torch
from huggingface_hub import HfApi, ModelCard, ModelCardData, constants
from PIL import Image
from safetensors.torch import load_file, save_file

WEIGHTS, WEIGHTS_2 = LORA_FILES.values()
pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of one step."""
    folder = tmp_path_factory.mktemp("made")
    options = ["--name", folder / "mine", "--rollout", "local", "--num_steps", 1, *SMALL, *few_eval_prompts(folder)]
    assert run_here(folder, "flow_grpo.py", *options, "--reward", brightness_reward(folder)) is None
    return folder / "mine"


@pytest.fixture
def run(made, tmp_path):
    """A copy of it, which a test may change."""
    return shutil.copytree(made, tmp_path / "mine")


class Hub:
    """A stand-in of the hub's API, which knows one model, and takes the arguments of the real one."""

    def __init__(self) -> None:
        self.base = ""  # its name
        self.gated: bool | str = False
        self.card: dict[str, str] = {}
        self.made: list[tuple[str, bool]] = []  # repositories, and whether they are private
        self.uploaded: dict[str, list[str]] = {}
        self.fault: Exception | None = None

    def model_info(self, name: str) -> SimpleNamespace:
        if name != self.base:
            raise ValueError("404 Client Error.\n\nRepository Not Found")
        return SimpleNamespace(gated=self.gated, card_data=ModelCardData(**self.card))

    def create_repo(self, name: str, *, private: bool) -> str:
        if self.fault:
            raise self.fault
        inspect.signature(HfApi.create_repo).bind(self, name, private=private)
        self.made.append((name, private))
        return f"https://hub.example/{name}"

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
        options = {"repo_id": repo_id, "folder_path": folder_path, "commit_message": commit_message}
        inspect.signature(HfApi.upload_folder).bind(self, **options)
        self.uploaded[repo_id] = sorted(path.name for path in Path(folder_path).iterdir())


@pytest.fixture(autouse=True)
def hub(monkeypatch):
    """A hub that knows nothing."""
    hub = Hub()
    monkeypatch.setattr(share, "HfApi", lambda: hub)
    return hub


def shared(run: Path, *words: object) -> tuple[ModelCard, Path]:
    """The card and the folder that the tool makes of a run."""
    share.main([str(run), "--license", "apache-2.0", *map(str, words)])
    return ModelCard.load(run / "share" / "README.md"), run / "share"


def refused(run: Path, *words: object) -> str:
    """The line that the tool ends with, which has left no folder."""
    with pytest.raises(SystemExit) as ended:
        share.main([str(run), *map(str, words)])
    assert not (run / "share").exists() and not list(run.glob(".share*"))
    line = str(ended.value.code)
    assert line.startswith("tools.share: error: ") and "\n" not in line
    return line


def code_of(card: ModelCard) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    return code


def image_of(code: str, folder: Path) -> Image.Image:
    """The image that a card's code makes where the repository is this folder."""
    code = code.replace(share.TO_BE_NAMED, str(folder)).replace('"assets/embedded"', f'"{EMBEDDED}"')
    torch.manual_seed(0)
    exec(code, {})
    return Image.open("image.png")


def image_by(pipe: diffusers.DiffusionPipeline, options: dict) -> Image.Image:
    """The same prompt and noise by a pipeline that a test has loaded."""
    torch.manual_seed(0)
    return pipe(**options).images[0]


def call_of(code: str) -> dict:
    """The arguments of the pipeline's call in a card's code; of those that are code themselves, the source."""
    (call,) = [
        node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call) and ast.unparse(node.func) == "pipe"
    ]
    arguments = {}
    for keyword in call.keywords:
        is_plain = not any(isinstance(node, ast.Call) for node in ast.walk(keyword.value))
        arguments[keyword.arg] = ast.literal_eval(keyword.value) if is_plain else ast.unparse(keyword.value)
    return arguments


def test_the_cards_code_loads_the_lora_and_makes_its_image(run):
    strong = {name: 40 * tensor for name, tensor in load_file(run / "adapter" / WEIGHTS).items()}
    save_file(strong, run / "adapter" / WEIGHTS)  # one step's LoRA changes no pixel
    card, folder = shared(run)
    options = call_of(code_of(card))
    assert options == {
        "prompt": 'a blue sign that says "55076"',
        "height": 32,
        "width": 96,
        "num_inference_steps": 3,
        "guidance_scale": 1.0,
        "max_sequence_length": 16,
    }
    pipe = diffusers.StableDiffusion3Pipeline.from_pretrained(EMBEDDED)
    before = image_by(pipe, options)
    pipe.load_lora_weights(run / "adapter")
    after = image_by(pipe, options)
    assert image_of(code_of(card), folder).tobytes() == after.tobytes() != before.tobytes()


def test_the_cards_code_loads_full_weights(run):
    """A transformer/ folder, for the rest of the base model."""
    transformer = diffusers.SD3Transformer2DModel.from_pretrained(EMBEDDED, subfolder="transformer")
    with torch.no_grad():
        transformer.proj_out.bias.add_(0.5)
    shutil.rmtree(run / "adapter")
    transformer.save_pretrained(run / "adapter")
    card, folder = shared(run)
    assert {path.name for path in (folder / "transformer").iterdir()} == {"config.json", share.FULL_WEIGHTS}
    pipe = diffusers.StableDiffusion3Pipeline.from_pretrained(EMBEDDED, transformer=transformer)
    expected = image_by(pipe, call_of(code_of(card)))
    assert image_of(code_of(card), folder).tobytes() == expected.tobytes()
    assert "lora" not in card.data.tags


def test_a_script_with_files_of_its_own_is_named_itself(run):
    """They stand before it in the record, as a name behind its own does too. Beside CleanFlow's commit the card has
    that of the script's own repository."""
    file = run / "args.json"
    record = json.loads(file.read_text())
    own = {"source a_helper.py": "1 bytes, blake2b 0", "source z/helper.py": "1 bytes, blake2b 0"}
    record |= {"contents": own | record["contents"], "script_git_hash": "abc-dirty"}
    record["command"] = f"-m mine.my_grpo --model {ROOT}/assets/embedded"
    file.write_text(json.dumps(record))
    card, _ = shared(run)
    assert "flow_grpo" in card.data.tags and "by `flow_grpo.py`" in card.text
    assert not {"a_helper", "helper"} & set(card.data.tags)
    assert record["git_hash"] in card.text and "`abc-dirty`" in card.text
    assert "\n-m mine.my_grpo --model assets/embedded\n" in card.text


def test_what_the_folder_and_the_card_have(run):
    card, folder = shared(run, "--gated")
    assert {path.name for path in folder.iterdir()} == {*("README.md", "before_after.png", "images", WEIGHTS)}
    weights = folder / WEIGHTS
    assert weights.read_bytes() == (run / "adapter" / WEIGHTS).read_bytes()
    assert digest([weights]) in card.text and json.loads((run / "args.json").read_text())["git_hash"] in card.text
    assert (card.data.license, card.data.pipeline_tag) == ("apache-2.0", "text-to-image")
    assert {"lora", "flow_grpo"} < {*card.data.tags} and card.data.base_model is None  # which is no model of the hub
    images = re.findall(r"!\[.*?\]\((.*?)\)", card.text) + [one["output"]["url"] for one in card.data.widget]
    assert len(images) == 5
    for image in images:
        with Image.open(folder / image) as opened:
            assert min(opened.size) > 0
    assert "gated" in card.text and "Flow-GRPO" in card.text and "brightness.py:brightness" in card.text
    assert str(run.parent) not in card.text and str(Path.home()) not in card.text  # nor is the rewards' folder
    (command,) = [line for line in card.text.splitlines() if line.startswith("flow_grpo.py")]
    assert " --name mine " in command and f" --eval_prompts eval.txt --reward {'brightness.py:brightness'}" in command


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("../data/client/prompts.jsonl", "prompts.jsonl"),
        ("--train_prompts=../data/client/prompts.jsonl", "--train_prompts=prompts.jsonl"),
        ("ocr=assets/../../client/adapter", "ocr=adapter"),
        ("../a=b/mine.py:f", "mine.py:f"),
        ("/data/client/a=b.txt:column", "a=b.txt:column"),
        (f"{ROOT}/assets/train_prompts.txt", "assets/train_prompts.txt"),
        ("contrib/../assets/train_prompts.txt", "contrib/../assets/train_prompts.txt"),
        ("runs/mine", "runs/mine"),
        ("val/ocr/mean>=0.9", "val/ocr/mean>=0.9"),
        ("a sign ...", "a sign ..."),
    ],
)
def test_of_a_path_outside_the_checkout_only_the_last_part_is_public(text, public):
    assert share.public_path(text) == public


@pytest.mark.parametrize(("option", "value"), [("records", ["mine.jsonl"]), ("pairs", "mine.jsonl")])
def test_records_and_pairs_stand_in_the_place_of_prompts(run, option, value):
    """Which such a run does not read; without pairs of its own offline DPO makes them of its prompts."""
    record = json.loads((run / "args.json").read_text())
    assert "- prompts: `assets/train_prompts.txt`" in shared(run)[0].text
    shutil.rmtree(run / "share")
    record["args"][option] = value
    (run / "args.json").write_text(json.dumps(record))
    text = shared(run)[0].text
    assert f"- {option}: `mine.jsonl`" in text and "- prompts:" not in text and "- held-out prompts: `" in text


def test_the_scores_are_the_evaluations_paired(run):
    """By hand: three prompts of two images each, one of which failed."""
    scores = {0: [0.0, 0.2, 0.4, None, 0.5, 0.5], 1: [0.2, 0.4, 0.8, 0.9, 0.5, 0.7]}
    for step, of_step in scores.items():
        folder = run / "samples" / f"{step:04d}"
        lines = []
        for number, score in enumerate(of_step):
            record = {"file": f"{number:05d}.png", "prompt": str(number // 2), "seed": number % 2, "mine": score}
            lines.append(json.dumps(record | {"group": number // 2}))
        (folder / "samples.jsonl").write_text("\n".join(lines))
    card, _ = shared(run)
    # differences of the prompts 0.2, 0.4 and 0.1: mean 0.2333, standard error 0.0882, times 4.303
    assert "| mine | 0.333 | 0.567 | +0.233 [-0.146, +0.613] |" in card.text


def test_equal_records_are_one_prompt():
    """Twice a, with 0.1 and 0.3, and b with 0.4; a record with other metadata would be another prompt."""
    pairs = []
    for group, (prompt, after) in enumerate([("a", 0.1), ("b", 0.4), ("a", 0.3)]):
        record = {"prompt": prompt, "group": group, "metadata": {"n": prompt}}
        pairs.append(share.Pair(record | {"mine": 0.0}, record | {"mine": after}, (Path("a.png"), Path("b.png"))))
    # a and b lie 0.1333 off in sum: the variance is 2 (2 x 0.1333^2) / 9, and t of one degree of freedom 12.706
    assert share.evaluation_table(pairs)[-1] == "| mine | 0.000 | 0.267 | +0.267 [-0.863, +1.396] |"
    pairs[0].after["metadata"] = {"n": "c"}  # three prompts: a standard error of 0.0882, times 4.303
    assert share.evaluation_table(pairs)[-1] == "| mine | 0.000 | 0.267 | +0.267 [-0.113, +0.646] |"


@pytest.mark.parametrize("change", ["weights", "step"])
def test_a_run_that_saves_meanwhile_is_not_shared(run, monkeypatch, change):
    """Its table and its step would be those of other weights."""
    file = run / "adapter" / WEIGHTS

    def goes_on(*args, **options):
        if change == "weights":
            save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)
        else:
            (run / "heartbeat.json").write_text('{"step": 2, "phase": "stopped"}')
        return find_base(*args, **options)

    find_base = share.find_base
    monkeypatch.setattr(share, "find_base", goes_on)
    assert f"{run}/adapter: " in refused(run, "--license", "mit")


def test_evaluations_of_other_options_are_not_compared(run, capsys):
    """As after a resume at step 0, which may do that evaluation again."""
    record = json.loads((run / "args.json").read_text())
    record["args"]["eval_num_inference_steps"] = 9
    (run / "args_step_000000.json").write_text(json.dumps(record))
    card, folder = shared(run)
    assert {path.name for path in folder.iterdir()} == {"README.md", WEIGHTS}
    assert "| reward |" not in card.text and "eval_num_inference_steps: 3 -> 9" in capsys.readouterr().out
    assert call_of(code_of(card))["prompt"] == 'a blue sign that says "55076"'


def test_the_best_adapter_is_that_of_its_evaluation(run):
    (run / "best_adapter" / "best.json").write_text('{"step": 1}')
    file = run / "best_adapter" / WEIGHTS
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)
    card, folder = shared(run, "--best")
    assert (folder / WEIGHTS).read_bytes() == file.read_bytes()
    assert "for 1 step " in card.text and "highest" in card.text


def test_a_best_adapter_whose_save_was_cut_is_not_shared(run):
    """best.json is written first: its weights would be called those of another step."""
    (run / "best_adapter" / "best.json").write_text('{"step": 1, "is_saved": false}')
    assert re.search("/best_adapter: .* step 1: .* resume ", refused(run, "--license", "mit", "--best"))


@pytest.mark.parametrize(("phase", "step"), [("gen", 1), ("stopped", 2)])
def test_the_last_adapter_is_of_the_last_checkpoint(run, phase, step):
    """An older one's evaluation is shown, and said to be."""
    (run / "heartbeat.json").write_text(json.dumps({"step": 2, "phase": phase}))
    card, _ = shared(run)
    assert f"for {step} step" in card.text
    assert ("which has no evaluation" in card.text) == (step == 2)


def test_a_bench_of_these_weights_stands_in_the_card(run, tmp_path, monkeypatch, capsys):
    for name, value in one_rank_environment().items():
        monkeypatch.setenv(name, value)
    words = ["--prompts", tmp_path / "own.txt", "--reward", brightness_reward(tmp_path), "--output", run / "bench"]
    (tmp_path / "own.txt").write_text("a red sign\na blue sign\n")
    bench.main(list(map(str, [EMBEDDED, "--runs", run, *words])))
    (one,) = json.loads((run / "bench" / "bench.json").read_text())["benches"]
    mean, low, high = one["table"][1]["difference"]
    card, _ = shared(run)
    assert "### own.txt" in card.text and f"{mean:+.3f} [{low:+.3f}, {high:+.3f}] |" in card.text
    shutil.rmtree(run / "share")
    file = run / "adapter" / WEIGHTS
    save_file({name: 2 * tensor for name, tensor in load_file(file).items()}, file)
    assert "bench.json" in refused(run, "--license", "mit", "--bench", run / "bench")
    capsys.readouterr()
    card, _ = shared(run)
    assert "own.txt" not in card.text and "bench.json" in capsys.readouterr().out


def test_a_run_without_an_evaluation_before_training_has_no_images(run, capsys):
    shutil.rmtree(run / "samples" / "0000")
    card, folder = shared(run)
    assert {path.name for path in folder.iterdir()} == {"README.md", WEIGHTS}
    assert "![" not in card.text and card.data.get("widget") is None and "step 0" in capsys.readouterr().out
    assert image_of(code_of(card), folder).size == (96, 32)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "--license: .* assets/embedded"),
        (["--license", "other"], "--license other"),
        (["--license_link", "https://example.org"], "--license_link"),
        (["--license", "mit", "--best"], "best_adapter.*before training"),
        (["--license", "mit", "--public"], "--public"),
        (["--license", "mit", "--to", "name"], "--to name"),
        (["--license", "mit", "--to", "user/a--b"], "--to user/a--b"),
        (["--license", "mit", "--bench", "nowhere"], "--bench nowhere"),
    ],
)
def test_what_a_card_may_not_say_is_one_line(run, words, named):
    (run / "best_adapter" / "best.json").write_text('{"step": 0}')
    assert re.search(named, refused(run, *words))


def test_faults_of_a_run_are_one_line(run, tmp_path):
    assert str(tmp_path / "nothing") in refused(tmp_path / "nothing", "--license", "mit")
    (run / "heartbeat.json").write_text('{"step": 3, "phase": "gen"}')
    shutil.rmtree(run / "checkpoints")
    assert "adapter/" in refused(run, "--license", "mit")
    shutil.rmtree(run / "adapter")
    assert f"{run}/adapter" in refused(run, "--license", "mit")


def test_a_folder_that_is_there_stays(run):
    shared(run)
    (run / "share" / "README.md").write_text("mine")
    with pytest.raises(SystemExit, match=f"{run}/share exists"):
        share.main([str(run), "--license", "mit"])
    assert (run / "share" / "README.md").read_text() == "mine"


# ---- the hub ---------------------------------------------------------------------------------------------------------
def with_model(run: Path, model: Path) -> None:
    """Let the run have been of this folder."""
    record = json.loads((run / "args.json").read_text())
    record["args"]["model"] = str(model)
    (run / "args.json").write_text(json.dumps(record))


def test_nothing_is_uploaded_without_to(run, hub):
    shared(run)
    assert not hub.made and not hub.uploaded


@pytest.mark.parametrize("is_public", [False, True])
def test_to_uploads_the_folder_to_a_new_repository(run, hub, is_public, capsys):
    hub.base, hub.gated = "base/model", "manual"
    hub.card = {"license": "other", "license_name": "their-terms", "license_link": "LICENSE.md"}
    words = ["--to", "user/name", "--base_model", "base/model", *(["--public"] if is_public else [])]
    share.main([str(run), *words])
    assert hub.made == [("user/name", not is_public)]
    assert hub.uploaded == {"user/name": sorted(path.name for path in (run / "share").iterdir())}
    assert capsys.readouterr().out.endswith("https://hub.example/user/name\n")
    card = ModelCard.load(run / "share" / "README.md")
    link = f"{constants.ENDPOINT}/base/model/blob/main/LICENSE.md"
    assert (card.data.license, card.data.license_name, card.data.license_link) == ("other", "their-terms", link)
    assert (card.data.base_model, card.data.base_model_relation) == ("base/model", "adapter")
    assert "gated" in card.text and f"[their-terms]({link})" in card.text and card.text.startswith("\n# name\n")
    code = code_of(card)
    assert 'from_pretrained("base/model", ' in code and 'load_lora_weights("user/name")' in code


def test_another_licence_stands_beside_the_bases(run, hub):
    hub.base, hub.card = "base/model", {"license": "mit"}
    shared(run, "--license_link", "https://example.org/own", "--to", "user/name", "--base_model", "base/model")
    card = ModelCard.load(run / "share" / "README.md")
    assert (card.data.license, card.data.license_name) == ("other", "apache-2.0")
    assert "mit" in card.text and "gated" not in card.text


def test_a_base_that_the_hub_does_not_know_is_refused(run, hub):
    assert "--base_model other/model: 404" in refused(run, "--to", "user/name", "--base_model", "other/model")
    assert "--base_model a/b/c: " in refused(run, "--license", "mit", "--base_model", "a/b/c")
    assert not hub.made


@pytest.mark.parametrize("fault", [OSError("409 Conflict"), httpx.ConnectError("no connection")])
def test_a_hub_that_refuses_leaves_the_folder(run, hub, fault):
    hub.fault = fault
    with pytest.raises(SystemExit, match=f"error: {run}/share is ready, but --to user/name: {fault}"):
        share.main([str(run), "--license", "mit", "--to", "user/name"])
    assert (run / "share" / "README.md").is_file() and not hub.uploaded


def test_a_folders_own_card_gives_the_licence(run, tmp_path):
    """As a clone of the hub's repository has it. The folder itself is no name for others."""
    model = shutil.copytree(EMBEDDED, tmp_path / "clone")
    (model / "README.md").write_text("---\nlicense: openrail\nextra_gated_prompt: agree\n---\n# Their model\n")
    with_model(run, model)
    assert re.search(f"--base_model: .*{model}", refused(run, "--license", "mit"))
    share.main([str(run), "--base_model", "base/model"])
    card = ModelCard.load(run / "share" / "README.md")
    assert (card.data.license, card.data.base_model) == ("openrail", "base/model") and "gated" in card.text
    assert str(model) not in card.content


# ---- other pipelines -------------------------------------------------------------------------------------------------
OPTIONS = {"image_size": (512, 384), "num_frames": 33, "num_inference_steps": 28, "guidance_scale": 4.0}
OPTIONS |= {"max_sequence_length": 256, "negative_prompt": "", "dtype": "bfloat16"}
GUIDANCE = {
    "StableDiffusion3Pipeline": {"guidance_scale": 4.0},
    "FluxPipeline": {"guidance_scale": 4.0},
    "FluxKontextPipeline": {"guidance_scale": 4.0, "max_area": 512 * 384, "_auto_resize": False},
    "Flux2KleinPipeline": {"guidance_scale": 4.0},
    "QwenImagePipeline": {"true_cfg_scale": 4.0, "negative_prompt": ""},
    "QwenImageEditPlusPipeline": {"true_cfg_scale": 4.0, "negative_prompt": ""},
    "WanPipeline": {"guidance_scale": 4.0, "num_frames": 33},
    "WanImageToVideoPipeline": {"guidance_scale": 4.0, "num_frames": 33},
    "Krea2Pipeline": {"guidance_scale": 3.0},
    "ZImagePipeline": {"guidance_scale": 3.0},
}
SOURCES = {"FluxKontextPipeline": 1, "QwenImageEditPlusPipeline": 2, "WanImageToVideoPipeline": 1}


def test_every_family_has_a_pipeline_here():
    families = {path.stem.replace("_", "") for path in (ROOT / "common" / "models").glob("*.py")}
    assert {name.removesuffix("Pipeline").lower() for name in GUIDANCE} == families - {
        *("init", "experts", "family", "fingerprints", "loading", "longprompts", "parts", "vae")
    }


@pytest.mark.parametrize("pipeline", GUIDANCE)
def test_the_code_calls_a_pipeline_by_the_names_that_it_takes(pipeline, tmp_path):
    is_flux = pipeline in ("FluxPipeline", "FluxKontextPipeline")
    (tmp_path / "transformer").mkdir()
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
    (tmp_path / "transformer" / "config.json").write_text(json.dumps({"guidance_embeds": is_flux}))
    base = share.Base("base/model", is_on_hub=True, license={}, is_gated=False)
    policy, count = share.Policy(tmp_path, 1, is_lora=True), SOURCES.get(pipeline, 0)
    options = OPTIONS | {"model": str(tmp_path)}
    code, task = share.usage_of(policy, base, options, "it's a fox", count, "user/name")
    arguments = call_of(code)
    inspect.signature(getattr(diffusers, pipeline).__call__).bind(None, **arguments)
    expected = {"prompt": "it's a fox", "height": 512, "width": 384, "num_inference_steps": 28} | GUIDANCE[pipeline]
    assert expected.items() <= arguments.items() and ("guidance_scale" in arguments) != ("true_cfg_scale" in arguments)
    assert arguments.get("image", "").count("load_image(") == count
    assert task == f"{'image' if count else 'text'}-to-{'video' if pipeline.startswith('Wan') else 'image'}"
    imports = [line for line in code.splitlines() if line.startswith(("from", "import"))]
    exec("\n".join(imports), {})


@pytest.mark.parametrize("files", [[WEIGHTS], [WEIGHTS_2], [WEIGHTS, WEIGHTS_2]])
def test_the_code_loads_a_lora_into_each_of_two_transformers(files, tmp_path):
    (tmp_path / "transformer").mkdir()
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline"}))
    (tmp_path / "transformer" / "config.json").write_text("{}")
    for name in files:
        (tmp_path / name).touch()
    base = share.Base("base/model", is_on_hub=True, license={}, is_gated=False)
    options = OPTIONS | {"model": str(tmp_path), "guidance_scale_2": 1.5}
    code, _ = share.usage_of(share.Policy(tmp_path, 1, is_lora=True), base, options, "a fox", 0, "user/name")
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    loads = [call for call in calls if getattr(call.func, "attr", "") == "load_lora_weights"]
    loaded = []
    for call in loads:
        given = {keyword.arg: keyword.value.value for keyword in call.keywords}
        loaded.append((given.get("weight_name", WEIGHTS), given.get("load_into_transformer_2", False)))
    assert loaded == [(name, name == WEIGHTS_2) for name in files]
    assert call_of(code)["guidance_scale_2"] == 1.5
