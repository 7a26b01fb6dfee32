"""Every number of every script has a bound; options that no other test sets do what they say."""

import importlib
import json
import math
import re
from dataclasses import replace
from typing import get_args, get_type_hints

import dpo_offline
import flow_grpo
from common.data import PromptSet
from common.engine import client
from common.files.checkpoints import saved_checkpoints
from common.models.flux import Flux
from common.models.stable_diffusion_3 import StableDiffusion3
from common.options import lr_factor
from common.run.command_line import check_options, parse_args
from common.run.inputs import Inputs
from common.sde import image_seed
from common.weights import start
from common.weights.lora import save_weights
from common.weights.policy import tensors_on_rank_0
from tests.conftest import (
    ROOT,
    SCRIPTS,
    TINY,
    checked,
    few_eval_prompts,
    is_installed,
    needs_wandb,
    policy_without_fsdp,
    read_metrics,
    run_here,
    torchrun,
)

import pytest
import torch
from PIL import Image

LOCAL = [*TINY, "--rollout", "local"]


# ---- bounds ----------------------------------------------------------------------------------------------------------
OUTSIDE_AND_INSIDE = {  # of each bound that an option can have
    "at least 0": ([-1], [0]),
    "at least 1": ([0], [1]),
    "at least 2": ([1], [2]),
    "above 0": ([0], [1e-9]),
    "above 0 and at most 1": ([0, 1.01], [1]),
    "at least 0 and below 1": ([-0.1, 1], [0]),
    "at least 0 and at most 4294967295": ([-1, 2**32], [0, 2**32 - 1]),
    "a finite number": ([], [-1]),
}
OPTIONS_BY_BOUND = {
    "at least 0": """max_minutes shard_ranks save_every lora_rank
        save_rollouts weight_decay max_prompts engine_devices reward_frames sde_window_size kl_coef num_steps
        learning_rate micro_batch_size rollout_batch_size""",
    "at least 1": """keep_checkpoints ranks_per_image image_size num_frames max_sequence_length lora_alpha eval_every
        eval_num_inference_steps eval_guidance_scale guidance_scale_2 eval_images_per_prompt
        num_prompts guidance_scale updates_per_rollout max_rollouts
        epochs_per_rollout iters_per_group update_interval num_pair_prompts num_pairs profile_steps train_shares""",
    "at least 2": "group_size num_inference_steps",
    "above 0": """adam_eps max_grad_norm noise_level clip_range adv_clip_max nft_beta dpo_beta""",
    "above 0 and at most 1": "timestep_fraction",
    "at least 0 and below 1": "ema_decay old_decay adam_betas",
    "at least 0 and at most 4294967295": "seed",
    "a finite number": "reward_weights",
}
OTHER_BOUNDS = {
    ("mix_grpo.py", "sde_window_size"): "at least 1",
    ("diffusion_nft.py", "num_inference_steps"): "at least 1",
    ("dpo_offline.py", "num_inference_steps"): "at least 1",
}


def numeric_options(args_class):
    """{name: whether it is a float} of the options that hold a number, alone or in a tuple.

    check_window looks at a window's range, not a bound.
    """
    types = {name: {hint, *get_args(hint)} for name, hint in get_type_hints(args_class).items()}
    return {name: float in of for name, of in types.items() if of & {int, float} and name != "sde_window_range"}


@pytest.mark.fast
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_number_has_a_bound_and_is_held_to_it(script):
    args_class = importlib.import_module(script.removesuffix(".py")).Args
    bounds = {name: bound for bound, names in OPTIONS_BY_BOUND.items() for name in names.split()}

    def options_with(name, value):
        default = getattr(args_class(), name)
        values = (value,) * max(1, len(default)) if isinstance(default, tuple) else value
        return replace(args_class(), **{name: values})

    for name, is_float in numeric_options(args_class).items():
        bound = OTHER_BOUNDS.get((script, name), bounds.get(name))
        assert bound, f"--{name} stands in no bound of OPTIONS_BY_BOUND"
        outside, inside = OUTSIDE_AND_INSIDE[bound]
        refused = [(value, bound) for value in outside]
        if is_float:
            refused += [(value, "a finite number") for value in (math.nan, math.inf, -math.inf)]
        for value, expected in refused:
            numbers = ".*".join(word for word in expected.split() if word.isdigit()) or ".*"
            with pytest.raises(ValueError) as error:
                check_options(options_with(name, value))
            assert re.fullmatch(f"--{name} {value}: .*{numbers}", str(error.value))
        for value in inside:
            check_options(options_with(name, value))


@pytest.mark.fast
def test_the_command_line_is_held_to_the_bounds():
    with pytest.raises(ValueError, match="^--seed -1: .* 0 .* 4294967295$"):
        parse_args(flow_grpo.Args, "", ["--seed", "-1"])


# ---- one run with many of them ---------------------------------------------------------------------------------------
REWARD = """
def by_place(images, prompts, metadata):  # 0, 1, 2, 3 in each group of four
    return [float(i % 4) for i in range(len(images))]
def length(images, prompts, metadata):
    return [len(prompt) / 100 for prompt in prompts]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("options")
    (folder / "mine.py").write_text(REWARD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        patch.setenv("WANDB_DATA_DIR", str(folder / "wandb_data"))  # where artifacts wait for a sync
        assert (
            run_here(
                folder,
                "flow_grpo.py",
                *LOCAL,
                "--name",
                "all",
                "--track",
                is_installed("wandb"),
                "--profile_steps",
                2,
                "--num_steps",
                4,
                "--eval_every",
                2,
                "--keep_checkpoints",
                1,
                "--max_prompts",
                3,
                "--eval_images_per_prompt",
                2,
                "--scale_rewards",
                "none",
                "--kl_coef",
                0.01,
                "--kl_type",
                "paper",
                "--reward",
                folder / "mine.py:by_place",
                folder / "mine.py:length",
                "--reward_weights",
                1.0,
                0.5,
                "--adv_clip_max",
                1.45,
            )
            is None
        )
    return folder / "runs" / "all"


def test_evaluation_takes_the_first_prompts_and_images_of_their_own_seeds(run):
    prompts = (ROOT / "assets" / "eval_prompts.txt").read_text().splitlines()[:3]
    for step in (0, 2, 4):
        lines = (run / "samples" / f"{step:04d}" / "samples.jsonl").read_text().splitlines()
        samples = [json.loads(line) for line in lines]
        assert [s["prompt"] for s in samples] == [prompts[i // 2] for i in range(6)]
        assert [s["seed"] for s in samples] == [image_seed("eval", i % 2, i // 2) for i in range(6)]
        assert len({s["seed"] for s in samples}) == 6
        images = [Image.open(run / "samples" / f"{step:04d}" / s["file"]) for s in samples]
        assert [image.size for image in images] == [(96, 32)] * 6
        assert len({image.convert("RGB").tobytes() for image in images}) == 6
        # 0 and 1, 2 and 3, 0 and 1: prompts' means .5, 2.5, .5
        assert [s["by_place"] for s in samples] == [0, 1, 2, 3, 0, 1]
        row = read_metrics(run)[step]
        assert row["val/by_place/mean"] == pytest.approx(3.5 / 3)
        variance = (2 * (0.5 - 3.5 / 3) ** 2 + (2.5 - 3.5 / 3) ** 2) / 3
        assert row["val/by_place/stderr"] == pytest.approx(math.sqrt(variance / 3))
        assert row["val/length/mean"] == pytest.approx(sum(len(p) / 100 for p in prompts) / 3)


def test_advantages_are_neither_scaled_nor_beyond_the_clamp_and_checkpoints_are_one(run):
    rows = read_metrics(run)
    assert len(rows) == 5
    for row in rows[1:]:  # of 0 to 3, around 1.5; what the prompt alone decides drops out. Scaled: 1.5 / 1.12 at most
        assert (row["critic/advantages/max"], row["critic/advantages/min"]) == (1.45, -1.45)
        assert row["critic/rewards/by_place/mean"] == pytest.approx(1.5)
        assert row["critic/rewards/mean"] == pytest.approx(1.5 + row["critic/rewards/length/mean"] / 2)
    assert rows[1]["actor/kl_loss"] == 0 and rows[2]["actor/kl_loss"] > 0
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000004.pt"]


def test_profile_steps_writes_a_trace_of_two_passes_of_that_step_alone(run):
    assert sorted(path.name for path in run.glob("trace_*")) == ["trace_0002.json", "trace_0002_rollout.json"]
    events = json.loads((run / "trace_0002.json").read_text())["traceEvents"]
    names = [event.get("name", "") for event in events if event.get("ph") == "X"]
    assert "aten::mm" in names
    assert names.count("MaximumBackward0") == 1  # a loss for each pass, of which an update of this run has one


@needs_wandb
def test_track_leaves_wandbs_table_of_images(run):
    """What wandb keeps for a sync: the run, and of each evaluation a table whose cells are the images."""
    (offline,) = (run / "wandb").glob("offline-run-*")
    record = next(offline.glob("run-*.wandb")).read_bytes()
    assert (
        b"actor/kl_loss" in record
        and b"val/by_place/mean" in record
        and len(list(offline.glob("files/media/table/val/images_*.table.json"))) == 3
    )
    staged = [path.read_bytes() for path in (run.parents[1] / "wandb_data" / "artifacts" / "staging").iterdir()]
    tables = [json.loads(data) for data in staged if data.startswith(b"{") and b'"prompt and score"' in data]
    assert {table["data"][0][0] for table in tables} == {0, 2, 4}
    paths = set()
    for table in tables:
        assert table["columns"] == ["step", "prompt and score", "image"]
        scores = [caption.split("\n")[1].split("  ")[0] for _, caption, _ in table["data"]]
        assert scores == [f"by_place {place}.00" for place in (0, 1, 2, 3, 0, 1)]
        assert all(
            (image["_type"], image["width"], image["height"]) == ("image-file", 96, 32) for _, _, image in table["data"]
        )
        paths |= {image["path"] for _, _, image in table["data"]}
    assert sum(data.startswith(b"\x89PNG") for data in staged) == 18 >= len(paths) > 6


# ---- others ----------------------------------------------------------------------------------------------------------
def test_eval_only_evaluates_what_resume_names_and_trains_nothing(run, tmp_path):
    options = [*LOCAL, "--max_prompts", 2, "--eval_only", "True"]
    assert run_here(tmp_path, "flow_grpo.py", "--name", "base", *options) is None
    options += ["--trust_code", "True"]  # the run's reward is a file, and the run is not in the checkout's runs/
    assert run_here(tmp_path, "flow_grpo.py", "--name", "trained", "--resume", run, *options) is None
    (base,), (trained,) = (read_metrics(tmp_path / "runs" / name) for name in ("base", "trained"))
    assert (base["training/global_step"], trained["training/global_step"]) == (0, 4)
    assert "val/ocr/mean" in base and "val/by_place/mean" in trained  # the rewards of the run
    assert not any("actor" in name for name in trained)
    assert not (tmp_path / "runs/trained/checkpoints").exists()


def test_eval_only_takes_other_prompts_and_rewards_than_the_run(run, tmp_path):
    (tmp_path / "bench.txt").write_text('a red sign that says "4711"\na blue sign that says "25"\n')
    given = ["--resume", run, "--eval_only", "True", "--eval_prompts", "bench.txt", "--eval_images_per_prompt", 1]
    given += ["--reward", "ocr", "--reward_weights", 1, "--eval_reward", "jpeg_compressibility"]
    assert run_here(tmp_path, "flow_grpo.py", "--name", "look", *given) is None
    (row,) = read_metrics(tmp_path / "runs/look")
    assert row["training/global_step"] == 4
    scored = {name.split("/")[1] for name in row if name.endswith("/mean")}
    assert scored == {"ocr", "jpeg_compressibility", "weighted_total"}
    samples = (tmp_path / "runs/look/samples/0004/samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["prompt"] for line in samples] == [
        'a red sign that says "4711"',
        'a blue sign that says "25"',
    ]


NO_TRAINING = [
    "--eval_only",
    "True",
    "--max_prompts",
    2,
    "--eval_num_inference_steps",
    2,
    "--train_prompts",
    "nowhere.txt",
    "--micro_batch_size",
    7,
]


@pytest.mark.parametrize(
    "script",
    [
        *("flow_grpo.py", "diffusion_nft.py", "dpo_offline.py"),
        *("contrib/crd.py", "contrib/dgpo.py", "contrib/diffusion_opd.py", "contrib/dmd2.py", "contrib/draft.py"),
        *("contrib/online_dpo.py", "contrib/ram.py", "contrib/sft.py", "contrib/tdm_r1.py", "contrib/v_grpo.py"),
    ],
)
def test_an_evaluation_alone_needs_no_training_prompts_and_cuts_no_mini_batches(tmp_path, capfd, monkeypatch, script):
    """Nor pairs, records, passes of whole groups, a reference, teachers or a reward's gradient.

    Without a start there is no drift: it would be 0.
    """
    add_policies, policies = start.add_policies, []

    def added(model, lora, names, *others):
        policies.extend(names)
        add_policies(model, lora, names, *others)

    monkeypatch.setattr(start, "add_policies", added)
    without_engine = [f"contrib/{name}.py" for name in ("dmd2", "draft", "sft", "tdm_r1")] + ["dpo_offline.py"]
    local = [] if script in without_engine else ["--rollout", "local"]
    own = {
        "dpo_offline.py": ["--pairs", "nowhere.jsonl"],
        "contrib/dmd2.py": ["--reward", "ocr"],
        "contrib/draft.py": ["--reward", "ocr"],
        "contrib/sft.py": ["--reward", "ocr", "--records", "nowhere.jsonl"],
        "contrib/diffusion_opd.py": ["--teachers", "a=nowhere"],
    }
    assert run_here(tmp_path, script, "--name", "look", *NO_TRAINING, *local, *own.get(script, [])) is None
    (row,) = read_metrics(tmp_path / "runs" / "look")
    assert "val/weighted_total/mean" in row and "val/drift_from_base" not in row
    assert "optimizer steps" not in capfd.readouterr().out
    assert policies[0] == "default" and "reference" not in policies


def test_an_evaluation_of_a_lora_on_three_ranks(tmp_path):
    """Which a rollout of 256 images in 2 mini-batches would not be cut into. Its drift would be 0 as well."""
    model, _, config = policy_without_fsdp()
    save_weights(tmp_path / "lora", model.pipe, tensors_on_rank_0(model)[0], config)
    options = ["--eval_only", "True", "--max_prompts", 2, "--rollout", "local", "--lora_path", "lora"]
    torchrun(tmp_path, "flow_grpo.py", *options, nproc=3)
    (row,) = read_metrics(tmp_path / "runs" / "flow_grpo")
    assert "val/ocr/mean" in row and "val/drift_from_base" not in row


class Started(Exception):
    """Raised where an engine's process would start."""


def test_the_engine_is_started_as_asked(one_rank, tmp_path, monkeypatch):
    args = flow_grpo.Args(
        rollout_batch_size=5,
        engine_with=("sleep",),
        engine_devices=(1, 2),
        dtype="bfloat16",
        model="a/model",
        family="my.py:Mine",
    )
    cpu = torch.device("cpu")
    with monkeypatch.context() as patch:
        patch.setattr(client, "VLLMEngine", lambda *positional, **named: (positional, named))
        engine, named = flow_grpo.start_engine(args, tmp_path, cpu)
    assert engine == ("a/model", "bfloat16", 5, tmp_path / "engine_rank0.log")
    assert named.pop("family") == "my.py:Mine"
    assert named == {"gpus": (None, None), "engine_with": ("sleep",), "attention": "native"}

    def start(*environment):
        raise Started(*environment)

    monkeypatch.setattr(client, "engine_environment", start)
    with pytest.raises(Started) as started:
        flow_grpo.start_engine(args, tmp_path, cpu)
    assert started.value.args == ("a/model", (None, None), max(1, torch.get_num_threads() // 2), False)


def test_nft_and_dpo_options(tmp_path):
    few = [*few_eval_prompts(tmp_path, 2), "--num_steps", 2]
    assert (
        run_here(
            tmp_path,
            "diffusion_nft.py",
            *LOCAL,
            *few,
            "--adv_mode",
            "positive_only",
            "--decay_schedule",
            "fixed",
            "--old_decay",
            0.75,
            "--learning_rate",
            3e-3,
        )
        is None
    )
    rows = read_metrics(tmp_path / "runs" / "diffusion_nft")[1:]
    assert [row["old_policy/decay"] for row in rows] == [0.75, 0.75] and rows[0]["actor/grad_norm"] > 0
    old, default = (
        torch.load(tmp_path / "runs/diffusion_nft/checkpoints/step_000002.pt", weights_only=True)["policies"][name]
        for name in ("old", "default")
    )
    assert any(not torch.equal(old[key], default[key]) for key in old)

    pairs = ["--num_pair_prompts", 6, "--group_size", 4, "--num_pairs", 2]
    assert run_here(tmp_path, "dpo_offline.py", *pairs, *few, "--dpo_beta", 1e-9) is None
    rows = read_metrics(tmp_path / "runs" / "dpo_offline")[1:]
    assert [row["actor/loss"] for row in rows] == pytest.approx([math.log(2)] * 2, abs=1e-6)  # no logit at all


# ---- evaluations and checkpoints of their own ------------------------------------------------------------------------
def test_evaluations_and_checkpoints_have_clocks_of_their_own(tmp_path):
    options = [*LOCAL, "--name", tmp_path / "out" / "mine", "--max_prompts", 2, "--num_steps", 3, "--eval_every", 2]
    assert run_here(tmp_path, "flow_grpo.py", *options, "--save_every", 1, "--keep_checkpoints", 5) is None
    folder = tmp_path / "out" / "mine"
    rows = read_metrics(folder)
    assert [row["training/global_step"] for row in rows if "val/ocr/mean" in row] == [0, 2, 3]
    assert sorted(path.name for path in (folder / "checkpoints").glob("*.pt")) == [
        f"step_{step:06d}.pt" for step in (1, 2, 3)
    ]
    assert not (tmp_path / "runs").exists()
    assert (folder / "best_adapter").exists()
    # it is found again there
    again = [*options, "--save_every", 1, "--keep_checkpoints", 5, "--resume", "latest", "--num_steps", 4]
    assert run_here(tmp_path, "flow_grpo.py", *again) is None
    assert [row["training/global_step"] for row in read_metrics(folder)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("script", ["flow_grpo.py", "dpo_offline.py"])
def test_checkpoints_may_be_rarer_than_evaluations(tmp_path, script):
    options = ["--num_steps", 4, *few_eval_prompts(tmp_path, 2), "--keep_checkpoints", 5]
    options += ["--num_pair_prompts", 6, "--group_size", 4, "--num_pairs", 2] if script == "dpo_offline.py" else LOCAL
    assert run_here(tmp_path, script, *options, "--eval_every", 1, "--save_every", 3) is None
    folder = tmp_path / "runs" / script.removesuffix(".py")
    evaluated = [row["training/global_step"] for row in read_metrics(folder) if "val/ocr/mean" in row]
    assert evaluated == [0, 1, 2, 3, 4]
    assert [path.stem for path in saved_checkpoints(folder)] == ["step_000003", "step_000004"]
    assert (folder / "best_adapter").exists()


@pytest.mark.fast
@pytest.mark.parametrize(("name", "words"), [("engine_devices", (1, 2)), ("engine_with", ("sleep", "compile"))])
def test_what_is_of_an_engine_is_refused_where_there_is_none(name, words):
    with pytest.raises(ValueError, match=f"^--{name} {words[0]} {words[1]}: .*--rollout local .*--{name} "):
        check_options(flow_grpo.Args(rollout="local", **{name: words}))
    check_options(flow_grpo.Args(rollout="vllm", **{name: words}))


@pytest.mark.fast
def test_a_vae_in_bf16_is_refused_where_the_engine_decodes():
    with pytest.raises(ValueError, match="^--vae_dtype bfloat16: .*--rollout local; .* VAE .* float32$"):
        check_options(flow_grpo.Args(vae_dtype="bfloat16"))
    check_options(flow_grpo.Args(vae_dtype="bfloat16", rollout="local"))
    check_options(dpo_offline.Args(vae_dtype="bfloat16"))  # which has no engine


def test_an_evaluation_that_the_model_cannot_make_is_refused_before_it_loads(tmp_path, capfd):
    line = run_here(tmp_path, "diffusion_nft.py", "--rollout", "local", "--eval_guidance_scale", 2.0)
    assert line.startswith("diffusion_nft.py: error: --eval_guidance_scale 2: ")
    assert "loading" not in capfd.readouterr().err


# ---- the learning rate -----------------------------------------------------------------------------------------------
@pytest.mark.fast
def test_the_schedules_of_the_learning_rate_by_hand():
    """6 optimizer steps, of which 2 warm up: the factor is 1 at the second, and 0 would be at the seventh."""
    steps = range(1, 7)
    assert [lr_factor("constant:2", k, 6) for k in steps] == [0.5, 1, 1, 1, 1, 1]
    assert [lr_factor("linear:2", k, 6) for k in steps] == pytest.approx([0.5, 1, 0.8, 0.6, 0.4, 0.2])
    expected = [0.5, *((1 + math.cos(math.pi * part / 5)) / 2 for part in range(5))]
    assert [lr_factor("cosine:2", k, 6) for k in steps] == pytest.approx(expected)
    assert lr_factor("linear:2", 9, 6) == pytest.approx(0.2)  # a run that is resumed with fewer updates per rollout
    assert lr_factor("linear", 3, 3) == pytest.approx(1 / 4)
    assert [lr_factor("constant", k, 6) for k in steps] == [1] * 6
    for bad in ("linear:", "linear:-1", "step", "cosine:2:3"):
        with pytest.raises(ValueError, match=f"^--lr_schedule {bad}: "):
            check_options(flow_grpo.Args(lr_schedule=bad))


@pytest.mark.fast
def test_a_negative_prompt_that_cannot_act_is_refused_before_a_model_loads():
    """The option's, or a record's: without guidance, in a script that has none, and for FLUX.1."""
    plain, with_one = PromptSet(["a", "b"], [{}, {"negative_prompt": ""}]), PromptSet(["c"], [{"negative_prompt": "x"}])
    needs = ".*--guidance_scale .* 1 .*"
    of_record = "--eval_prompts: .* negative_prompt .* 'c'"

    def check(family, eval_set, **more):
        inputs = Inputs(family, {}, {}, plain, eval_set, lora=None, checkpoint=None)
        checked(flow_grpo.Args(**more), inputs)

    check(StableDiffusion3, plain)
    check(StableDiffusion3, with_one, guidance_scale=4.5, negative_prompt="y")
    for more in ({}, {"guidance_scale": 1.0}):
        with pytest.raises(ValueError, match=f"^{of_record}: {needs}$"):
            check(StableDiffusion3, with_one, **more)
        with pytest.raises(ValueError, match=f"^--negative_prompt: {needs}$"):
            check(StableDiffusion3, plain, negative_prompt="y", **more)
    with pytest.raises(ValueError, match=f"^{of_record}: Flux's "):
        check(Flux, with_one, guidance_scale=4.5)
    with pytest.raises(
        ValueError,
        match="^--eval_by kind: .*--eval_prompts .*; --eval_by None ",
    ):
        check(StableDiffusion3, plain, eval_by="kind")
