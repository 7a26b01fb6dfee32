"""tools/lora.py, and --lora_path over what other tools write: the numbers are those of the LoRA that was written."""

import json
import re

from common.models import Family
from common.models.loading import family_class
from common.weights import adapter_files, make_lora
from common.weights.adapter_files import read_lora
from common.weights.lora import linear_shapes, save_weights
from common.weights.policy import tensors_on_rank_0
from tests.comfyui_names import BY_DIFFUSERS_NAME, BY_OWN_NAME, names_in_a_file, starred
from tests.conftest import EMBEDDED, embedded_model, policy_without_fsdp
from tests.tiny_models import make_checkpoint
from tools import lora

import pytest
import torch
from safetensors.torch import load_file, save_file

MODEL = str(EMBEDDED)
MODULES = ("transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.to_out.0")


def matrices(model, modules, rank=2):
    """{module: (A, B)} of random matrices that fit."""
    generator = torch.Generator().manual_seed(0)
    shapes = linear_shapes(model)
    found = {}
    for module in modules:
        outputs, inputs = shapes[module]
        found[module] = (
            torch.randn(rank, inputs, generator=generator),
            torch.randn(outputs, rank, generator=generator),
        )
    return found


def named(pairs, name, down="lora_A", up="lora_B", alpha=None):
    """The tensors of a file; name: module -> prefix of a key."""
    tensors = {}
    for module, (a, b) in pairs.items():
        tensors |= {f"{name(module)}.{down}.weight": a, f"{name(module)}.{up}.weight": b}
        if alpha is not None:
            tensors[f"{name(module)}.alpha"] = torch.tensor(alpha)
    return tensors


def products(path, model=MODEL):
    """{module: what it adds to the weight} by read_lora."""
    tensors, config = read_lora(path, model)
    scale = config.lora_alpha / config.r
    modules = {key.rpartition(".lora_")[0] for key in tensors}
    return {m: scale * tensors[f"{m}.lora_B.weight"] @ tensors[f"{m}.lora_A.weight"] for m in modules}


def assert_same(found, pairs, scale=1.0):
    assert found.keys() == pairs.keys()
    for module, (a, b) in pairs.items():
        torch.testing.assert_close(found[module], scale * b @ a, rtol=1e-5, atol=1e-5)


# ---- names of other tools --------------------------------------------------------------------------------------------
@pytest.mark.fast
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (lambda module: f"transformer.{module}", ("lora_A", "lora_B")),  # diffusers
        (lambda module: f"base_model.model.{module}", ("lora_A", "lora_B")),  # peft
        (lambda module: f"diffusion_model.{module}", ("lora_A", "lora_B")),  # ComfyUI, ai-toolkit
        (lambda module: "lora_unet_" + module.replace(".", "_"), ("lora_down", "lora_up")),  # kohya, musubi
        (lambda module: module, ("lora_A.default", "lora_B.default")),  # peft's state_dict
    ],
)
@pytest.mark.parametrize("alpha", [None, 1.0])
def test_names_of_other_tools(tmp_path, name, parts, alpha):
    pairs = matrices(MODEL, MODULES)
    file = tmp_path / "lora.safetensors"
    save_file(named(pairs, name, *parts, alpha=alpha), file)
    assert_same(products(file), pairs, scale=1.0 if alpha is None else 0.5)


@pytest.mark.parametrize("family", ["qwen_image", "flux"])
def test_an_alpha_beside_diffusers_names_counts(family, tmp_path):
    """Qwen-Image's converter in diffusers drops it, and FLUX.1's gives it apart."""
    model = str(make_checkpoint(family, tmp_path / family))
    pairs = matrices(model, MODULES[:1])
    save_file(named(pairs, lambda module: f"transformer.{module}", alpha=1.0), tmp_path / "lora.safetensors")
    assert_same(products(tmp_path / "lora.safetensors", model), pairs, scale=0.5)


def test_names_of_the_original_code_are_translated_by_diffusers(tmp_path):
    """FLUX.1's q, k and v in one matrix, as kohya's trainer for FLUX writes them."""
    model = str(make_checkpoint("flux", tmp_path / "flux"))
    shapes = linear_shapes(model)
    inner = shapes["transformer_blocks.0.attn.to_q"][1]
    a = torch.randn(2, inner)
    b = torch.randn(3 * inner, 2)
    key = "lora_unet_double_blocks_0_img_attn_qkv"
    tensors = {f"{key}.lora_down.weight": a, f"{key}.lora_up.weight": b, f"{key}.alpha": torch.tensor(2.0)}
    save_file(tensors, tmp_path / "kohya.safetensors")
    found = products(tmp_path / "kohya.safetensors", model)
    expected = {f"transformer_blocks.0.attn.to_{part}": b[i * inner :][:inner] @ a for i, part in enumerate("qkv")}
    assert found.keys() == expected.keys()
    for module, product in expected.items():
        torch.testing.assert_close(found[module], product, rtol=1e-4, atol=1e-4)


def test_what_a_file_has_twice_may_be_left_out(tmp_path):
    """A trainer of Z-Image writes q, k and v singly and in one matrix."""
    model = str(make_checkpoint("z_image", tmp_path / "z_image"))
    names = {f"to.{part}": f"layers.0.attention.to_{part}" for part in "qkv"} | {
        "to_out.0": "layers.0.attention.to_out.0"
    }
    pairs = matrices(model, names.values())
    by_module = {module: f"diffusion_model.layers.0.attention.{name}" for name, module in names.items()}
    single = named(pairs, by_module.__getitem__, "lora.down", "lora.up")
    inner = linear_shapes(model)["layers.0.attention.to_q"][0]
    sizes = {"qkv": 3 * inner, "out": inner}
    both = {name: (torch.ones(2, inner), torch.ones(size, 2)) for name, size in sizes.items()}
    twice = named(both, lambda name: f"diffusion_model.layers.0.attention.{name}", "lora.down", "lora.up")
    save_file(single | twice, tmp_path / "lora.safetensors")
    assert_same(products(tmp_path / "lora.safetensors", model), pairs)
    save_file(twice, tmp_path / "lora.safetensors")
    with pytest.raises(ValueError, match=r"attention\.(qkv|out)\.lora"):
        read_lora(tmp_path / "lora.safetensors", model)


def test_a_lora_is_put_on_its_own_modules_alone(tmp_path):
    """Of FLUX.1 the last layer and a part of each block are called proj_out."""
    model = str(make_checkpoint("flux", tmp_path / "flux"))
    save_file(named(matrices(model, ["proj_out"]), str), tmp_path / "lora.safetensors")
    _, config = read_lora(tmp_path / "lora.safetensors", model)
    others = {name for name in linear_shapes(model) if name.endswith(".proj_out")}
    assert config.target_modules == {"proj_out"} and config.exclude_modules == others and others


def test_what_is_left_out_ends_so_or_is_inside(monkeypatch):
    """FLUX.2's to_out is a list in some blocks and a layer in others."""
    layers = ["a.attn.to_out.0", "a.attn.to_q", "b.attn.to_out"]
    monkeypatch.setattr("common.weights.lora.linear_shapes", lambda model: dict.fromkeys(layers, (2, 2)))
    monkeypatch.setattr("common.weights.lora.has_two_transformers", lambda model: False)
    given = make_lora(Family, rank=2, alpha=2, model="m", target_modules=["all-linear", "not:to_out"])
    assert given.config.exclude_modules == {"a.attn.to_out.0", "b.attn.to_out"}


def test_an_alpha_that_a_converter_drops_counts(tmp_path):
    """FLUX.1's, of the last layer, among kohya's names."""
    model = str(make_checkpoint("flux", tmp_path / "flux"))
    names = {"double_blocks_0_img_attn_proj": "transformer_blocks.0.attn.to_out.0", "final_layer_linear": "proj_out"}
    pairs = matrices(model, names.values())
    by_module = {module: f"lora_unet_{name}" for name, module in names.items()}
    tensors = named(pairs, by_module.__getitem__, "lora_down", "lora_up", alpha=1.0)
    save_file(tensors, tmp_path / "kohya.safetensors")
    assert_same(products(tmp_path / "kohya.safetensors", model), pairs, scale=0.5)


@pytest.mark.parametrize(
    ("family", "kept", "lost"),
    [
        ("flux", "double_blocks_0_img_attn_proj:transformer_blocks.0.attn.to_out.0", "diff_b"),
        ("flux2_klein", "single_blocks_0_linear2:single_transformer_blocks.0.attn.to_out", "final_layer_adaLN"),
    ],
)
def test_what_a_converter_leaves_out_is_refused(family, kept, lost, tmp_path):
    model = str(make_checkpoint(family, tmp_path / family))
    name, module = kept.split(":")
    tensors = named(matrices(model, [module]), lambda module: f"lora_unet_{name}", "lora_down", "lora_up", alpha=2.0)
    save_file(tensors, tmp_path / "kohya.safetensors")
    assert products(tmp_path / "kohya.safetensors", model).keys() == {module}
    outputs, inputs = linear_shapes(model)["norm_out.linear"]
    more = {f"lora_unet_{name}.diff_b": torch.ones(linear_shapes(model)[module][0])}
    if lost != "diff_b":
        pair = {"last": (torch.ones(2, inputs), torch.ones(outputs, 2))}
        last = "lora_unet_final_layer_adaLN_modulation_1"
        more = named(pair, lambda module: last, "lora_down", "lora_up", alpha=2.0)
    save_file(tensors | more, tmp_path / "kohya.safetensors")
    with pytest.raises(ValueError, match=f"kohya.safetensors: lora_unet_.*{lost}"):
        read_lora(tmp_path / "kohya.safetensors", model)


@pytest.mark.parametrize("family", sorted(BY_DIFFUSERS_NAME | BY_OWN_NAME))
def test_comfyui_finds_each_module(family, tmp_path):
    """A LoRA on all linear layers, at the strength of the product: alpha, which ComfyUI would divide, is not in it."""
    model = str(make_checkpoint(family, tmp_path / family))
    shapes = linear_shapes(model)
    pairs = matrices(model, shapes)
    table = names_in_a_file(family)
    assert {starred(module) for module in shapes} == table.keys()  # each row is one of the model's, and none is missing
    expected = {}
    for module, (a, b) in pairs.items():
        number = re.search(r"\.(\d+)\.", module)
        name = table[starred(module)].replace("*", number[1] if number else "")
        expected |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    tensors = lora.convert(pairs, "comfyui", family_class(model).__name__, shapes)
    assert tensors.keys() == expected.keys() and len(tensors) == 2 * len(shapes)
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize("family", sorted(BY_DIFFUSERS_NAME | BY_OWN_NAME))
def test_what_is_written_for_comfyui_is_read_back(family, tmp_path):
    """By --lora_path: of every linear layer, but for those of FLUX.2 that ComfyUI finds by other names."""
    model = str(make_checkpoint(family, tmp_path / family))
    others = BY_OWN_NAME[family] if family == "flux2_klein" else ()
    pairs = matrices(model, [module for module in linear_shapes(model) if module not in others])
    tensors = lora.convert(pairs, "comfyui", family_class(model).__name__, linear_shapes(model))
    save_file(tensors, tmp_path / "comfyui.safetensors")
    assert_same(products(tmp_path / "comfyui.safetensors", model), pairs)


# The names of LoRA modules: "lora_unet_" and the module's path in the scripts' own model, with underscores for dots. Of
# sd-scripts (48d368f), networks/lora_sd3.py over library/sd3_models.py and lora_flux.py over flux_models.py; and of
# musubi-tuner (30c658c), networks/lora_wan.py, lora_qwen_image.py and lora_zimage.py over the models beside them.
KOHYA_NAMES = {
    "stable_diffusion_3": r"joint_blocks_\d+_((x|context)_block_(attn_(qkv|proj)|mlp_fc[12])|x_block_attn2_(qkv|proj))",
    "flux": r"double_blocks_\d+_(img|txt)_(attn_(qkv|proj)|mlp_[02])|single_blocks_\d+_linear[12]",
    "wan": r"blocks_\d+_((self|cross)_attn_[qkvo]|ffn_[02])",
    "wan_image_to_video": r"blocks_\d+_((self|cross)_attn_[qkvo]|cross_attn_[kv]_img|ffn_[02])",
    "qwen_image": r"transformer_blocks_\d+_(attn_(to_[qkv]|to_out_0|add_[qkv]_proj|to_add_out)|(img|txt)_mlp_net_"
    r"(0_proj|2))",
    "z_image": r"(layers|noise_refiner|context_refiner)_\d+_(attention_(to_[qkv]|to_out_0)|feed_forward_w[123])",
}


@pytest.mark.parametrize(("family", "plain"), [("flux_kontext", "flux"), ("qwen_image_edit_plus", "qwen_image")])
@pytest.mark.parametrize("to", ["comfyui", "kohya"])
def test_a_model_that_edits_has_the_names_of_the_model_that_it_is_made_of(family, plain, to, tmp_path):
    model = str(make_checkpoint(family, tmp_path / family))
    shapes = linear_shapes(model)
    pairs = matrices(model, [module for module in shapes if module.endswith((".attn.to_q", ".attn.add_v_proj"))])
    tensors = lora.convert(pairs, "diffusers", family, shapes)
    save_file(tensors, tmp_path / "edits.safetensors")
    out = tmp_path / "converted.safetensors"
    lora.main(["convert", str(tmp_path / "edits.safetensors"), str(out), "--model", model, "--to", to])
    of_plain = family_class(make_checkpoint(plain, tmp_path / plain)).__name__
    assert load_file(out).keys() == lora.convert(pairs, to, of_plain, shapes).keys()


# The modules of SD3's blocks whose rows kohya's matrices have, from the top. diffusers reads the other families' names
ROWS_OF_SD3 = {
    "x_block_attn_qkv": ["attn.to_q", "attn.to_k", "attn.to_v"],
    "x_block_attn_proj": ["attn.to_out.0"],
    "x_block_attn2_qkv": ["attn2.to_q", "attn2.to_k", "attn2.to_v"],
    "x_block_attn2_proj": ["attn2.to_out.0"],
    "x_block_mlp_fc1": ["ff.net.0.proj"],
    "x_block_mlp_fc2": ["ff.net.2"],
    "context_block_attn_qkv": ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"],
    "context_block_attn_proj": ["attn.to_add_out"],
    "context_block_mlp_fc1": ["ff_context.net.0.proj"],
    "context_block_mlp_fc2": ["ff_context.net.2"],
}


@pytest.mark.parametrize("family", KOHYA_NAMES)
def test_kohyas_names_and_products(family, tmp_path):
    """Of every attention and MLP module of the blocks; what several add to one matrix of kohya's is the same."""
    model = str(make_checkpoint(family, tmp_path / family))
    own = r".*blocks\.\d+\.(attn\d?|ff|ff_context|ffn|img_mlp|txt_mlp|proj_mlp|proj_out)\b.*"
    own += r"|(layers|\w+_refiner)\.\d+\.(att|feed).*"  # Z-Image's
    shapes = linear_shapes(model)
    pairs = matrices(model, [m for m in shapes if re.fullmatch(own, m) and ".norm" not in m])
    default = tuple(f".{target}" for target in family_class(model).lora_target_modules)
    assert pairs.keys() >= {module for module in shapes if module.endswith(default)}
    tensors = lora.convert(pairs, "kohya", family_class(model).__name__, shapes)
    names = {key.partition(".")[0] for key in tensors}
    assert all(re.fullmatch("lora_unet_(" + KOHYA_NAMES[family] + ")", name) for name in names), names
    assert {key.partition(".")[2] for key in tensors} == {"lora_down.weight", "lora_up.weight", "alpha"}
    total = sum((b @ a).sum() for a, b in pairs.values())
    found = {name: tensors[f"{name}.lora_up.weight"] @ tensors[f"{name}.lora_down.weight"] for name in names}
    torch.testing.assert_close(sum(product.sum() for product in found.values()), total, rtol=1e-3, atol=1e-2)
    assert all(tensors[f"{name}.alpha"] == len(tensors[f"{name}.lora_down.weight"]) for name in names)
    if family == "stable_diffusion_3":  # diffusers has no converter for these names
        for name, product in found.items():
            block, matrix = re.fullmatch(r"lora_unet_joint_blocks_(\d+)_(\w+)", name).groups()
            of_rows = [pairs[f"transformer_blocks.{block}.{module}"] for module in ROWS_OF_SD3[matrix]]
            torch.testing.assert_close(product, torch.cat([b @ a for a, b in of_rows]), rtol=1e-4, atol=1e-4)
        save_file(tensors, tmp_path / "kohya.safetensors")
        for prefix in ("lora_unet_", "diffusion_model.", "lycoris_"):
            renamed = {key.replace("lora_unet_", prefix): tensor.contiguous() for key, tensor in tensors.items()}
            save_file(renamed, tmp_path / "kohya.safetensors")
            with pytest.raises(ValueError, match="joint_blocks.*: .* SD3's "):
                read_lora(tmp_path / "kohya.safetensors", model)
        return
    # diffusers reads FLUX.1's single blocks of the published width alone; the next test has those
    kept = {key: tensor.contiguous() for key, tensor in tensors.items() if "_single_blocks_" not in key}
    save_file(kept, tmp_path / "kohya.safetensors")
    read = products(tmp_path / "kohya.safetensors", model)
    assert len(read) == sum(not module.startswith("single") for module in pairs)
    for module, product in read.items():
        a, b = pairs[module]
        torch.testing.assert_close(product, b @ a, rtol=1e-4, atol=1e-4)


def test_flux1s_single_blocks_of_the_published_width_come_back_from_kohyas_names(tmp_path):
    """By diffusers' converter, which splits their matrix at q, k, v and MLP of 3072, 3072, 3072 and 12288 rows."""
    model = make_checkpoint("flux", tmp_path / "flux")
    config = json.loads((model / "transformer" / "config.json").read_text())
    config |= {"num_attention_heads": 24, "attention_head_dim": 128, "axes_dims_rope": [16, 56, 56]}
    (model / "transformer" / "config.json").write_text(json.dumps(config))
    shapes = linear_shapes(str(model))
    wanted = [m for m in shapes if re.fullmatch(r"single\w+\.1\.(attn\.to_[qkv]|proj_mlp|proj_out)", m)]
    pairs = matrices(str(model), wanted)
    save_file(lora.convert(pairs, "kohya", "Flux", shapes), tmp_path / "kohya.safetensors")
    read = products(tmp_path / "kohya.safetensors", str(model))
    assert_same(read, pairs)
    assert len(wanted) == 5


@pytest.mark.parametrize(("family", "fault"), [("flux", " FLUX's .*AssertionError"), ("wan", "(?!.*FLUX)")])
def test_names_that_diffusers_converter_does_not_take_are_told_as_such(family, fault, tmp_path):
    """Those of FLUX.1's single blocks of another width than the published one, for which its converter has an assert;
    and the same for another model, where nothing else can be said."""
    flux = str(make_checkpoint("flux", tmp_path / "flux"))
    shapes = linear_shapes(flux)
    pairs = matrices(flux, [module for module in shapes if module.startswith("single_transformer_blocks.0.attn.to_")])
    save_file(lora.convert(pairs, "kohya", "Flux", shapes), tmp_path / "kohya.safetensors")
    model = flux if family == "flux" else str(make_checkpoint(family, tmp_path / family))
    with pytest.raises(ValueError, match=rf"lora_unet_single_blocks_0_linear1\S*: .*{fault}") as caught:
        read_lora(tmp_path / "kohya.safetensors", model)
    assert "\n" not in str(caught.value)


@pytest.mark.fast
def test_an_adapter_over_a_changed_base_is_neither_converted_nor_merged(tmp_path):
    """By the same settings as --lora_path, as the product would be that of another model."""
    tensors = lora.convert(matrices(MODEL, MODULES), "diffusers", "StableDiffusion3", linear_shapes(MODEL))
    save_file(
        tensors, tmp_path / "pissa.safetensors", {"lora_adapter_metadata": '{"transformer.init_lora_weights": "pissa"}'}
    )
    for command in ("convert", "merge"):
        with pytest.raises(SystemExit, match="pissa.safetensors: init_lora_weights pissa: PiSSA"):
            lora.main([command, str(tmp_path / "pissa.safetensors"), str(tmp_path / "out"), "--model", MODEL])
        assert not (tmp_path / "out").exists()


def test_a_family_without_comfyuis_names_is_refused(tmp_path):
    model = str(make_checkpoint("krea2", tmp_path / "krea2"))
    pairs = matrices(model, list(linear_shapes(model))[:1])
    with pytest.raises(ValueError, match="^--to comfyui .* Krea2, .*StableDiffusion3, Flux"):
        lora.convert(pairs, "comfyui", "Krea2", linear_shapes(model))
    with pytest.raises(ValueError, match="^--to kohya .* Krea2, .*StableDiffusion3, Flux"):
        lora.convert(pairs, "kohya", "Krea2", linear_shapes(model))


def test_a_family_without_kohyas_names_is_refused(tmp_path):
    model = str(make_checkpoint("flux2_klein", tmp_path / "klein"))
    pairs = matrices(model, ["transformer_blocks.0.attn.to_q"])
    with pytest.raises(ValueError, match="^--to kohya .* Flux2Klein, .*StableDiffusion3, Flux"):
        lora.convert(pairs, "kohya", "Flux2Klein", linear_shapes(model))


def test_rows_of_kohyas_matrix_without_a_lora_are_zero(tmp_path):
    """SD3's q and v alone: rows q, k, v of qkv, by hand; and a module that kohya does not train is refused."""
    shapes = linear_shapes(MODEL)
    pairs = matrices(MODEL, ["transformer_blocks.0.attn.to_v", "transformer_blocks.0.attn.to_q"])
    tensors = lora.convert(pairs, "kohya", "StableDiffusion3", shapes)
    name = "lora_unet_joint_blocks_0_x_block_attn_qkv"
    assert {key.partition(".")[0] for key in tensors} == {name} and tensors[f"{name}.alpha"] == 4
    product = tensors[f"{name}.lora_up.weight"] @ tensors[f"{name}.lora_down.weight"]
    q, k, v = product.chunk(3)
    assert not k.any()
    for rows, part in ((q, "q"), (v, "v")):
        a, b = pairs[f"transformer_blocks.0.attn.to_{part}"]
        torch.testing.assert_close(rows, b @ a)
    with pytest.raises(ValueError, match="^proj_out: .*kohya's .* StableDiffusion3$"):
        lora.convert(matrices(MODEL, ["proj_out"]), "kohya", "StableDiffusion3", shapes)


# ---- what is refused -------------------------------------------------------------------------------------------------
@pytest.mark.fast
def test_what_has_no_place_is_named_with_a_way_on(tmp_path):
    pairs = matrices(MODEL, MODULES)
    good = named(pairs, lambda module: f"transformer.{module}")
    file = tmp_path / "lora.safetensors"
    one = torch.ones(2, 2)
    faults = {
        "transformer.blocks.7.to_q.lora_A.weight": f"{MODEL} ",
        "text_encoder.layers.0.q_proj.lora_A.weight": r"tools\.lora convert FILE OUT --model",
        "lora_te1_text_model_q.lora_down.weight": r"tools\.lora convert FILE OUT --model",
        "transformer.blocks.0.to_q.dora_scale": "dora_scale .* LoRA",
        "lora_unet_blocks_0_to_q.lokr_w1": "lokr_w1 .* LoRA",
        "transformer.blocks.0.to_q.magnitude": "magnitude .* LoRA",
    }
    for key, fault in faults.items():
        save_file(good | {key: one}, file)
        with pytest.raises(ValueError, match=f"^--lora_path {file}: .*{fault}") as error:
            read_lora(file, MODEL)
        assert "\n" not in str(error.value)
    wide = {key: torch.ones(2, 7) if "lora_A" in key else tensor for key, tensor in good.items()}
    save_file(wide, file)
    with pytest.raises(ValueError, match=" 7 "):
        read_lora(file, MODEL)


# ---- the tool --------------------------------------------------------------------------------------------------------
@pytest.mark.fast
def test_convert_gives_one_rank_and_one_alpha_and_drops_encoders(tmp_path, capsys):
    """Ranks 2 and 4, alphas 1 and 4, and a text encoder's tensor; at half the strength."""
    one, two = matrices(MODEL, MODULES[:1], rank=2), matrices(MODEL, MODULES[1:], rank=4)
    tensors = named(one, lambda m: f"transformer.{m}", alpha=1.0) | named(two, lambda m: f"transformer.{m}", alpha=4.0)
    tensors["text_encoder.q_proj.lora_A.weight"] = torch.ones(2, 2)
    save_file(tensors, tmp_path / "in.safetensors")
    for loader in ("diffusers", "comfyui"):
        out = tmp_path / f"{loader}.safetensors"
        files = [str(tmp_path / "in.safetensors"), str(out)]
        lora.main(["convert", *files, "--model", MODEL, "--to", loader, "--scale", "0.5"])
        assert re.fullmatch(rf".*: 1 .*\n{out}: 2 .* 4\n", capsys.readouterr().out)
        found = products(out)
        assert_same({MODULES[0]: found[MODULES[0]]}, one, scale=0.25)
        assert_same({MODULES[1]: found[MODULES[1]]}, two, scale=0.5)
    with pytest.raises(SystemExit, match=f"{out} "):
        lora.main(["convert", str(tmp_path / "in.safetensors"), str(out), "--model", MODEL])


@pytest.mark.fast
@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize(
    "alpha_pattern",
    [
        {"attn.to_q": 64},  # the end of names
        {r"transformer_blocks\.[01]\.attn\.to_(q|k)": 2.5, "to_out.0": 8},  # an expression
        {"transformer_blocks.1.attn.to_q": 8, "to_q": 64},  # both fit one
        {"to_out.0": 3, ".*": 5},
    ],
)
def test_alphas_by_pattern_are_pefts(tmp_path, alpha_pattern, use_rslora):
    """What peft adds to each module by an adapter of two ranks that it has written and read."""
    from peft import LoraConfig, PeftModel, get_peft_model

    targets = ["attn.to_q", "attn.to_k", "to_out.0"]
    settings = LoraConfig(
        r=4,
        lora_alpha=4,
        rank_pattern={"to_k": 2},
        alpha_pattern=alpha_pattern,
        target_modules=targets,
        use_rslora=use_rslora,
        init_lora_weights=False,
    )
    get_peft_model(embedded_model().transformer, settings).save_pretrained(tmp_path / "adapter")
    read = PeftModel.from_pretrained(embedded_model().transformer, tmp_path / "adapter")  # patterns are sorted in it
    expected = {}
    for name, layer in read.base_model.model.named_modules():
        if hasattr(layer, "lora_A") and layer.lora_A:
            expected[name] = layer.get_delta_weight("default")
    found = lora.read_matrices(tmp_path / "adapter", MODEL)
    assert found.keys() == expected.keys()
    for module, (a, b) in found.items():
        torch.testing.assert_close(b @ a, expected[module], rtol=1e-5, atol=1e-6)


@pytest.mark.fast
def test_alphas_by_pattern_are_found_by_the_names_in_the_file(tmp_path):
    """Whose modules diffusers' converter renames, and splits: here q, k and v in one matrix."""
    model = str(make_checkpoint("flux", tmp_path / "flux"))
    inner = linear_shapes(model)["transformer_blocks.0.attn.to_q"][1]
    a, b = torch.randn(2, inner), torch.randn(3 * inner, 2)
    key = "lora_unet_double_blocks_0_img_attn_qkv"
    (tmp_path / "in").mkdir()
    save_file({f"{key}.lora_down.weight": a, f"{key}.lora_up.weight": b}, tmp_path / "in" / "adapter_model.safetensors")
    settings = {"r": 2, "lora_alpha": 2, "alpha_pattern": {".*_img_attn_qkv": 8}}
    (tmp_path / "in" / "adapter_config.json").write_text(json.dumps(settings))
    found = lora.read_matrices(tmp_path / "in", model)
    for i, part in enumerate("qkv"):
        of_part, to_b = found[f"transformer_blocks.0.attn.to_{part}"]
        torch.testing.assert_close(to_b @ of_part, 4 * b[i * inner :][:inner] @ a, rtol=1e-4, atol=1e-4)


NESTED = "[" * 100_000
PAIR = {"transformer.m.lora_A.weight": torch.ones(2, 2), "transformer.m.lora_B.weight": torch.ones(2, 2)}
SCALED = PAIR | {"transformer.m.lora_B.weight": torch.full((2, 2), 3e38)}


@pytest.mark.fast
@pytest.mark.parametrize(
    ("content", "settings", "fault"),
    [
        (b"", "{}", ".* LoRA .*: "),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "{}", ".* LoRA .*: "),
        (PAIR, NESTED, ".* LoRA .*: "),
        (PAIR, '{"alpha_pattern": 3}', ".* LoRA .*: "),
        (PAIR, '{"alpha_pattern": {"to_q": 4}}', "alpha_pattern: to_q: "),
        (PAIR, '{"alpha_pattern": {"m": 4, "(": 2}}', r"alpha_pattern: \(: "),
        (PAIR, '{"alpha_pattern": {"m": "8"}}', "alpha_pattern: m: .* 8, .* 0$"),
        (PAIR, '{"lora_alpha": NaN}', "m: .* nan, .* 0$"),
        (PAIR, '{"lora_alpha": "8"}', "m: .* 8, .* 0$"),
        (dict(list(PAIR.items())[1:]), "{}", "m: .* lora_A .* lora_B "),
        (PAIR | {"transformer.m.lora_A.weight": torch.ones(3, 2)}, "{}", "m: .* lora_A .* lora_B "),
        (PAIR | {"transformer.m.lora_A.weight": torch.full((2, 2), torch.nan)}, "{}", "transformer.m.lora_A.weight "),
        (
            PAIR | {"transformer.m.lora_A.weight": torch.ones(2, 2).double() * 1e300},
            "{}",
            "transformer.m.lora_A.weight ",
        ),
        (PAIR | {"transformer.m.lora_A.weight": torch.ones(2, 2).int()}, "{}", "transformer.m.lora_A.weight "),
        (SCALED, "{}", "--scale 2.0: .* NaN "),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(tmp_path, monkeypatch, content, settings, fault):
    monkeypatch.setattr(lora, "linear_shapes", lambda model: {"m": (2, 2)})
    monkeypatch.setattr(adapter_files, "linear_shapes", lambda model: {"m": (2, 2)})
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "adapter_config.json").write_text(settings)
    file = tmp_path / "in" / "adapter_model.safetensors"
    file.write_bytes(content) if isinstance(content, bytes) else save_file(content, file)
    command = ["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--model", MODEL, "--scale", "2"]
    with pytest.raises(SystemExit, match=f"^tools.lora: error: {tmp_path}/in: {fault}") as error:
        lora.main(command)
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


@pytest.mark.fast
def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    save_file(named(matrices(MODEL, MODULES), lambda module: f"transformer.{module}"), tmp_path / "in")
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match=f"^tools.lora: error: {tmp_path}/file/out "):
        lora.main(["convert", str(tmp_path / "in"), str(tmp_path / "file" / "out"), "--model", MODEL])
    with pytest.raises(SystemExit, match="^tools.lora: error: .*--scale nan: .* NaN "):
        lora.main(["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--model", MODEL, "--scale", "nan"])
    lora.main(["convert", str(tmp_path / "in"), str(tmp_path / "new" / "out"), "--model", MODEL])
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]


@torch.no_grad()
def test_the_trainers_velocity_from_a_merged_model_and_from_converted_files(tmp_path, capsys):
    """Stock diffusers, with the merged model and with each file that it reads, gives the trained policy's numbers."""
    from diffusers import DiffusionPipeline

    model, args, config = policy_without_fsdp()
    save_weights(tmp_path / "adapter", model.pipe, tensors_on_rank_0(model)[0], config)
    lora.main(["merge", str(tmp_path / "adapter"), str(tmp_path / "merged"), "--model", MODEL, "--dtype", "float32"])
    lora.main(["convert", str(tmp_path / "adapter"), str(tmp_path / "d.safetensors"), "--model", MODEL])
    capsys.readouterr()
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, *model.schedule(2, 32, 96)[2], generator=generator)
    conditioning = model.encode_prompts(['a red sign that says "1"'] * 2, 16)
    expected = model.predict_velocity(latents, torch.tensor(600.0), conditioning)

    def velocity(pipe):
        inputs = {"encoder_hidden_states": conditioning["prompt_embeds"]}
        inputs["pooled_projections"] = conditioning["pooled_prompt_embeds"]
        return pipe.transformer(latents, timestep=torch.tensor([600.0, 600.0]), **inputs, return_dict=False)[0]

    merged = DiffusionPipeline.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(velocity(merged), expected, rtol=0, atol=2e-5)
    stock = DiffusionPipeline.from_pretrained(MODEL)
    base = velocity(stock)
    stock.load_lora_weights(tmp_path / "d.safetensors")
    torch.testing.assert_close(velocity(stock), expected, rtol=0, atol=2e-5)
    assert (base - expected).abs().max() > 0.01
    index = json.loads((tmp_path / "merged" / "model_index.json").read_text())
    assert index["_class_name"] == "StableDiffusion3Pipeline"
