"""--plan: what it counts is what real passes, real optimizers and published figures say; what cannot fit is refused."""

import importlib
from unittest import mock

from common import plan
from common.blueprint import Blueprint, Meter
from common.models import find_family
from common.options import SharedArgs
from common.policy import add_policies, make_lora
from tests.conftest import EMBEDDED, embedded_model, policy_without_fsdp, run_here
from tests.published_models import PIPELINES, PUBLISHED, presets, write_configs

import pytest
import torch

SD35_MEDIUM = "stabilityai/stable-diffusion-3.5-medium"
blueprints = {}  # of published models: those of one LoRA share what their passes cost


def blueprint_of(source, rank, dtype=torch.bfloat16):
    """The Blueprint of a model with a LoRA of that rank, or with 0 full weights; a pass is counted once."""
    family = find_family(source)
    lora = make_lora(None, rank, 2 * rank, family.lora_target_modules) if rank else None
    blueprint = Blueprint(family, str(source), lora, dtype)
    for name in ("velocity", "decoding"):
        setattr(blueprint, name, remember(getattr(blueprint, name)))
    return blueprint


def remember(function):
    """functools.cache, of arguments that may be lists."""
    known = {}

    def call(*args, **kwargs):
        key = repr((args, kwargs))
        if key not in known:
            known[key] = function(*args, **kwargs)
        return known[key]

    return call


@pytest.fixture(scope="module")
def sd35(tmp_path_factory):
    """SD3.5-medium by its published configs, with the paper's LoRA."""
    return blueprint_of(write_configs(SD35_MEDIUM, tmp_path_factory.mktemp("sd35")), 32)


# ---- against published figures ---------------------------------------------------------------------------------------
def test_a_pass_of_sd35_medium_at_512(sd35):
    """Its forward pass is 2.479 TFLOP an image by torch's counter, with attention as two matrix products; with the
    backward pass of a LoRA 5.31. Activations of 2.2 GB were seen of it, and .8 GB of the VAE's decoder."""
    size = ((512, 512), 1)
    assert sd35.velocity(*size, 256, 1.0).flops == pytest.approx(2.479e12, rel=0.01)
    training = sd35.velocity(*size, 256, 1.0, train=True)
    assert training.flops == pytest.approx(5.31e12, rel=0.01)
    assert training.peak_bytes == pytest.approx(2.22e9, rel=0.05)
    decoding = sd35.decoding(1, *size)
    assert decoding.flops == pytest.approx(2.51e12, rel=0.01)
    assert decoding.peak_bytes == pytest.approx(0.81e9, rel=0.05)


def test_parameters_of_published_parts(tmp_path):
    """In billions, of every family's text encoders and transformer."""
    names = {family: name for name, (family, *_) in reversed(PUBLISHED.items())}
    for family, (_, _, text_encoders) in PIPELINES.items():
        blueprint = blueprint_of(write_configs(names[family], tmp_path / family), 32)
        billions = sum(count for _, _, count in text_encoders.values())
        assert blueprint.text_encoder_bytes / 2e9 == pytest.approx(billions, abs=0.1), family
        assert blueprint.num_weights / 1e9 == pytest.approx(PUBLISHED[names[family]][3], abs=0.05), family
        shapes = blueprint.conditioning_shapes(256)
        assert shapes["prompt_embeds"][0] == (333 if family == "stable_diffusion_3" else 256)


# ---- against real tensors --------------------------------------------------------------------------------------------
@pytest.mark.fast
def test_activations_are_those_of_real_tensors():
    """What autograd saves of a real pass of the embedded model is what its fake pass has alive at the peak, less what
    backward holds for a moment; the real pass, counted by the same meter, has the same peak and FLOPs to the bit."""
    model, args, _ = policy_without_fsdp(trained=False)
    blueprint = blueprint_of(EMBEDDED, args.lora_rank, torch.float32)
    planned = blueprint.velocity((32, 96), 1, 16, 1.0, train=True)

    transformer = model.transformer
    tensors = [*transformer.parameters(), *transformer.buffers()]
    known = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    timesteps, _, shape = model.schedule(2, 32, 96)
    conditioning = {name: torch.zeros(1, *shape) for name, shape in blueprint.conditioning_shapes(16).items()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        velocity = model.predict_velocity(torch.zeros(1, *shape), timesteps[0], conditioning)
        kept = sum(saved.values())
        velocity.square().mean().backward()
    assert kept <= planned.peak_bytes <= 1.15 * kept

    transformer.zero_grad()
    with Meter(tensors) as meter:
        latents = torch.zeros(1, *shape)
        conditioning = {name: torch.zeros(1, *shape) for name, shape in blueprint.conditioning_shapes(16).items()}
        model.predict_velocity(latents, timesteps[0], conditioning).square().mean().backward()
    assert meter.flops == planned.flops > 0
    assert meter.peak_bytes == pytest.approx(planned.peak_bytes, rel=0.1)  # with the gradients


@pytest.mark.fast
def test_checkpointing_keeps_less_and_computes_more():
    blueprint = blueprint_of(EMBEDDED, 16, torch.float32)
    plain = blueprint.velocity((32, 96), 1, 16, 1.0, train=True)
    forward = blueprint.velocity((32, 96), 1, 16, 1.0)
    checkpointed = blueprint.velocity((32, 96), 1, 16, 1.0, train=True, checkpointing=True)
    assert forward.peak_bytes < checkpointed.peak_bytes < 0.6 * plain.peak_bytes
    # every block's forward pass once more, and little else is in this model
    assert plain.flops + 0.8 * forward.flops < checkpointed.flops <= plain.flops + forward.flops
    counted_anew = Blueprint.velocity(blueprint, (32, 96), 1, 16, 1.0, train=True)
    assert counted_anew == plain  # checkpointing was switched off again
    guided = blueprint.velocity((32, 96), 1, 16, 4.5)
    assert guided.flops == 2 * forward.flops


@pytest.mark.fast
@pytest.mark.parametrize("rank", [16, 0])
def test_gradients_and_adam_are_those_of_the_optimizer(rank):
    """Bytes of the real gradients and moments of the embedded model, of a LoRA and of full weights."""
    if rank:
        model, _, _ = policy_without_fsdp()
        transformer = model.transformer
    else:
        transformer = embedded_model().transformer.requires_grad_(True)
    trained = [p for p in transformer.parameters() if p.requires_grad]
    for p in trained:
        p.grad = torch.zeros_like(p)
    optimizer = torch.optim.AdamW(trained)
    optimizer.step()
    moments = sum(state[name].nbytes for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))
    blueprint = blueprint_of(EMBEDDED, rank, torch.float32)
    w = small_workload()
    sizes = {part.name: part.num_bytes for part in plan.weight_parts(blueprint, w)}
    assert sizes["gradients, float32"] == sum(p.grad.nbytes for p in trained)
    assert sizes["Adam's two moments, float32"] == moments
    assert sizes["trained weights, float32"] == sum(p.nbytes for p in trained)
    frozen = sum(p.nbytes for p in transformer.parameters() if not p.requires_grad)
    assert sizes["frozen weights, float32"] == frozen


def small_workload(**changes):
    values = {
        "num_images": 8,
        "sampled_steps": 3,
        "trained_steps": 2,
        "policies": ("default",),
        "num_eval_images": 4,
        "micro_batch_images": 4,
        "trained_guidance": 1.0,
        "image_size": (32, 96),
        "max_sequence_length": 16,
    }
    return plan.Workload(**values | changes)


@pytest.mark.fast
def test_what_more_ranks_policies_and_offloading_change():
    blueprint = blueprint_of(EMBEDDED, 0, torch.float32)

    def parts(**changes):
        return {part.name: part for part in plan.weight_parts(blueprint, small_workload(**changes))}

    one = parts()
    four = parts(ranks=8, ranks_here=4, policies=("default", "old", "ema", "reference"))
    weights = 4 * blueprint.num_weights
    assert one["trained weights, float32"].num_bytes == weights
    for name in ("trained weights, float32", "gradients, float32", "frozen weights, float32"):
        assert four[name].num_bytes == weights / 4
    assert four["weights of old and ema, float32"].num_bytes == four["Adam's two moments, float32"].num_bytes
    places = {name: part.place for name, part in parts(train_with=("cpu_offload",)).items()}
    assert places["trained weights, float32"] == "host" and places["buffers of the transformer"] == "device"
    copies = parts(ranks=8, ranks_here=4, shard_ranks=2)
    assert copies["trained weights, float32"].num_bytes == weights / 2


@pytest.mark.fast
def test_weights_are_whole_to_sample_where_ranks_share_them_and_no_engine_samples():
    """Whole with the adapters of all policies, but for a new LoRA's reference, which has none."""
    blueprint = blueprint_of(EMBEDDED, 16, torch.float32)
    model = embedded_model()
    add_policies(model, make_lora(None, 16, 32, model.lora_target_modules), ["default", "ema", "reference"])
    num_bytes = sum(p.nbytes for p in model.transformer.parameters())
    blocks = "blocks as FSDP gathers them"
    whole = "weights gathered to sample"

    def parts(**changes):
        return {part.name: part for part in plan.pass_parts(blueprint, small_workload(**changes), COSTS)}

    two = parts(ranks=2, ranks_here=2, policies=("default", "ema", "reference"))
    assert two[whole].num_bytes == num_bytes + 4 * blueprint.largest_block
    assert two[whole].phases == ("rollout",) and two[blocks].phases == ("update",)
    others = [{"rollout": "vllm"}, {"gather_for_sampling": False}, {"shard_ranks": 1}, {"ranks": 1, "ranks_here": 1}]
    others.append({"train_with": ("cpu_offload",)})
    for changes in others:
        alone = parts(**{"ranks": 2, "ranks_here": 2} | changes)
        assert whole not in alone and alone[blocks].phases == ("rollout", "update"), changes


@pytest.mark.fast
def test_bytes_of_the_pipe_and_seconds_by_hand(monkeypatch):
    """Of a rank's 4 images of 32 x 96 pixels, latents of 8 x 8 x 24 at 4 times of 3 steps; a LoRA's weights."""
    blueprint = blueprint_of(EMBEDDED, 16, torch.float32)
    w = small_workload(ranks=2, rollout="vllm")
    assert plan.pipe_bytes(blueprint, w) == (4 * blueprint.num_trained, 4 * (4 * 4 * 8 * 8 * 24 + 3 * 32 * 96))
    monkeypatch.setitem(plan.DEVICES, "rtx4090", plan.Device(24, 165, 1e-12))  # a FLOP a second
    rollout = next(line for line in plan.work_table(w, COSTS, "rtx4090") if line.startswith("  rollout "))
    assert rollout.split() == ["rollout", "0.000", "400.0"]  # 160 FLOP at .4


@pytest.mark.fast
@pytest.mark.parametrize(("script", "epochs"), [("flow_grpo.py", 1), ("diffusion_nft.py", 3)])
def test_how_often_a_policy_that_only_acts_is_asked(script, epochs, tmp_path, monkeypatch):
    """A GRPO's reference scores the sampled steps, which stay; DiffusionNFT's noise is drawn anew in every epoch."""
    monkeypatch.setattr(plan, "report", lambda blueprint, w, device: found.append(w))
    found = []
    assert run_here(tmp_path, script, "--plan", "cpu", "--epochs_per_rollout", 3) is None
    assert found[0].acting_epochs == epochs


@pytest.mark.fast
def test_an_engine_beside_its_rank_and_on_a_gpu_of_its_own():
    """It decodes its whole batch at once where that is a few pixels, else image by image."""
    blueprint = blueprint_of(EMBEDDED, 16, torch.float32)
    taken = "engine: sampling and decoding 8 images"

    def parts(**changes):
        w = small_workload(rollout="vllm", rollout_batch_size=8, **changes)
        return {part.name: part for part in plan.engine_parts(blueprint, w, COSTS)}

    small = parts()
    assert small[taken].num_bytes == 8 * 100
    large = COSTS._replace(sampling=plan.Cost(10, 1))
    w = small_workload(rollout="vllm", rollout_batch_size=8, image_size=(1024, 1024))
    assert {part.name: part.num_bytes for part in plan.engine_parts(blueprint, w, large)}[taken] == 100
    beside = {part.place for part in small.values()}
    apart = {part.place for part in parts(engine_devices=(4, 5)).values()}
    assert beside == {"device", "host"} and apart == {"engine", "host"}


# ---- the sums --------------------------------------------------------------------------------------------------------
COST = plan.Cost(flops=10, peak_bytes=100)
COSTS = plan.Costs(COST, plan.Cost(7, 90), plan.Cost(30, 500), plan.Cost(37, 50), COST, plan.Cost(2, 200))


@pytest.mark.fast
def test_work_by_hand():
    """Two ranks of four images, three steps, two trained, two epochs, in the first of which the reference's means are
    computed: 4 (3 x 10 + 10), 4 x 2 x 7, 8 (2 x 30 + 7). Another policy's passes are made in both."""
    w = small_workload(ranks=2, epochs_per_rollout=2, policies=("default", "ema", "reference"), rollout="vllm")
    w.old_log_prob = "recompute"
    expected = {"rollout": 160, "old log-probs": 56, "update": 536, "evaluation": 2 * (1 * 10 + 10)}
    assert plan.work(w, COSTS) == expected
    w.acting_epochs = 2
    assert plan.work(w, COSTS)["update"] == 592
    w = small_workload(sampled_steps=0, policies=("default",))
    assert plan.work(w, COSTS) == {"update": 8 * 2 * 30, "evaluation": 4 * 20}


@pytest.mark.fast
def test_what_does_not_fit_is_told_with_its_largest_part():
    parts = [
        plan.Part("weights", 6e9, plan.PHASES, "device", "use more ranks"),
        plan.Part("activations", 3e9, ("update",), "device", "lower --micro_batch_size"),
        plan.Part("encoders", 2e9, ("encode",), "device", "pass --prompt_cache"),
    ]
    assert plan.check_fits(parts, 9, "a100-40", "a GPU") == "peak 9.00 GB of the 9 GB of a GPU, in the phase update"
    with pytest.raises(ValueError) as error:
        plan.check_fits(parts, 8.9, "a100-40", "a GPU")
    assert str(error.value) == (
        "--plan a100-40: 9.0 GB are needed of the 8.9 GB of a GPU, in the phase update; "
        "the largest part is weights, 6.0 GB: use more ranks"
    )
    parts[1] = parts[1]._replace(num_bytes=7e9)
    with pytest.raises(ValueError, match="the largest part is activations, 7.0 GB: lower --micro_batch_size$"):
        plan.check_fits(parts, 8.9, "a100-40", "a GPU")


@pytest.mark.fast
def test_the_option_names_the_devices():
    hint = SharedArgs.__annotations__["plan"]
    assert list(hint.__args__[0].__args__) == list(plan.DEVICES)


# ---- the scripts -----------------------------------------------------------------------------------------------------
@pytest.mark.fast
@pytest.mark.parametrize("script", ["flow_grpo.py", "diffusion_nft.py", "dpo_offline.py"])
def test_a_script_prints_its_plan_and_runs_nothing(script, tmp_path, capsys):
    options = ["--plan", "h100-80"] if script == "dpo_offline.py" else ["--plan", "h100-80", "--rollout", "local"]
    assert run_here(tmp_path, script, *options, "--eval_reward", "clip_score") is None  # which it does not load
    lines = capsys.readouterr().out.splitlines()
    assert not (tmp_path / "runs").exists()
    assert lines[0] == "not counted: the networks of clip_score, docs/rewards.md has their sizes"
    print("\n".join(lines))
    assert lines[-1].startswith("peak ") and any("engine" in line for line in lines) is False
    assert any(line.startswith("  activations of ") for line in lines)
    assert any(line.startswith("  rollout ") and "PFLOP" not in line for line in lines) == (script != "dpo_offline.py")


@pytest.mark.fast
def test_what_cannot_fit_ends_with_a_line(tmp_path, monkeypatch):
    monkeypatch.setitem(plan.DEVICES, "rtx4090", plan.Device(0.5, 165, 82.6))
    told = run_here(tmp_path, "flow_grpo.py", "--rollout", "local", "--plan", "rtx4090")
    assert told.startswith("flow_grpo.py: error: --plan rtx4090: ") and "of the 0.5 GB of a GPU" in told


# ---- docs/models.md --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("number", range(len(presets())))
def test_a_preset_fits(number, tmp_path_factory, monkeypatch, capsys):
    """By its own script's parser and checks of options, its GPUs have the memory, and a tenth more than it needs."""
    ranks, script, options = presets()[number]
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    module = importlib.import_module(script.removesuffix(".py"))
    args = module.parse_args(module.Args, "", options)
    key = (args.model, args.lora_rank)
    if key not in blueprints:
        folder = write_configs(args.model, tmp_path_factory.mktemp("preset"))
        blueprints[key] = blueprint_of(folder, args.lora_rank)
    with mock.patch.object(module, "load_rewards", return_value={}), mock.patch.object(module, "read_prompts"):
        args.model = str(blueprints[key].source)
        module.check_args(args)
    trained_steps = len(module.trained_steps(args, 1))
    w = plan.workload(vars(args), 256, trained_steps=trained_steps)
    capsys.readouterr()
    plan.report(blueprints[key], w, args.plan)
    peak = float(capsys.readouterr().out.splitlines()[-1].split()[1])
    print(peak)
    assert peak < 0.9 * plan.DEVICES[args.plan].memory_gb
