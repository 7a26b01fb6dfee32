"""Supervised flow matching: a LoRA, or full weights, learn the images of records, {"prompt", "image"}.

It is what a fine-tune begins with, and what makes a model of random weights one that rewards can train on. It needs
no rollout and no engine; rewards only score evaluations. Read `main`, at the end, first. With x_s = (1 - s) x0 +
s noise and v = noise - x0, as in Stable Diffusion 3 (Esser et al., arXiv 2403.03206v1):

  1. Latents and prompts are encoded once, whatever the number of epochs (no equation): `encode_drawn`.
  2. The level s of an image's noise is drawn: logit-normal (eq. 19), evenly, or with heavy tails (eq. 20), and shifted
     as the model samples at this size (eq. 23): `draw_sigma`.
  3. Some images are trained without their prompt, for guidance (Ho & Salimans, arXiv 2207.12598): `drop_prompts`.
  4. The velocity is regressed on noise - x0 (Lipman et al., arXiv 2210.02747v2, eq. 9 and 23, whose time runs the
     other way), with a weight of the level: `flow_matching_errors`, `flow_matching_loss`, `update`.

A step, or training step, is one optimizer step on num_records records. A rank has B of them; a micro-batch has b.

    torchrun --standalone -m contrib.sft --records train.jsonl                    # {"prompt", "image"} a line
    torchrun --standalone -m contrib.sft --records 'data/train-*.parquet:caption' --caption_dropout 0.1
    torchrun --standalone --nproc_per_node 2 -m contrib.sft --records train.jsonl --lora_rank 0 --learning_rate 1e-5

Parent: dpo_offline.py

Where it departs from the papers: s grows with the noise, as in SD3 and unlike the indices of diffusers' training
scripts, in which a positive logit_mean leads to less noise. By default the shift is that of the model's own schedule at
--image_size, which need not be eq. 23. x0 is the mode of the VAE's posterior, not a draw. Images are not cropped,
flipped or sorted by their aspect.
"""

# ==== 1 ARGS ==========================================================================================================
import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from common.data import GroupSampler, PromptSet, fit_micro_batch, share_eval_images
from common.distributed import (
    mean_over_ranks,
    setup_distributed,
    shard_mesh,
)
from common.files import read_prompts
from common.models import Family, find_family, on_device
from common.options import (
    Bound,
    CodeOrName,
    FileOrName,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SharedArgs,
    lr_factor,
)
from common.pairs import EncodedRecord, ImageRecord, encode_records, load_records, pair_prompts, read_image_records
from common.rewards import load_rewards, with_preservation
from common.rollout import RolloutRequest, Trajectories
from common.run import (
    Inputs,
    Run,
    check_inputs,
    checkpoint_to_resume,
    choose_sizes,
    evaluate_samples,
    friendly_errors,
    parse_args,
)
from common.scoring import Scorer
from common.sde import draw_noise, image_seed, sde_step
from common.weights import (
    acting,
    choose_adam_kernel,
    follow,
    load_policies,
    load_training_state,
    make_lora,
    sampling,
    training_state,
    units_to_shard,
)
from common.workload import Workload

import torch
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.optim import AdamW


@dataclass
class Args(SharedArgs):  # and the shared options, in common/options.py; parse_args refuses values beyond a Bound
    # ---- run
    name: str = "sft"
    """the run's folder is runs/<name>, or an absolute path; it must not hold a run yet, unless you resume it"""

    # ---- data
    records: tuple[CodeOrName, ...] = ()
    """images to train on: .jsonl, .json or .csv of {"prompt", "image"} (image files relative to it), a .parquet with
    such columns, a folder or a pattern of these, FILE:FIELD for prompts in another field, or your own
    path/to/file.py:function; train_prompts are refused. --eval_only needs none"""
    cache: FileOrName = "cache"
    """folder of encoded records, kept between runs and seen by all ranks; a changed model or image is encoded again"""

    # ---- reward
    reward: tuple[CodeOrName, ...] = ()
    """rewards that score evaluations, and by their weighted total choose best_adapter/; none of them is trained on, and
    there may be none. Their names are those of other scripts (docs/rewards.md)"""

    # ---- rollout
    guidance_scale: Annotated[float, Bound(at_least=1)] = 1.0
    """classifier-free guidance of the images sampled for evaluation; 1 turns it off. Training has none, and gives 1 to
    FLUX.1's guidance embedding"""

    # ---- algorithm
    timestep_sampling: Literal["logit_normal", "uniform", "mode"] = "logit_normal"
    """how the noise's level s is drawn, before the shift: the sigmoid of a normal, evenly, or with heavy tails (SD3's
    eq. 20)"""
    logit_mean: float = 0.0
    """mean of the normal of logit_normal; above 0 there is more noise (SD3: -0.5, 0 and 0.5 were tried)"""
    logit_std: PositiveFloat = 1.0
    """standard deviation of the normal of logit_normal"""
    mode_scale: Annotated[float, Bound(at_least=-1, at_most=1.75)] = 1.29
    """scale of mode; above 0 the middle levels are drawn more often"""
    train_shift: PositiveFloat | None = None
    """s becomes shift s / (1 + (shift - 1) s); 1 leaves it as it is drawn. None: s becomes what the model's own
    scheduler makes of it when it samples at this size"""
    loss_weighting: Literal["none", "sigma_sqrt", "cosmap"] = "none"
    """weight of a record's error at level s: 1, 1 / s^2, or 2 / (pi (1 - 2 s + 2 s^2)), by diffusers' names"""
    caption_dropout: Annotated[float, Bound(at_least=0, at_most=1)] = 0.0
    """probability that a record is trained with the empty prompt, which guidance needs; 0.1 is usual"""

    # ---- optimization
    num_steps: NonNegativeInt = 100
    """optimizer steps of the run"""
    num_records: PositiveInt = 64
    """records per optimizer step, over all ranks"""
    micro_batch_size: NonNegativeInt = 64
    """records per pass on a rank, and images per sampling batch; at most what a rank has; 0: what fits on a GPU"""
    learning_rate: NonNegativeFloat = 1e-3
    """learning rate of AdamW"""
    lr_schedule: str = "cosine"
    """constant, or linear or cosine, by which the learning rate falls to nearly 0 at num_steps (if you resume with more
    steps, it rises again). constant:N, linear:N and cosine:N first let it rise over N optimizer steps"""


# ==== 2 SETUP =========================================================================================================
def check(args: Args) -> Args:
    """Refuse options that cannot work together. Returns them with the micro-batch that a rank has."""
    if not args.reward:
        args = replace(args, reward_weights=())
    if args.eval_only:  # no mini-batches are cut
        return args
    for name in ("train_prompts", "train_shares"):
        if getattr(args, name) != getattr(Args, name):
            raise ValueError(f"--{name}: is not read here; --records has what is trained on")
    micro_batch_size = fit_micro_batch(
        args.num_records, 1, args.micro_batch_size, "--num_records", ranks_per_image=args.ranks_per_image
    )
    return replace(args, micro_batch_size=micro_batch_size)


def workload(args: Args) -> Workload:
    """What a training step samples, trains and keeps: for the plan, the sizes that fit, and perf/mfu."""
    return Workload(
        num_images=args.num_records,
        num_prompts=1,  # a record's embeddings are read from its file
        sampled_steps=0,
        trained_steps=1,
        policies=tuple(policy_names(args)),
        guidance_scale=args.guidance_scale,  # of evaluations; a trained pass has none
        drawn_prompts=0,
    )


def prepare(args: Args) -> Inputs:
    """Load and check all but the model: rewards, prompts, the LoRA, which checkpoint. An error names what is wrong."""
    rewards = load_rewards(args.reward, args.reward_weights, args.num_frames, args.reward_frames)
    eval_rewards = load_rewards(  # the trained ones, without those that only compare a group, then its own
        args.eval_reward, None, args.num_frames, args.reward_frames, option="--eval_reward", trained=rewards
    )
    records = None
    if not args.eval_only:
        if not args.records:
            raise ValueError('--records: needs a file of {"prompt", "image"} records')
        records = read_image_records(args.records)
    eval_set = read_prompts(args.eval_prompts, eval_rewards, args.max_prompts, others=rewards)
    eval_rewards = with_preservation(eval_rewards, eval_set, args.num_frames)  # where images are edited
    checkpoint = checkpoint_to_resume(args.run_folder, args.resume, args.eval_only)  # or None
    # diffusers and peft, which take seconds to import, come last
    height, width = args.image_size
    length = args.max_sequence_length
    family = find_family(args.model, height, width, args.num_frames, args.guidance_scale, length, args.family)
    if family.makes_videos:
        raise ValueError(f"--model {args.model}: makes videos, and contrib/sft.py takes records of images")
    if family.num_sources[0]:
        raise ValueError(f"--model {args.model}: edits pictures, and a record of contrib/sft.py has no picture to edit")
    lora = make_lora(
        family,
        model=args.model,
        path=args.lora_path,
        rank=args.lora_rank,
        alpha=args.lora_alpha,
        target_modules=args.lora_target_modules,
        base_weights=args.base_weights,
        checkpoint=checkpoint,
    )
    none = PromptSet([], [])  # beside the records nothing is trained on
    inputs = Inputs(family, rewards, eval_rewards, none, eval_set, lora=lora, checkpoint=checkpoint, pairs=records)
    check_inputs(
        args,
        inputs,
        workload(args),
        schedules={},
        guidance_scale=args.guidance_scale,
        given="--records",
    )
    return inputs


# ==== 3 DATA ==========================================================================================================
def make_request(
    args: Args, model: Family, prompts: PromptSet, prompt_index: Tensor, seeds: list[int]
) -> RolloutRequest:
    """A request for B ODE images of U prompts, encoded: prompt_index (B,) says which prompt, seeds (B) the noise."""
    height, width = args.image_size
    length = args.max_sequence_length
    negatives = prompts.negatives(args.negative_prompt)
    timesteps, sigmas, latent_shape = model.schedule(args.eval_num_inference_steps, height, width)
    return RolloutRequest(
        conditioning=model.encode(prompts, length, args.image_size, args.num_frames),
        negative_conditioning=model.encode_negative(negatives, args.guidance_scale, length),  # None: no second pass
        prompt_index=prompt_index,
        seeds=seeds,
        timesteps=timesteps,  # (T,)
        sigmas=sigmas,  # (T + 1,), on the CPU, as they become Python's floats
        latent_shape=latent_shape,  # (C, h, w)
        height=height,
        width=width,
        guidance_scale=args.guidance_scale,
    )


def encode_drawn(
    args: Args, run: Run, model: Family, records: list[ImageRecord], rows: set[int]
) -> tuple[dict[int, EncodedRecord], dict[str, Tensor]]:
    """Encode the records that the run will draw, and no others. Returns them, by row, and the empty prompt's
    conditioning (1, ...), as guidance takes it."""
    with run.timed("encode_records"), on_device(model, "text_encoder"), on_device(model, "vae"):
        encoded = encode_records(
            model,
            records,
            rows,
            folder=args.cache,
            image_size=args.image_size,
            max_sequence_length=args.max_sequence_length,
        )
        no_prompt = model.encode_negative_prompts([""], args.max_sequence_length)
    run.print_message(f"{len(records)} records, of which {len(encoded)} are drawn")
    return encoded, no_prompt


def draw_sigma(args: Args, schedule: list[float], generator: torch.Generator) -> float:
    """The level s in [0, 1] of an image's noise. schedule: sigmas of the model's own, from 1 to 0.

    In Python's fp64: an image's number does not depend on which others are drawn.
    """
    if args.timestep_sampling == "logit_normal":  # eq. 19
        normal = args.logit_mean + args.logit_std * torch.randn((), generator=generator).item()
        s = (1 + math.tanh(normal / 2)) / 2  # its sigmoid
    else:
        s = torch.rand((), generator=generator).item()
    if args.timestep_sampling == "mode":  # eq. 20
        s = 1 - s - args.mode_scale * (math.cos(math.pi / 2 * s) ** 2 - 1 + s)
    if args.train_shift is not None:  # eq. 23
        return args.train_shift * s / (1 + (args.train_shift - 1) * s)
    place = (1 - s) * (len(schedule) - 1)  # sampling goes from 1 to 0
    i = min(int(place), len(schedule) - 2)
    return schedule[i] + (place - i) * (schedule[i + 1] - schedule[i])


def draw_training_noise(
    args: Args, step: int, record_index: Tensor, schedule: list[float], latent_shape: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """For each record sigma (B,), noise (B, ...) and whether its prompt is dropped (B,), seeded by (seed, step, global
    place). schedule: draw_sigma's."""
    seeds = [image_seed(args.seed, step, i) for i in record_index.tolist()]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    sigmas = torch.tensor([draw_sigma(args, schedule, generator) for generator in generators])
    uniform = torch.stack([torch.rand((), generator=generator) for generator in generators])
    return sigmas, draw_noise((len(generators), *latent_shape), generators), uniform < args.caption_dropout


# ==== 4 MODEL =========================================================================================================
def policy_names(args: Args) -> list[str]:
    """The policies that a run keeps (common/weights/policy.py)."""
    names = ["default"]  # peft's name for the trained one
    if args.ema_decay > 0:
        names.append("ema")
    return names


def load_policy(args: Args, inputs: Inputs, device: torch.device) -> tuple[Family, list[torch.nn.Parameter]]:
    """The pipeline and its policies, sharded; and the parameters that are trained."""
    num_drawn = inputs.num_drawn(args.num_steps, args.num_records)
    prompts = pair_prompts(inputs.pairs).first_drawn(num_drawn, args.order_seed).prompts if inputs.pairs else []
    prompts += inputs.eval_set.prompts
    prompts += inputs.eval_set.negatives(args.negative_prompt).prompts
    model = load_policies(args, inputs.family, inputs.lora, policy_names(args), prompts, device)
    shard(args, model, device)
    return model, [p for p in model.transformer.parameters() if p.requires_grad]


def shard(args: Args, model: Family, device: torch.device) -> None:
    """FSDP2: every block of the transformer, then the rest of it. A family's `forward` casts what it should."""
    dtype = getattr(torch, args.dtype)
    # FSDP must not cast the inputs: it would round the timesteps to bf16
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    on_cpu = "cpu_offload" in args.train_with
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if on_cpu else OffloadPolicy()
    mesh = shard_mesh(device, args.shard_ranks)
    for module in units_to_shard(model, mesh, dtype, args.train_with):  # each made ready: compiled, in fp32 ...
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload, ignored_params=model.unsharded)


# ==== 5 ENGINE ========================================================================================================
# None: the records are given, and images are sampled for evaluation only, by the training transformer.


# ==== 6 ROLLOUT =======================================================================================================
@torch.no_grad()
def sample(args: Args, model: Family, request: RolloutRequest) -> Trajectories:
    """Sample the request's B images with the training transformer, by the ODE, micro_batch_size at once."""
    parts = []
    gathers_once = not {"cpu_offload", "gather_blocks"} & set(args.train_with)  # all weights, not a block in each pass
    with sampling(model, gathers_once):  # and the VAE stays on the device
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
                x = outputs[-1].prev_sample  # the next x, by diffusers' name
            parts.append(Trajectories.from_steps(first_latents, outputs, model.decode(x)))
    return Trajectories.cat(parts)


# ==== 7 ADVANTAGE =====================================================================================================
# None: every record is as good as another.


# ==== 8 LOG PROB ======================================================================================================
def flow_matching_errors(
    model: Family, conditioning: dict[str, Tensor], latents: Tensor, sigmas: Tensor, noise: Tensor
) -> Tensor:
    """e (B,): mean over elements of (v - (noise - x0))^2 of latents (B, ...), in fp32.

    sigmas (B,), noise (B, ...). No guidance: the plain conditional prediction.
    """
    s = sigmas.view(-1, *[1] * (noise.dim() - 1))
    x_s = (1 - s) * latents + s * noise  # (B, ...)
    v = model.predict_velocity(x_s, sigmas * 1000, conditioning)
    return ((v - (noise - latents)) ** 2).flatten(1).mean(1)


# ==== 9 LOSS ==========================================================================================================
def flow_matching_loss(errors: Tensor, sigmas: Tensor, loss_weighting: str) -> tuple[Tensor, dict[str, Tensor]]:
    """w(s) e, mean over records; errors e and sigmas s (B,). Weights are those of diffusers' training scripts.

    Returns the loss, to be minimised, and its metrics, without gradient.
    """
    weights = torch.ones_like(sigmas)
    if loss_weighting == "sigma_sqrt":
        weights = sigmas**-2
    elif loss_weighting == "cosmap":
        weights = 2 / (math.pi * (1 - 2 * sigmas + 2 * sigmas**2))
    loss = (weights * errors).mean()
    metrics = {"loss": loss, "error": errors.mean(), "sigma": sigmas.mean()}
    return loss, {f"actor/{name}": value.detach().double() for name, value in metrics.items()}


def drop_prompts(
    conditioning: dict[str, Tensor], no_prompt: dict[str, Tensor], is_dropped: Tensor
) -> dict[str, Tensor]:
    """The conditioning (B, ...) with the empty prompt's (1, ...) where is_dropped (B,)."""
    dropped = {}
    for name, tensor in conditioning.items():
        dropped[name] = torch.where(is_dropped.view(-1, *[1] * (tensor.dim() - 1)), no_prompt[name], tensor)
    return dropped


def optimizer_step(args: Args, model: Family, optimizer: AdamW) -> float:
    """Clip the gradient, take one AdamW step at the schedule's rate, update the EMA. Returns the norm before clipping,
    equal on all ranks.

    The step is left out where the norm is not finite, or is 0: AdamW would move the weights with nothing to learn.
    """
    group = optimizer.param_groups[0]
    norm = torch.nn.utils.clip_grad_norm_(group["params"], args.max_grad_norm)
    grad_norm = norm.full_tensor().item()  # type: ignore[attr-defined]  # FSDP's is a DTensor
    if 0 < grad_norm < math.inf:
        model.num_updates += 1  # a checkpoint holds this count
        k = model.num_updates
        num_updates = args.num_steps * workload(args).updates_per_step  # of the whole run
        group["lr"] = args.learning_rate * lr_factor(args.lr_schedule, k, num_updates)
        optimizer.step()
        if args.ema_decay > 0:
            follow(model, "ema", min(args.ema_decay, (1 + k) / (10 + k)))  # the average's decay, smaller at first
    optimizer.zero_grad()
    return grad_norm


def update(
    args: Args,
    model: Family,
    optimizer: AdamW,
    records: list[EncodedRecord],
    no_prompt: dict[str, Tensor],
    sigmas: Tensor,
    noise: Tensor,
    is_dropped: Tensor,
) -> dict[str, float]:
    """One optimizer step on this rank's B records. Returns metrics over all ranks."""
    micro_batches = torch.arange(len(records)).split(args.micro_batch_size)
    # FSDP averages gradients over the ranks in every backward pass; the last pass alone is enough, so we switch it off
    # until then. Not for full weights: their unsharded fp32 gradients are as large as the model and would not fit
    model.transformer.set_requires_gradient_sync(not model.is_lora)
    passes: list[dict[str, Tensor]] = []
    for rows in micro_batches:
        if len(passes) == len(micro_batches) - 1:
            model.transformer.set_requires_gradient_sync(True)
        latents, conditioning = load_records([records[row] for row in rows.tolist()], model.device)  # (b, ...)
        s = sigmas[rows].to(model.device)  # (b,)
        eps = noise[rows].to(model.device)  # (b, ...)
        dropped = is_dropped[rows].to(model.device)  # (b,)
        conditioning = drop_prompts(conditioning, no_prompt, dropped)

        errors = flow_matching_errors(model, conditioning, latents, s, eps)  # (b,)
        loss, pass_metrics = flow_matching_loss(errors, s, args.loss_weighting)
        pass_metrics["actor/dropped_prompts"] = dropped.double().mean()
        (loss / len(micro_batches)).backward()
        passes.append(pass_metrics)
    grad_norm = optimizer_step(args, model, optimizer)
    metrics: dict[str, float] = {}
    metrics["actor/skipped_steps"] = 0
    metrics["actor/lr"] = optimizer.param_groups[0]["lr"]
    if math.isfinite(grad_norm):  # it is over all ranks: they skip together
        metrics["actor/grad_norm"] = grad_norm
        metrics |= mean_over_ranks(passes)
    else:
        metrics["actor/skipped_steps"] = 1
    return metrics


# ==== 10 EVAL =========================================================================================================
def evaluate(args: Args, run: Run, model: Family, inputs: Inputs) -> tuple[dict, list | None]:
    """ODE images of every held-out prompt, from the same seeds every time, shared by the ranks.

    Returns their metrics (rewards, failures, diversity, drift) and, on rank 0, up to 32 images as (PIL image, caption).
    Except with --eval_only, the policy of the best evaluation is saved.
    """
    with run.timed("testing"):
        places, prompts, seeds = share_eval_images(inputs.eval_set, args.eval_images_per_prompt)  # B each: this rank's
        eval_guidance = args.eval_guidance_scale or args.guidance_scale  # at least 1, or None
        eval_args = replace(args, guidance_scale=eval_guidance)
        prompt_index = torch.arange(len(places))  # a prompt for each image; prompts may repeat
        request = make_request(eval_args, model, prompts, prompt_index, seeds)  # without SDE steps
        scorer = Scorer(inputs.eval_rewards, prompts, args.reward_failure)
        with acting(model, args.evaluated_policy):
            scorer.add(range(len(places)), sample(args, model, request).images)
            scores = scorer.scores(places, args.eval_images_per_prompt)  # (B, R)
        metrics, grid = evaluate_samples(args, run, scorer, places=places, seeds=seeds, scores=scores)
        if not args.eval_only:
            run.save_if_best(model, args.evaluated_policy, metrics)
    return metrics, grid


# ==== 11 CHECKPOINT ===================================================================================================
def save(args: Args, run: Run, model: Family, optimizer: AdamW, sampler: GroupSampler) -> None:
    """Write all that training changes, for any number of ranks to resume from; and the policy for diffusers, of full
    weights only at the end."""
    state = training_state(model, optimizer, run.checkpoint_path)  # full weights are written now, beside this path
    state["sampler"] = sampler.state_dict()
    run.save_checkpoint(state, model, args.evaluated_policy)


def load(args: Args, run: Run, model: Family, optimizer: AdamW, sampler: GroupSampler) -> None:
    """Restore what `save` wrote, on any number of ranks; and the run's step, best score and unlogged metrics."""
    state = run.load_checkpoint()
    load_training_state(model, optimizer, state)
    sampler.load_state_dict(state["sampler"])
    adam = optimizer.param_groups[0]
    adam["weight_decay"] = args.weight_decay  # this run's; the rate is set at every optimizer step
    adam["betas"] = args.adam_betas
    adam["eps"] = args.adam_eps
    run.repair_adapter(model, args.evaluated_policy)  # of a run that has all its steps


# ==== 12 MAIN =========================================================================================================
def main(args: Args, inputs: Inputs) -> None:
    device = setup_distributed(args.shard_ranks, args.ranks_per_image)
    args = choose_sizes(args, inputs, workload(args))  # what fits, where an option is 0; rank and alpha of --lora_path
    run = Run(args, inputs.all_rewards, script=__file__, checkpoint=inputs.checkpoint, workload=workload(args))
    model, parameters = load_policy(args, inputs, device)
    optimizer = AdamW(
        parameters, lr=args.learning_rate, betas=args.adam_betas, eps=args.adam_eps, weight_decay=args.weight_decay
    )
    optimizer = choose_adam_kernel(optimizer, model, args.adam_bits)  # foreach, fused, or torchao's of 8 bits
    records = inputs.pairs or []
    sampler = GroupSampler(len(records), args.num_records, group_size=1, seed=args.order_seed)  # of records
    _, schedule, latent_shape = model.schedule(model.level_steps, *args.image_size)

    # RUN LOGIC, the same in all scripts: resume; evaluate first, or redo the evaluation that failed (run.unlogged)
    if run.checkpoint:
        load(args, run, model, optimizer, sampler)
    encoded: dict[int, EncodedRecord] = {}
    no_prompt: dict[str, Tensor] = {}
    if records:
        encoded, no_prompt = encode_drawn(args, run, model, records, sampler.upcoming(args.num_steps - run.step))
    if args.eval_only or run.unlogged or not run.checkpoint:
        run.log(*evaluate(args, run, model, inputs))
    last_step = run.step if args.eval_only else args.num_steps  # --eval_only takes no training step

    for step in range(run.step + 1, last_step + 1):
        run.begin_step(step, sampler, lambda: save(args, run, model, optimizer, sampler))  # saves if a rollout fails

        # regress the velocity at noised images on noise - x0
        with run.updating():
            rows, _, record_index = sampler.draw()  # this rank's B records; their numbers among the step's
            drawn = [encoded[row] for row in rows.tolist()]
            noised = draw_training_noise(args, step, record_index, schedule.tolist(), latent_shape)
            metrics = update(args, model, optimizer, drawn, no_prompt, *noised)

        # RUN LOGIC, the same in all scripts: evaluate, log, save, stop
        metrics |= {"training/epoch": sampler.epoch}
        shown = {"loss": "actor/loss"}
        run.end_step(metrics, has_gradient="actor/grad_norm" in metrics, shown=shown)  # keeps them until `log`
        is_due = step % args.eval_every == 0 or step == args.num_steps
        val_metrics, grid = evaluate(args, run, model, inputs) if is_due else ({}, None)
        run.log(val_metrics, grid)  # ends the run at a NaN, or after three steps in a row without a finite gradient
        stopping = run.should_stop()  # asked before `save`, which writes more at the end
        if step % (args.save_every or args.eval_every) == 0 or step == args.num_steps or stopping:
            save(args, run, model, optimizer, sampler)
        if stopping:
            break

    run.close()


if __name__ == "__main__":
    with friendly_errors():  # an expected error ends the script in one line, without a traceback
        args = check(parse_args(Args, __doc__))
        main(args, prepare(args))
