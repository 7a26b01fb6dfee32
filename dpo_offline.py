"""Offline DPO (Diffusion-DPO, arXiv 2311.12908v1) for flow matching: preference pairs, the whole algorithm in one file.

One training step, by the paper's equations; x_s = (1 - s) x0 + s noise, v = noise - x0:
  1. A pair says which of two images of a prompt is preferred (Bradley-Terry model, eq. 3). Pairs are given, or made of
     the model's own best and worst image: `read_pairs`, `make_pairs`.
  2. Latents and prompts are encoded once, whatever the number of epochs (no equation): `encode_pairs`.
  3. Both images of a pair are noised alike, as in the paper's code (x_t of eq. 14): `draw_training_noise`.
  4. An error of the velocity stands for minus the log-prob of an image (eq. 13, 14): `flow_matching_errors`.
  5. The loss raises the chosen image's log-prob over the rejected one's, relative to the reference, the model before
     training (eq. 14), as a mean over pairs: `dpo_loss`, `update`.

    torchrun --standalone dpo_offline.py                            # makes pairs with the embedded model, then trains
    torchrun --standalone dpo_offline.py --pairs pairs.jsonl        # {"prompt", "chosen", "rejected"} of your own
    torchrun --standalone --nproc_per_node 2 dpo_offline.py         # the same pairs, shared by two ranks

Where it departs from the paper: the error is flow matching's, a mean over elements, in place of the noise prediction's;
s is the sigmoid of a standard normal, in place of a uniform timestep.
"""

# ==== 1 ARGS ==========================================================================================================
import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

# common before torch and diffusers: it repairs torchvision next to a CPU torch
from common import checkpoints
from common.bounds import Bound, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from common.data import ParquetPairs, PromptSet, open_image, read_pairs, read_prompts
from common.distributed import end_distributed, gather_objects, mean_over_ranks, on_rank_0, setup_distributed
from common.errors import RunError, one_line
from common.failures import best_and_worst
from common.files import atomic_file, writing
from common.models import check_model, compile_block, find_family, load_model, on_device
from common.noise import draw_noise, image_seed
from common.options import SharedArgs, check_options, parse_args, recorded
from common.plan import show_plan
from common.policy import acting, add_policies, follow, gathered, make_lora
from common.policy_state import load_optimizer_state, load_policy_states, optimizer_state, policy_states
from common.prompt_cache import cache_prompts, hash_bits
from common.rewards import eval_metrics, load_eval_rewards, load_rewards, offload_rewards, sample_records, score_images
from common.rng import restore_rng_states, rng_states, set_seed
from common.rollout import RolloutRequest, Trajectories
from common.run import RunLog, create_run_folder, save_if_best, save_policy, save_samples
from common.sampler import GroupSampler, fit_micro_batch, share_eval_images, share_of_rank
from common.sde import sde_step
from common.sharding import shard_mesh
from common.stops import catch_stop_signals
from common.watch import watch_metrics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

MAX_SKIPPED = 3  # optimizer steps in a row without a finite gradient before the run stops
ADAM_EPS = 1e-15  # small, because gradients of a mean over all latent elements are (5e-9 RMS has been seen)


@dataclass
class Args(SharedArgs):
    # ---- run
    name: str = "dpo_offline"
    """everything is written to runs/<name>, which must not hold a run yet (or see resume)"""

    # ---- data
    pairs: str | None = None
    """.jsonl of {"prompt", "chosen", "rejected"} (image files, relative to it; "chosen_score" and "rejected_score" are
    checked where given), a .parquet of pick-a-pic's, or a folder with a pairs.jsonl or .parquet files; None: pairs are
    made from train_prompts, else unused"""
    cache: str = "cache"
    """folder of encoded pairs, kept between runs and seen by all ranks; a changed model or image is encoded anew"""
    num_pair_prompts: PositiveInt = 512
    """without --pairs: prompts to make pairs for"""
    group_size: Annotated[int, Bound(at_least=2)] = 8
    """without --pairs: images per prompt, of which the best and the worst become the pair"""

    # ---- rollout
    guidance_scale: Annotated[float, Bound(at_least=1)] = 1.0
    """classifier-free guidance of the images sampled for pairs and evaluation; 1 is none. Training is without"""
    num_inference_steps: PositiveInt = 3
    """sampling steps of the images that pairs are made of"""

    # ---- algorithm
    dpo_beta: PositiveFloat = 100.0
    """weight of the errors' differences in the logit: larger stays closer to the reference (paper: 2000 and more)"""

    # ---- optimization
    num_steps: NonNegativeInt = 40
    """optimizer steps of the run"""
    num_pairs: PositiveInt = 64
    """pairs per optimizer step, over all ranks"""
    micro_batch_size: PositiveInt = 64
    """pairs per forward and backward pass on a rank, and images per sampling batch; lowered to what a rank has"""
    learning_rate: NonNegativeFloat = 1e-3
    """learning rate of AdamW"""


# ==== 2 SETUP =========================================================================================================
class Inputs(NamedTuple):
    """What `check_args` makes of the arguments before any model loads."""

    family: type  # a class of common/models
    rewards: dict  # {name: function}
    eval_rewards: dict  # those, and behind them those of --eval_reward
    train_set: PromptSet
    eval_set: PromptSet
    lora: tuple | None  # make_lora's; None: full weights
    checkpoint: Path | None  # to go on from
    pairs: list | ParquetPairs | None  # (prompt, chosen, rejected) each; None: to be made


def check_args(args):
    """Refuse what cannot work before any model loads. Returns the run's Inputs."""
    check_options(args)
    args.micro_batch_size = fit_micro_batch(args.num_pairs, "--num_pairs", 1, args.micro_batch_size)

    rewards = load_rewards(args.reward, args.reward_weights, args.num_frames, load=not args.plan)
    eval_rewards = load_eval_rewards(args.eval_reward, rewards, args.num_frames, load=not args.plan)
    pairs = read_pairs(args.pairs) if args.pairs else None
    train_set = PromptSet([], []) if pairs else read_prompts(args.train_prompts, rewards)
    eval_set = read_prompts(args.eval_prompts, eval_rewards, args.max_prompts)
    checkpoint = checkpoints.open_run(Path("runs") / args.name, args.resume, args.eval_only)
    # what imports diffusers and peft, which takes seconds, comes last
    family = find_family(args.model)
    check_model(family, args.model, *args.image_size, args.num_frames, args.guidance_scale)
    if family.encode_images is None:
        raise ValueError(f"--model {args.model}: makes videos, and dpo_offline.py takes pairs of images")
    targets = args.lora_target_modules or family.lora_target_modules
    lora = make_lora(args.lora_path, args.lora_rank, args.lora_alpha, targets, args.lora_exclude_modules)
    checkpoints.check_policy(checkpoint, lora)
    return Inputs(family, rewards, eval_rewards, train_set, eval_set, lora=lora, checkpoint=checkpoint, pairs=pairs)


# ==== 3 DATA ==========================================================================================================
def make_request(args, model, prompts, prompt_index, seeds, *, num_inference_steps=None):
    """Ask for B ODE images of `prompts`, each encoded once: prompt_index (B,) says which one, seeds (B) its noise."""
    num_inference_steps = num_inference_steps or args.num_inference_steps
    height, width = args.image_size
    timesteps, sigmas, latent_shape = model.schedule(num_inference_steps, height, width)  # (T,), (T + 1,), (C, h, w)
    return RolloutRequest(
        conditioning=model.encode_prompts(prompts, args.max_sequence_length),
        negative_conditioning=model.encode_negative(args.guidance_scale, args.max_sequence_length),
        prompt_index=prompt_index,
        seeds=seeds,
        timesteps=timesteps,
        sigmas=sigmas,
        latent_shape=latent_shape,
        sde_steps=(),
        sde_type="sde",
        noise_level=0.0,
        guidance_scale=args.guidance_scale,
        height=height,
        width=width,
    )


def make_pairs(args, model, inputs, folder):
    """Sample group_size images for each of the first num_pair_prompts prompts and write best and worst as a pair.

    Ranks share the prompts; prompts whose images all score the same make no pair. Returns the path of pairs.jsonl.

    Raises:
        RunError: the images of every prompt score the same, or have no scores.
    """
    num_prompts = min(args.num_pair_prompts, len(inputs.train_set))
    (folder / "pairs").mkdir(parents=True, exist_ok=True)
    records = {}  # by the prompt's row
    num_failed = 0  # images that a reward failed on
    for row in share_of_rank(num_prompts):
        record, failed = make_pair(args, model, inputs, folder, row)
        num_failed += failed
        if record is not None:
            records[row] = record
    offload_rewards(inputs.rewards)  # networks of rewards leave the GPU to the training, if asked
    by_row = {row: record for of_rank in gather_objects(records) for row, record in of_rank.items()}
    num_failed = sum(gather_objects(num_failed))
    told = f"; a reward failed on {num_failed} of their images" if num_failed else ""
    if not by_row:
        raise RunError(f"--num_pair_prompts {args.num_pair_prompts}: the images of every prompt score the same{told}")
    if on_rank_0():
        print(f"{len(by_row)} pairs of {num_prompts} prompts{told}")
        with atomic_file(folder / "pairs.jsonl") as temporary:
            temporary.write_text("".join(json.dumps(by_row[row]) + "\n" for row in sorted(by_row)))
    dist.barrier()  # before other ranks read the file
    return folder / "pairs.jsonl"


def make_pair(args, model, inputs, folder, row):
    """The record of a pair of train_set's prompt `row`, its images written, and how many images a reward failed on.

    No record, None, where all that have scores score the same, and for a prompt of another rank, which is sampled only
    to keep the ranks together.
    """
    prompt = inputs.train_set.prompts[row]
    seeds = [image_seed(args.seed, "pairs", row * args.group_size + i) for i in range(args.group_size)]
    request = make_request(args, model, [prompt], torch.zeros(args.group_size, dtype=torch.long), seeds)
    images = sample(args, model, request).images
    if row % dist.get_world_size() != dist.get_rank():
        return None, 0
    prompts = inputs.train_set.select([row] * args.group_size)
    scores = score_images(inputs.rewards, images, prompts, args.reward_failure)  # (G, R), NaN where a reward failed
    totals = scores @ torch.tensor(args.reward_weights).double()  # (G,), NaN of an image that is left out
    failed = totals.isnan().sum().item()
    places = best_and_worst(totals)
    if places is None:
        return None, failed
    record = {"prompt": prompt}
    for kind, i in zip(("chosen", "rejected"), places, strict=True):
        file = f"pairs/{row:05d}_{kind}.png"
        with writing(folder / "pairs"):
            images[i].save(folder / file)
        record |= {kind: file, f"{kind}_score": totals[i].item()}
    return record, failed


def encode_pairs(args, model, pairs):
    """Encode what the cache lacks: latents of a pair's two images, (2, C, h, w), and its prompt's conditioning.

    A pair's key covers the prompt, both files' bytes, the size, and the bits of VAE and text encoders. Returns the
    files of all pairs; ranks share the work.
    """
    bits = [hash_bits(tensor) for tensor in model.frozen_tensors()]
    frozen_key = hashlib.blake2b(repr(bits).encode())
    ranks = {}  # of each distinct file the rank that encodes it: a pair that stands twice is encoded once
    files = []
    for prompt, chosen, rejected in pairs:
        key = frozen_key.copy()
        key.update(repr((prompt, *args.image_size, args.max_sequence_length)).encode())
        key.update(chosen.read_bytes() + rejected.read_bytes())
        file = Path(args.cache) / f"{key.hexdigest()[:32]}.pt"
        files.append(file)
        rank = ranks.setdefault(file, len(ranks) % dist.get_world_size())
        if rank == dist.get_rank() and not is_encoded(file):
            encode_pair(args, model, (prompt, chosen, rejected), file)
    dist.barrier()  # a rank reads what others have encoded
    return files


def encode_pair(args, model, pair, file):
    """Write a pair's encoding to `file`; raises RunError for an image that cannot be read."""
    prompt, *images = pair
    try:
        images = [open_image(image) for image in images]
    except ValueError as error:
        raise RunError(str(error)) from None
    encoded = {"latents": model.encode_images(images, *args.image_size)}
    encoded |= model.encode_prompts([prompt], args.max_sequence_length)
    with atomic_file(file, shared=True) as temporary, open(temporary, "wb") as opened:
        torch.save({name: tensor.cpu() for name, tensor in encoded.items()}, opened)


def is_encoded(file):
    """Whether the cache holds a pair: all of it, and finite. What a failing disk has left of one is encoded anew."""
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
        return len(tensors["latents"]) == 2 and all(tensor.isfinite().all() for tensor in tensors.values())
    except Exception:  # a flipped byte can make the readers of zip and pickle raise nearly anything
        return False


def draw_training_noise(args, step, pair_index, latent_shape):
    """Of each pair sigma (B,), sigmoid of a normal, and noise (B, ...), seeded by (seed, step, global place)."""
    generators = [torch.Generator().manual_seed(image_seed(args.seed, step, i)) for i in pair_index.tolist()]
    sigmas = torch.stack([torch.sigmoid(torch.randn((), generator=generator)) for generator in generators])
    return sigmas, draw_noise((len(generators), *latent_shape), generators)


# ==== 4 MODEL =========================================================================================================
def load_policy(args, inputs, device):
    """The pipeline and its policies (common/policy.py), sharded; and the parameters that are trained."""
    model = load_model(inputs.family, args.model, getattr(torch, args.dtype), device)
    prompts = inputs.train_set.prompts + inputs.eval_set.prompts + [prompt for prompt, _, _ in inputs.pairs or []]
    cache_prompts(model, prompts, args.max_sequence_length, args.prompt_cache)
    set_seed(args.seed)  # the same initial LoRA on every rank
    policies = ["default", "reference"]
    if args.ema_decay > 0:
        policies.append("ema")
    add_policies(model, inputs.lora, policies)
    model.evaluated_policy = "ema" if args.ema_decay > 0 else "default"  # and saved for diffusers
    shard(args, model, device)
    return model, [p for p in model.transformer.parameters() if p.requires_grad]


def shard(args, model, device):
    """FSDP2: every block of the transformer, then the rest of it."""
    dtype = getattr(torch, args.dtype)
    # FSDP must not cast the inputs: it would round the timesteps to bf16. predict_velocity casts what is to be cast
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    on_cpu = "cpu_offload" in args.train_with
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if on_cpu else OffloadPolicy()
    options = {"mesh": shard_mesh(device, args.shard_ranks), "mp_policy": precision, "offload_policy": offload}
    # with a LoRA one transformer for all policies, else one each; the dict keeps one order on all ranks
    for transformer in dict.fromkeys(model.policies.values()):
        if "activation_checkpointing" in args.train_with:
            transformer.enable_gradient_checkpointing()
        blocks = [m for m in transformer.modules() if type(m).__name__ in transformer._no_split_modules]
        for module in [*blocks, transformer]:
            if "compile" in args.train_with and module is not transformer:
                compile_block(module)
            if not model.is_lora and transformer is not model.policies.get("reference"):
                module.float()  # what is trained or averaged; a block at a time, as the whole model may not fit
            fully_shard(module, **options)


# ==== 5 ENGINE ========================================================================================================
# None: the pairs are given, and images are sampled for evaluation (and without --pairs) only, by the training model.


# ==== 6 ROLLOUT =======================================================================================================
@torch.no_grad()
def sample(args, model, request):
    """Sample the request's B images with the training transformer, by the ODE, micro_batch_size at once."""
    parts = []
    with gathered(model, args.gather_for_sampling and "cpu_offload" not in args.train_with):
        for rows in torch.arange(len(request.seeds)).split(args.micro_batch_size):
            part = request.select(rows)
            generators = [torch.Generator().manual_seed(seed) for seed in part.seeds]
            first_latents = part.first_latents(generators, model.device)  # (b, C, h, w)
            outputs = []
            x = first_latents
            for i in range(len(part.timesteps)):
                v = model.predict_velocity(
                    x, part.timesteps[i], part.conditioning, part.negative_conditioning, part.guidance_scale
                )
                sigma, sigma_next = part.sigmas[i : i + 2].tolist()
                outputs.append(sde_step(x, v, sigma, sigma_next, noise_level=0.0))
                x = outputs[-1].prev_sample
            parts.append(Trajectories.from_steps(first_latents, outputs, model.decode(x)))
    return Trajectories.cat(parts)


# ==== 7 ADVANTAGE =====================================================================================================
# None: a pair says which of its images is better, not by how much.


# ==== 8 LOG PROB ======================================================================================================
def flow_matching_errors(model, conditioning, latents, sigmas, noise):
    """e (2, B): mean over elements of (v - (noise - x0))^2 of chosen and rejected latents (2, B, ...), in fp32.

    Stands for minus the log-prob. Both share sigmas (B,) and noise (B, ...). No guidance: the plain conditional
    prediction, as the paper trains it.
    """
    s = sigmas.view(-1, *[1] * (noise.dim() - 1))
    x_s = (1 - s) * latents + s * noise  # (2, B, ...)
    pair_conditioning = {name: torch.cat([tensor, tensor]) for name, tensor in conditioning.items()}
    timesteps = torch.cat([sigmas, sigmas]) * 1000
    v = model.predict_velocity(x_s.flatten(0, 1), timesteps, pair_conditioning).view_as(x_s)
    return ((v - (noise - latents)) ** 2).flatten(2).mean(2)


# ==== 9 LOSS ==========================================================================================================
def dpo_loss(errors, ref_errors, dpo_beta):
    """-log sigmoid(-dpo_beta / 2 ((e_w - e_w_ref) - (e_l - e_l_ref))), mean over pairs (eq. 14).

    errors, ref_errors: (2, B), chosen first. Returns the loss, to be minimised, and its metrics, without gradient.
    """
    implicit_rewards = -dpo_beta / 2 * (errors - ref_errors)  # (2, B)
    chosen, rejected = implicit_rewards
    logits = chosen - rejected
    loss = -F.logsigmoid(logits).mean()
    is_tie = logits == 0
    accuracy = torch.where(is_tie, 0.5, (logits > 0).double()).mean()  # a tie counts one half
    metrics = {"loss": loss, "implicit_accuracy": accuracy, "margin": logits.mean(), "logit_scale": logits.abs().mean()}
    metrics |= {"chosen_reward": chosen.mean(), "rejected_reward": rejected.mean()}
    return loss, {f"actor/{name}": value.detach().double() for name, value in metrics.items()}


def optimizer_step(args, model, optimizer):
    """Clip the gradient, take one AdamW step, let the average follow. Returns the norm before, the same on all ranks.

    No step is taken where the norm is not finite, or is 0: nothing to learn, and no weight to decay.
    """
    group = optimizer.param_groups[0]
    grad_norm = torch.nn.utils.clip_grad_norm_(group["params"], args.max_grad_norm).full_tensor().item()
    if 0 < grad_norm < math.inf:
        state = optimizer.state[group["params"][0]]
        k = int(state.get("step", 0)) + 1  # this is the k-th step, by Adam's own count, which a checkpoint restores
        group["lr"] = args.learning_rate * min(1, k / max(1, args.lr_warmup_steps))
        optimizer.step()
        if args.ema_decay > 0:
            follow(model, "ema", min(args.ema_decay, (1 + k) / (10 + k)))
    optimizer.zero_grad()
    return grad_norm


def update(args, model, optimizer, files, sigmas, noise):
    """One optimizer step on this rank's B pairs, cached in `files`. Returns metrics over all ranks."""
    micro_batches = torch.arange(len(files)).split(args.micro_batch_size)
    # ranks exchange gradients once per optimizer step, in its last pass; of full weights, whose gradients before the
    # exchange are as large as the whole model in fp32, in every pass
    model.transformer.set_requires_gradient_sync(not model.is_lora)
    passes = []
    for rows in micro_batches:
        if rows is micro_batches[-1]:
            model.transformer.set_requires_gradient_sync(True)
        encoded_pairs = [torch.load(files[row], map_location="cpu", weights_only=True) for row in rows.tolist()]
        latents = torch.stack([pair.pop("latents") for pair in encoded_pairs], 1).to(model.device)  # (2, b, ...)
        conditioning = {
            name: torch.cat([pair[name] for pair in encoded_pairs]).to(model.device) for name in encoded_pairs[0]
        }
        s = sigmas[rows].to(model.device)  # (b,)
        eps = noise[rows].to(model.device)  # (b, ...)

        with torch.no_grad(), acting(model, "reference"):
            ref_errors = flow_matching_errors(model, conditioning, latents, s, eps)  # (2, b)
        errors = flow_matching_errors(model, conditioning, latents, s, eps)
        loss, metrics = dpo_loss(errors, ref_errors, args.dpo_beta)
        (loss / len(micro_batches)).backward()
        passes.append(metrics)
    grad_norm = optimizer_step(args, model, optimizer)
    metrics = {"actor/skipped_steps": 0, "actor/lr": optimizer.param_groups[0]["lr"]}
    if math.isfinite(grad_norm):  # it is over all ranks: they skip together
        metrics["actor/grad_norm"] = grad_norm
        metrics |= mean_over_ranks(passes)
    else:
        metrics["actor/skipped_steps"] = 1
    return metrics


# ==== 10 EVAL =========================================================================================================
def evaluate(args, model, inputs, folder):
    """ODE images of every held-out prompt, from the same seeds every time, shared by the ranks, written to `folder`.

    Returns its metrics (rewards, failures, diversity, drift) and, on rank 0, 32 images as (PIL image, caption).
    """
    places, prompts, seeds = share_eval_images(inputs.eval_set, args.eval_images_per_prompt)  # B of this rank
    steps = args.eval_num_inference_steps
    index = torch.arange(len(places))
    request = make_request(args, model, prompts.prompts, index, seeds, num_inference_steps=steps)
    with acting(model, model.evaluated_policy):
        images = sample(args, model, request).images
    scores = score_images(inputs.eval_rewards, images, prompts, args.reward_failure)  # (B, R)
    offload_rewards(inputs.eval_rewards)
    grid = save_samples(folder, places, images, sample_records(prompts, seeds, scores, inputs.eval_rewards))
    num_prompts = len(inputs.eval_set)
    metrics = eval_metrics(scores, inputs.eval_rewards, args.reward_weights, num_prompts, args.eval_images_per_prompt)
    return metrics | watch_metrics(folder, places, images, args.eval_images_per_prompt), grid


# ==== 11 CHECKPOINT ===================================================================================================
def save(args, model, optimizer, sampler, *, step, best_score):
    """Write all that changes, for any number of ranks to go on from, and the policy for diffusers. A collective."""
    folder = Path("runs") / args.name
    state = {
        "step": step,
        "best": best_score,
        "args": recorded(args),
        "sampler": sampler.state_dict(),
        "rng": gather_objects(rng_states()),
        "policies": policy_states(model),
        "optimizer": optimizer_state(model, optimizer),
    }
    checkpoints.save_checkpoint(folder, step, state, args.keep_checkpoints)
    save_policy(folder / "adapter", model, model.evaluated_policy)


def load(args, path, model, optimizer, sampler):
    """Restore what `save` wrote, on any number of ranks. Returns the step and the best evaluation's score so far."""
    state = checkpoints.load_checkpoint(path)
    load_policy_states(model, state["policies"])
    load_optimizer_state(model, optimizer, state["optimizer"])
    optimizer.param_groups[0]["weight_decay"] = args.weight_decay  # the rate is set at every step
    sampler.load_state_dict(state["sampler"])
    restore_rng_states(state["rng"][dist.get_rank() % len(state["rng"])])
    is_comparable = checkpoints.say_resumed(path, state["args"], recorded(args))
    return state["step"], state["best"] if is_comparable else -math.inf


# ==== 12 MAIN =========================================================================================================
def main(args, inputs):
    device = setup_distributed()
    inputs = inputs._replace(checkpoint=checkpoints.from_rank_0(inputs.checkpoint))
    stop_requested = catch_stop_signals(args.max_minutes)
    folder = Path("runs") / args.name
    create_run_folder(folder, recorded(args), __file__, inputs.checkpoint)
    num_images = 2 * args.num_pairs
    log = RunLog(folder, args.track, recorded(args), num_images, args.profile_steps)
    model, parameters = load_policy(args, inputs, device)
    optimizer = torch.optim.AdamW(parameters, lr=args.learning_rate, weight_decay=args.weight_decay, eps=ADAM_EPS)

    # the pairs: given, made by this run before it was interrupted, or made now; then encoded, once
    pairs = inputs.pairs or []
    if inputs.pairs is None and not args.eval_only:
        with log.timed("make_pairs"):
            pairs_file = folder / "pairs.jsonl"
            if args.resume != "latest" or not pairs_file.exists():
                pairs_file = make_pairs(args, model, inputs, folder)
            try:
                pairs = read_pairs(pairs_file)
            except ValueError as error:
                raise RunError(f"{error}; remove {pairs_file} to have the pairs made anew") from None
    with log.timed("encode_pairs"), on_device(model, "text_encoder"), on_device(model, "vae"):
        files = [] if args.eval_only else encode_pairs(args, model, pairs)
    sampler = GroupSampler(len(files), args.num_pairs, group_size=1, seed=args.seed)
    if files:
        log.say(f"{len(files)} pairs, {len(set(files))} of them distinct; {args.num_steps * args.num_pairs} are drawn")
    _, _, latent_shape = model.schedule(1, *args.image_size)

    # go on where a checkpoint ends, or begin
    first_step = 0
    best_score = -math.inf
    if inputs.checkpoint:
        first_step, best_score = load(args, inputs.checkpoint, model, optimizer, sampler)
    checkpoints.rewind(folder, first_step if inputs.checkpoint else -1)

    # the score that training starts from or, with eval_only, the one that is asked for
    if args.eval_only or not inputs.checkpoint:
        with log.timed("testing"):
            metrics, grid = evaluate(args, model, inputs, folder / "samples" / f"{first_step:04d}")
        if not args.eval_only:
            best_score = save_if_best(folder, model, metrics, best_score)
        log.write(first_step, metrics, grid)
    if args.eval_only:
        log.close()
        return

    skipped_in_a_row = 0
    for step in log.steps(range(first_step + 1, args.num_steps + 1), args.stop_if):
        # make the chosen images likelier than the rejected ones, relative to the reference (eq. 14)
        with log.timed("update_actor"):
            pair_rows, pair_index, _ = sampler.draw()  # (num_pairs,), (B,): our B of them
            sigmas, noise = draw_training_noise(args, step, pair_index, latent_shape)
            files_of_step = [files[row] for row in pair_rows[pair_index]]
            metrics = update(args, model, optimizer, files_of_step, sigmas=sigmas, noise=noise)
        skipped_in_a_row = 0 if "actor/grad_norm" in metrics else skipped_in_a_row + 1
        if skipped_in_a_row == MAX_SKIPPED:
            raise RunError(f"step {step}: no finite gradient in {MAX_SKIPPED} steps: lower --learning_rate")
        metrics["training/epoch"] = sampler.position / len(files)
        log.show(accuracy=metrics.get("actor/implicit_accuracy", math.nan))

        # evaluate, log and save; a stop that one rank was asked for is a stop of all
        grid = None
        is_due = step % args.eval_every == 0 or step == args.num_steps
        if is_due:
            with log.timed("testing"):
                val_metrics, grid = evaluate(args, model, inputs, folder / "samples" / f"{step:04d}")
                best_score = save_if_best(folder, model, val_metrics, best_score)
            metrics |= val_metrics
        log.write(step, metrics, grid)
        stopping = any(gather_objects(stop_requested())) or log.stop_reason is not None
        if is_due or stopping:
            with log.timed("save_checkpoint"):  # after the log, which a resumed run cuts back to the checkpoint
                save(args, model, optimizer, sampler, step=step, best_score=best_score)
        if stopping:
            break

    log.close()


if __name__ == "__main__":
    with one_line(ValueError):
        args = parse_args(Args, __doc__)
        inputs = check_args(args)
        if args.plan:
            show_plan(
                asdict(args),
                inputs,
                num_images=2 * args.num_pairs,
                micro_batch_images=2 * args.micro_batch_size,
                sampled_steps=0,
                trained_steps=1,
                trained_guidance=1.0,
                policies=["reference"],
            )
            raise SystemExit
    with one_line(RunError, Path("runs") / args.name):
        main(args, inputs)
    end_distributed()
