"""Guidance scales of records of 0.1.0: Z-Image's are read with 1 more, and those of other models as they are."""

import json

from common.checkpoints import load_checkpoint, saved_checkpoints
from common.resuming import options_today, resumed_guidance
from common.run import FORMAT
from tests.conftest import TINY, few_eval_prompts, run_here
from tests.tiny_models import FAMILIES, make_checkpoint
from tools import sample

import pytest
import torch


def model_folder(tmp_path, pipeline):
    folder = tmp_path / pipeline
    folder.mkdir(exist_ok=True)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
    return str(folder)


def record(model, guidance_scale, eval_guidance_scale=None, **more):
    options = {"model": model, "guidance_scale": guidance_scale, "eval_guidance_scale": eval_guidance_scale}
    return {"args": options, **more}


def scales(options):
    return options["guidance_scale"], options["eval_guidance_scale"]


@pytest.mark.fast
def test_a_record_of_z_image_without_a_format_has_1_more(tmp_path):
    z_image = model_folder(tmp_path, "ZImagePipeline")
    assert scales(options_today(record(z_image, 4.0))) == (5.0, None)
    assert scales(options_today(record(z_image, 1.0, 3.5))) == (1.0, 4.5)
    assert scales(options_today(record(z_image, 4.0, format=FORMAT))) == (4.0, None)
    assert options_today({"args": {"model": z_image}}) == {"model": z_image}  # diffusion_nft.py has no guidance


@pytest.mark.fast
def test_options_of_another_form_are_read():
    """Steps to trace were numbers, and the engine's sleep an option of its own."""
    old = {"profile_steps": [3, 5], "engine_sleep": True}
    assert options_today({"args": old}) == {"profile_steps": ["3", "5"], "engine_with": ["sleep"]}
    assert options_today({"args": {"engine_sleep": False}}) == {}
    assert old == {"profile_steps": [3, 5], "engine_sleep": True}


@pytest.mark.fast
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "z_image"])
def test_a_record_of_another_family_stays(tmp_path, family):
    folder = str(make_checkpoint(family, tmp_path / family))
    assert scales(options_today(record(folder, 4.0, 3.5))) == (4.0, 3.5)


@pytest.mark.fast
def test_a_resumed_run_takes_1_more_where_its_command_is_the_old_one(tmp_path, capfd):
    z_image = model_folder(tmp_path, "ZImagePipeline")
    old, new = tmp_path / "old.pt", tmp_path / "new.pt"
    torch.save({**record(z_image, 4.0, 2.0), "script": "flow_grpo"}, old)
    torch.save({**record(z_image, 4.0, 2.0, format=FORMAT), "script": "flow_grpo"}, new)
    same = record(z_image, 4.0, 2.0)["args"]
    assert resumed_guidance(old, same) == {"guidance_scale": 5.0, "eval_guidance_scale": 3.0}
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].endswith("where --guidance_scale 4 acted like 5: this run takes 5, pass that from now on")
    assert resumed_guidance(old, same | {"guidance_scale": 5.0}) == {"eval_guidance_scale": 3.0}
    assert resumed_guidance(new, same) == {}


@pytest.mark.fast
def test_tools_sample_reads_an_old_run(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "args.json").write_text(json.dumps(record(model_folder(tmp_path, "ZImagePipeline"), 4.0)))
    assert sample.read_options(run)["guidance_scale"] == 5.0


def test_a_script_resumes_a_checkpoint_of_0_1_0(tmp_path, capfd):
    """By the old command: the next step equals that of a run which had today's scale from its start."""
    model = make_checkpoint("z_image", tmp_path / "model")
    options = ["--model", model, "--max_sequence_length", 160, "--eval_every", 1, *few_eval_prompts(tmp_path, 2)]
    options += ["--reward", "jpeg_compressibility", "--learning_rate", 1e-2, "--rollout", "local", *TINY[:6]]
    options += ["--num_inference_steps", 3, "--eval_at_start", "False"]
    start = [*options, "--guidance_scale", 4, "--num_steps", 1, "--name"]
    assert (
        run_here(tmp_path, "flow_grpo.py", *options, "--guidance_scale", 4, "--name", "today", "--num_steps", 2) is None
    )
    assert run_here(tmp_path, "flow_grpo.py", *start, "old") is None
    (checkpoint,) = saved_checkpoints(tmp_path / "runs" / "old")
    state = load_checkpoint(checkpoint)
    assert state.pop("format") == json.loads((tmp_path / "runs/old/args.json").read_text())["format"] == FORMAT
    state["args"]["guidance_scale"] = 3.0  # as 0.1.0 counted the 4 that this run had
    torch.save({**state, "script": "flow_grpo"}, tmp_path / "old.pt")
    (tmp_path / "old.pt").rename(checkpoint)
    capfd.readouterr()
    again = [*options, "--guidance_scale", 3, "--num_steps", 2, "--name", "old", "--resume", "latest"]
    assert run_here(tmp_path, "flow_grpo.py", *again) is None
    told = capfd.readouterr().err
    assert "where --guidance_scale 3 acted like 4: this run takes 4, pass that from now on" in told
    assert "changes the score" not in told
    today, old = (tmp_path / "runs" / name / "adapter/pytorch_lora_weights.safetensors" for name in ("today", "old"))
    assert today.read_bytes() == old.read_bytes()
    newest = saved_checkpoints(tmp_path / "runs/old")[-1]
    assert load_checkpoint(newest)["args"]["guidance_scale"] == 4.0
