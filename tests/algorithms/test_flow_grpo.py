"""flow_grpo.py run as users run it, under torchrun, on the embedded model with both engines and one and two ranks."""

import importlib.util
import re
import subprocess
import sys
from dataclasses import fields

import flow_grpo
from common.data import PromptSet
from common.run.command_line import FIRST, parse_args
from common.run.inputs import Inputs
from common.sde import draw_noise
from common.weights.lora import save_weights
from common.weights.policy import tensors_on_rank_0
from tests.conftest import (
    EMBEDDED,
    ROOT,
    SMALL,
    TINY,
    brightness_reward,
    constant_reward,
    few_eval_prompts,
    new_run,
    policy_without_fsdp,
    prompt_set,
    read_metrics,
    run_here,
    torchrun,
    without_times,
)

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from PIL import Image

PHASES = ("gen", "reward", "old_log_prob", "adv", "update_actor", "update_weights", "step")
EXPECTED = {
    "training/global_step",
    "training/epoch",
    "critic/diversity",
    *(f"critic/rewards/{k}" for k in ("mean", "max", "min", "std_mean", "zero_std_ratio", "group_size", "ocr/mean")),
    *(f"critic/rewards/{k}" for k in ("ocr/failed", "skipped_groups")),
    *(f"critic/advantages/{k}" for k in ("mean", "max", "min")),
    *(f"actor/{k}" for k in ("loss", "pg_clipfrac", "pg_clipfrac_higher", "pg_clipfrac_lower", "ratio_mean")),
    *(f"actor/{k}" for k in ("ratio_std", "ppo_kl", "grad_norm", "lr", "skipped_steps")),
    *(f"actor/on_policy_ratio_{k}" for k in ("mean", "std")),
    *(f"timing_s/{k}" for k in PHASES),
    *(f"timing_per_image_ms/{k}" for k in ("gen", "reward", "update_actor")),
    *(f"perf/{k}" for k in ("throughput", "time_per_step", "total_num_images", "max_memory_gb")),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One short run for each engine and number of ranks, made on first use: run(rollout, nproc) -> folder, output."""
    folder = tmp_path_factory.mktemp("runs")
    options = ["--num_steps", 2, *SMALL, "--updates_per_rollout", 2, *few_eval_prompts(folder)]
    options += ["--sde_window_size", 4, "--sde_window_range", 0, 4]
    options += ["--reward", "ocr", brightness_reward(folder), "--reward_weights", 0, 1]
    done = {}

    def run(rollout, nproc):
        if (rollout, nproc) not in done:
            name = f"{rollout}{nproc}"
            command = ["--name", name, "--rollout", rollout, *options]
            out = torchrun(folder, "flow_grpo.py", *command, nproc=nproc, draw_curves=rollout == "local")
            done[rollout, nproc] = folder / "runs" / name, out.stdout
        return done[rollout, nproc]

    return run


@pytest.mark.fast
def test_a_short_run_in_this_process(tmp_path):
    """A step of four images, evaluated before and after it, and a checkpoint of it."""
    options = ["--rollout", "local", "--num_prompts", 2, "--group_size", 2, "--updates_per_rollout", 1]
    options += ["--num_steps", 1, "--reward", brightness_reward(tmp_path), *few_eval_prompts(tmp_path, 2)]
    options += ["--num_inference_steps", 4, "--eval_num_inference_steps", 4]
    assert run_here(tmp_path, "flow_grpo.py", *options) is None
    run = tmp_path / "runs" / "flow_grpo"
    before, after = read_metrics(run)
    assert after["actor/grad_norm"] > 0 and after["actor/on_policy_ratio_mean"] == 1
    assert 0 < after["timing_s/ref"] < after["timing_s/update_actor"]  # which it is a part of
    assert after["val/brightness/mean"] != before["val/brightness/mean"]
    state = torch.load(run / "checkpoints" / "step_000001.pt", weights_only=True)
    assert any(v.abs().max() > 0 for k, v in state["policies"]["default"].items() if "lora_B" in k)


@pytest.mark.parametrize(("rollout", "nproc"), [("local", 1), ("local", 2), ("vllm", 2)])
def test_a_run_leaves_what_the_readme_promises(runs, rollout, nproc):
    run, stdout = runs(rollout, nproc)
    rows = read_metrics(run)
    assert [row["training/global_step"] for row in rows] == [0, 1, 2]
    assert not EXPECTED - set(rows[1])
    assert {"val/ocr/mean", "val/ocr/stderr"} <= set(rows[0]) & set(rows[2])
    for file in (
        "args.json",
        "source.py",
        "curves.png",
        "grid_0000.png",
        "grid_0002.png",
        "checkpoints/step_000002.pt",
        "samples/0002/samples.jsonl",
        "samples/0002/00007.png",
        "best_adapter/pytorch_lora_weights.safetensors",
        "adapter/pytorch_lora_weights.safetensors",
    ):
        assert (run / file).stat().st_size > 0 or (file, rollout) == ("curves.png", "vllm"), file
    assert (run / "source.py").read_text() == (ROOT / "flow_grpo.py").read_text()
    assert Image.open(run / "grid_0000.png").size == Image.open(run / "grid_0002.png").size
    assert "reward=" in stdout  # the progress bar
    for row in rows[1:]:
        assert row["actor/grad_norm"] > 0 and row["actor/skipped_steps"] == 0
        assert row["actor/on_policy_ratio_mean"] == 1 and row["actor/on_policy_ratio_std"] == 0
        if rollout == "vllm":
            assert row["rollout_corr/logprob_abs_diff_max"] <= 2e-6 and row["rollout_corr/velocity_diff_max"] <= 1e-4
    state = torch.load(run / "checkpoints" / "step_000002.pt", weights_only=True)
    assert state["step"] == 2 and state["sampler"] == {"position": 8}
    assert any(v.abs().max() > 0 for k, v in state["policies"]["default"].items() if "lora_B" in k)


@pytest.mark.parametrize("other", [("local", 2), ("vllm", 2)])
def test_ranks_and_engines_agree(runs, other):
    """Invariant 11: the same images, rewards and first updates whatever makes them."""
    first, second = read_metrics(runs("local", 1)[0]), read_metrics(runs(*other)[0])
    assert second[0]["val/brightness/mean"] == pytest.approx(first[0]["val/brightness/mean"], abs=1e-6)
    for name in ("critic/rewards/mean", "critic/rewards/std_mean"):
        assert second[1][name] == pytest.approx(first[1][name], abs=1e-6), name
    assert second[1]["critic/advantages/max"] == pytest.approx(first[1]["critic/advantages/max"], abs=1e-4)
    for name in ("actor/loss", "actor/grad_norm"):
        assert second[1][name] == pytest.approx(first[1][name], abs=1e-5), name
        assert second[2][name] == pytest.approx(first[2][name], rel=2e-2, abs=1e-4), name  # after Adam steps


def test_one_sgd_step_is_the_same_on_any_ranks_and_micro_batches(tmp_path):
    """Invariant 11: accumulated micro-batches equal one big batch, and one rank equals four with two copies of the
    weights, as on two nodes. By SGD: Adam magnifies."""
    adapters = {}
    for name, nproc, micro, shard_ranks in (
        ("big", 1, 16, 0),
        ("micro", 1, 4, 1),
        ("copies", 4, 2, 2),
    ):
        options = [tmp_path / f"{name}.pt", micro, shard_ranks]
        if nproc == 1:
            assert run_here(tmp_path, "tests/one_sgd_step.py", *options) is None
        else:
            torchrun(tmp_path, "tests/one_sgd_step.py", *options, nproc=nproc)
        adapters[name] = torch.load(tmp_path / f"{name}.pt")
    assert max(v.abs().max() for k, v in adapters["big"].items() if "lora_B" in k) > 1e-4
    for other in ("micro", "copies"):
        for key, value in adapters["big"].items():
            torch.testing.assert_close(adapters[other][key], value, rtol=0, atol=1e-6, msg=f"{other}: {key}")


# ---- the policy in this process --------------------------------------------------------------------------------------
def request_of(args, model, prompts, prompt_index, seeds, sde_steps=()):
    drawn = prompt_set(prompts)
    index = torch.tensor(prompt_index)
    return flow_grpo.make_request(args, model, drawn, index, seeds, sde_steps)


def test_saved_adapter_gives_the_trainers_image_in_stock_diffusers(tmp_path, one_rank):
    """Invariant 18, through save_weights and StableDiffusion3Pipeline.load_lora_weights; merged equals adapter."""
    model, args, config = policy_without_fsdp()
    adapter, _ = tensors_on_rank_0(model)
    request = request_of(args, model, ['a red sign that says "4711"'], [0], [7])
    trained = flow_grpo.sample_locally(model, request)
    names = {name.rpartition(".")[0].rpartition(".lora_")[0] for name in adapter}
    targets = model.lora_target_modules
    expected = {
        n
        for n, m in StableDiffusion3Pipeline.from_pretrained(EMBEDDED).transformer.named_modules()
        if isinstance(m, torch.nn.Linear) and n.endswith(tuple("." + t for t in targets))
    }
    assert names == expected  # every intended module matched
    save_weights(tmp_path / "adapter", model.pipe, adapter, config)

    pipe = StableDiffusion3Pipeline.from_pretrained(EMBEDDED)
    latents = draw_noise((1, *request.latent_shape), [torch.Generator().manual_seed(7)])

    def image():
        return pipe(
            'a red sign that says "4711"',
            num_inference_steps=6,
            guidance_scale=1.0,
            height=32,
            width=96,
            max_sequence_length=16,
            latents=latents,
            output_type="latent",
        ).images

    base = image()
    pipe.load_lora_weights(tmp_path / "adapter")
    with_adapter = image()
    torch.testing.assert_close(with_adapter, trained.latents[:, -1], rtol=0, atol=1e-5)
    assert (with_adapter - base).abs().max() > 1e-2
    pipe.fuse_lora()
    torch.testing.assert_close(image(), with_adapter, rtol=0, atol=1e-4)


def test_evaluation_leaves_weights_and_rng_alone_and_repeats_itself(one_rank, tmp_path):
    """Invariant 19."""
    model, args, _ = policy_without_fsdp()
    eval_set = PromptSet(['a sign that says "12"'] * 3, [{}] * 3)
    rewards = {"ocr": lambda images, prompts, metadata: [0.5] * len(images)}
    inputs = Inputs(type(model), rewards, rewards, eval_set, eval_set, lora=None, checkpoint=None)
    run = new_run(tmp_path, rewards)
    before, rng = {k: v.clone() for k, v in model.transformer.state_dict().items()}, torch.get_rng_state()
    grids = [flow_grpo.evaluate(args, run, model, None, inputs)[1] for _ in range(2)]
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(before[k], v) for k, v in model.transformer.state_dict().items())
    assert all(a.tobytes() == b.tobytes() for (a, _), (b, _) in zip(*grids, strict=True))
    assert grids[0][0][0].tobytes() != grids[0][1][0].tobytes()  # one prompt, another seed: another image


def test_rescoring_a_trajectory_gives_its_log_probs(one_rank):
    """Invariant 6: unchanged weights, the same micro-batches: equal to the last bit, for guidance and each sde_type."""
    for sde_type, guidance in (("sde", 1.0), ("sde", 3.0), ("dance", 1.0), ("cps", 1.0), ("cps_gauss", 2.0)):
        model, args, _ = policy_without_fsdp(sde_type=sde_type, guidance_scale=guidance, micro_batch_size=2)
        prompts = ['a red sign that says "12"', 'a blue sign that says "345"']
        request = request_of(args, model, prompts, [0, 0, 1, 1], [1, 2, 3, 4], (1, 2, 4))
        trajectories = flow_grpo.rollout(args, model, None, request)
        assert trajectories.latents.shape == (4, 7, 8, 8, 24)
        assert trajectories.prev_sample_means.shape == (4, 3, 8, 8, 24)
        again = flow_grpo.recompute_log_probs(args, model, request, trajectories)
        assert torch.equal(again.prev_sample_means, trajectories.prev_sample_means)
        assert torch.equal(again.log_probs, trajectories.log_probs) and again.log_probs.isfinite().all()


# ---- what is learned -------------------------------------------------------------------------------------------------
def test_constant_reward_changes_nothing(tmp_path):
    """Invariants 12 and 20."""
    options = ["--rollout", "local", "--num_steps", 2, *SMALL, *few_eval_prompts(tmp_path, 2)]
    assert run_here(tmp_path, "flow_grpo.py", *options, "--reward", constant_reward(tmp_path)) is None
    rows = read_metrics(tmp_path / "runs" / "flow_grpo")
    assert [row["actor/loss"] for row in rows[1:]] == [0, 0] and rows[1]["critic/rewards/zero_std_ratio"] == 1
    state = torch.load(tmp_path / "runs/flow_grpo/checkpoints/step_000002.pt", weights_only=True)
    assert all(v.abs().max() == 0 for k, v in state["policies"]["default"].items() if "lora_B" in k)
    model, _, _ = policy_without_fsdp(trained=False)
    for name, value in tensors_on_rank_0(model)[0].items():
        assert torch.equal(state["policies"]["default"][name], value), name


def test_a_reversed_reward_goes_the_other_way(tmp_path):
    """Invariant 20, on file size, which a few steps move a lot."""
    options = ["--rollout", "local", "--num_steps", 6, *SMALL, "--learning_rate", 3e-3, *few_eval_prompts(tmp_path, 16)]
    final = {}
    for name in ("jpeg_compressibility", "jpeg_incompressibility"):
        assert run_here(tmp_path, "flow_grpo.py", "--name", name, "--reward", name, *options) is None
        rows = read_metrics(tmp_path / "runs" / name)
        final[name] = rows[-1][f"val/{name}/mean"] - rows[0][f"val/{name}/mean"]
    assert final["jpeg_compressibility"] > 0 and final["jpeg_incompressibility"] > 0


# ---- a step kind of the user's own -----------------------------------------------------------------------------------
def test_a_step_kind_of_the_users_own(tmp_path):
    """The formula of `sde` in a file gives the run that `--sde_type sde` gives: with the same code to the bit, and to
    round-off of the first step where it is written as the paper has it."""
    (tmp_path / "steps.py").write_text(
        "from common.sde import sde as same\n\n\n"
        "def paper(x, v, sigma, sigma_next, noise_level, sigma_max):\n"
        "    dt = sigma_next - sigma\n"
        "    q_squared = noise_level**2 * sigma / (1 - min(sigma, sigma_max)) if noise_level else 0.0\n"
        "    mean = x + (v + q_squared / (2 * sigma) * (x + (1 - sigma) * v)) * dt\n"
        "    return mean, (q_squared * -dt) ** 0.5\n"
    )
    options = ["--rollout", "local", *TINY, "--reward", brightness_reward(tmp_path)]
    options += [*few_eval_prompts(tmp_path, 2), "--kl_coef", 0]  # --kl_type code has a rule for `sde` by its name
    rows = {}
    for name, sde_type, steps in (("sde", "sde", 2), ("same", "steps.py:same", 2), ("paper", "steps.py:paper", 1)):
        given = ["--name", name, "--sde_type", sde_type, "--num_steps", steps]
        assert run_here(tmp_path, "flow_grpo.py", *given, *options) is None
        rows[name] = without_times(read_metrics(tmp_path / "runs" / name))
    assert rows["same"] == rows["sde"] and rows["sde"][2]["actor/grad_norm"] > 0
    for name in ("critic/rewards/mean", "critic/rewards/std_mean", "actor/loss", "actor/grad_norm"):
        assert rows["paper"][1][name] == pytest.approx(rows["sde"][1][name], abs=1e-5), name


# ---- options ---------------------------------------------------------------------------------------------------------
ERRORS = {  # beyond the bounds of single options, which tests/core/test_options.py has
    "--reward nonsense": "--reward nonsense: ",
    "--reward no/such.py:f": "--reward no/such.py:f: .*no/such.py$",
    "--reward ocr ocr_contains --reward_weights 1 1 --scale_rewards none --multi_objective_aggregation "
    "normalize_then_sum": "--multi_objective_aggregation normalize_then_sum: .*--scale_rewards group or batch$",
    "--reward_weights 1.0 2.0": "--reward_weights: 2 .* 1 ",
    "--num_prompts 5 --group_size 5": "--num_prompts x --group_size = 25 .* 2 .* x 1 ",
    "--micro_batch_size 24": "--micro_batch_size 24: .* 128, .*"
    r"\(--num_prompts x --group_size = 256, 2 .* 1 ",
    "--num_inference_steps 6 --sde_window_size 4 --sde_window_range 7 11": "--sde_window_range 7 11: "
    "--sde_window_size 4 .* 0 5 .* 6 ",
    "--model no/such/model": "--model no/such/model: ",
    "--train_prompts plain.txt": "plain.txt:2: OCR .*: a sign$",
    "--sde_type euler": "--sde_type euler: .* sde, dance, cps, cps_gauss, .*path/to/file.py:function$",
}


@pytest.mark.fast
@pytest.mark.parametrize("arguments", ERRORS)
def test_bad_arguments_end_in_one_clear_line(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "1")
    (tmp_path / "plain.txt").write_text('a sign that says "1"\na sign\n')
    (tmp_path / "steps.py").write_text("")
    with pytest.raises(ValueError) as error:
        options = ["--rollout", "local", *arguments.split()]
        flow_grpo.prepare(flow_grpo.check(parse_args(flow_grpo.Args, flow_grpo.__doc__, options)))
    assert re.match(ERRORS[arguments], str(error.value)) and "\n" not in str(error.value)


@pytest.mark.fast
def test_help_shows_the_first_options_and_help_all_every_option(capsys):
    printed = {}
    for word in ("--help", "--help_all"):
        with pytest.raises(SystemExit) as end:
            parse_args(flow_grpo.Args, flow_grpo.__doc__, ["--seed", "3", word])
        assert end.value.code == 0
        printed[word] = capsys.readouterr().out
    own = {field.name for field in fields(flow_grpo.Args)}
    first = re.findall(r"^\W*--(\w+) [A-Z{[]", printed["--help"], re.MULTILINE)
    assert first == [name for name in FIRST if name in own]
    assert set(re.findall(r"^\W*--(\w+) ", printed["--help_all"], re.MULTILINE)) >= own
    assert all("Flow-GRPO (arXiv" in text for text in printed.values())  # the script's header


@pytest.mark.fast
def test_missing_vllm_says_what_to_install(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "vllm_omni" else find_spec(name))
    with pytest.raises(ValueError, match="pip install -r requirements.txt .*--rollout local"):
        flow_grpo.prepare(flow_grpo.Args())


def test_an_error_is_one_line_on_the_screen(tmp_path):
    command = [sys.executable, ROOT / "flow_grpo.py", "--group_size", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    first, error = done.stderr.splitlines()
    assert first == "runs/flow_grpo: checking options and files"
    assert re.fullmatch("flow_grpo.py: error: --group_size 1: .* 2", error)


@pytest.mark.fast
def test_a_run_is_not_overwritten(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match="^--sde_type typo"):
        flow_grpo.check(flow_grpo.Args(eval_only=True, sde_type="typo"))
    (tmp_path / "runs" / "old").mkdir(parents=True)
    (tmp_path / "runs" / "old" / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match="^runs/old .*--name"):
        flow_grpo.prepare(flow_grpo.Args(name="old"))
