"""tools/sample.py: what the trainer would sample, before and after, beside each other."""

import json
import shutil
from dataclasses import asdict, replace

import flow_grpo
from common.files.checkpoints import FORMAT, save_checkpoint, saved_checkpoints
from common.images import open_png
from common.sde import image_seed
from common.weights.lora import save_weights
from common.weights.policy import tensors_on_rank_0
from tests.conftest import EMBEDDED, embedded_model, good_state, policy_without_fsdp, prompt_set
from tools import sample

import pytest
import torch
from safetensors.torch import save_file

pytestmark = pytest.mark.fast
PROMPTS = ['a red sign that says "4711"', 'a blue sign that says "25"']


@pytest.fixture
def run(tmp_path):
    """A run's folder with its options and an adapter that acts, and the policy."""
    model, args, config = policy_without_fsdp()
    folder = tmp_path / "mine"
    save_weights(folder / "adapter", model.pipe, tensors_on_rank_0(model)[0], config)
    (folder / "args.json").write_text(json.dumps({"args": asdict(args), "format": FORMAT}))
    (tmp_path / "own.txt").write_text("\n".join(PROMPTS))
    return folder, model, args


@torch.no_grad()
def images_of(model, args, seeds, prompts):
    """The evaluation's images, as flow_grpo.py samples them."""
    drawn = prompt_set(prompts)
    args = replace(args, num_inference_steps=args.eval_num_inference_steps)
    request = flow_grpo.make_request(args, model, drawn, torch.arange(len(prompts)), seeds)
    return flow_grpo.sample_locally(model, request).images


def assert_close(picture, image):
    """Equal but for round-off: prompts are encoded and sampled one by one."""
    difference = torch.tensor(list(picture.tobytes())) - torch.tensor(list(image.tobytes()))
    assert difference.abs().max() <= 1


def test_the_options_of_a_resumed_run_are_those_of_its_highest_step(run):
    folder, _, args = run
    assert sample.read_options(folder)["seed"] == args.seed
    for step in (30, 5):
        record = {"args": asdict(args) | {"seed": step}, "format": FORMAT}
        (folder / f"args_step_{step:06d}.json").write_text(json.dumps(record))
    assert sample.read_options(folder)["seed"] == 30


def test_the_trainers_images_before_and_after(run, tmp_path, capsys):
    folder, model, args = run
    sample.main([str(folder), "--prompts", str(tmp_path / "own.txt"), "--images_per_prompt", "2"])
    assert capsys.readouterr().out == f"{folder}/samples_of_own/side_by_side.png\n"
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]
    seeds = [image_seed("eval", i % 2, i // 2) for i in range(4)]
    after = images_of(model, args, seeds, prompts)
    model.transformer.disable_adapters()
    before = images_of(model, args, seeds, prompts)
    for name, expected in {"before": before, "mine": after}.items():
        for number, image in enumerate(expected):
            assert_close(open_png(folder / "samples_of_own" / name / f"{number:05d}.png"), image)
    assert before[0].tobytes() != after[0].tobytes()
    assert open_png(folder / "samples_of_own" / "side_by_side.png").size == (2 * (192 + 4), 4 * (64 + 2 * 14 + 4))


def test_a_checkpoints_images_are_those_of_its_average_at_the_runs_alpha(run, tmp_path):
    """The rank is 16 and alpha 32, which is not in a checkpoint's tensors as it is in an adapter's."""
    folder, model, args = run
    assert (args.lora_rank, args.lora_alpha) == (16, 32)
    average = tensors_on_rank_0(model)[0]
    policies = {"default": {name: 2 * tensor for name, tensor in average.items()}, "ema": average}
    save_checkpoint(tmp_path, 1, good_state() | {"policies": policies, "args": asdict(args)}, 1)
    source = saved_checkpoints(tmp_path)[0]
    out = tmp_path / "out"
    sample.main([str(folder), str(source), "--prompts", str(tmp_path / "own.txt"), "--output", str(out)])
    seeds = [image_seed("eval", 0, row) for row in range(2)]
    for number, image in enumerate(images_of(model, args, seeds, PROMPTS)):
        for name in ("mine", "step_000001.pt"):
            assert_close(open_png(out / name / f"{number:05d}.png"), image)


def test_another_size_and_several_sources(run, tmp_path):
    folder, _, _ = run
    out = tmp_path / "out"
    options = ["--prompts", str(tmp_path / "own.txt"), "--output", str(out), "--max_prompts", "1"]
    sample.main(
        [str(folder), str(folder / "adapter"), *options, "--image_size", "64", "96", "--num_inference_steps", "2"]
    )
    assert {path.name for path in out.iterdir()} == {"before", "mine", "adapter", "side_by_side.png"}
    assert open_png(out / "mine" / "00000.png").size == (96, 64)
    assert (out / "mine" / "00000.png").read_bytes() == (out / "adapter" / "00000.png").read_bytes()


def test_prompts_of_a_function(run, tmp_path):
    folder, _, _ = run
    (tmp_path / "made.py").write_text(f"def prompts():\n    return {PROMPTS}\n")
    for prompts, output in ((tmp_path / "own.txt", "of_file"), (f"{tmp_path}/made.py:prompts", "of_function")):
        sample.main([str(folder), "--prompts", str(prompts), "--output", str(tmp_path / output)])
    of_file, of_function = (
        {path.relative_to(tmp_path / output): path.read_bytes() for path in (tmp_path / output).rglob("*.png")}
        for output in ("of_file", "of_function")
    )
    assert of_file == of_function and len(of_file) == 5  # two before, two after, and the picture


def test_a_lora_leaves_nothing_behind_for_full_weights(run):
    folder, _, args = run
    model = embedded_model()
    full = {name: tensor + 1 for name, tensor in model.transformer.state_dict().items()}
    sample.use(model, *sample.read_policy(folder, args.model))
    sample.use(model, full, None)
    now = model.transformer.state_dict()
    assert now.keys() == full.keys() and all(torch.equal(now[name], tensor) for name, tensor in full.items())


def test_size_and_guidance_are_the_evaluations(run, tmp_path, monkeypatch):
    folder, _, args = run
    own = asdict(args) | {"image_size": (64, 96), "eval_guidance_scale": 3.0, "eval_num_inference_steps": 1}
    (folder / "args.json").write_text(json.dumps({"args": own, "format": FORMAT}))
    used = []
    real = sample.sample

    def recorded(model, prompts, seeds, options):
        used.append((tuple(options["image_size"]), options["guidance_scale"]))
        return real(model, prompts, seeds, options)

    monkeypatch.setattr(sample, "sample", recorded)
    command = [str(folder), "--prompts", str(tmp_path / "own.txt"), "--max_prompts", "1", "--output"]
    sample.main([*command, str(tmp_path / "as_evaluated")])
    sample.main([*command, str(tmp_path / "otherwise"), "--image_size", "32", "96", "--guidance_scale", "1"])
    assert used == 2 * [((64, 96), 3.0)] + 2 * [((32, 96), 1.0)]


def test_faults_are_one_line(run, tmp_path):
    folder, _, args = run
    model = shutil.copytree(EMBEDDED, tmp_path / "model")
    scheduler = model / "scheduler/scheduler_config.json"
    scheduler.write_text(scheduler.read_text().replace('"shift_terminal": null', '"shift_terminal": 0.02'))
    (tmp_path / "of_a_copy").mkdir()
    record = {"args": asdict(replace(args, model=str(model))), "format": FORMAT}
    (tmp_path / "of_a_copy/args.json").write_text(json.dumps(record))
    own = ["--prompts", str(tmp_path / "own.txt")]
    for argv, fault in {
        (str(tmp_path), *own): f"{tmp_path}: .*args.json",
        (str(folder), str(tmp_path / "nothing"), *own): f"{tmp_path}/nothing: ",
        (str(folder), "--prompts", "nowhere.txt"): "nowhere.txt: ",
        (str(tmp_path / "of_a_copy"), *own, "--num_inference_steps", "1"): "--num_inference_steps 1: ",
        (str(folder), *own, "--output", str(folder)): f"{folder} .*--output",
    }.items():
        with pytest.raises(SystemExit, match=f"^tools.sample: error: .*{fault}"):
            sample.main(list(argv))


@pytest.mark.parametrize("content", ["{", "[]", f'{{"format": {FORMAT}}}', '{"args": {}, "format": 0}'])
def test_bad_options_are_named(run, tmp_path, content):
    (run[0] / "args.json").write_text(content)
    with pytest.raises(SystemExit, match=f"^tools.sample: error: {run[0]}/args.json: [^\n]+$"):
        sample.main([str(run[0]), "--prompts", str(tmp_path / "own.txt")])


@pytest.mark.parametrize(
    ("tensor", "fault"),
    [
        (torch.tensor([torch.inf]), "m.lora_A.weight .*NaN"),
        (torch.tensor([1]), "m.lora_A.weight .*NaN"),
        (None, "Error while deserializing header|.*is not a zip file"),
    ],
)
@pytest.mark.parametrize("is_checkpoint", [False, True])
def test_bad_weights_are_named(run, tmp_path, is_checkpoint, tensor, fault):
    """Of full weights, and of a checkpoint, before a model loads."""
    source = tmp_path / "step_000001.pt" if is_checkpoint else tmp_path / "other"
    file = source if is_checkpoint else source / "diffusion_pytorch_model.safetensors"
    file.parent.mkdir(exist_ok=True)
    if tensor is None:
        file.write_bytes(b"version https://git-lfs.github.com/spec/v1")
    elif is_checkpoint:
        policies = {"default": {"m.lora_A.weight": tensor}}
        save_checkpoint(tmp_path, 1, good_state() | {"policies": policies, "format": FORMAT}, 1)
        source = saved_checkpoints(tmp_path)[0]
    else:
        save_file({"m.lora_A.weight": tensor}, file)
    with pytest.raises(SystemExit, match=f"^tools.sample: error: {source}(: | )({fault})"):
        sample.main([str(run[0]), str(source), "--prompts", str(tmp_path / "own.txt")])
