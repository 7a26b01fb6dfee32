"""LoRAs in files: we read them as peft and diffusers do, and write them so that diffusers reads them."""

import json
from pathlib import Path

from common.weights.adapter_files import read_lora
from common.weights.lora import save_weights
from common.weights.policy import tensors_on_rank_0
from tests.conftest import EMBEDDED, embedded_model, policy_without_fsdp

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.fast

FILE = "pytorch_lora_weights.safetensors"


@torch.no_grad()
def velocity(model):
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, *model.schedule(2, 32, 96)[2], generator=generator)
    return model.predict_velocity(latents, torch.tensor(600.0), model.encode_prompts(['a red sign that says "1"'], 16))


def velocity_with(tensors, config):
    """v of a model that starts from this adapter as a script does. Every tensor must find its place."""
    model = embedded_model()
    model.transformer.add_adapter(config)
    assert not set_peft_model_state_dict(model.transformer, tensors).unexpected_keys
    assert set(get_peft_model_state_dict(model.transformer)) == set(tensors)
    return velocity(model)


def assert_as_in_diffusers(ours, folder):
    """Assert that v is the same as with the LoRA in `folder` loaded by diffusers."""
    # diffusers builds the adapter in another way and may place it elsewhere in memory. 1e-6 allows for fp32 round-off
    # in a v of size 1. It does not allow for an error of the LoRA, which moves v by more than 0.01.
    torch.testing.assert_close(ours, stock_velocity(folder), rtol=0, atol=1e-6)


def stock_velocity(folder):
    model = embedded_model()
    model.pipe.load_lora_weights(folder)
    return velocity(model)


@pytest.fixture(scope="module")
def trained():
    """A model with a LoRA of rank 16 and alpha 32 that changes v, the LoRA's tensors, and its config."""
    model, _, config = policy_without_fsdp()
    return model, tensors_on_rank_0(model)[0], config


def assert_same_lora(read, tensors, rank, alpha):
    got, config = read
    assert set(got) == set(tensors) and all(torch.equal(got[name], tensors[name]) for name in tensors)
    assert (config.r, config.lora_alpha) == (rank, alpha)
    assert set(config.target_modules) == {name.split(".lora_")[0] for name in tensors}


@torch.no_grad()
def test_what_a_run_saves_is_read_as_diffusers_reads_it(trained, tmp_path):
    model, tensors, config = trained
    save_weights(tmp_path, model.pipe, tensors, config)
    # alpha / rank, 2, is in the B matrices
    strong = {name: tensor * 2 if ".lora_B." in name else tensor for name, tensor in tensors.items()}
    for path in (tmp_path, str(tmp_path / FILE)):
        assert_same_lora(read_lora(path), strong, 16, 16)
    ours = velocity_with(*read_lora(tmp_path))
    assert_as_in_diffusers(ours, tmp_path)
    torch.testing.assert_close(ours, velocity(model), rtol=0, atol=0)
    assert (ours - velocity(embedded_model())).abs().max() > 0.01  # the adapter acts


@torch.no_grad()
def test_an_adapter_of_commit_f9bd441_is_read():
    """A step of `flow_grpo.py --rollout local --num_steps 1 --lora_rank 4 --lora_alpha 8 --learning_rate 1e-2`."""
    folder = Path(__file__).parent / "adapter_f9bd441"
    tensors, config = read_lora(folder, EMBEDDED)
    stored = load_file(folder / FILE)
    assert_same_lora((tensors, config), {name.removeprefix("transformer."): stored[name] for name in stored}, 4, 4)
    assert len(tensors) == 62
    ours = velocity_with(tensors, config)
    assert_as_in_diffusers(ours, folder)
    assert (ours - velocity(embedded_model())).abs().max() > 0.01  # the adapter acts


@torch.no_grad()
def test_what_other_trainers_save_with_an_alpha_in_the_metadata_is_read(trained, tmp_path):
    """diffusers' training scripts do so, as did our own runs before alpha was multiplied into B."""
    model, tensors, config = trained
    metadata = config.to_dict() | {"target_modules": sorted(config.target_modules)}
    model.pipe.save_lora_weights(tmp_path, tensors, transformer_lora_adapter_metadata=metadata)
    assert_same_lora(read_lora(tmp_path), tensors, 16, 32)
    assert_as_in_diffusers(velocity_with(*read_lora(tmp_path)), tmp_path)


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_what_peft_saves_is_read(tmp_path, prefix):
    config = LoraConfig(r=3, lora_alpha=5, target_modules=r".*\.attn\.(to_q|to_out\.0)", lora_dropout=0.5)
    torch.manual_seed(0)
    base = embedded_model()
    peft_model = get_peft_model(base.transformer, config).eval()  # no dropout
    for name, p in peft_model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(p, std=0.1)
    peft_model.save_pretrained(tmp_path)
    if prefix:  # as where peft was given the whole pipeline
        saved = load_file(tmp_path / "adapter_model.safetensors")
        assert all(name.startswith("base_model.model.transformer_blocks.") for name in saved)
        save_file(
            {name.replace("model.model.", "model.model.transformer."): t for name, t in saved.items()},
            tmp_path / "adapter_model.safetensors",
        )
    tensors = {name.removeprefix("base_model.model."): t for name, t in get_peft_model_state_dict(peft_model).items()}
    assert_same_lora(read_lora(tmp_path), tensors, 3, 5)
    torch.testing.assert_close(velocity_with(*read_lora(tmp_path)), velocity(base), rtol=0, atol=0)


@pytest.mark.parametrize("alpha", [None, 8.0])
def test_without_settings_alpha_is_the_tensors_own_or_the_rank(trained, tmp_path, alpha):
    model, tensors, _ = trained
    file = {f"transformer.{name}": tensor.half() for name, tensor in tensors.items()}
    if alpha:
        file |= {name.replace("lora_A.weight", "alpha"): torch.tensor(alpha) for name in file if "lora_A" in name}
    save_file(file, tmp_path / FILE)
    assert_same_lora(
        read_lora(tmp_path), {name: tensor.half().float() for name, tensor in tensors.items()}, 16, alpha or 16
    )
    if not alpha:  # diffusers takes no .alpha for Stable Diffusion 3
        assert_as_in_diffusers(velocity_with(*read_lora(tmp_path)), tmp_path)


def test_key_names_from_before_peft_are_read(trained, tmp_path):
    _, tensors, _ = trained
    save_file(
        {
            f"transformer.{name}".replace("lora_A", "lora.down").replace("lora_B", "lora.up"): tensor
            for name, tensor in tensors.items()
        },
        tmp_path / FILE,
    )
    assert_same_lora(read_lora(tmp_path), tensors, 16, 16)
    assert_as_in_diffusers(velocity_with(*read_lora(tmp_path)), tmp_path)


def pair(module="transformer.transformer_blocks.0.attn.to_q", rank=2):
    return {f"{module}.lora_A.weight": torch.ones(rank, 4), f"{module}.lora_B.weight": torch.ones(4, rank)}


def settings(**values):
    return {"lora_adapter_metadata": json.dumps({f"transformer.{key}": value for key, value in values.items()})}


OTHER = "transformer.transformer_blocks.1.attn.to_q"
REFUSED = {
    "a text encoder's": (
        pair() | pair("text_encoder.layers.0.q_proj"),
        None,
        "text_encoder.layers.*tools.lora convert ",
    ),
    "only a text encoder's": (pair("text_encoder_2.layers.0.q_proj"), None, "text_encoder_2.*tools.lora convert "),
    "not a LoRA": ({"transformer.proj_out.weight": torch.ones(2, 2)}, None, "transformer.proj_out.weight in it"),
    "DoRA": (
        pair() | {f"{OTHER}.lora_magnitude_vector": torch.ones(4)},
        None,
        "magnitude_vector .* LoRA",
    ),
    "a bias": (pair() | {f"{OTHER}.lora_B.bias": torch.ones(4)}, None, "lora_B.bias in it"),
    "empty": ({}, None, "no tensor in it"),
    "only alphas": ({f"{OTHER}.alpha": torch.tensor(1.0)}, None, "no tensor in it"),
    "half": ({name: t for name, t in pair().items() if "lora_A" in name}, None, " lora_A .* lora_B "),
    "two ranks": (pair() | pair(OTHER, 3), None, "tools.lora convert "),
    "another rank": (pair(), settings(r=4, lora_alpha=4), "tools.lora convert "),
    "rank pattern": (pair(), settings(r=2, lora_alpha=4, rank_pattern={"to_q": 2}), "tools.lora convert "),
    "alpha pattern": (pair(), settings(r=2, lora_alpha=4, alpha_pattern={"to_q": 2}), "tools.lora convert "),
    "two alphas": (
        pair(OTHER + "_a")
        | pair(OTHER + "_b")
        | {OTHER + "_a.alpha": torch.tensor(1.0), OTHER + "_b.alpha": torch.tensor(2.0)},
        None,
        "tools.lora convert ",
    ),
    "some alphas": (pair() | pair(OTHER) | {OTHER + ".alpha": torch.tensor(1.0)}, None, "tools.lora convert "),
    "rslora": (pair(), settings(r=2, lora_alpha=4, use_rslora=True), "use_rslora"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_in_a_line(tmp_path, name):
    tensors, metadata, match = REFUSED[name]
    save_file(tensors, tmp_path / FILE, metadata=metadata)
    with pytest.raises(ValueError, match=f"^--lora_path {tmp_path}: .*{match}") as caught:
        read_lora(tmp_path)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_read_is_refused_in_a_line(trained, tmp_path):
    def refuse(path, match):
        with pytest.raises(ValueError, match=f"^--lora_path {path}: .*{match}") as caught:
            read_lora(path)
        assert "\n" not in str(caught.value)

    refuse(tmp_path / "nowhere", f"{tmp_path}/nowhere$")
    refuse(tmp_path, f" adapter_config.json .* {FILE} ")
    (tmp_path / FILE).write_bytes(b"no safetensors")
    refuse(tmp_path, " LoRA ")
    refuse(tmp_path / FILE, " LoRA ")
    (tmp_path / "adapter_config.json").write_text("{}")
    refuse(tmp_path, "/adapter_model.safetensors$")
    save_file(pair(), tmp_path / "adapter_model.safetensors")
    assert read_lora(tmp_path)[1].lora_alpha == 2
    (tmp_path / "adapter_config.json").write_text("{")
    refuse(tmp_path, " LoRA ")


# ---- what peft's settings say of the base weights --------------------------------------------------------------------
def peft_adapter(init, name="default"):
    """A model of peft's over the embedded transformer, whose A and B are not what they were initialised to."""
    torch.manual_seed(0)
    base = embedded_model()
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["attn.to_q", "attn.to_v"], init_lora_weights=init)
    peft_model = get_peft_model(base.transformer, config, adapter_name=name).eval()
    return base, peft_model


@torch.no_grad()
def train(peft_model):
    """Change each A and B a little, as training would."""
    generator = torch.Generator().manual_seed(1)
    for name, p in peft_model.named_parameters():
        if "lora_" in name:
            p += 0.05 * torch.randn(p.shape, generator=generator)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora"])
def test_an_adapter_whose_base_was_changed_is_refused_until_peft_has_converted_it(tmp_path, init):
    """peft subtracts what the initialisation took from the base, and writes `true`, twice the rank and twice alpha."""
    base, peft_model = peft_adapter(init)
    peft_model.peft_config["default"].init_lora_weights = True  # as peft's page has it
    peft_model.save_pretrained(tmp_path / "start")
    peft_model.peft_config["default"].init_lora_weights = init
    train(peft_model)
    trained = velocity(base)
    peft_model.save_pretrained(tmp_path / "raw")
    with pytest.raises(ValueError, match=f"^--lora_path {tmp_path}/raw: .*{init}.*path_initial_model_for_weight_conv"):
        read_lora(tmp_path / "raw")
    peft_model.save_pretrained(tmp_path / "converted", path_initial_model_for_weight_conversion=str(tmp_path / "start"))
    tensors, config = read_lora(tmp_path / "converted")
    assert (config.r, config.lora_alpha) == (4, 8)
    # the base's weights are put together again from two parts in fp32, where the adapter moves v by more than 0.01
    torch.testing.assert_close(velocity_with(tensors, config), trained, rtol=0, atol=1e-4)
    assert (trained - velocity(embedded_model())).abs().max() > 0.01


def peft_folder(folder, tensors=None, **values):
    """A folder as peft saves it, with these settings."""
    folder.mkdir(parents=True, exist_ok=True)
    saved = {f"base_model.model.{name}": tensor for name, tensor in (tensors or pair("blocks.0.to_q")).items()}
    save_file(saved, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2} | values))
    return folder


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_initialisations_that_leave_the_base_alone_are_read(tmp_path, init):
    """Also with the settings of one that peft has undone, which it leaves in the file."""
    folder = peft_folder(tmp_path, init_lora_weights=init, corda_config={"corda_method": "ipm"}, loftq_config={})
    assert read_lora(folder)[1].r == 2


@pytest.mark.parametrize(
    ("setting", "way"),
    [
        *(({"init_lora_weights": init}, "path_initial_model") for init in ("PiSSA", "corda", "lora_ga", "OLoRA")),
        *(({"init_lora_weights": init}, "--model") for init in ("loftq", "an_initialisation_of_tomorrow")),
        ({"kasa_config": {"beta": 1e-4}}, "KaSA.*--model"),  # it truncates the base weights
        ({"use_dora": True}, "DoRA.*--model"),
        ({"layer_replication": [[0, 2]]}, "--model"),
        ({"alora_invocation_tokens": [1]}, "aLoRA.*--model"),
        ({"peft_type": "ADALORA"}, "--model"),
    ],
)
def test_settings_of_other_adapters_are_refused_by_name(tmp_path, setting, way):
    folder = peft_folder(tmp_path, **setting)
    name, value = next(iter(setting.items()))
    with pytest.raises(ValueError, match=f"^--lora_path {tmp_path}: {name}.*{way}") as caught:
        read_lora(folder)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=f"safetensors: {name}"):  # by the file's own path too
        read_lora(folder / "adapter_model.safetensors")
    if name == "init_lora_weights":  # in the metadata of a file of diffusers', as well
        save_file(pair(), tmp_path / FILE, metadata=settings(r=2, lora_alpha=2, init_lora_weights=value))
        with pytest.raises(ValueError, match=f"^--lora_path {tmp_path}/{FILE}: {name} {value}: "):
            read_lora(tmp_path / FILE)


# ---- names and places of adapters ------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["mine", "weight_2", "default"])
def test_the_name_of_an_adapter_in_its_keys_is_dropped(tmp_path, name):
    """As in the state dict of a model with adapters, which some trainers save as it is."""
    _, peft_model = peft_adapter(True, name)
    train(peft_model)
    state = {key: p.detach().clone() for key, p in peft_model.named_parameters() if "lora_" in key}
    assert any(key.endswith(f".lora_A.{name}.weight") for key in state)
    save_file(state, tmp_path / "state.safetensors")
    tensors, _ = read_lora(tmp_path / "state.safetensors", EMBEDDED)
    expected = get_peft_model_state_dict(peft_model, adapter_name=name)
    assert tensors.keys() == {key.removeprefix("base_model.model.") for key in expected}
    assert all(torch.equal(tensors[key.removeprefix("base_model.model.")], expected[key]) for key in expected)


@pytest.mark.parametrize(
    ("tensors", "fault"),
    [
        ({"a.lora_A.mine.weight": (2, 4), "a.lora_B.old.weight": (4, 2)}, " mine, old: "),
        (
            {"a.lora_A.mine.weight": (2, 4), "a.lora_B.mine.weight": (4, 2), "a.lora_B.mine.bias": (4,)},
            ".mine.bias ",
        ),
    ],
)
def test_two_adapters_or_a_bias_in_one_file_are_refused(tmp_path, tensors, fault):
    save_file({name: torch.ones(shape) for name, shape in tensors.items()}, tmp_path / FILE)
    with pytest.raises(ValueError, match=f"^--lora_path {tmp_path}: .*{fault}"):
        read_lora(tmp_path)


@pytest.mark.parametrize("folder", ["lora", "mine"])
def test_a_folder_with_one_lora_in_a_folder_of_it_is_read(tmp_path, folder, capfd):
    """flow_grpo's checkpoint-N has lora/; peft puts an adapter with a name of its own into a folder of that name."""
    _, peft_model = peft_adapter(True, "default" if folder == "lora" else folder)
    train(peft_model)
    checkpoint = tmp_path / "checkpoint-120"
    peft_model.save_pretrained(checkpoint / folder if folder == "lora" else checkpoint)
    (checkpoint / "optimizer").mkdir()
    assert (checkpoint / folder / "adapter_config.json").is_file()
    found, config = read_lora(checkpoint)
    assert str(checkpoint / folder / "adapter_model.safetensors") in capfd.readouterr().err
    expected, _ = read_lora(checkpoint / folder)
    assert config.lora_alpha == 4
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)


def test_a_folder_without_a_lora_or_with_several_is_told_in_a_line(tmp_path):
    def refuse(path, match):
        with pytest.raises(ValueError, match=f"^--lora_path {path}: .*{match}") as caught:
            read_lora(path)
        assert "\n" not in str(caught.value)

    refuse(tmp_path, f" adapter_config.json nor {FILE} ")
    save_file(pair(), tmp_path / "last.safetensors")  # kohya's folder of outputs
    refuse(tmp_path, f" {tmp_path / 'last.safetensors'}$")
    for name in ("best_adapter", "adapter"):
        if name == "adapter":  # a run that was killed before its first checkpoint has the other alone
            refuse(tmp_path, f" of {tmp_path / 'best_adapter'}$")
        peft_folder(tmp_path / name)
    refuse(tmp_path, f" {tmp_path / 'adapter'}, {tmp_path / 'best_adapter'}$")
    pickled = peft_folder(tmp_path / "pickled")
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    refuse(pickled, "adapter_model.bin ")
