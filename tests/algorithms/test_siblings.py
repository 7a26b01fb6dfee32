"""The other four scripts: what they share with flow_grpo.py is byte-equal, and each runs as users run it."""

import json
import re

from tests.conftest import (
    SIBLINGS,
    SMALL,
    assert_one_line,
    brightness_and_redness,
    brightness_reward,
    constant_reward,
    definitions,
    differing,
    few_eval_prompts,
    option_sources,
    own_options,
    read_metrics,
    run_here,
    shared_options,
    torchrun,
    unread_options,
    without_times,
)
from tools.diff import BASE

import pytest
import torch
from PIL import Image

# Functions and classes of flow_grpo.py that an algorithm changes; any other of the same name is equal to the byte.
DIFFERENT = {
    "grpo_guard.py": {"policy_loss", "accumulate_gradients", "find_old_policy", "main"},
    "mix_grpo.py": {"draw_sde_steps", "accumulate_gradients", "main"},
    "diffusion_nft.py": {
        "check",
        "prepare",
        "workload",
        "make_request",
        "policy_names",
        "sample_locally",
        "rollout",
        "Batch",
        "accumulate_gradients",
        "update",
        "evaluate",
        "main",
    },
    "dpo_offline.py": {
        "check",
        "prepare",
        "workload",
        "make_request",
        "policy_names",
        "load_policy",
        "update",
        "evaluate",
        "main",
    },
}
UPDATES = {"updates_per_rollout", "learning_rate"}  # two at 1.5e-3 in flow_grpo.py, four at 1e-3 in these
# Options of another default, bound or meaning, as the algorithm needs; `name` differs in all.
DIFFERENT_OPTIONS = {
    "grpo_guard.py": {"clip_range", "kl_coef", "num_steps", *UPDATES},
    "mix_grpo.py": {
        *("kl_coef", "num_steps", "sde_window_size", "sde_window_range", "multi_objective_aggregation"),
        *UPDATES,
    },
    "diffusion_nft.py": {"num_inference_steps", "kl_coef", "num_steps", *UPDATES},
    "dpo_offline.py": {
        "group_size",
        "guidance_scale",
        "learning_rate",
        "num_inference_steps",
        "num_steps",
        "micro_batch_size",
    },
}


@pytest.mark.fast
@pytest.mark.parametrize("script", SIBLINGS)
def test_functions_of_one_name_are_one(script):
    assert differing(definitions(BASE), definitions(script)) == DIFFERENT[script]


@pytest.mark.fast
@pytest.mark.parametrize("script", SIBLINGS)
def test_options_of_one_name_are_one(script):
    assert differing(option_sources(BASE), option_sources(script)) == DIFFERENT_OPTIONS[script] | {"name"}


@pytest.mark.fast
@pytest.mark.parametrize("script", [BASE, *SIBLINGS])
def test_no_option_is_unread_or_declared_again_except_the_name_and_sizes(script):
    assert unread_options(script) == []
    again = {"name", "num_steps", "micro_batch_size"}
    if script != "diffusion_nft.py":
        again.add("lr_schedule")  # where the defaults let it fall
    assert own_options(script).keys() & shared_options().keys() == again


# ---- as users run them -----------------------------------------------------------------------------------------------
# grpo_guard.py samples by flow_grpo.py's functions, to the byte; test_mains.py has its find_old_policy with an engine
WITH_ENGINES = ["mix_grpo.py", "diffusion_nft.py"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One short run for each script, engine and number of ranks, made on first use; returns its folder."""
    folder, done = tmp_path_factory.mktemp("runs"), {}

    def run(script, rollout, nproc):
        if (script, rollout, nproc) not in done:
            name = f"{script[:-3]}-{rollout}{nproc}"
            options = ["--name", name, "--rollout", rollout, "--num_steps", 2, *SMALL, "--updates_per_rollout", 2]
            options += ["--reward", *brightness_and_redness(folder), "--reward_weights", 1, 0.5]
            options += ["--multi_objective_aggregation", "normalize_then_sum", *few_eval_prompts(folder)]
            if (rollout, nproc) == ("local", 1):
                assert run_here(folder, script, *options) is None
            else:
                torchrun(folder, script, *options, nproc=nproc)
            done[script, rollout, nproc] = folder / "runs" / name
        return done[script, rollout, nproc]

    return run


@pytest.mark.parametrize("script", WITH_ENGINES)
def test_two_ranks_with_engines_do_as_one_without(runs, script):
    """Invariant 11: the same images, rewards and first update whatever makes them. The other two combinations, of the
    same functions, are those of flow_grpo.py (test_flow_grpo.py) and of the engine's own tests."""
    first, second = read_metrics(runs(script, "local", 1)), read_metrics(runs(script, "vllm", 2))
    assert first[0]["val/brightness/mean"] == pytest.approx(second[0]["val/brightness/mean"], abs=1e-6)
    assert first[1]["critic/diversity"] == pytest.approx(second[1]["critic/diversity"], abs=1e-5)
    assert first[1]["critic/rewards/mean"] == pytest.approx(second[1]["critic/rewards/mean"], abs=1e-6)
    for name in ("actor/loss", "actor/grad_norm"):
        assert second[1][name] == pytest.approx(first[1][name], rel=1e-3, abs=1e-5), name
    assert first[2]["actor/grad_norm"] > 0 and "val/brightness/mean" in second[2]


def test_the_engine_computes_the_trainers_log_probs(runs):
    for row in read_metrics(runs("mix_grpo.py", "vllm", 2))[1:]:
        assert row["rollout_corr/logprob_abs_diff_max"] <= 2e-6


def test_old_policy_is_saved_with_the_adapter(runs):
    checkpoint = runs("diffusion_nft.py", "local", 1) / "checkpoints" / "step_000002.pt"
    old, default = (torch.load(checkpoint, weights_only=True)["policies"][name] for name in ("old", "default"))
    assert old.keys() == default.keys()
    assert any(not torch.equal(old[k], default[k]) for k in old)  # it follows slowly


def test_mix_grpo_with_the_full_window_is_flow_grpo_to_the_bit(tmp_path):
    """Invariant 14."""
    common = ["--rollout", "local", "--num_steps", 2, *SMALL, "--updates_per_rollout", 2]
    common += ["--kl_coef", 0.04, "--learning_rate", 1e-3]
    common += ["--reward", brightness_reward(tmp_path), *few_eval_prompts(tmp_path, 2)]
    full_window = ["--sde_window_size", 5, "--sde_window_range", 0, 5, "--shared_initial_noise", False]
    assert run_here(tmp_path, "flow_grpo.py", "--name", "flow", *common, "--sde_window_size", 0) is None
    assert run_here(tmp_path, "mix_grpo.py", "--name", "mix", *common, *full_window) is None
    flow, mix = (without_times(read_metrics(tmp_path / "runs" / name)) for name in ("flow", "mix"))
    assert flow == mix and flow[2]["actor/grad_norm"] > 0


def test_mix_grpo_shares_the_prefix_between_ranks_of_unequal_numbers_of_prompts(tmp_path):
    """Two groups of three on three ranks: the middle one has images of both, the others of one."""
    options = ["--rollout", "local", "--num_prompts", 2, "--group_size", 3, "--num_steps", 1]
    options += ["--updates_per_rollout", 1, "--micro_batch_size", 1, "--sde_window_range", 1, 2]
    options += ["--num_inference_steps", 4, "--eval_num_inference_steps", 2]
    options += ["--reward", brightness_reward(tmp_path), *few_eval_prompts(tmp_path, 3)]
    torchrun(tmp_path, "mix_grpo.py", *options, nproc=3)
    assert read_metrics(tmp_path / "runs" / "mix_grpo")[1]["actor/grad_norm"] > 0


def test_diffusion_nft_learns_nothing_from_a_constant_reward(tmp_path):
    options = ["--rollout", "local", "--num_steps", 2, *SMALL, *few_eval_prompts(tmp_path, 2), "--kl_coef", 0.1]
    assert run_here(tmp_path, "diffusion_nft.py", *options, "--reward", constant_reward(tmp_path)) is None
    rows = read_metrics(tmp_path / "runs" / "diffusion_nft")
    assert [(row["actor/grad_norm"], row["old_policy/decay"]) for row in rows[1:]] == [(0, 0), (0, 0)]
    state = torch.load(tmp_path / "runs/diffusion_nft/checkpoints/step_000002.pt", weights_only=True)
    for adapter in (state["policies"]["default"], state["policies"]["old"]):
        assert all(v.abs().max() == 0 for k, v in adapter.items() if "lora_B" in k)


def test_diffusion_nft_samples_with_old(tmp_path):
    """`old` that does not follow keeps sampling the base model's images. test_mains.py has what an engine gets."""
    options = ["--rollout", "local", "--num_steps", 2, *SMALL, "--weight_decay", 0, "--update_interval", 9]
    options += ["--reward", brightness_reward(tmp_path), *few_eval_prompts(tmp_path, 2)]
    rewards = {}
    for name, rate in (("still", 0.0), ("learning", 1e-2)):
        assert run_here(tmp_path, "diffusion_nft.py", "--name", name, *options, "--learning_rate", rate) is None
        rewards[name] = [row["critic/rewards/mean"] for row in read_metrics(tmp_path / "runs" / name)[1:]]
    assert rewards["learning"] == pytest.approx(rewards["still"], abs=1e-6)


def assert_same_pairs(file, expected):
    """The same prompts and images are paired. Two ranks have another number of threads than one, whose sums round
    otherwise: a pixel may be a grey level off, which moves the brightness of an image by 4e-7."""
    records, expected_records = (
        [json.loads(line) for line in path.read_text().splitlines()] for path in (file, expected)
    )
    for record, other in zip(records, expected_records, strict=True):
        for score in ("chosen_score", "rejected_score"):
            assert record.pop(score) == pytest.approx(other.pop(score), rel=0, abs=1e-5)
        assert record == other


def test_dpo_offline_makes_pairs_and_trains_on_them_on_one_rank_and_two(tmp_path):
    small = ["--num_pair_prompts", 9, "--group_size", 4, "--num_pairs", 4, "--num_steps", 2]
    small += [*few_eval_prompts(tmp_path, 2), "--reward", brightness_reward(tmp_path), "--num_inference_steps", 4]
    assert run_here(tmp_path, "dpo_offline.py", "--name", "one", *small) is None
    pairs = tmp_path / "runs" / "one" / "pairs.jsonl"
    torchrun(tmp_path, "dpo_offline.py", "--name", "two", "--pairs", pairs, *small, nproc=2)
    torchrun(tmp_path, "dpo_offline.py", "--name", "made", *small, nproc=2)
    assert_same_pairs(tmp_path / "runs" / "made" / "pairs.jsonl", pairs)
    one, two = (read_metrics(tmp_path / "runs" / name) for name in ("one", "two"))
    assert one[1]["actor/loss"] == pytest.approx(0.693147, abs=1e-5)  # the policy is still the reference
    for name in ("actor/loss", "actor/grad_norm"):
        assert two[1][name] == pytest.approx(one[1][name], rel=1e-3, abs=1e-5), name
    assert one[2]["actor/loss"] != one[1]["actor/loss"] and one[2]["actor/grad_norm"] > 0


def test_dpo_offline_encodes_a_changed_image_again(tmp_path):
    small = ["--num_pair_prompts", 6, "--group_size", 4, "--num_pairs", 6, "--num_steps", 1]  # every pair is drawn
    small += ["--reward", brightness_reward(tmp_path), *few_eval_prompts(tmp_path, 2), "--num_inference_steps", 4]
    assert run_here(tmp_path, "dpo_offline.py", "--name", "one", *small) is None
    run, cache = tmp_path / "runs" / "one", tmp_path / "cache"
    before = {file: file.stat().st_mtime_ns for file in cache.glob("*.pt")}
    assert len(before) == len((run / "pairs.jsonl").read_text().splitlines())
    assert run_here(tmp_path, "dpo_offline.py", "--name", "two", "--pairs", run, *small) is None
    assert {file: file.stat().st_mtime_ns for file in cache.glob("*.pt")} == before
    chosen = next((run / "pairs").glob("*_chosen.png"))
    Image.new("RGB", (96, 32), "green").save(chosen)
    assert run_here(tmp_path, "dpo_offline.py", "--name", "three", "--pairs", run, *small) is None
    assert len(list(cache.glob("*.pt"))) == len(before) + 1


def test_dpo_offline_says_which_pairs_repeat(tmp_path, capsys):
    for colour in ("red", "blue"):
        Image.new("RGB", (16, 16), colour).save(tmp_path / f"{colour}.png")
    pair = '{"prompt": "p", "chosen": "red.png", "rejected": "blue.png"}\n'
    (tmp_path / "pairs.jsonl").write_text(pair + pair.replace('"p"', '"q"') + pair)
    options = ["--pairs", "pairs.jsonl", "--num_pairs", 2, "--num_steps", 2, *few_eval_prompts(tmp_path, 2)]
    options += ["--train_prompts", "no/such.txt"]  # which pairs of one's own make needless
    assert run_here(tmp_path, "dpo_offline.py", *options) is None
    assert re.search("^3 .* 3 .* 2 .*\n", capsys.readouterr().out, re.M)


def test_dpo_offline_ends_where_no_image_is_better_than_another(tmp_path):
    options = ["--num_pair_prompts", 2, "--group_size", 2, "--num_pairs", 2, "--reward", constant_reward(tmp_path)]
    line = run_here(tmp_path, "dpo_offline.py", *options, *few_eval_prompts(tmp_path, 2))
    assert_one_line(line, "dpo_offline.py")
    assert "error: --num_pair_prompts 2: " in line
    assert not (tmp_path / "runs" / "dpo_offline" / "pairs.jsonl").exists()
