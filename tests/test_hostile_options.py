"""Every option against hostile values: one line that names the option before a model loads, or it works."""

import importlib
import shlex

from common.lora import read_lora
from common.options import parse_args
from tests.conftest import SCRIPTS, own_options, shared_options

import pytest
import torch
from safetensors.torch import save_file

pytestmark = pytest.mark.fast

FINITE = "must be a finite number"
NUMBERS = {  # of each script: option -> values that it refuses
    "all": {
        "seed": ["-1", "4294967296"],
        "keep_checkpoints": ["0", "-1"],
        "max_minutes": ["-1", "nan", "inf"],
        "profile_steps": ["-1"],
        "image_size": ["0 96", "-32 96", "32 95", "100000 96", "32 0"],
        "max_sequence_length": ["0", "-1"],
        "lora_rank": ["-1"],
        "lora_alpha": ["0", "-1"],
        "max_prompts": ["-1"],
        "eval_images_per_prompt": ["0"],
        "reward_weights": ["nan", "inf", "1 2"],
        "lr_warmup_steps": ["-1"],
        "weight_decay": ["-1", "nan", "inf"],
        "max_grad_norm": ["0", "nan", "inf"],
        "ema_decay": ["1", "inf", "nan", "-0.1"],
        "eval_every": ["0", "-1"],
        "eval_num_inference_steps": ["0"],
        "learning_rate": ["-1", "nan", "inf"],
        "num_steps": ["-1"],
        "micro_batch_size": ["0", "-1"],
        "group_size": ["1", "0", "-1"],
        "num_inference_steps": ["0", "-1"],
    },
    "flow_grpo.py": {
        "num_prompts": ["0", "-1"],
        "guidance_scale": ["nan", "0.5", "0", "-1", "inf"],
        "noise_level": ["0", "-1", "nan", "inf", "1e-320", "1e308"],
        "sde_type": ["nonsense", "no.py:f", "__init__"],
        "sde_window_size": ["-1", "2"],
        "sde_window_range": ["-1 1", "1 1", "0 3", "0 9", "1 0"],  # of 3 steps the last is never stochastic
        "clip_range": ["0", "nan", "inf", "-1"],
        "kl_coef": ["-1", "nan", "inf"],
        "adv_clip_max": ["0", "nan", "inf"],
        "rollout_batch_size": ["0"],
        "engine_timeout_s": ["0", "nan", "inf"],
        "updates_per_rollout": ["0", "-1"],
        "epochs_per_rollout": ["0"],
        "max_velocity_drift": ["0", "nan", "inf", "-1"],
        "rollout_correction": ["nonsense", "tis:nan", "tis:-1"],
    },
    "grpo_guard.py": {"dppo_delta": ["0", "nan", "inf"], "noise_level": ["nan", "1e308"]},
    "mix_grpo.py": {
        "sde_window_size": ["0", "-1"],
        "iters_per_group": ["0", "-1"],
        "flash_ratio": ["0", "1.5", "nan", "-1"],
    },
    "diffusion_nft.py": {
        "nft_beta": ["0", "nan", "inf"],
        "timestep_fraction": ["0", "1.01", "nan"],
        "old_decay": ["1", "-0.1", "nan"],
        "update_interval": ["0", "-1"],
    },
    "dpo_offline.py": {
        "dpo_beta": ["0", "nan", "inf"],
        "num_pairs": ["0", "-1"],
        "num_pair_prompts": ["0"],
        "guidance_scale": ["0.5", "nan"],
    },
}
CASES = [
    (script, option, value)
    for of, options in NUMBERS.items()
    for script in (SCRIPTS if of == "all" else [of])
    for option, values in options.items()
    if option in {**shared_options(), **own_options(script)}
    for value in values
]


def refusal(script, command, folder, monkeypatch):
    """The message by which check_args refuses a command line."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("WORLD_SIZE", "1")
    module = importlib.import_module(script.removesuffix(".py"))
    local = [] if script == "dpo_offline.py" else ["--rollout", "local"]
    args = parse_args(module.Args, "", [*local, *shlex.split(command)])
    with pytest.raises(ValueError) as error:
        module.check_args(args)
    return str(error.value)


@pytest.mark.parametrize(("script", "option", "value"), CASES)
def test_a_number_out_of_bounds_is_named_in_one_line(script, option, value, tmp_path, monkeypatch):
    message = refusal(script, f"--{option} {value}", tmp_path, monkeypatch)
    assert f"--{option}" in message and "\n" not in message and len(message) < 300


@pytest.mark.parametrize("sde_type", ["cps", "cps_gauss"])
def test_a_noise_level_beyond_the_sines_quarter_is_refused(sde_type, tmp_path, monkeypatch):
    message = refusal("flow_grpo.py", f"--sde_type {sde_type} --noise_level 2", tmp_path, monkeypatch)
    assert (
        message == f"--sde_type {sde_type} --noise_level 2.0: it is the sine's argument in units of pi / 2: at most 1"
    )


STEP_KINDS = """
import torch
def raises(x, v, sigma, sigma_next, noise_level, sigma_max):
    raise KeyError("mine")
def of_another_shape(x, v, sigma, sigma_next, noise_level, sigma_max):
    return x.sum(), 0.1
def silent(x, v, sigma, sigma_next, noise_level, sigma_max):
    return x, 0.0
def not_a_number(x, v, sigma, sigma_next, noise_level, sigma_max):
    return x, float("nan")
def without_std(x, v, sigma, sigma_next, noise_level, sigma_max):
    return x
def not_euler(x, v, sigma, sigma_next, noise_level, sigma_max):
    return x, noise_level
takes_less = lambda x, v: x
number = 3
"""


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("raises", "raised KeyError: 'mine'"),
        ("of_another_shape", "gives no mean of the samples' shape (2, 2, 3)"),
        ("silent", "gives std 0"),
        ("not_a_number", "gives std nan"),
        ("without_std", "raised TypeError"),
        ("not_euler", "at noise_level 0 the step from sigma 1.0 to 0.9 is not the Euler step x + v dt with std 0"),
        ("takes_less", "raised TypeError"),
        ("number", "has no function number"),
        ("nothing", "has no function nothing"),
    ],
)
def test_a_step_kind_of_ones_own_is_tried_before_a_model_loads(name, fault, tmp_path, monkeypatch):
    (tmp_path / "kinds.py").write_text(STEP_KINDS)
    message = refusal("flow_grpo.py", f"--sde_type kinds.py:{name}", tmp_path, monkeypatch)
    if name == "without_std":  # a tensor of two rows unpacks into two
        assert message.startswith("--sde_type kinds.py:without_std")
    else:
        assert message.startswith(f"--sde_type kinds.py:{name}") and fault in message and "\n" not in message


# ---- files -----------------------------------------------------------------------------------------------------------
def lora_tensors(**changes):
    tensors = {"transformer.a.lora_A.weight": torch.ones(2, 3), "transformer.a.lora_B.weight": torch.ones(3, 2)}
    return {name: tensor for name, tensor in {**tensors, **changes}.items() if tensor is not None}


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"transformer.a.lora_A.weight": torch.full((2, 3), torch.nan)}, "has values that are NaN or infinite"),
        ({"transformer.a.lora_B.weight": torch.full((3, 2), torch.inf)}, "has values that are NaN or infinite"),
        ({"transformer.a.lora_A.weight": torch.ones(2)}, r"has the shape \(2,\), where matrices are taken"),
        ({"transformer.a.lora_A.weight": torch.ones(0, 3)}, r"has the shape \(0, 3\), where matrices are taken"),
        ({"transformer.a.alpha": torch.ones(2)}, "is not one number above 0"),
        ({"transformer.a.alpha": torch.tensor(torch.nan)}, "is not one number above 0"),
    ],
)
def test_a_lora_of_odd_tensors_is_refused(changes, fault, tmp_path):
    save_file(lora_tensors(**changes), tmp_path / "pytorch_lora_weights.safetensors")
    with pytest.raises(ValueError, match=rf"^--lora_path .*: transformer.a.\S+ {fault}$"):
        read_lora(tmp_path)
