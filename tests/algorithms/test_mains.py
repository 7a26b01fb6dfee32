"""What the `main` of a script trains, logs, saves and evaluates, against loops by hand (by_hand.py), on 1 and 2 ranks.

Three steps of two epochs of two mini-batches, a KL, an average, a window of two steps, guidance, and images on which
the reward fails, where a script has them. benchmarks/mutants.py changes lines of the scripts, which these tests see.
"""

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.exam_model import to_images
from common.engine import client
from common.models.family import Family
from common.rollout import RolloutRequest, Trajectories
from common.sde import sde_step
from common.weights.policy import policy_tensors, reshard, whole
from tests.algorithms import by_hand
from tests.algorithms.by_hand import Expected, Options, Policy, Run
from tests.algorithms.toy_family import toy_model
from tests.conftest import ROOT, constant_reward, read_metrics, run_here, torchrun, without_times

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.fast

TOY = ROOT / "tests" / "algorithms" / "toy_family.py"
TRAIN = ["1 0.5 0", "-0.5 1 1", "0.75 -1 1"]
EVAL = ["1 1 0", "-1 0.5 0", "0.5 -0.5 0", "0.25 1 0"]  # more than are trained on
GUIDED = {"guidance_scale": 1.5, "eval_guidance_scale": 2.5}
WINDOW = {"sde_window_size": 2, "sde_window_range": "0 3", "noise_level": 0.7, "clip_range": 0.01}
ROLLOUT = {"num_prompts": 2, "group_size": 4, "num_inference_steps": 4, "updates_per_rollout": 2}
ROLLOUT |= {"epochs_per_rollout": 2, "adv_clip_max": 1.2, "save_rollouts": 1, "rollout": "local", "kl_coef": 5.0}


def without(options: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != name}


RATIOS = ROLLOUT | WINDOW | GUIDED
NOISED = ROLLOUT | {"decay_schedule": "fixed", "old_decay": 0.5}
SHARED = {"seed": 5, "num_steps": 3, "learning_rate": 0.03, "lr_schedule": "cosine:3", "weight_decay": 0.1}
SHARED |= {
    "adam_betas": "0.8 0.95",
    "adam_eps": 1e-6,
    "max_grad_norm": 0.2,
    "ema_decay": 0.3,
    "lora_rank": 1,
    "lora_alpha": 2,
}
SHARED |= {"eval_num_inference_steps": 3, "eval_images_per_prompt": 2, "eval_every": 2}
SHARED |= {"reward_failure": "mask", "image_size": "2 2", "keep_checkpoints": 3}

# the prompt of a pair, and its two images
PAIRS = [(TRAIN[n % 3], *torch.randn(2, 1, 4, generator=torch.Generator().manual_seed(n)).unbind()) for n in range(6)]
Loop = Callable[[Run], Expected]
ratios, noised = by_hand.run_of_ratios, by_hand.run_of_noised
DMD2: dict[str, Any] = {"teacher_guidance": 3.0, "fake_updates": 2, "fake_learning_rate": 0.02}
TDM_R1: dict[str, Any] = {"teacher_guidance": 3.0, "surrogate_guidance": 2.0, "surrogate_share": 0.6}
TDM_R1 |= {"surrogate_level": 0.3, "max_deviation": 1e-4, "fake_updates": 2, "fake_learning_rate": 0.02}
TDM_R1 |= {"surrogate_updates": 2, "surrogate_learning_rate": 0.04}
PARTED: dict[str, Any] = {"first_noise": "branch", "images_of_noise": 2}
CASES: dict[str, tuple[dict[str, Any], Loop]] = {
    "flow_grpo.py": (RATIOS, lambda run: ratios(run, by_hand.flow_grpo_loss)),
    "grpo_guard.py": (RATIOS, lambda run: ratios(run, by_hand.grpo_guard_loss)),
    "mix_grpo.py": (
        RATIOS | {"iters_per_group": 1},
        lambda run: ratios(run, by_hand.flow_grpo_loss, by_hand.sliding_window, first_noise="prompt"),
    ),
    "dpo_offline.py": (
        GUIDED | {"num_pairs": 4, "dpo_beta": 20.0},
        lambda run: by_hand.run_of_pairs(run, PAIRS),
    ),
    "diffusion_nft.py": (NOISED | {"nft_beta": 0.3}, lambda run: noised(run, by_hand.nft_loss, 0.5)),
    "contrib/awm.py": (
        NOISED | {"clip_range": 0.01, "old_kl_coef": 0.5},
        lambda run: noised(run, by_hand.awm_loss, 0.5),
    ),
    "contrib/dance_grpo.py": (
        RATIOS,
        lambda run: ratios(run, by_hand.flow_grpo_loss, kind="dance", first_noise="prompt"),
    ),
    "contrib/dgpo.py": (
        NOISED | {"clip_range": 0.01, "dpo_beta": 20.0, "updates_per_rollout": 1, "micro_batch_size": 4},
        lambda run: noised(run, by_hand.dgpo_loss, 0.5, images_of_noise=4),
    ),
    "contrib/dmd2.py": (
        GUIDED | {"num_prompts": 8, "num_inference_steps": 4} | DMD2 | {"noise_range": "0.1 0.9"},
        lambda run: by_hand.run_of_dmd2(run, **DMD2, noise_range=(0.1, 0.9)),
    ),
    "contrib/flow_dppo.py": (
        without(RATIOS, "adv_clip_max") | {"dppo_delta": 1e-4},
        lambda run: ratios(run, by_hand.flow_dppo_loss),
    ),
    "contrib/ram.py": (
        without(NOISED, "kl_coef") | {"reward_multiplier": 2, "adv_clip_max": 0},
        lambda run: noised(run, by_hand.ram_loss, 0.5),
    ),
    "contrib/sft.py": (
        GUIDED | {"num_records": 8, "caption_dropout": 0.4, "loss_weighting": "cosmap"},
        lambda run: by_hand.run_of_records(run, [pair[:2] for pair in PAIRS], num_records=8, caption_dropout=0.4),
    ),
    "contrib/tdm_r1.py": (
        GUIDED
        | {"num_prompts": 2, "group_size": 4, "num_inference_steps": 4, "micro_batch_size": 4, "adv_clip_max": 1.2}
        | TDM_R1
        | {"kl_coef": 5.0, "dpo_beta": 20.0, "noise_range": "0.1 0.9"},
        lambda run: by_hand.run_of_tdm_r1(run, **TDM_R1, noise_range=(0.1, 0.9)),
    ),
    "contrib/tempflow_grpo.py": (
        RATIOS | {"sde_window_size": 1, "branches_per_seed": 2, "weight_scale": 2.25},
        lambda run: ratios(run, by_hand.tempflow_loss, **PARTED),
    ),
}
OFFLINE = ("dpo_offline.py", "contrib/sft.py")  # without a rollout
WITHOUT_ENGINE = (*OFFLINE, "contrib/dmd2.py", "contrib/tdm_r1.py")  # which learn without a reward's differences, too
# of contrib/, whose loops are not written by hand
OTHERS: dict[str, dict[str, Any]] = {
    "contrib/crd.py": NOISED | {"updates_per_rollout": 1, "micro_batch_size": 4},  # of whole groups
    "contrib/online_dpo.py": without(NOISED, "adv_clip_max"),
    "contrib/v_grpo.py": without(ROLLOUT, "kl_coef") | {"old_kl_coef": 0.1, "pairs_per_prompt": 2},
    "contrib/flow_grpo_ahead.py": RATIOS,
}


def hand_options(script: str, **changes: Any) -> Options:
    """Those of the loop: advantages of Flow-DPPO and RAM are not clamped, DGPO's groups stay whole on two ranks, and
    TempFlow-GRPO's images part at one step."""
    if script in ("contrib/flow_dppo.py", "contrib/ram.py"):
        changes["adv_clip_max"] = math.inf
    if script == "contrib/dgpo.py":
        changes["updates_per_rollout"] = 1
    if script == "contrib/dmd2.py":
        changes["num_prompts"] = 8  # an image each
    if script == "contrib/tempflow_grpo.py":
        changes["sde_window_size"] = 1
    return Options(**changes)


def options_of(script: str, folder: Path, **changes: Any) -> list[str]:
    """The command line of a run, its prompts in files of the folder."""
    (folder / "train.txt").write_text("\n".join(TRAIN) + "\n")
    (folder / "eval.txt").write_text("\n".join(EVAL) + "\n")
    files = {"train_prompts": folder / "train.txt", "eval_prompts": folder / "eval.txt"}
    options = SHARED | files | {"model": toy_model(), "family": f"{TOY}:Toy", "micro_batch_size": 2}
    options |= {"reward": f"{TOY}:closeness", "eval_reward": f"{TOY}:farness"}
    options |= (CASES[script][0] if script in CASES else OTHERS[script]) | changes
    if script in OFFLINE:
        pairs, records = write_pairs(folder)
        if script == "contrib/sft.py":
            options = without(options, "train_prompts") | {"records": records}
        else:
            options |= {"pairs": pairs}
        options |= {"cache": folder / "cache"}
    return [word for name, value in options.items() for word in (f"--{name}", *str(value).split())]


def write_pairs(folder: Path) -> tuple[Path, Path]:
    """Files of the PAIRS, and of the chosen images as records."""
    pairs, records = [], []
    for n, (prompt, *images) in enumerate(PAIRS):
        names = f"{n}_chosen.png", f"{n}_rejected.png"
        for name, x0 in zip(names, images, strict=True):
            to_images(x0.view(1, 1, 2, 2))[0].save(folder / name)
        pairs.append(json.dumps({"prompt": prompt, "chosen": names[0], "rejected": names[1]}) + "\n")
        records.append(json.dumps({"prompt": prompt, "image": names[0]}) + "\n")
    (folder / "pairs.jsonl").write_text("".join(pairs))
    (folder / "records.jsonl").write_text("".join(records))
    return folder / "pairs.jsonl", folder / "records.jsonl"


def lora_of_file(folder: Path) -> Policy:
    """A saved adapter's A and B, whose factor alpha / rank is in B or beside it."""
    tensors = load_file(folder / "pytorch_lora_weights.safetensors")
    [a] = [tensor for name, tensor in tensors.items() if "lora_A" in name]
    [b] = [tensor for name, tensor in tensors.items() if "lora_B" in name]
    return a, b


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """The LoRA with which a run of this seed begins, as the evaluation before training saves it."""
    folder = tmp_path_factory.mktemp("start")
    assert run_here(folder, "flow_grpo.py", *options_of("flow_grpo.py", folder, num_steps=0, name="run")) is None
    return lora_of_file(folder / "runs" / "run" / "best_adapter")


@pytest.fixture(scope="module")
def expected(start: Policy) -> Callable[[str], Expected]:
    @functools.cache
    def of_script(script: str) -> Expected:
        return CASES[script][1](Run(hand_options(script), start, TRAIN, EVAL))

    return of_script


def assert_is(policy: dict[str, torch.Tensor], by_hand: Policy) -> None:
    [a] = [tensor for name, tensor in policy.items() if "lora_A" in name]
    [b] = [tensor for name, tensor in policy.items() if "lora_B" in name]
    for tensor, wanted in zip((a, b), by_hand, strict=True):
        torch.testing.assert_close(tensor.double(), wanted, rtol=1e-3, atol=1e-4)


def assert_ends_as(folder: Path, wanted: Expected, num_images: int) -> None:
    rows = read_metrics(folder)
    assert len(rows) == len(wanted.rows)
    assert json.loads((folder / "heartbeat.json").read_text())["phase"] == "finished"
    for step, (row, by_hand_row) in enumerate(zip(rows, wanted.rows, strict=True)):
        assert ("val/closeness/mean" in row) == ("val/farness/mean" in row)
        assert ("val/closeness/mean" in row) == ("val/closeness/mean" in by_hand_row)
        for name, value in by_hand_row.items():
            assert row[name] == pytest.approx(value, rel=1e-3, abs=1e-5), (step, name)
        if step:
            assert row["perf/total_num_images"] == step * num_images
    checkpoints = sorted(path.name for path in (folder / "checkpoints").glob("*.pt"))
    assert checkpoints == ["step_000002.pt", "step_000003.pt"]  # as evaluations are, without --save_every
    for step, name in enumerate(checkpoints, 2):
        state = torch.load(folder / "checkpoints" / name, weights_only=True)
        assert state["step"] == step
        for policy, tensors in state["policies"].items():
            assert_is(tensors, wanted.policies[step][policy])
    for step, records in enumerate(wanted.rollouts, 1):
        lines = (folder / "rollouts" / f"{step:04d}" / "samples.jsonl").read_text().splitlines()
        for line, record in zip(lines, records, strict=True):
            found = json.loads(line)
            assert (found["prompt"], found["seed"]) == (record["prompt"], record["seed"])
            assert found["advantage"] == pytest.approx(record["advantage"], rel=1e-4, abs=1e-5)
            is_whole = record["closeness"] is not None
            assert found["closeness"] == (pytest.approx(record["closeness"], rel=1e-4, abs=1e-5) if is_whole else None)
    scores = {step: row["val/closeness/mean"] for step, row in enumerate(wanted.rows) if "val/closeness/mean" in row}
    best = max(scores, key=lambda step: scores[step])
    assert json.loads((folder / "best_adapter" / "best.json").read_text())["step"] == best
    tensors = load_file(folder / "adapter" / "pytorch_lora_weights.safetensors")
    a, b = wanted.policies[-1]["ema"]
    [saved_b] = [tensor for name, tensor in tensors.items() if "lora_B" in name]
    [saved_a] = [tensor for name, tensor in tensors.items() if "lora_A" in name]
    # as a change of the weight, whichever of the two has the factor
    ratio = (saved_b.double() @ saved_a.double()) / (b @ a)
    assert ratio.max().item() == pytest.approx(ratio.min().item(), rel=1e-2)


@pytest.mark.parametrize("script", CASES)
def test_a_run_is_that_by_hand(script, tmp_path, expected):
    assert run_here(tmp_path, script, *options_of(script, tmp_path, name="run")) is None
    folder = tmp_path / "runs" / "run"
    assert_ends_as(folder, expected(script), num_images=8)
    # resumed after two steps, and only evaluated
    checkpoint = folder / "checkpoints" / "step_000002.pt"
    assert run_here(tmp_path, script, *options_of(script, tmp_path, name="again", resume=checkpoint)) is None
    rows, again = (without_times(read_metrics(tmp_path / "runs" / name)) for name in ("run", "again"))
    assert again == rows[3:]
    names = [f"{folder}/adapter/pytorch_lora_weights.safetensors" for folder in ("run", "again")]
    run, resumed = ((tmp_path / "runs" / name).read_bytes() for name in names)
    assert run == resumed
    only = options_of(script, tmp_path, name="only", resume=folder, eval_only=True)
    assert run_here(tmp_path, script, *only) is None
    [row] = read_metrics(tmp_path / "runs" / "only")
    assert row["val/closeness/mean"] == rows[-1]["val/closeness/mean"]
    assert not (tmp_path / "runs" / "only" / "best_adapter").exists()


@pytest.mark.parametrize("script", [script for script in CASES if script not in WITHOUT_ENGINE])
def test_with_nothing_to_learn_no_weight_moves(script, tmp_path, start):
    """Not by AdamW's decay either: a gradient of 0 is no optimizer step."""
    options = options_of(script, tmp_path, name="run", num_steps=1, reward=constant_reward(tmp_path))
    assert run_here(tmp_path, script, *options) is None
    folder = tmp_path / "runs" / "run"
    row = read_metrics(folder)[1]
    assert row["actor/grad_norm"] == 0 and row["actor/skipped_steps"] == 0
    state = torch.load(folder / "checkpoints" / "step_000001.pt", weights_only=True)
    for policy in state["policies"].values():
        [a] = [tensor for name, tensor in policy.items() if "lora_A" in name]
        [b] = [tensor for name, tensor in policy.items() if "lora_B" in name]
        assert torch.equal(a, start[0]) and not b.any()


class EngineByHand:
    """Samples as VLLMEngine does, in this process, with the LoRA that was pushed last, its velocity 5e-5 too large."""

    ERROR = 5e-5
    started: ClassVar[list["EngineByHand"]] = []

    def __init__(self, *options: object, **named: object) -> None:
        self.is_open = True
        self.is_verified = False
        self.pushed: Policy | None = None
        self.started.append(self)

    def push(self, tensors: dict[str, torch.Tensor], config: object) -> None:
        [a] = [whole(tensor).double().clone() for name, tensor in tensors.items() if "lora_A" in name]
        [b] = [whole(tensor).double().clone() for name, tensor in tensors.items() if "lora_B" in name]
        self.pushed = a, b

    def push_policy(self, model: Family, name: str = "default") -> None:
        self.push(*policy_tensors(model, name))

    def verify_policy(self, model: Family, request: RolloutRequest, sample_locally: object) -> None:
        self.is_verified = True
        self.push_policy(model)
        reshard(model.transformer)

    def generate(
        self, request: RolloutRequest, finished: Callable[[range, list], None] | None = None, alone: bool = False
    ) -> Trajectories:
        assert self.is_open and self.pushed
        one = request.select(torch.arange(len(request.seeds)))
        c = one.conditioning["c"].double()
        generators = [torch.Generator().manual_seed(seed) for seed in one.seeds]
        x = first_latents = one.first_latents(generators, "cpu")
        outputs = []
        for i in range(len(one.timesteps)):
            s, s_next = one.sigmas[i : i + 2].tolist()
            v = by_hand.velocity(Options(), self.pushed, x.double().flatten(1), s, c, one.guidance_scale)
            v = ((1 + self.ERROR) * v).float().view_as(x)
            noise_level = one.noise_level if i in one.sde_steps else 0.0
            options = {"sde_type": one.sde_type, "sigma_max": one.sigma_max, "generator": generators}
            outputs.append(sde_step(x, v, s, s_next, noise_level, **options))
            x = outputs[-1].prev_sample
        trajectories = Trajectories.from_steps(first_latents, outputs, to_images(x))
        if finished:
            finished(range(len(one.seeds)), trajectories.images)
        return trajectories

    def close(self) -> None:
        self.is_open = False


@pytest.mark.parametrize("script", [script for script in CASES if script not in WITHOUT_ENGINE])
def test_a_run_with_an_engine_is_that_by_hand(script, tmp_path, monkeypatch, start):
    """Its samples are weighted by --rollout_correction, where a script has that."""
    monkeypatch.setattr(client, "VLLMEngine", EngineByHand)
    monkeypatch.setattr("common.engine.check_engine", lambda *of, **named: None)
    monkeypatch.setattr(EngineByHand, "started", [])
    options, loop = CASES[script]
    has_ratio = "sde_window_size" in options
    changes = {"rollout_correction": "reject_k1:1e-9"} if has_ratio else {}
    options = options_of(script, tmp_path, name="run", rollout="vllm", **changes)
    assert run_here(tmp_path, script, *options) is None
    wanted = loop(Run(hand_options(script, engine_error=EngineByHand.ERROR), start, TRAIN, EVAL))
    assert_ends_as(tmp_path / "runs" / "run", wanted, num_images=8)
    [engine] = EngineByHand.started
    assert engine.is_verified and not engine.is_open
    last = wanted.policies[-1]["default" if has_ratio else "old"]
    for tensor, by_hand_tensor in zip(engine.pushed, last, strict=True):
        torch.testing.assert_close(tensor, by_hand_tensor, rtol=1e-3, atol=1e-4)
    # resumed after two steps, when another engine has to get the checkpoint's policy
    checkpoint = tmp_path / "runs" / "run" / "checkpoints" / "step_000002.pt"
    options = options_of(script, tmp_path, name="again", rollout="vllm", resume=checkpoint, **changes)
    assert run_here(tmp_path, script, *options) is None
    rows, again = (without_times(read_metrics(tmp_path / "runs" / name)) for name in ("run", "again"))
    assert again == rows[3:]
    assert not has_ratio or rows[1]["rollout_corr/logprob_abs_diff_mean"] > 0


@pytest.mark.parametrize("rollout", ["local", "vllm"])
@pytest.mark.parametrize("script", OTHERS)
def test_another_run_trains_resumes_and_closes_its_engine(script, rollout, tmp_path, monkeypatch):
    monkeypatch.setattr(client, "VLLMEngine", EngineByHand)
    monkeypatch.setattr("common.engine.check_engine", lambda *of, **named: None)
    monkeypatch.setattr(EngineByHand, "started", [])
    if script == "contrib/flow_grpo_ahead.py" and rollout == "local":
        pytest.skip("it needs an engine")
    options = options_of(script, tmp_path, name="run", rollout=rollout)
    assert run_here(tmp_path, script, *options) is None
    folder = tmp_path / "runs" / "run"
    assert json.loads((folder / "heartbeat.json").read_text())["phase"] == "finished"
    checkpoint = folder / "checkpoints" / "step_000002.pt"
    options = options_of(script, tmp_path, name="again", rollout=rollout, resume=checkpoint)
    assert run_here(tmp_path, script, *options) is None
    rows, again = (without_times(read_metrics(tmp_path / "runs" / name)) for name in ("run", "again"))
    assert [row["training/global_step"] for row in rows] == [0, 1, 2, 3] and again == rows[3:]
    assert rows[3]["val/closeness/mean"] != rows[0]["val/closeness/mean"] and "val/farness/mean" in rows[3]
    assert len(EngineByHand.started) == (2 if rollout == "vllm" else 0)
    assert not any(engine.is_open for engine in EngineByHand.started)
    if rollout == "local" or script == "contrib/flow_grpo_ahead.py":  # an evaluation alone starts no engine
        only = options_of(script, tmp_path, name="only", rollout=rollout, resume=folder, eval_only=True)
        assert run_here(tmp_path, script, *only) is None
        [row] = read_metrics(tmp_path / "runs" / "only")
        assert row["val/closeness/mean"] == rows[3]["val/closeness/mean"]


@pytest.mark.parametrize("script", CASES)
def test_a_run_on_two_ranks_is_that_by_hand(script, tmp_path, expected):
    size = 4 if script in ("contrib/dgpo.py", "contrib/tdm_r1.py") else 1
    torchrun(tmp_path, script, *options_of(script, tmp_path, name="run", micro_batch_size=size), nproc=2)
    assert_ends_as(tmp_path / "runs" / "run", expected(script), num_images=8)
