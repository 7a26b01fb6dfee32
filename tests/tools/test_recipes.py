"""recipes/*.sh: each starts a command that its script takes, for the GPUs in the file's name."""

import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common.rewards._loading import built_in_rewards
from common.run.command_line import parse_args
from tests.conftest import ROOT, SCRIPTS
from tests.published_models import DEVICES, EMBEDDED, PUBLISHED, recipe_commands, started_by
from tools import plan
from tools.plan import DEVICES as PLANNED

import pytest

pytestmark = pytest.mark.fast

COMMANDS = recipe_commands()
RECIPES = sorted({command.recipe for command in COMMANDS.values()})


@pytest.mark.parametrize("name", COMMANDS)
def test_a_recipe_is_parsed_and_in_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the script's own parser and check: its window fits its steps, and its ranks can share the images."""
    command = COMMANDS[name]
    monkeypatch.setenv("WORLD_SIZE", str(command.ranks))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(command.ranks))
    script = importlib.import_module(command.script.removesuffix(".py"))
    args = parse_args(script.Args, "", command.options)
    args = script.check(args)
    assert args.model in PUBLISHED
    assert all(reward in built_in_rewards() or ":" in reward for reward in args.reward)


# what a published script, or a comment of the recipe, has for the clip range
CLIP_RANGES = {
    "Qwen/Qwen-Image": {"flow_grpo.py": 1e-5, "mix_grpo.py": 1e-4},
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": {"flow_grpo.py": 1e-3, "mix_grpo.py": 1e-3},
}
OF_SD35_AND_THE_REST = {"flow_grpo.py": 1e-4, "mix_grpo.py": 1e-4}


@pytest.mark.parametrize("name", COMMANDS)
def test_no_recipe_of_a_clipped_ratio_lacks_its_clip_range(name: str) -> None:
    """The script's own default suits the embedded model alone. GRPO-Guard's ratio has another unit, and one value."""
    command = COMMANDS[name]
    script = importlib.import_module(command.script.removesuffix(".py"))
    args = parse_args(script.Args, "", command.options)
    assert ("--clip_range" in command.options) == hasattr(args, "clip_range")
    if command.script == "grpo_guard.py":
        assert args.clip_range == 2e-6
    elif hasattr(args, "clip_range"):
        assert args.clip_range == CLIP_RANGES.get(args.model, OF_SD35_AND_THE_REST)[command.script]


@pytest.mark.parametrize("name", COMMANDS)
def test_no_recipe_leaves_a_published_number_to_the_embedded_model(name: str) -> None:
    """The options whose defaults were chosen on the embedded model, and Adam's epsilon, 1e-8 in all published codes."""
    command = COMMANDS[name]
    script = importlib.import_module(command.script.removesuffix(".py"))
    args = parse_args(script.Args, "", command.options)
    needed = {"adam_eps", "learning_rate", "num_inference_steps", "eval_num_inference_steps"}
    needed |= {"guidance_scale", "updates_per_rollout", "noise_level", "sde_window_size"} & vars(args).keys()
    needed |= {"kl_coef", "dpo_beta", "num_pair_prompts", "num_pairs"} & vars(args).keys()
    if command.script != "diffusion_nft.py":
        needed |= {"lr_schedule", "num_steps"}
    assert [option for option in sorted(needed) if f"--{option}" not in command.options] == []
    assert args.adam_eps == 1e-8 and args.eval_num_inference_steps >= 28
    updates = {"updates_per_rollout": 2}
    if command.script == "dpo_offline.py":
        updates = {}
    elif command.script == "diffusion_nft.py" and args.model not in WITH_NFTS_OWN_SCHEDULE:
        updates = {"updates_per_rollout": 1}  # Flow-Factory's
    assert {option: getattr(args, option) for option in updates} == updates


@pytest.mark.parametrize("name", COMMANDS)
def test_a_recipe_compiles_and_eight_gpus_sample_without_an_engine(name: str) -> None:
    """Quantised weights are not compiled. The engine has not run on a GPU yet."""
    command = COMMANDS[name]
    args = parse_args(importlib.import_module(command.script.removesuffix(".py")).Args, "", command.options)
    assert ("compile" in args.train_with) == (args.base_weights is None)
    assert command.ranks < 8 or getattr(args, "rollout", "local") == "local"


WITH_NFTS_OWN_SCHEDULE = ("stabilityai/stable-diffusion-3.5-medium", "Qwen/Qwen-Image")


@pytest.mark.parametrize("name", [name for name in COMMANDS if COMMANDS[name].script == "diffusion_nft.py"])
def test_diffusion_nft_has_a_published_pair_of_schedule_and_kl(name: str) -> None:
    """NVlabs' and VeRL-Omni's configs for text: delayed, KL 1e-4. Flow-Factory's: up to 0.5, no KL. Beta 0.1 in all."""
    args = parse_args(importlib.import_module("diffusion_nft").Args, "", COMMANDS[name].options)
    pair = ("delayed_linear_to_0_999", 1e-4) if args.model in WITH_NFTS_OWN_SCHEDULE else ("linear_to_0_5", 0)
    assert (args.decay_schedule, args.kl_coef) == pair and args.nft_beta == 0.1
    assert args.update_interval == (2 if args.model == "Qwen/Qwen-Image" else 1)  # VeRL-Omni's


# models with one command, and no settings for all scripts
WITHOUT_GENERAL = {"flux2_klein_edit", "qwen_image_edit_plus", "wan21_image"}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_a_recipe_is_named_after_model_and_gpus(recipe) -> None:
    """sd35_medium.sh has settings for several scripts, sd35_medium_8x80gb.sh a command for eight GPUs of 80 GB."""
    name = re.fullmatch(r"(?P<model>[a-z0-9]+(_[a-z]+)*?)(_(?P<ranks>\d+)x(?P<gb>\d+)gb)?\.sh", recipe.name)
    assert name
    commands = [command for command in COMMANDS.values() if command.recipe == recipe]
    assert {command.script for command in commands} <= set(SCRIPTS)
    of_all_scripts = recipe.with_name(f"{name['model']}.sh")
    models = {command.options[command.options.index("--model") + 1] for command in commands}
    if name["model"] not in WITHOUT_GENERAL:
        assert models <= {
            c.options[c.options.index("--model") + 1] for c in COMMANDS.values() if c.recipe == of_all_scripts
        }
    if name["ranks"]:
        (command,) = commands
        assert command.ranks == int(name["ranks"])
        assert DEVICES[name["gb"]] in PLANNED
        assert PLANNED[DEVICES[name["gb"]]].memory_gb == int(name["gb"])
    else:
        assert len(commands) > 1


def test_what_is_added_wins() -> None:
    """A reader's own options come last, and the parser takes the last."""
    recipe = ROOT / "recipes" / "sd35_medium.sh"
    command = started_by(recipe, "mix_grpo.py", "--learning_rate", "1e-5", "--reward", "ocr", "jpeg_compressibility")
    args = parse_args(importlib.import_module("mix_grpo").Args, "", command.options)
    assert args.learning_rate == 1e-5 and args.reward == ("ocr", "jpeg_compressibility")


def test_another_launcher(tmp_path) -> None:
    """LAUNCH stands for torchrun and its options; a script without settings is refused."""
    recipe = ROOT / "recipes" / "wan21.sh"
    launch = os.environ | {"LAUNCH": "echo 8 ranks:"}
    done = subprocess.run(["bash", recipe, "flow_grpo.py"], env=launch, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("8 ranks: flow_grpo.py --model Wan-AI/")
    done = subprocess.run(["bash", recipe, "dpo_offline.py"], env=launch, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr == "recipes/wan21.sh has no settings for dpo_offline.py\n"
    done = subprocess.run(["bash", recipe], env=launch, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode != 0 and "which script" in done.stderr


OF_SEVERAL_SCRIPTS = [path for path in RECIPES if "which script" in path.read_text()]


@pytest.mark.parametrize("recipe", [*OF_SEVERAL_SCRIPTS, EMBEDDED], ids=lambda path: path.name)
def test_a_fork_gets_the_settings_of_its_parent(tmp_path: Path, recipe: Path) -> None:
    """Also a fork of a fork, and with the commit of its parent. One in a folder imports what lies in the root."""
    launch = os.environ | {"LAUNCH": "echo"}
    for name, parent in (("mine.py", "flow_grpo.py@0123abc"), ("again.py", "mine.py"), ("lost.py", "nothing.py")):
        (tmp_path / name).write_text(f'"""Mine.\n\nParent: {parent}\n"""\n')
    of = {}
    for script in ("flow_grpo.py", "mine.py", "again.py", "lost.py"):
        command = ["bash", recipe, script, "--name", "a b"]
        of[script] = subprocess.run(command, env=launch, capture_output=True, text=True, cwd=tmp_path)
    for fork in ("mine.py", "again.py"):
        assert of[fork].stdout == of["flow_grpo.py"].stdout.replace("flow_grpo.py", fork, 1)
    (tmp_path / "beside.py").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine.py").write_text('"""Mine.\n\nParent: flow_grpo.py\n"""\nimport beside\n')
    command = ["bash", recipe, "folder/mine.py"]
    subprocess.run(command, env=launch | {"LAUNCH": sys.executable}, check=True, cwd=tmp_path)
    assert of["lost.py"].returncode == 2 and of["lost.py"].stderr.endswith("has no settings for lost.py\n")


# of contrib/, those that have all options of their parent's settings (docs/models.md), with what they need beside them
WITH_PARENTS_SETTINGS: dict[str, list[str]] = {
    "contrib/dance_grpo.py": [],
    "contrib/flow_dppo.py": [],
    "contrib/flow_grpo_ahead.py": ["--rollout", "vllm"],
    "contrib/tempflow_grpo.py": [],
}


def settings_of(recipe: Path, script: str, *words: str) -> dict[str, Any]:
    """By the script's own parser and check, on eight ranks."""
    launch = os.environ | {"LAUNCH": "echo"}
    line = subprocess.check_output(["bash", recipe, script, *words], env=launch, text=True, cwd=ROOT)
    options = line.split()
    assert options.pop(0) == script
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    return vars(module.check(parse_args(module.Args, "", options)))


@pytest.mark.parametrize("script", WITH_PARENTS_SETTINGS)
@pytest.mark.parametrize("recipe", OF_SEVERAL_SCRIPTS, ids=lambda path: path.name)
def test_a_script_of_contrib_has_the_settings_of_its_parent(recipe: Path, script: str, monkeypatch) -> None:
    """TempFlow-GRPO's images part at one step, where Flow-GRPO's window may have several. What is added wins."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    parent = "grpo_guard.py" if script == "contrib/flow_dppo.py" else "flow_grpo.py"
    more = WITH_PARENTS_SETTINGS[script]
    settings, of_parent = settings_of(recipe, script, *more), settings_of(recipe, parent, *more)
    own = {"contrib/tempflow_grpo.py": {"sde_window_size", "sde_window_range"}, "contrib/dance_grpo.py": {"sde_type"}}
    shared = settings.keys() & of_parent.keys() - {"name"} - own.get(script, set())
    assert {option: settings[option] for option in shared} == {option: of_parent[option] for option in shared}
    assert settings_of(recipe, script, *more, "--sde_window_range", "1", "3")["sde_window_range"] == (1, 3)


@pytest.mark.parametrize("recipe", OF_SEVERAL_SCRIPTS, ids=lambda path: path.name)
def test_tempflow_branches_where_flow_grpo_is_noisy(recipe: Path, monkeypatch, tmp_path: Path) -> None:
    """At one step within the window's range; anywhere but at the last step, where Flow-GRPO trains all but the last."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    script = "contrib/tempflow_grpo.py"
    settings, of_parent = settings_of(recipe, script), settings_of(recipe, "flow_grpo.py")
    assert settings["sde_window_size"] == 1
    anywhere = (0, of_parent["num_inference_steps"] - 1)
    assert settings["sde_window_range"] == (of_parent["sde_window_range"] if of_parent["sde_window_size"] else anywhere)
    fork = tmp_path / "fork.py"
    fork.write_text(f'"""Mine.\n\nParent: {script}\n"""\n')
    launch = os.environ | {"LAUNCH": "echo"}
    lines = [
        subprocess.check_output(["bash", recipe, name, "--name", "a b"], env=launch, text=True, cwd=ROOT)
        for name in (script, str(fork))
    ]
    assert lines[1] == lines[0].replace(script, str(fork), 1)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [("sd35_medium.sh", ["flow_grpo.py"]), ("sd35_medium_1x24gb.sh", []), ("embedded_scenes.sh", [])],
)
def test_a_signal_to_a_recipe_reaches_torchrun(tmp_path: Path, recipe: str, words: list[str]) -> None:
    """As `kill PID` and `docker stop` send it: to the process that was started, and to no other."""
    stand_in = tmp_path / "torchrun"
    lines = ("#!/bin/bash", "trap 'touch saved; exit' TERM", "touch started", "while :; do sleep 0.05; done")
    stand_in.write_text("\n".join(lines))
    stand_in.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", ROOT / "recipes" / recipe, *words]
    # in a group of its own, by which the test ends what a shell leaves behind
    started = subprocess.Popen(command, env=environment, cwd=tmp_path, start_new_session=True)
    try:
        end = time.monotonic() + 10
        while not (tmp_path / "started").exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        started.send_signal(signal.SIGTERM)
        assert started.wait(10) == 0 and (tmp_path / "saved").exists()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)


@pytest.mark.fast
def test_a_recipe_is_planned_with_the_ranks_that_it_starts(tmp_path) -> None:
    recipe, told = tmp_path / "recipe.sh", tmp_path / "told"
    recipe.write_text(f'echo "${{LAUNCH:-torchrun --nproc_per_node 8}}" flow_grpo.py "$@" > {told}\n')
    for options, ranks in (([], "--ranks 8 --ranks_per_node 8"), (["--ranks", "2"], "--ranks 2 --ranks_per_node 2")):
        with pytest.raises(SystemExit) as ended:
            plan.main(["h100-80", str(recipe), *options, "--name", "a"])
        assert ended.value.code == 0
        assert told.read_text().endswith(f"-m tools.plan h100-80 {ranks} flow_grpo.py --name a\n")
    with pytest.raises(SystemExit, match=r"error: none\.sh: "):
        plan.main(["h100-80", "none.sh"])


# ---- the embedded model of scenes ------------------------------------------------------------------------------------
@pytest.mark.parametrize("script", ["", *(script for script in SCRIPTS if script != "dpo_offline.py")])
def test_the_recipe_of_scenes_is_taken_by_each_script_that_samples(script: str, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    command = started_by(EMBEDDED, *filter(None, [script, "--seed", "2"]))
    assert command.script == (script or "flow_grpo.py") and command.ranks == 1
    module = importlib.import_module(command.script.removesuffix(".py"))
    args = module.check(parse_args(module.Args, "", command.options))
    assert (args.seed, args.model, args.eval_reward) == (2, "assets/embedded_scenes", ("geneval",))
    for file in (args.model, *args.train_prompts, *args.eval_prompts):
        assert Path(file).exists()


REFUSED = ["dpo_offline.py", *(f"contrib/{name}.py" for name in ("sft", "draft", "dmd2", "tdm_r1"))]


@pytest.mark.parametrize("script", REFUSED)
def test_the_recipe_of_scenes_refuses_a_script_that_does_not_sample(script: str) -> None:
    launch = os.environ | {"LAUNCH": "echo"}
    done = subprocess.run(["bash", EMBEDDED, script], env=launch, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.endswith(f"has no settings for {script}\n")


def test_the_recipe_of_scenes_trains_a_step(tmp_path) -> None:
    """By the real detector, from the real model."""
    small = ["--num_steps=1", "--num_prompts=2", "--group_size=2", "--max_prompts=6", "--micro_batch_size=4"]
    command = ["bash", EMBEDDED, *small, "--name", tmp_path / "run"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0 and "finished all 1 steps" in done.stdout, done.stdout
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert 0 <= rows[0]["val/geneval/mean"] <= 1 and "critic/rewards/geneval.soft/mean" in rows[-2] | rows[-1]
