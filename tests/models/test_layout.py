"""Checkpoints as people have them: tiny ones, in a folder and in the hub's cache, as they are saved and shipped."""

import json
import re
import shutil
from pathlib import Path

import diffusion_nft
import dpo_offline
import flow_grpo
from common.data import PromptSet
from common.errors import RunError
from common.models.loading import check_weight_files, find_family, find_weights, load_model, plain_weights
from common.models.stable_diffusion_3 import StableDiffusion3
from common.run.inputs import Inputs
from common.weights.prompt_cache import encoders_key
from tests.conftest import EMBEDDED, checked

import pytest
import torch
from safetensors.torch import load_file, save_file

SIZE = (32, 96, 1)
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
NOT_DECREASING = ".* {copy} "


@pytest.fixture
def copy(tmp_path):
    """A copy of the embedded model, to be spoilt."""
    return Path(shutil.copytree(EMBEDDED, tmp_path / "model"))


def set_config(folder, component, **changes):
    path = folder / component / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def set_index(folder, **changes):
    path = folder / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cache(folder, home, monkeypatch, model="someone/a-model"):
    """The folder in a hub cache, as a download leaves it: a snapshot of symlinks to blobs. No network."""
    repo = home / ("models--" + model.replace("/", "--"))
    snapshot = repo / "snapshots" / "0123abc"
    for number, file in enumerate(path for path in folder.rglob("*") if path.is_file()):
        blob = repo / "blobs" / str(number)
        blob.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, blob)
        link = snapshot / file.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0123abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(home))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("diffusers.utils.constants.HF_HUB_OFFLINE", True, raising=False)
    return model


def weights_of(model):
    return {name: p.clone() for name, p in model.transformer.state_dict().items()}


def assert_loads_as_the_model(folder, expected=None):
    find_family(folder, *SIZE)
    loaded = load_model(find_family(folder, *SIZE), folder, torch.float32, "cpu")
    expected = expected or weights_of(load_model(find_family(EMBEDDED, *SIZE), EMBEDDED, torch.float32, "cpu"))
    found = weights_of(loaded)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    return loaded


def test_a_hub_id_in_the_cache(copy, tmp_path, monkeypatch):
    model = cache(copy, tmp_path / "hub", monkeypatch)
    assert_loads_as_the_model(model)


def test_shards(copy):
    """Two files and their index, as large models have them."""
    loaded = load_model(find_family(copy, *SIZE), copy, torch.float32, "cpu")
    shutil.rmtree(copy / "transformer")
    loaded.transformer.save_pretrained(copy / "transformer", max_shard_size="1MB")
    assert len(list((copy / "transformer").glob("*.safetensors"))) > 1
    assert_loads_as_the_model(copy)


# ---- variants --------------------------------------------------------------------------------------------------------
def as_variant(folder, variant="fp16", factor=1.0):
    """Make a component's weights a variant, as diffusers' save_pretrained(variant=...) names it, in fp16."""
    for file in sorted(folder.glob("*.safetensors")):
        tensors = {name: factor * tensor.half() for name, tensor in load_file(file).items()}
        file.unlink()
        stem, _, shard = file.stem.partition("-")
        save_file(tensors, folder / f"{stem}.{variant}{f'-{shard}' if shard else ''}.safetensors", {"format": "pt"})
    for index in folder.glob("*.index.json"):
        content = json.loads(index.read_text())
        content["weight_map"] = {k: re.sub("-", f".{variant}-", v, count=1) for k, v in content["weight_map"].items()}
        index.unlink()
        stem, _, _ = index.name.rpartition(".json")
        (folder / f"{stem}.{variant}.json").write_text(json.dumps(content))


def networks_of(loaded):
    """{component: its tensors in fp32} of a loaded family."""
    parts = {name: part for name, part in loaded.pipe.components.items() if isinstance(part, torch.nn.Module)}
    return {name: {key: t.clone() for key, t in part.state_dict().items()} for name, part in parts.items()}


def load(model):
    return load_model(find_family(model, *SIZE), model, torch.float32, "cpu")


NETWORKS = ("transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3")


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("having", [NETWORKS, *((name,) for name in NETWORKS)])
@pytest.mark.parametrize("place", ["folder", "hub id"])
def test_weights_that_are_there_as_a_variant_alone_load(copy, having, is_sharded, place, tmp_path, monkeypatch, capfd):
    """Of one component or of all, in a file or in shards with an index, of a folder and of a hub id; a line says so."""
    names = [name for name in having if (copy / name).is_dir()]
    plain = load(copy)
    for name in names:
        if is_sharded:
            part = plain.pipe.components[name]
            shutil.rmtree(copy / name)
            part.save_pretrained(copy / name, max_shard_size="200KB")
            assert list((copy / name).glob("*.index.json"))
        as_variant(copy / name)
    model = copy if place == "folder" else cache(copy, tmp_path / "hub", monkeypatch)
    capfd.readouterr()
    loaded = load(model)
    lines = re.findall(r"--model \S+: (\w+) .* fp16\n", capfd.readouterr().err)
    assert sorted(lines) == sorted(names)
    expected = networks_of(plain)
    for name, tensors in networks_of(loaded).items():
        for key, tensor in tensors.items():
            wanted = expected[name][key].half().float() if name in names else expected[name][key]
            assert torch.equal(tensor, wanted if tensor.is_floating_point() else expected[name][key]), (name, key)
    place_of_weights = Path(loaded.transformer.config["_name_or_path"])
    assert place_of_weights.is_dir() and place_of_weights.name == "transformer"  # not of the links, which are gone


@pytest.mark.parametrize("name", ["transformer", "text_encoder"])
def test_plain_weights_win_over_a_variant_beside_them(copy, name, capfd):
    """And nothing is loaded twice: libraries see a folder without the variant."""
    plain = load(copy)
    files = [(file, file.read_bytes()) for file in (copy / name).glob("*.safetensors")]
    as_variant(copy / name, factor=1.5)
    for file, content in files:
        file.write_bytes(content)
    (copy / name / "model.fp16-00001-of-00002.safetensors").write_bytes(LFS_POINTER)  # a shard beside them, not loaded
    capfd.readouterr()
    loaded = load(copy)
    assert "variant" not in capfd.readouterr().err
    expected = networks_of(plain)
    for part, tensors in networks_of(loaded).items():
        assert all(torch.equal(tensors[key], expected[part][key]) for key in tensors)
    with plain_weights(copy) as folder:
        assert folder != copy
        assert sorted(file.name for file in (folder / name).iterdir()) == sorted(
            file.name for file in (copy / name).iterdir() if "fp16" not in file.name
        )
        assert {item.name for item in folder.iterdir()} == {item.name for item in copy.iterdir()}
    assert not folder.exists()


@pytest.mark.fast
@pytest.mark.parametrize(
    ("names", "variant", "files"),
    [
        (["model.safetensors", "model.fp16.safetensors"], "", {"model.safetensors": "model.safetensors"}),
        (["pytorch_model.bin", "model.fp16.safetensors"], "", {"pytorch_model.bin": "pytorch_model.bin"}),
        (["model.fp16.safetensors", "model.bf16.safetensors"], "bf16", {"model.safetensors": "model.bf16.safetensors"}),
        (
            ["model.fp16-00001-of-00002.safetensors", "model.safetensors.index.fp16.json", "config.json"],
            "fp16",
            {
                "model.fp16-00001-of-00002.safetensors": "model.fp16-00001-of-00002.safetensors",
                "model.safetensors.index.json": "model.safetensors.index.fp16.json",
            },
        ),
        (  # as diffusers wrote them formerly
            ["diffusion_pytorch_model-00001-of-00002.fp16.safetensors", "model.safetensors.fp16.index.json"],
            "fp16",
            {
                "diffusion_pytorch_model-00001-of-00002.fp16.safetensors": (
                    "diffusion_pytorch_model-00001-of-00002.fp16.safetensors"
                ),
                "model.safetensors.index.json": "model.safetensors.fp16.index.json",
            },
        ),
        # an index without weights is none; names of other programs are none
        (["model.safetensors.index.json", "model.fp16.bin"], "fp16", {"model.bin": "model.fp16.bin"}),
        (["sd3.5_medium.safetensors", "t5xxl_fp16.safetensors", "tokenizer.json"], "", {}),
    ],
)
def test_which_files_of_a_component_load(names, variant, files):
    assert find_weights(names)[:2] == (files, variant)
    assert find_weights(reversed(names))[:2] == (files, variant)


@pytest.mark.fast
def test_of_several_variants_the_most_precise_loads_and_the_others_are_named(copy, tmp_path, capfd):
    """And what is saved of the pipeline names the folder, not that of the links."""
    (file,) = (copy / "text_encoder").glob("*.safetensors")
    content = load_file(file)
    names = ["fp32", "bf16", "fp16", "ema", "non_ema"]
    for number, name in enumerate(names):
        tensors = {
            key: number + 0 * tensor if tensor.is_floating_point() else tensor for key, tensor in content.items()
        }
        save_file(tensors, copy / "text_encoder" / f"model.{name}.safetensors", {"format": "pt"})
    file.unlink()
    capfd.readouterr()
    for number, name in enumerate(names):
        loaded = load(copy)
        values = {float(p.mean()) for p in loaded.pipe.text_encoder.parameters()}
        (line,) = [line for line in capfd.readouterr().err.splitlines() if ": text_encoder " in line]
        assert values == {number} and f" {name}" in line
        assert all(other in line for other in names[number + 1 :])
        if name != names[-1]:
            (copy / "text_encoder" / f"model.{name}.safetensors").unlink()
    loaded.pipe.save_pretrained(tmp_path / "saved")
    for path in (tmp_path / "saved").glob("**/*.json"):
        assert "cleanflow_" not in path.read_text(), path
    assert json.loads((tmp_path / "saved" / "model_index.json").read_text())["_name_or_path"] == str(copy)


@pytest.mark.fast
def test_a_plan_takes_a_variant_and_configs_alone(copy):
    """Neither reads weights."""
    for name in NETWORKS:
        if (copy / name).is_dir():
            as_variant(copy / name)
    assert find_family(copy, *SIZE) is StableDiffusion3
    for file in copy.glob("*/*.safetensors"):
        file.unlink()
    assert find_family(copy, *SIZE, needs_weights=False) is StableDiffusion3
    assert "text_encoder: no weights in it" in refusal(copy)


# ---- folders ---------------------------------------------------------------------------------------------------------
def test_a_component_whose_folder_is_missing_is_named(copy):
    """Of a tokenizer some libraries make one that knows no word. Entries that are no components are passed over."""
    set_index(copy, layers=[1, 2, 3], is_distilled=False)
    check_weight_files(copy)
    shutil.rmtree(copy / "tokenizer_2")
    with pytest.raises(ValueError, match=f"^--model {copy}: tokenizer_2/ .* model_index.json "):
        check_weight_files(copy)


def edit_index(change):
    """A spoiler that changes what model_index.json says."""

    def spoil(folder):
        path = folder / "model_index.json"
        index = json.loads(path.read_text())
        change(index)
        path.write_text(json.dumps(index))

    return spoil


@pytest.mark.fast
@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda folder: (folder / "model_index.json").write_text(""), "model_index.json: "),
        (lambda folder: (folder / "model_index.json").write_text("[1]"), "model_index.json: "),
        *(
            (edit_index(lambda index, name=name: index.pop(name)), f"model_index.json: names no {name}$")
            for name in ("transformer", "vae", "scheduler", "text_encoder", "tokenizer_2")
        ),
        (edit_index(lambda index: index.update(vae=[None, None])), "model_index.json: names no vae$"),
        *(
            (lambda folder, name=name: shutil.rmtree(folder / name), f"{name}/ ")
            for name in ("transformer", "scheduler", "tokenizer")
        ),
        (lambda folder: (folder / "text_encoder/config.json").unlink(), "text_encoder: config.json is missing"),
        (lambda folder: next((folder / "vae").glob("*.safetensors")).unlink(), "vae: no weights in it"),
        (lambda folder: (folder / "tokenizer/tokenizer.json").unlink(), "tokenizer: no vocabulary in it"),
        (
            lambda folder: (folder / "transformer/diffusion_pytorch_model.safetensors.index.json").write_text("{}"),
            "transformer: diffusion_pytorch_model.safetensors.index.json: ",
        ),
    ],
)
def test_a_folder_that_lacks_something_is_told_before_it_loads(copy, spoil, told):
    spoil(copy)
    assert re.match(f"--model {copy}: {told}", refusal(copy))


@pytest.mark.fast
def test_a_config_that_is_a_list_is_told(copy):
    (copy / "transformer/config.json").write_text("[]")
    assert f"{copy}/transformer/config.json: " in refusal(copy)


def test_a_shard_or_the_shards_index_is_missing(copy):
    loaded = load(copy)
    shutil.rmtree(copy / "transformer")
    loaded.transformer.save_pretrained(copy / "transformer", max_shard_size="1MB")
    shard = min((copy / "transformer").glob("*.safetensors"))
    content = shard.read_bytes()
    shard.unlink()
    index = "diffusion_pytorch_model.safetensors.index.json"
    assert re.match(f"--model {copy}: transformer: {shard.name} .* {index} ", refusal(copy))
    shard.write_bytes(content)
    (copy / "transformer" / index).unlink()
    assert f"transformer: {shard.name} " in refusal(copy)


STALE = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "pytorch_model-00001-of-00002.bin"}})


@pytest.mark.fast
@pytest.mark.parametrize(
    ("part", "file"),
    [
        ("text_encoder", "pytorch_model.bin.index.json"),  # as `hf download --exclude "*.bin"` leaves it
        ("text_encoder", "model.safetensors.index.json"),
        ("text_encoder", "model-00001-of-00002.safetensors"),
        ("transformer", "diffusion_pytorch_model.bin.index.json"),
        ("transformer", "diffusion_pytorch_model-00001-of-00002.bin"),
    ],
)
def test_what_no_library_loads_beside_whole_weights_is_no_fault(copy, part, file):
    whole = min((copy / part).glob("*.safetensors")).read_bytes()
    (copy / part / file).write_bytes(STALE.encode() if file.endswith("json") else whole)
    assert find_family(copy, *SIZE) is StableDiffusion3
    load(copy)


@pytest.mark.fast
@pytest.mark.parametrize("lacking", [1, 138])
def test_a_transformer_without_some_of_its_weights_is_no_model(copy, lacking):
    """diffusers would draw them at random, with a warning alone."""
    (file,) = (copy / "transformer").glob("*.safetensors")
    tensors = load_file(file)
    names = sorted(dict(load(copy).transformer.named_parameters()))
    kept = {name: tensor for name, tensor in tensors.items() if name not in names[:lacking]}
    save_file(kept, file, {"format": "pt"})
    fault = rf"transformer: .* {lacking} of its {len(names)} .* \S+$"
    with pytest.raises(RunError, match=f"^--model {copy}: {fault}"):
        load(copy)


def test_sd3_without_t5(copy):
    """Its place in the conditioning is zeros, as in the stock pipeline, and the plan counts no bytes for it."""
    from common.plan.memory import build_pipeline

    whole = sum(p.numel() for encoder in build_pipeline(str(copy))[1].values() for p in encoder.parameters())
    for name in ("text_encoder_3", "tokenizer_3"):
        shutil.rmtree(copy / name, ignore_errors=True)
    set_index(copy, text_encoder_3=[None, None], tokenizer_3=[None, None])
    loaded = assert_loads_as_the_model(copy)
    assert len(encoders_key(loaded)) == 128  # --prompt_cache's, and offline DPO's
    embeds = loaded.encode_prompts(["a sign"], 16)["prompt_embeds"]
    stock = loaded.pipe.encode_prompt("a sign", None, None, do_classifier_free_guidance=False, max_sequence_length=16)
    assert torch.equal(embeds, stock[0])
    assert embeds.shape[1] == 16 + 16 and not embeds[:, 16:].any()  # those of this model's CLIPs, then T5's
    _, encoders = build_pipeline(str(copy))
    assert sum(p.numel() for encoder in encoders.values() for p in encoder.parameters()) < whole


# ---- what is refused, in one line, before anything loads -------------------------------------------------------------
def refusal(model):
    with pytest.raises(ValueError) as error:
        find_family(model, *SIZE)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("component", ["transformer", "text_encoder"])
def test_quantised_weights(copy, component):
    set_config(copy, component, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    assert re.match(f"--model {copy}: {component} .* diffusers' ", refusal(copy))


def test_quantised_weights_of_a_hub_id(copy, tmp_path, monkeypatch):
    set_config(copy, "transformer", quantization_config={"quant_method": "torchao"})
    assert re.search(": transformer .* diffusers' ", refusal(cache(copy, tmp_path / "hub", monkeypatch)))


@pytest.mark.parametrize("component", ["transformer", "text_encoder"])
@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda content: LFS_POINTER, ".*`git lfs pull`.*"),
        (lambda content: b"", "Error while deserializing header: .*"),
        (lambda content: b"\xff" * 8 + content[8:], "Error while deserializing header: .*"),
        (lambda content: b"\x02" + bytes(7) + b"[]", "Error while deserializing header: .*"),
        (lambda content: content[:-1], "Error while deserializing header: .*"),
    ],
)
def test_a_file_that_holds_no_weights_is_named(copy, component, spoil, fault):
    """A clone without git-lfs, a header that is none, a download that was cut."""
    (file,) = (copy / component).glob("*.safetensors")
    file.write_bytes(spoil(file.read_bytes()))
    assert re.fullmatch(f"--model {copy}: {component}/{file.name}: {fault}", refusal(copy))


def test_files_that_are_not_loaded_may_be_pointers_of_git_lfs(copy):
    """Of a variant, of a component that the pipeline goes without, and beside the components."""
    set_index(copy, text_encoder_3=[None, None])
    for name in ("transformer/model.fp16.safetensors", "text_encoder_3/model.safetensors", "single/all.safetensors"):
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_bytes(LFS_POINTER)
    assert find_family(copy, *SIZE) is StableDiffusion3


def test_single_files(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"0" * 16)
    for model in (tmp_path / "model.safetensors", "nowhere/flux-Q4.gguf"):
        assert re.match(f"--model {model}: .* diffusers' ", refusal(model))


def test_a_prompt_longer_than_the_family_takes():
    with pytest.raises(ValueError, match="^--max_sequence_length 1024: StableDiffusion3 .* 512 "):
        find_family(EMBEDDED, *SIZE, 1.0, 1024)


def test_what_a_library_raises_while_it_loads_is_one_line(copy):
    set_config(copy, "vae", latent_channels=7)
    family = find_family(copy, *SIZE)
    with pytest.raises(RunError, match=f"^--model {copy}: ") as error:
        load_model(family, copy, torch.float32, "cpu")
    assert "\n" not in str(error.value) and error.value.__cause__


# ---- schedules -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("script", "options", "config", "fault"),
    [
        (
            flow_grpo,
            {"eval_num_inference_steps": 1},
            {"shift_terminal": 0.02},
            f"--eval_num_inference_steps 1: {NOT_DECREASING}",
        ),
        (
            diffusion_nft,
            {"num_inference_steps": 1},
            {"shift_terminal": 0.02},
            f"--num_inference_steps 1: {NOT_DECREASING}",
        ),
        (dpo_offline, {}, {"invert_sigmas": True}, f"--eval_num_inference_steps 3: {NOT_DECREASING}"),
        (flow_grpo, {}, {"use_dynamic_shifting": True, "base_shift": "x"}, "--eval_num_inference_steps 3: "),
        (flow_grpo, {}, {"shift_terminal": 0.02}, None),
    ],
)
def test_a_schedule_that_cannot_be_sampled_is_refused_before_a_model_loads(copy, script, options, config, fault):
    """Of training and of evaluations; the terminal shift, which Qwen-Image has, divides 0 by 0 for one step."""
    file = copy / "scheduler/scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    args = script.Args(model=str(copy), **options)
    nothing = PromptSet([], [])
    inputs = Inputs(StableDiffusion3, {}, {}, nothing, nothing, lora=None, checkpoint=None)
    if fault is None:
        checked(args, inputs)
        return
    with pytest.raises(ValueError, match=f"^{fault.format(copy=copy)}"):
        checked(args, inputs)
