"""tools/plan.py: it counts what real passes, real optimizers and published figures say, and refuses what cannot fit."""

import functools
import importlib
import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import flow_grpo
from common.data import PromptSet
from common.errors import RunError
from common.files.checkpoints import save_checkpoint
from common.models.family import Family
from common.models.loading import family_class
from common.plan import needs
from common.plan.devices import Device
from common.plan.memory import Blueprint, Cost, Meter, count_alike
from common.weights.lora import make_lora
from common.weights.policy import add_policies
from tests.conftest import EMBEDDED, ROOT, SCRIPTS, embedded_model, good_state, policy_without_fsdp
from tests.published_models import PIPELINES, PUBLISHED, presets, write_configs
from tests.tiny_models import make_checkpoint
from tools import plan

import pytest
import torch
from PIL import Image

SMALL = needs.PlannedRun(
    num_images=8,
    num_prompts=1,
    sampled_steps=3,
    trained_steps=2,
    policies=("default",),
    num_eval_images=4,
    micro_batch_size=4,
    image_size=(32, 96),
    max_sequence_length=16,
)
COST = Cost(flops=10, peak_bytes=100)
COSTS = needs.Costs(COST, Cost(7, 90), Cost(30, 500), COST, Cost(2, 200))


@functools.cache
def blueprint_of(source, rank, dtype=torch.bfloat16, num_sources=None, fused_norms=True):
    """The Blueprint of a model with a LoRA of that rank, or for 0 with full weights. Each pass is counted once."""
    family = family_class(source)
    lora = make_lora(family, rank=rank, alpha=2 * rank or 1)
    blueprint = Blueprint(family, str(source), lora, dtype, num_sources, fused_norms=fused_norms)
    for name in ("velocity", "decoding"):
        setattr(blueprint, name, functools.cache(getattr(blueprint, name)))
    return blueprint


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """published(hub id): a folder with the configs of that model, written once."""
    return functools.cache(lambda name: write_configs(name, tmp_path_factory.mktemp("published")))


def by_name(parts):
    return {part.name: part for part in parts}


# ---- against published figures ---------------------------------------------------------------------------------------
def test_a_pass_of_sd35_medium_at_512(published):
    """A forward pass is 2.479 TFLOP per image by torch's counter, with attention as two matrix products; with the
    backward pass of a LoRA it is 5.31. The VAE's decoder was seen to take 0.8 GB, and activations of a pass 2.3 GB when
    diffusers' norms of queries and keys kept each element in fp32 as well, which a GPU's kernel does not.
    """
    sd35 = blueprint_of(published("stabilityai/stable-diffusion-3.5-medium"), 32)
    assert sd35.velocity((512, 512), 1, 256, 1.0).flops == pytest.approx(2.479e12, rel=0.01)
    training = sd35.velocity((512, 512), 1, 256, 1.0, train=True)
    assert training.flops == pytest.approx(5.31e12, rel=0.01)
    elements = 2 * 1536 * (24 * (1024 + 333) + 13 * 1024)  # of q and k; 13 blocks have a second attention
    assert training.peak_bytes == pytest.approx(2.3e9 - 4 * elements, rel=0.02)
    decoding = sd35.decoding(1, (512, 512), 1)
    assert decoding.flops == pytest.approx(2.51e12, rel=0.01)
    assert decoding.peak_bytes == pytest.approx(0.81e9, rel=0.05)


def test_parameters_of_published_parts(published):
    """In billions, for the text encoders and the transformer of every family."""
    names = {family: name for name, (family, *_) in reversed(PUBLISHED.items())}
    for family, (_, _, text_encoders) in PIPELINES.items():
        rank = 32 if family in ("stable_diffusion_3", "wan") else 64  # as of their presets, which have these blueprints
        blueprint = blueprint_of(published(names[family]), rank)
        billions = sum(count for _, _, count in text_encoders.values())
        assert blueprint.text_encoder_bytes / 2e9 == pytest.approx(billions, abs=0.1), family
        assert blueprint.num_weights / 1e9 == pytest.approx(PUBLISHED[names[family]][3], abs=0.05), family
        tokens = blueprint.conditioning_shapes(256, (512, 512))["prompt_embeds"][0]
        assert tokens == {"stable_diffusion_3": 333, "qwen_image_edit_plus": 512, "wan_image_to_video": 512}.get(
            family, 256
        )


def test_the_tokens_of_references_are_counted(published):
    """Three references as large as the image have, with it, as many tokens as an image of twice its sides."""
    source = published("black-forest-labs/FLUX.2-klein-base-4B")
    text = blueprint_of(source, 16)
    family = family_class(source)
    three = Blueprint(family, str(source), make_lora(family, rank=16, alpha=32), torch.bfloat16, num_sources=3)
    small, large = (256, 256), (512, 512)
    assert three.velocity(small, 1, 512, 4.0).flops == text.velocity(large, 1, 512, 4.0).flops
    training = three.velocity(small, 1, 512, 4.0, train=True)
    assert training.peak_bytes == pytest.approx(text.velocity(large, 1, 512, 4.0, train=True).peak_bytes, rel=0.01)
    latents = 128 * 16 * 16
    assert three.conditioning_bytes(512, small) == text.conditioning_bytes(512, small) + 3 * 4 * latents  # fp32


# ---- against real tensors --------------------------------------------------------------------------------------------
@pytest.mark.fast
def test_activations_are_those_of_real_tensors():
    """The peak of a fake pass is what autograd saves in a real pass of the embedded model, and what backward holds for
    a moment. The real pass, counted by the same meter, has the same peak, and the same FLOPs to the bit."""
    model, args, _ = policy_without_fsdp(trained=False)
    blueprint = blueprint_of(EMBEDDED, args.lora_rank, torch.float32, fused_norms=False)  # as on a CPU
    planned = blueprint.velocity((32, 96), 1, 16, 1.0, train=True)
    tensors = [*model.transformer.parameters(), *model.transformer.buffers()]
    known = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    def velocity():
        timesteps, _, shape = model.schedule(2, 32, 96)
        shapes = blueprint.conditioning_shapes(16, (32, 96))
        conditioning = {name: torch.zeros(1, *shape) for name, shape in shapes.items()}
        return model.predict_velocity(torch.zeros(1, *shape), timesteps[0], conditioning)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = velocity()
        kept = sum(saved.values())
        output.square().mean().backward()
    assert kept <= planned.peak_bytes <= 1.15 * kept

    model.transformer.zero_grad()
    with Meter(tensors) as meter:
        velocity().square().mean().backward()
    assert meter.flops == planned.flops > 0
    assert meter.peak_bytes == pytest.approx(planned.peak_bytes, rel=0.1)  # with the gradients


class Rows(torch.nn.Module):
    """79 blocks that are alike and a wider one; in another list 80 and 60. `before` numbers are held before them."""

    _no_split_modules = ("Sequential", "Linear")

    def __init__(self, before):
        super().__init__()
        sizes = [16] * 79 + [32]
        layers = [[torch.nn.Linear(8, size), torch.nn.GELU(), torch.nn.Linear(size, 8)] for size in sizes]
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(*block) for block in layers)
        self.singles = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=number >= 80) for number in range(140))
        self.before = before
        self.num_run = 0

    def forward(self, x):
        x = x + torch.zeros(self.before).sum()
        for block in (*self.blocks, *self.singles):
            x = x + block(x)
            self.num_run += 1
        return x


@pytest.mark.fast
@pytest.mark.parametrize(
    ("train", "before"), [(False, 1), (False, 10**5), *((True, n) for n in (1, *range(240, 2200, 80), 10**5))]
)
def test_blocks_that_are_alike_cost_alike(train, before):
    """To the byte. Where the peak of few blocks is before them, a training pass is counted whole."""
    model = Rows(before)

    def count_pass():
        model.zero_grad()
        with Meter(model.parameters()) as meter, torch.set_grad_enabled(train):
            output = model(torch.zeros(4, 8))
            if train:
                output.sum().backward()
        return Cost(meter.flops, meter.peak_bytes)

    every = count_pass()
    model.num_run = 0
    assert count_alike(model, count_pass, train) == every and every.flops > 0
    if not train or before in (1, 10**5):
        shortest = 2 + 1 + 2 + 2
        whole = 8 * shortest + 3 * 3
        assert model.num_run == (whole if not train or before == 1 else 4 * shortest + 3 + 220)
    assert len(model.blocks) == 80 and len(model.singles) == 140


def test_checkpointing_keeps_less_and_computes_more():
    blueprint = blueprint_of(EMBEDDED, 16, torch.float32)
    plain = blueprint.velocity((32, 96), 1, 16, 1.0, train=True)
    forward = blueprint.velocity((32, 96), 1, 16, 1.0)
    checkpointed = blueprint.velocity((32, 96), 1, 16, 1.0, train=True, checkpointing=True)
    assert forward.peak_bytes < checkpointed.peak_bytes < 0.6 * plain.peak_bytes
    # every block's forward pass once more, and little else is in this model
    assert plain.flops + 0.8 * forward.flops < checkpointed.flops <= plain.flops + forward.flops
    assert Blueprint.velocity(blueprint, (32, 96), 1, 16, 1.0, train=True) == plain  # it was switched off again
    assert blueprint.velocity((32, 96), 1, 16, 4.5).flops == 2 * forward.flops


@pytest.mark.fast
@pytest.mark.parametrize("rank", [16, 0])
def test_gradients_and_adam_are_those_of_the_optimizer(rank):
    """Bytes of the real gradients and moments of the embedded model, for a LoRA and for full weights."""
    model = policy_without_fsdp()[0] if rank else embedded_model()
    if not rank:
        model.transformer.requires_grad_(True)
    trained = [p for p in model.transformer.parameters() if p.requires_grad]
    for p in trained:
        p.grad = torch.zeros_like(p)
    optimizer = torch.optim.AdamW(trained)
    optimizer.step()
    moments = sum(state[name].nbytes for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))
    frozen = sum(p.nbytes for p in model.transformer.parameters() if not p.requires_grad)
    parts = by_name(needs.weight_parts(blueprint_of(EMBEDDED, rank, torch.float32), SMALL))
    assert parts["gradients, float32"].num_bytes == sum(p.grad.nbytes for p in trained)
    assert parts["Adam's two moments, float32"].num_bytes == moments
    assert parts["trained weights, float32"].num_bytes == sum(p.nbytes for p in trained)
    assert parts["frozen weights, float32"].num_bytes == frozen


@pytest.mark.fast
def test_what_more_ranks_policies_and_offloading_change():
    blueprint = blueprint_of(EMBEDDED, 0, torch.float32)

    def parts(**changes):
        return by_name(needs.weight_parts(blueprint, replace(SMALL, **changes)))

    four = parts(ranks=8, ranks_here=4, policies=("default", "old", "ema", "reference"))
    weights = 4 * blueprint.num_weights
    assert parts()["trained weights, float32"].num_bytes == weights
    for name in ("trained weights, float32", "gradients, float32", "frozen weights, float32"):
        assert four[name].num_bytes == weights / 4
    assert four["weights of old and ema, float32"].num_bytes == four["Adam's two moments, float32"].num_bytes
    offloaded = parts(train_with=("cpu_offload",))
    assert offloaded["trained weights, float32"].place == "host"
    assert offloaded["buffers of the transformer"].place == "device"
    assert parts(ranks=8, ranks_here=4, shard_ranks=2)["trained weights, float32"].num_bytes == weights / 2


@pytest.mark.fast
def test_weights_are_whole_to_sample_where_ranks_share_them_and_no_engine_samples():
    """They are whole with the adapters of all policies; the reference of a new LoRA has no adapter."""
    blueprint = blueprint_of(EMBEDDED, 16, torch.float32)
    model = embedded_model()
    add_policies(model, make_lora(type(model), rank=16, alpha=32), ["default", "ema", "reference"], seed=1)
    num_bytes = sum(p.nbytes for p in model.transformer.parameters())
    blocks, whole = "blocks as FSDP gathers them", "weights gathered to sample"
    shared = replace(SMALL, ranks=2, ranks_here=2, policies=("default", "ema", "reference"))
    two = by_name(needs.pass_parts(blueprint, shared, COSTS))
    assert two[whole].num_bytes == num_bytes + 4 * blueprint.largest_block
    assert two[whole].phases == ("rollout",) and two[blocks].phases == ("update",)
    for changes in ({"rollout": "vllm"}, {"train_with": ("gather_blocks",)}, {"train_with": ("cpu_offload",)}):
        alone = by_name(needs.pass_parts(blueprint, replace(shared, **changes), COSTS))
        assert whole not in alone and alone[blocks].phases == ("rollout", "update"), changes


@pytest.mark.fast
@pytest.mark.parametrize("sharing", [{"shard_ranks": 1}, {"ranks": 1, "ranks_here": 1}])
def test_no_frozen_weight_is_held_twice_where_a_rank_has_all_of_them(sharing):
    """What FSDP holds beside its shards is then the LoRA of the trained and the average policy, in bf16. Offloaded
    weights and full weights come a block at a time."""
    blocks, lora = "blocks as FSDP gathers them", "the LoRA as passes read it"
    w = replace(SMALL, **{"ranks": 2, "ranks_here": 2, "policies": ("default", "ema", "reference"), **sharing})
    blueprint = blueprint_of(EMBEDDED, 16)
    parts = by_name(needs.pass_parts(blueprint, w, COSTS))
    assert blocks not in parts and parts[lora].num_bytes == 2 * 2 * blueprint.num_trained
    offloaded = by_name(needs.pass_parts(blueprint, replace(w, train_with=("cpu_offload",)), COSTS))
    full = by_name(needs.pass_parts(blueprint_of(EMBEDDED, 0), w, COSTS))
    for found in (offloaded, full):
        assert lora not in found and found[blocks].num_bytes > 2 * 2 * blueprint.largest_block


@pytest.mark.fast
def test_each_rank_has_a_copy_of_the_weights_where_nine_tenths_of_its_gpu_hold_it(monkeypatch):
    """The least GPU that a copy on each of 4 ranks needs, and a byte less; full weights and offloading need shards."""
    blueprint = blueprint_of(EMBEDDED, 16, torch.float32)
    four = replace(SMALL, ranks=4, ranks_here=4)
    of_gpu = [
        part for part in needs.memory_parts(blueprint, replace(four, shard_ranks=1), COSTS) if part.place == "device"
    ]
    least = max(needs.phase_sums(of_gpu).values()) / 0.9
    choose = functools.partial(needs.choose_shard_ranks, blueprint, costs=COSTS)
    assert choose(four, gpu_bytes=least + 2) == 1
    assert choose(four, gpu_bytes=least - 2) == 0
    assert choose(replace(four, shard_ranks=2), gpu_bytes=least + 2) == 2  # somebody asked for it
    assert choose(replace(four, ranks_here=1), gpu_bytes=least + 2) == 0  # a rank alone has no one to share with
    assert choose(replace(four, train_with=("cpu_offload",)), gpu_bytes=1e15) == 0
    full = blueprint_of(EMBEDDED, 0, torch.float32)
    assert needs.choose_shard_ranks(full, four, COSTS, 1e15) == 0


@pytest.mark.fast
@pytest.mark.parametrize(("script", "largest", "smaller"), [("flow_grpo.py", 128, 16), ("dpo_offline.py", 256, 16)])
def test_a_micro_batch_of_0_is_the_largest_that_divides_a_share_and_fits(script, largest, smaller):
    """A share of 128 images, or of 256 pairs. The least GPU for 16 of them does not hold 32."""
    blueprint = blueprint_of(EMBEDDED, 16, torch.float32)
    module = importlib.import_module(script.removesuffix(".py"))
    options = vars(module.Args()) | {"micro_batch_size": 0, "rollout": "local"}
    workload = module.workload(module.Args())
    w = needs.planned_run(workload, options | {"micro_batch_size": smaller}, 4, ranks=1, ranks_per_node=1)
    least = needs.gpu_peak(blueprint, w, needs.measure(blueprint, w)) / 0.9
    choose = functools.partial(needs.choose_options, workload=workload, ranks=1, ranks_here=1)
    found = [choose(blueprint, options=options, gpu_bytes=size) for size in (1e15, least + 2, 1)]
    assert [chosen["micro_batch_size"] for chosen in found] == [largest, smaller, 1]
    given = choose(blueprint, options=options | {"micro_batch_size": 8}, gpu_bytes=1e15)
    assert given == {"shard_ranks": 0, "micro_batch_size": 8}
    # what a resumed run chose is kept, but on a number of ranks whose share it does not divide
    resumed = [choose(blueprint, options=options, gpu_bytes=1e15, saved_size=size) for size in (32, 24)]
    assert [chosen["micro_batch_size"] for chosen in resumed] == [32, largest]
    given = choose(blueprint, options=options | {"micro_batch_size": 8}, gpu_bytes=1e15, saved_size=32)
    assert given["micro_batch_size"] == 8


# ---- the sums, by hand -----------------------------------------------------------------------------------------------
@pytest.mark.fast
def test_work_and_seconds(monkeypatch):
    """Two ranks of four images, three steps, two trained, two epochs, in the first of which the reference's means are
    computed: 4 (3 x 10 + 10), 4 x 2 x 7, 8 (2 x 30 + 7). Another policy's passes may be made in both."""
    policies = ("default", "ema", "reference")
    w = replace(SMALL, ranks=2, epochs=2, policies=policies, acting_passes=1, rollout="vllm", recomputes_log_probs=True)
    expected = {"rollout": (120, 40), "old log-probs": (56, 0), "update": (536, 0), "evaluation": (2 * 10, 2 * 10)}
    assert needs.work(w, COSTS) == expected
    assert "old log-probs" not in needs.work(replace(w, rollout="local"), COSTS)
    assert needs.work(replace(w, rollout="local", max_rollouts=2), COSTS) == expected
    assert needs.work(replace(w, acting_epochs=2), COSTS)["update"].transformer == 592
    assert needs.work(replace(w, acting_passes=2), COSTS)["update"].transformer == 592
    # a step that trains on half of the images that it samples
    half = needs.work(replace(w, trained_images=4), COSTS)
    assert half["rollout"] == (120, 40) and half["update"].transformer == 268
    assert needs.work(replace(SMALL, sampled_steps=0), COSTS) == {"update": (8 * 2 * 30, 0), "evaluation": (40, 40)}
    # a FLOP a second of the transformer, and two of the VAE
    monkeypatch.setitem(plan.DEVICES, "rtx4090", Device(24, 165, 1e-12, 2e-12))
    lines = plan.work_table(w, COSTS, "rtx4090")
    found = {name: next(line for line in lines if line.startswith(f"  {name} ")) for name in ("rollout", "all")}
    assert found["rollout"].split() == ["rollout", "0.000", "700.0"]  # 120 and 40 / 2 FLOP at 0.2
    assert found["all"].split() == ["all", "0.000", "3660.0"]
    compiled = plan.work_table(replace(w, train_with=("compile",)), COSTS, "rtx4090")
    rollout = next(line for line in compiled if line.startswith("  rollout "))
    assert float(rollout.split()[-1]) == pytest.approx(120 / 0.35 + 40 / 2 / 0.2, abs=0.1)  # the VAE is not compiled


@pytest.mark.fast
def test_ranks_that_share_images_have_more_of_them_and_a_part_of_each_pass():
    """Of four ranks, groups of two: a rank has twice as many images, half of their passes, and decodes all of them."""
    blueprint = blueprint_of(EMBEDDED, 4, torch.float32)
    alone, shared = replace(SMALL, ranks=4), replace(SMALL, ranks=4, ranks_per_image=2)
    assert (alone.images_of_a_rank, shared.images_of_a_rank, shared.trained_images_of_a_rank) == (2, 4, 4)
    costs, half = needs.measure(blueprint, alone), needs.measure(blueprint, shared)
    for kind in ("sampling", "forward", "training"):
        whole = getattr(costs, kind)
        assert getattr(half, kind) == Cost(whole.flops // 2, whole.peak_bytes // 2)
    assert half.decoding == costs.decoding
    of_alone, of_shared = needs.work(alone, costs), needs.work(shared, half)
    for phase in ("rollout", "update", "evaluation"):
        assert of_shared[phase].transformer == pytest.approx(of_alone[phase].transformer)
    assert of_shared["rollout"].vae == 2 * of_alone["rollout"].vae


@pytest.mark.fast
def test_an_engine_beside_its_rank_and_on_a_gpu_of_its_own():
    """It decodes its whole batch at once where that is a few pixels, and otherwise image by image. It is pushed a LoRA,
    and answers for each of a rank's 4 images: latents of 8 x 8 x 24 at 4 times and 2 means, and 32 x 96 pixels."""
    blueprint = blueprint_of(EMBEDDED, 16, torch.float32)
    taken = "engine: sampling and decoding 8 images"
    costs = COSTS._replace(sampling=Cost(10, 1))

    def parts(**changes):
        w = replace(SMALL, rollout="vllm", rollout_batch_size=8, **changes)
        return by_name(needs.engine_parts(blueprint, w, costs))

    assert parts()[taken].num_bytes == 8 * 100
    assert parts(image_size=(1024, 1024))[taken].num_bytes == 100
    assert {part.place for part in parts().values()} == {"device", "host"}
    two = parts(engine_devices=(4, 5))
    assert {part.place for part in two.values()} == {"engine", "host"} and two[taken].num_bytes == 8 * 100
    assert by_name(plan.on_one_memory(two.values(), engine_workers=2))[taken].num_bytes == 2 * 8 * 100
    piped = plan.pipe_bytes(blueprint, replace(SMALL, ranks=2, rollout="vllm"))
    assert piped == (4 * blueprint.num_trained, 4 * (6 * 4 * 8 * 8 * 24 + 3 * 32 * 96))


# A LoRA whose rank has an engine beside it that sleeps, and full weights of two ranks with engines of two workers each;
# {part: (bytes, where, when)}, by hand. An empty "when" would be left out, as are parts of no bytes
ALL = "start encode rollout update save"
LATER = "encode rollout update save"
BY_HAND = {
    "LoRA": {
        "frozen weights, bfloat16": (2 * 1000, "device", ALL),
        "trained weights, float32": (4 * 10, "device", ALL),
        "weights of ema, float32": (4 * 10, "device", ALL),
        "Adam's two moments, float32": (2 * 4 * 10, "device", LATER),
        "buffers of the transformer": (7, "device", ALL),
        "gradients, float32": (4 * 10, "device", "update"),
        "the LoRA as passes read it": (2 * 2 * 10, "device", "encode rollout update"),
        "activations of 4 images": (4 * 500, "device", "update"),
        # latents of 80 bytes at 4 times and 3 x 2 of 8 images, and embeddings of 2 prompts
        "trajectories and embeddings": ((4 + 6) * 80 * 8 + 2 * 30, "device", "rollout update"),
        "engine: its transformer and VAE": (2 * (1000 + 10) + 3 + 50, "device", "start rollout"),
        "engine: its transformer and VAE, asleep": (2 * (1000 + 10) + 3 + 50, "host", "encode update save"),
        "engine: sampling and decoding 2 images": (2 * 100, "device", "rollout"),
        "engine: CUDA": (0.8e9, "device", ALL),
        "engine: process": (0.8e9, "host", ALL),
        "CUDA": (0.8e9, "device", ALL),
        "text encoders, in use": (400, "device", "encode"),
        "VAE, in use": (50, "device", "encode"),  # for pictures; the engine has one of its own to decode
        "text encoders and VAE, waiting": (400 + 50, "host", ALL),
        "text encoders, rounded up as pinned": (512 - 400, "host", ALL),
        "process": (0.5e9, "host", ALL),
        "the transformer's files, mapped": (2 * 1000 + 7, "node", "start"),
        # two policies, two moments and adapter/
        "a checkpoint and adapter/, being saved": (4 * 5 * 10, "node", "save"),
    },
    "full weights": {
        "frozen weights, float32": (4 * 1000 / 2, "device", LATER),
        "trained weights, float32": (4 * 1000 / 2, "device", LATER),
        "weights of ema, float32": (4 * 1000 / 2, "device", LATER),
        "Adam's two moments, float32": (2 * 4 * 1000 / 2, "device", LATER),
        "buffers of the transformer": (7, "device", ALL),
        "gradients, float32": (4 * 1000 / 2, "device", "update"),
        "gradients that ranks exchange": (2 * (4 + 4) * 200, "device", "update"),
        "blocks as FSDP gathers them": (4 * (100 + 3 * 200), "device", "rollout update"),
        "activations of 4 images": (4 * 500, "device", "update"),
        "trajectories and embeddings": ((4 + 6) * 80 * 2 + 2 * 30, "device", "rollout update"),
        "engine: its transformer and VAE": (4 * (400 + 600 / 2) + 3 + 50, "engine", ALL),
        "engine: sampling and decoding 2 images": (2 * 100, "engine", "rollout"),
        "engine: CUDA": (0.8e9, "engine", ALL),
        "engine: process": (3 * 0.8e9, "host", ALL),
        "CUDA": (0.8e9, "device", ALL),
        "text encoders, in use": (400, "device", "start"),
        "text encoders and VAE, waiting": (400 + 50, "host", ALL),
        "process": (0.5e9, "host", ALL),
        "the transformer's files, mapped": (4 * 1000 + 7, "node", "start"),
        "a checkpoint and adapter/, being saved": (4 * 1000, "node", "save"),
    },
}


@pytest.mark.fast
@pytest.mark.parametrize("trained", BY_HAND)
def test_every_part_of_memory_by_hand(trained):
    """Of a transformer of 1000 numbers, of which an engine can split 600, and whose largest block has 200."""
    is_lora = trained == "LoRA"
    blueprint = SimpleNamespace(
        is_lora=is_lora, dtype=torch.bfloat16 if is_lora else torch.float32, num_trained=10 if is_lora else 1000,
        num_weights=1000, num_linear=800, num_split=600, largest_block=200, outside_blocks=100,
        buffer_bytes=7, fp32_buffer_bytes=3, vae_bytes=50, num_sources=int(is_lora),
        text_encoder_bytes=400, num_encoder_linear=300, pinned_encoder_bytes=512,
        latent_shape=lambda size, num_frames: (4, 5), conditioning_bytes=lambda length, size, num_frames: 30,
        has_two_transformers=False,
    )  # fmt: skip
    w = replace(SMALL, policies=("default", "ema", "reference"), rollout="vllm", rollout_batch_size=2)
    w = replace(w, num_prompts=2)
    if is_lora:
        w = replace(w, dtype="bfloat16", engine_with=("sleep",))
    else:
        w = replace(w, ranks=4, ranks_here=2, engine_devices=(2, 3, 4, 5), prompt_cache="folder")
    found = {
        part.name: (part.num_bytes, part.place, " ".join(part.phases))
        for part in needs.memory_parts(blueprint, w, COSTS)
        if part.num_bytes and part.phases
    }
    assert found == BY_HAND[trained]
    # several ranks may need both of two transformers in a pass, for which each passes a row more
    blueprint.has_two_transformers = True
    n = w.micro_batch_images
    for part in needs.memory_parts(blueprint, w, COSTS):
        if part.num_bytes and part.phases:
            rows = n + 1 if part.name.startswith("activations of ") and w.ranks > 1 else n
            assert part.num_bytes * n == found[part.name][0] * rows, part.name


@pytest.mark.fast
def test_the_line_of_what_does_not_fit_names_its_largest_part():
    weights = needs.Part("weights", 6e9, needs.PHASES, "device", "use more ranks")
    activations = needs.Part("activations", 3e9, ("update",), "device", "lower --micro_batch_size")
    encoders = needs.Part("encoders", 2e9, ("encode",), "device", "pass --prompt_cache")
    memory = plan.Memory("a table", "a GPU", [weights, activations, encoders], 10)
    assert plan.check_fits(memory, "a100-40") == "peak 9.00 GB of the 10 GB of a GPU, in the phase update"
    line = "a100-40: .* 9.0 GB .* 9.9 GB .* update; .* weights, 6.0 GB: use more ranks"
    with pytest.raises(ValueError, match=f"^{line}$"):
        plan.check_fits(memory._replace(limit_gb=9.9), "a100-40")
    memory.parts[1] = activations._replace(num_bytes=7e9)
    with pytest.raises(ValueError, match="activations, 7.0 GB: lower --micro_batch_size$"):
        plan.check_fits(memory, "a100-40")


@pytest.mark.fast
def test_small_plans_are_printed_in_small_units():
    weights = needs.Part("weights", 9.2e6, ("update",), "device", "")
    whole = plan.Memory("a table", "a GPU", [weights, weights._replace(num_bytes=1e9)], 80)
    table = plan.memory_table(whole)
    assert table[0].startswith("MB of a table ") and table[1].split() == ["weights", "9.2"]
    assert table[-1].split() == ["all", "0.0", "0.0", "0.0", "1009.2", "0.0"]
    large = plan.memory_table(whole._replace(parts=[weights._replace(num_bytes=12.344e9)]))
    assert large[0].startswith("GB of a table ") and large[1].split() == ["weights", "12.34"]
    assert [plan.size(num_bytes) for num_bytes in (4.4e5, 9.9e7, 1e8)] == ["0.4 MB", "99.0 MB", "0.10 GB"]


@pytest.mark.fast
def test_the_sum_of_a_nodes_memory_is_held_against_this_machine(monkeypatch):
    """On a CPU it is the limit, to the last byte. A plan for GPUs may be made elsewhere, so there it is said."""
    monkeypatch.setattr(plan.os, "sysconf", lambda name: {"SC_PAGE_SIZE": 1000, "SC_PHYS_PAGES": 64_000_000}[name])
    parts = [
        needs.Part("encoders", 8e9, ("save",), "host", "fewer"),
        needs.Part("files", 1e9, ("save",), "node", "more"),
    ]
    monkeypatch.setattr(plan, "memory_parts", lambda blueprint, w, costs: parts)
    eight = replace(SMALL, ranks=8, ranks_here=8)
    (node,) = plan.memories(None, eight, COSTS, "h100-80")
    said = (
        "peak 65.00 GB of a node's memory, in the phase save; this machine has 64 GB: too little, if it is such a node"
    )
    assert plan.check_fits(node, "h100-80") == said
    (node,) = plan.memories(None, replace(eight, ranks_here=7), COSTS, "h100-80")
    assert plan.check_fits(node, "h100-80") == "peak 57.00 GB of a node's memory, in the phase save"
    (node,) = plan.memories(None, replace(eight, ranks_here=7), COSTS, "cpu")
    assert plan.check_fits(node, "cpu") == "peak 57.00 GB of the 64 GB of this machine, in the phase save"
    (node,) = plan.memories(None, eight, COSTS, "cpu")
    with pytest.raises(ValueError, match=" 65.0 GB .* 64 GB .* save; "):
        plan.check_fits(node, "cpu")


@pytest.mark.fast
@pytest.mark.parametrize("read", ["tolist", "nonzero"])
def test_a_pass_that_reads_numbers_has_no_plan(read, monkeypatch):
    """As Lumina 2's, which reads how long prompts are from their mask."""
    blueprint = Blueprint(family_class(EMBEDDED), str(EMBEDDED), None, torch.float32)
    monkeypatch.setattr(
        blueprint.model, "forward", lambda x, t, conditioning: getattr(conditioning["prompt_embeds"], read)()
    )
    with pytest.raises(RunError, match="^StableDiffusion3: "):
        blueprint.velocity((32, 96), 1, 16, 1.0)


@pytest.mark.fast
def test_text_encoders_are_on_the_gpu_when_prompts_are_encoded():
    """In each rollout, or once at the start, beside the weights of an engine, which loads none itself."""
    blueprint = blueprint_of(EMBEDDED, 16, torch.float32)
    parts = by_name(needs.waiting_parts(blueprint, SMALL))
    assert parts["text encoders, in use"].phases == ("encode",)
    cached = replace(SMALL, prompt_cache="folder", rollout="vllm")
    found = by_name(needs.memory_parts(blueprint, cached, COSTS))
    assert found["text encoders, in use"].phases == ("start",)
    encoders = {
        name: part.num_bytes for name, part in found.items() if "text encoder" in name and part.place == "device"
    }
    assert encoders == {"text encoders, in use": blueprint.text_encoder_bytes}
    assert found["frozen weights, float32"].phases == needs.PHASES[1:]  # the transformer comes when they have left
    on_host = by_name(needs.weight_parts(blueprint, replace(cached, train_with=("cpu_offload",))))
    assert on_host["frozen weights, float32"].phases == needs.PHASES


@pytest.mark.fast
def test_a_vae_in_bf16_takes_half_the_memory_and_the_rate_of_bf16():
    whole = blueprint_of(EMBEDDED, 16, torch.float32)
    lora = make_lora(family_class(EMBEDDED), rank=16, alpha=32)
    rounded = Blueprint(family_class(EMBEDDED), str(EMBEDDED), lora, torch.float32, vae_dtype=torch.bfloat16)
    assert rounded.vae_bytes == whole.vae_bytes / 2
    cost, of_rounded = whole.decoding(2, (32, 96), 1), rounded.decoding(2, (32, 96), 1)
    assert of_rounded.flops == cost.flops and of_rounded.peak_bytes < 0.8 * cost.peak_bytes
    costs = COSTS._replace(decoding=Cost(flops=int(1e18), peak_bytes=1))
    seconds = []
    for dtype in ("float32", "bfloat16"):
        rows = plan.work_table(replace(SMALL, vae_dtype=dtype), costs, "h100-80")
        seconds += [float(row.split()[-1]) for row in rows if row.startswith("  rollout ")]
    assert seconds[0] / seconds[1] == pytest.approx(989 / 494, rel=1e-3)


@pytest.mark.fast
def test_pinned_encoders_take_a_power_of_two_of_bytes_for_each_tensor():
    """They wait in pinned memory where they come to a GPU for each rollout, and not on a CPU."""
    blueprint = blueprint_of(EMBEDDED, 16, torch.float32)
    name = "text encoders, rounded up as pinned"
    held = 0
    pipe = embedded_model().pipe
    for encoder in (pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3):
        held += sum(2 ** math.ceil(math.log2(t.nbytes)) for t in (*encoder.parameters(), *encoder.buffers()))
    parts = needs.waiting_parts(blueprint, SMALL)
    assert blueprint.pinned_encoder_bytes == held
    assert by_name(parts)[name].num_bytes == pytest.approx(held - blueprint.text_encoder_bytes)
    assert by_name(parts)[name].place == "host" and name not in by_name(plan.on_one_memory(parts, engine_workers=1))
    assert name not in by_name(needs.waiting_parts(blueprint, replace(SMALL, prompt_cache="folder")))


@pytest.mark.fast
def test_adapter_is_gathered_while_the_checkpoint_is_in_memory():
    """Three policies and Adam's two moments of a LoRA, and the evaluated policy once more; full weights stay in shards,
    and rank 0 gathers one policy in the dtype."""
    w = replace(SMALL, policies=("default", "old", "ema", "reference"))
    name = "a checkpoint and adapter/, being saved"
    lora = blueprint_of(EMBEDDED, 16, torch.bfloat16)
    assert by_name(needs.waiting_parts(lora, w))[name].num_bytes == 4 * lora.num_trained * (3 + 2 + 1)
    full = blueprint_of(EMBEDDED, 0, torch.bfloat16)
    assert by_name(needs.waiting_parts(full, w))[name].num_bytes == 2 * full.num_weights


# ---- scripts ---------------------------------------------------------------------------------------------------------
GRPO = {"sampled_steps": 3, "trained_steps": 1, "policies": ("default",), "acting_epochs": 1, "num_images": 256}
NFT = GRPO | {"trained_steps": 3, "policies": ("default", "old")}
DPO = {"sampled_steps": 0, "trained_steps": 1, "policies": ("default", "reference"), "num_images": 512}
DPO |= {"micro_batch_images": 128, "guidance_scale": 4.0, "trained_guidance": 1.0, "acting_passes": 1}
CHANGED = [
    ("diffusion_nft.py", {"kl_coef": 0.0}, NFT),
    ("dpo_offline.py", {"guidance_scale": 4.0}, DPO),
    ("flow_grpo.py", {"sde_window_size": 0, "guidance_scale": 4.0}, {"trained_steps": 2, "trained_guidance": 4.0}),
    ("flow_grpo.py", {"kl_coef": 0.1, "ema_decay": 0.9}, {"policies": ("default", "ema", "reference")}),
    ("flow_grpo.py", {"epochs_per_rollout": 3}, {"acting_epochs": 1}),  # the sampled steps stay
    ("diffusion_nft.py", {"epochs_per_rollout": 3}, {"acting_epochs": 3}),  # noise is drawn again in every epoch
    ("diffusion_nft.py", {"timestep_fraction": 0.1, "num_inference_steps": 5}, {"trained_steps": 1}),
    ("contrib/v_grpo.py", {"epochs_per_rollout": 3}, GRPO | {"trained_steps": 4, "acting_passes": 1}),
    ("contrib/ram.py", {}, NFT | {"policies": ("default", "old", "reference"), "acting_passes": 2}),
    ("contrib/crd.py", {"kl_coef": 0.0}, {"policies": ("default", "old", "sampling"), "acting_passes": 1}),
    ("contrib/online_dpo.py", {"num_prompts": 8}, {"num_images": 8 * 8, "num_trained_images": 16}),
    ("contrib/diffusion_opd.py", {"teachers": ("a=x", "b=y")}, {"frozen_adapters": 2, "acting_passes": 2}),
    (
        "contrib/dmd2.py",
        {"fake_updates": 3, "ema_decay": 0.9},
        # of an image one pass by the fake score and two of the guided teacher
        {"trained_steps": 4, "sampled_steps": 2, "policies": ("default", "ema", "fake", "reference")}
        | {"trained_policies": 2, "acting_passes": 0.75},
    ),
    ("contrib/dmd2.py", {"fake_updates": 3, "guidance_scale": 4.0}, {"acting_passes": 0.5}),  # two branches in each
    (
        "contrib/tdm_r1.py",
        {"fake_updates": 2, "surrogate_updates": 3, "surrogate_guidance": 1.0, "ema_decay": 0.9},
        # of an image one pass by the fake score, two of the guided teacher, 2 + 3 of it alone, one by the surrogate
        {"num_images": 64, "trained_steps": 6, "sampled_steps": 2, "acting_passes": 1.5, "trained_policies": 3}
        | {"policies": ("default", "ema", "fake", "surrogate", "reference")},
    ),
    ("contrib/draft.py", {"gradient_steps": 2}, {"sampled_steps": 1, "trained_steps": 2, "chained_steps": 2}),
    ("contrib/draft.py", {"method": "refl", "refl_range": (0, 2)}, {"sampled_steps": 1, "policies": ("default",)}),
    (
        "contrib/sft.py",
        {"guidance_scale": 4.0, "ema_decay": 0.9},
        {"sampled_steps": 0, "trained_steps": 1, "acting_passes": 0, "policies": ("default", "ema"), "num_images": 64}
        | {"micro_batch_images": 64, "guidance_scale": 4.0, "trained_guidance": 1.0},
    ),
]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("script", "changes", "expected"), [*((script, {"kl_coef": 0.0}, GRPO) for script in SCRIPTS[:3]), *CHANGED]
)
def test_a_script_says_what_it_does(script, changes, expected):
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    args = replace(module.Args(), **changes)
    w = needs.planned_run(module.workload(args), vars(args), num_eval_prompts=100, ranks=2, ranks_per_node=1)
    assert {name: getattr(w, name) for name in expected} == expected
    assert (w.ranks, w.shards, w.num_eval_images) == (2, 1, 100)


@pytest.mark.fast
def test_an_evaluation_is_counted_by_its_own_guidance():
    """Trained without guidance and evaluated with it, each sampling step of an evaluation passes twice the rows."""
    blueprint = blueprint_of(EMBEDDED, 16, torch.float32)
    guided = replace(SMALL, eval_guidance_scale=4.5)
    costs, plain = needs.measure(blueprint, guided), needs.measure(blueprint, SMALL)
    throughout = needs.measure(blueprint, replace(SMALL, guidance_scale=4.5))
    done, without, with_it = needs.work(guided, costs), needs.work(SMALL, plain), needs.work(SMALL, throughout)
    assert done["rollout"] == without["rollout"] and done["evaluation"] == with_it["evaluation"]
    assert done["evaluation"].transformer > 1.9 * without["evaluation"].transformer
    larger = COSTS._replace(evaluation=Cost(flops=20, peak_bytes=700))
    sampling = {"local": "sampling and decoding 4 images", "vllm": "engine: sampling and decoding 8 images"}
    for rollout, name in sampling.items():
        parts = by_name(needs.memory_parts(blueprint, replace(guided, rollout=rollout), larger))
        assert parts[name].num_bytes == int(name.split()[-2]) * 700


@pytest.mark.fast
def test_a_gradient_through_the_image_holds_every_step_and_the_vae():
    """Twice the activations for two steps; the VAE, which is used in the update, with what its gradient keeps."""
    blueprint = blueprint_of(EMBEDDED, 16, torch.float32)
    one, two = (replace(SMALL, chained_steps=steps) for steps in (1, 2))
    costs = needs.measure(blueprint, one)
    parts, of_two, plain = (by_name(needs.memory_parts(blueprint, w, costs)) for w in (one, two, SMALL))
    activations = f"activations of {SMALL.micro_batch_images} images"
    assert of_two[activations].num_bytes == 2 * parts[activations].num_bytes == 2 * plain[activations].num_bytes
    assert parts["VAE, in use"].phases == ("rollout", "update") and plain["VAE, in use"].phases == ("rollout",)
    decoding = blueprint.decoding(SMALL.micro_batch_images, (32, 96), 1)
    assert parts["decoding with a gradient"].num_bytes == costs.trained_decoding.peak_bytes > 2 * decoding.peak_bytes
    # forward, forward again, and a backward pass of the activations alone: the VAE's weights are frozen
    assert 2.9 * decoding.flops < costs.trained_decoding.flops < 3.1 * decoding.flops
    assert needs.measure(blueprint, SMALL).trained_decoding == Cost(0, 0)
    assert needs.work(one, costs)["rollout"].vae == 0 < needs.work(one, costs)["update"].vae


@pytest.fixture
def fork(tmp_path, monkeypatch):
    """fork(*options): plan a script outside of the project, in a folder with a run of its name. Returns the line of an
    error, or None."""
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")  # so that they are restored: the tool sets them
    (tmp_path / "runs" / "flow_grpo").mkdir(parents=True)
    (tmp_path / "runs" / "flow_grpo" / "metrics.jsonl").write_text("{}")
    (tmp_path / "fork.py").write_text((ROOT / "flow_grpo.py").read_text())

    def call(*options, script="fork.py", device="h100-80"):
        try:
            plan.main([device, script, *map(str, options)])
        except SystemExit as error:
            assert "\n" not in error.code
            return error.code.removeprefix("tools.plan: error: ")
        return None

    return call


def test_a_run_is_planned_by_the_options_of_its_checkpoint(fork, tmp_path, monkeypatch):
    """Which its script wrote, and tools.plan names for it."""
    (tmp_path / "runs" / "flow_grpo" / "metrics.jsonl").unlink()
    config = vars(flow_grpo.Args(rollout="local", group_size=4, lora_target_modules=("nowhere",)))
    monkeypatch.setattr("sys.argv", ["fork.py"])
    save_checkpoint(tmp_path / "runs" / "flow_grpo", 1, good_state() | {"args": config}, keep=1)
    monkeypatch.setattr("sys.argv", ["tools/plan.py"])
    line = fork("--resume", "latest")
    assert line.startswith("--lora_target_modules nowhere: SD3Transformer2DModel ")


def test_a_fork_is_planned_and_nothing_loads(fork, tmp_path, capfd):
    (tmp_path / "mine.py").write_text("raise SystemExit")  # which would end it if it were imported
    rewards = ["--eval_reward", "clip_score", "mine.py:mine"]
    assert fork("--rollout", "local", "--ranks", 4, "--ranks_per_node", 2, *rewards) is None
    shown = capfd.readouterr()
    assert "runs/" not in shown.err  # no run begins
    lines = shown.out.splitlines()
    assert lines[0] == "not counted: the networks of clip_score, whose sizes docs/rewards.md has"
    assert lines[1] == "not counted: whatever mine.py:mine loads"
    assert lines[2].endswith(" 32")
    # a LoRA of rank 16 on 62 matrices, its moments; nothing is cached
    assert re.fullmatch(r"disk: checkpoints 2 x \d\.\d MB, adapter/ and best_adapter/ \d\.\d MB", lines[3])
    assert lines[4].startswith("MB of each of 4 GPUs, h100-80") and lines[-1].startswith("peak ")
    for words in ("  activations of 32 images ", "MB of a node's memory, 2 ranks"):
        assert any(line.startswith(words) for line in lines), words
    assert not any("engine" in line for line in lines)
    assert fork("--rollout", "local", "--ranks", 4, "--ranks_per_node", 2, "--shard_ranks", 2) is None
    lines = capfd.readouterr().out.splitlines()
    assert re.search(" 2 .* 32$", lines[0])
    assert any(line.startswith("  weights gathered to sample") for line in lines)


@pytest.mark.parametrize(("family", "least"), [("flux2_klein", 0), ("qwen_image_edit_plus", 1)])
def test_the_first_record_says_how_many_pictures_a_plan_counts(family, least, fork, tmp_path, monkeypatch):
    """At least as many as the family needs. With --pairs the held-out prompts say it: files have equally many."""
    model = make_checkpoint(family, tmp_path / "model")
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    counted = []
    monkeypatch.setattr(plan, "report", lambda blueprint, *_: counted.append(blueprint.num_sources))
    for count in (0, 2):
        record = {"prompt": "a sign"} | ({"image": ["a.png"] * count} if count else {})
        (tmp_path / f"{count}.jsonl").write_text(json.dumps(record) + "\n")
    options = ["--model", model, "--max_sequence_length", 32]
    assert fork(*options, "--train_prompts", "0.jsonl", device="cpu") is None
    assert fork(*options, "--train_prompts", "2.jsonl", device="cpu") is None
    of_pairs = ["--pairs", "no_such.jsonl", "--eval_prompts", "2.jsonl"]
    assert fork(*options, *of_pairs, script=str(ROOT / "dpo_offline.py"), device="cpu") is None
    assert counted == [least, 2, 2]
    (tmp_path / "a.png").unlink()
    line = fork(*options, "--train_prompts", "2.jsonl", device="cpu")
    assert line.startswith('2.jsonl:1: "image": a.png: ')


@pytest.mark.fast
def test_a_run_on_gpus_counts_the_pictures_of_its_records(one_rank, monkeypatch):
    counted = []
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (8e10, 8e10))
    monkeypatch.setattr(needs, "Blueprint", lambda *given: counted.append(given[4]))
    monkeypatch.setattr(needs, "choose_options", lambda *given, **more: {"shard_ranks": 0, "micro_batch_size": 4})
    options = {"model": "klein", "dtype": "bfloat16", "vae_dtype": "float32", "shard_ranks": 0, "micro_batch_size": 0}
    for record in ({"image": ["a.png", "b.png"]}, {}):
        chosen = needs.fit_to_gpus(Family, None, PromptSet(["a sign"], [record]), None, options, SMALL)
        assert chosen["micro_batch_size"] == 4
    assert counted == [2, 0]


@pytest.mark.fast
def test_a_run_fits_beside_what_its_gpus_hold_already(one_rank, monkeypatch):
    """Networks of rewards, or a judge's server, on the GPU of any rank. CUDA's own memory is in the plan."""
    given = []
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70e9, 80e9))
    monkeypatch.setattr(needs, "Blueprint", lambda *given: None)

    def choose_options(*args, **more):
        given.append(args[-1])
        return {"shard_ranks": 0, "micro_batch_size": 1}

    monkeypatch.setattr(needs, "choose_options", choose_options)
    monkeypatch.setattr(needs, "gather_objects", lambda mine: [mine, 60e9 if isinstance(mine, float) else mine])
    options = {"model": "sd", "dtype": "bfloat16", "vae_dtype": "float32", "shard_ranks": 0, "micro_batch_size": 0}
    prompts = PromptSet(["a sign"], [{}])
    needs.fit_to_gpus(Family, None, prompts, None, options, SMALL)
    monkeypatch.setattr(needs, "gather_objects", lambda mine: [mine])
    needs.fit_to_gpus(Family, None, prompts, None, options, SMALL)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (80e9 - needs.CUDA_PROCESS / 2, 80e9))
    needs.fit_to_gpus(Family, None, prompts, None, options, SMALL)
    assert given == [60e9, 70e9 + needs.CUDA_PROCESS, 80e9]


@pytest.mark.fast
def test_the_disk_of_a_full_model_and_of_a_cache_by_hand(tmp_path):
    """Weights and two moments in fp32, an average; adapters in bf16. 3 held-out prompts, the empty one, 8 drawn."""
    blueprint = blueprint_of(EMBEDDED, 0, torch.bfloat16)
    w = replace(SMALL, policies=("default", "ema"), prompt_cache="kept", num_prompts=4, max_sequence_length=16)
    options = {"keep_checkpoints": 3, "num_steps": 2, "train_prompts": ROOT / "assets" / "train_prompts.txt"}
    options |= {"train_shares": (), "shuffle": True, "seed": 1}
    checkpoint = 4 * blueprint.num_weights * 4 / 1e6
    adapter = 2 * blueprint.num_weights / 1e6
    cached = 12 * blueprint.conditioning_bytes(16, (32, 96)) / 1e6
    expected = f"disk: checkpoints 3 x {checkpoint:.1f} MB, adapter/ and best_adapter/ {2 * adapter:.1f} MB, "
    assert plan.disk_line(blueprint, w, options, 3) == expected + f"kept at most {cached:.1f} MB for 12 prompts"
    (tmp_path / "two.txt").write_text("a sign\na mug\n")
    files = {"train_prompts": (options["train_prompts"], tmp_path / "two.txt"), "train_shares": (1, 1)}
    assert plan.disk_line(blueprint, w, options | files, 3).endswith("for 10 prompts")  # 4 and 2 are drawn
    line = plan.disk_line(blueprint, replace(w, drawn_prompts=0), options, 3)
    assert line.endswith("MB for each prompt of the pairs")


def test_what_cannot_be_planned_ends_with_a_line(fork, tmp_path, monkeypatch):
    monkeypatch.setitem(plan.DEVICES, "rtx4090", Device(0.5, 165, 82.6, 82.6))
    line = fork("--rollout", "local", device="rtx4090")
    assert line.startswith("rtx4090: ") and " 0.5 GB " in line
    assert fork("--ranks", 3, "--ranks_per_node", 2).startswith("--ranks 3: ")
    assert fork("--ranks", 3).startswith("--num_prompts x --group_size = 256 ")  # by its check
    assert fork(script="no_such.py").startswith("no_such.py: ")
    assert fork("--reward", "unknown").startswith("--reward unknown: unknown")
    line = fork("--rollout", "local", "--lora_target_modules", "to_q", "nowhere", device="cpu")
    assert line.startswith("--lora_target_modules nowhere: SD3Transformer2DModel ")
    assert fork("--micro_batch_size", 0, device="cpu").startswith("--micro_batch_size 0: ")
    (tmp_path / "fork.py").write_text("Args = 1\n")
    assert fork().startswith("fork.py: has no check")
    (tmp_path / "fork.py").write_text("Args = check = 1\n")
    assert fork().startswith("fork.py: has no workload")


@pytest.mark.fast
@pytest.mark.parametrize("status", [0, 3])
def test_the_exit_status_of_a_recipe_is_that_of_its_plan(status, tmp_path):
    (tmp_path / "recipe.sh").write_text(f"exit {status}\n")
    with pytest.raises(SystemExit) as ended:
        plan.main(["h100-80", "recipe.sh"])
    assert ended.value.code == status


# ---- recipes ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("number", range(len(presets())))
def test_a_preset_fits(number, published, tmp_path, monkeypatch):
    """By its script's own parser and checks, its GPUs have the memory, and a tenth more than it needs.

    A model that may take a picture is given one.
    """
    ranks, script, device, options = presets()[number]
    monkeypatch.chdir(tmp_path)  # it may not depend on what lies in the checkout
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    module = plan.load_script(str(ROOT / script))
    args = module.check(module.parse_args(module.Args, "", options))
    folder = published(args.model)
    least, most = family_class(folder).num_sources
    blueprint = blueprint_of(folder, args.lora_rank, num_sources=None if min(1, most) == least else 1)
    w = needs.planned_run(module.workload(args), vars(args), num_eval_prompts=256, ranks=ranks, ranks_per_node=ranks)
    costs = needs.measure(blueprint, w)
    w = replace(w, shard_ranks=needs.choose_shard_ranks(blueprint, w, costs, plan.DEVICES[device].memory_gb * needs.GB))
    gpu = plan.memories(blueprint, w, costs, device)[0]
    print(gpu.peak_gb)
    assert gpu.owner == "a GPU" and gpu.peak_gb < 0.9 * gpu.limit_gb
