"""DRaFT-K (arXiv 2309.17400) and ReFL (arXiv 2304.05977): a differentiable reward trains the model through the image.

The model samples an image for every prompt, and the reward scores its pixels. The gradient goes from the score through
the VAE and the last sampling steps to the weights. There are no groups, no densities and no engine. The reward must
have a form for tensors, `of_pixels` (docs/rewards.md). Read `main`, at the end, first:

  1. Sample an image for each prompt from noise by the ODE dx = v ds: `sample`.
  2. Only the last K sampling steps keep their graph (DRaFT-K): `trained_steps`. Or the model jumps to x0 = x_s - s v at
     a random step, which alone keeps its graph (ReFL): --method refl.
  3. The VAE decodes to pixels; the backward pass computes its activations again: `Family.pixels`.
  4. Maximise the reward's mean over the images: `reward_loss`, `accumulate_gradients`, `update`.

A step, or training step, is one rollout and one optimizer step. Trained steps are those sampling steps that keep their
graph. A rank has B of the N = num_prompts images; a micro-batch has b. An image takes T sampling steps. There are R
rewards.

    torchrun --standalone -m contrib.draft                                        # DRaFT-1 on a sign's colour, on a CPU
    torchrun --standalone -m contrib.draft --reward clip_score aesthetic --reward_weights 0.1 1
    torchrun --standalone --nproc_per_node 2 -m contrib.draft --method refl       # the same images, shared by two ranks

Parent: flow_grpo.py

We read DRaFT's abstract alone, and ReFL's abstract and code (THUDM/ImageReward at 1beb4e4). Where it departs from them:
  - Both are of diffusion models; here sampling is flow matching's ODE.
  - DRaFT-LV, a gradient of less variance for K = 1, is left out.
  - ReFL's loss is minus the reward, as DRaFT's; its code has max(2 - r, 0) times a scale.
  - ReFL's step is one for all images of a training step; its code draws one for each process and batch.
"""

# ==== 1 ARGS ==========================================================================================================
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from common.data import GroupSampler, PromptSet, fit_micro_batch, share_eval_images
from common.distributed import gather_rows, mean_over_ranks, setup_distributed, shard_mesh
from common.errors import RunError, truncate
from common.files import read_prompts
from common.models import Family, find_family, on_device
from common.options import (
    ASSETS,
    Bound,
    CodeOrName,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    SharedArgs,
    lr_factor,
)
from common.rewards import built_in_rewards, load_rewards, with_preservation
from common.rollout import RolloutRequest
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
from common.scoring import NOT_ASKED, Reward, Scorer, offload_rewards, weighted_totals
from common.sde import image_seed, sde_step
from common.user_code import describe
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
    name: str = "draft"
    """the run's folder is runs/<name>, or an absolute path; it must not hold a run yet, unless you resume it"""

    # ---- reward
    reward: tuple[CodeOrName, ...] = (f"{ASSETS / 'sign_colour.py'}:sign_colour",)
    """rewards with an `of_pixels` (docs/rewards.md): clip_score, aesthetic, or your own path/to/file.py:function"""

    # ---- rollout
    num_prompts: PositiveInt = 32
    """prompts per training step, over all ranks, an image each"""
    num_inference_steps: PositiveInt = 3
    """sampling steps of a training image (ReFL: 40)"""
    guidance_scale: Annotated[float, Bound(at_least=1)] = 1.0
    """guidance in training and evaluation alike, as the model takes it (docs/models.md); 1 turns it off, but for
    FLUX.1's guidance embedding"""

    # ---- algorithm
    method: Literal["draft", "refl"] = "draft"
    """draft: the gradient goes through the last gradient_steps sampling steps; refl: through one step of refl_range,
    from which the model jumps to the image"""
    gradient_steps: PositiveInt = 1
    """DRaFT's K; the activations of K sampling steps are held at once (--train_with activation_checkpointing)"""
    refl_range: tuple[int, int] = (1, 3)
    """ReFL's step is drawn, once per training step, within sampling steps lo to hi - 1, counted from 0 (ReFL: 30 to 39
    of 40)"""

    # ---- optimization
    num_steps: NonNegativeInt = 30
    """training steps of the run, each of them one optimizer step"""
    micro_batch_size: NonNegativeInt = 32
    """images per pass on a rank, and per sampling batch; at most what a rank has; 0: what fits on a GPU"""
    learning_rate: NonNegativeFloat = 1e-3
    """learning rate of AdamW"""
    lr_schedule: str = "cosine"
    """constant, or linear or cosine, by which the learning rate falls to nearly 0 at num_steps (if you resume with more
    steps, it rises again). constant:N, linear:N and cosine:N first let it rise over N optimizer steps"""


# ==== 2 SETUP =========================================================================================================
def check(args: Args) -> Args:
    """Refuse options that cannot work together. Returns them with the micro-batch that a rank has."""
    if args.eval_only:  # no mini-batches are cut
        return args
    micro_batch_size = fit_micro_batch(
        args.num_prompts, 1, args.micro_batch_size, "--num_prompts", ranks_per_image=args.ranks_per_image
    )
    num_steps = args.num_inference_steps
    if args.method == "draft" and args.gradient_steps > num_steps:
        raise ValueError(f"--gradient_steps {args.gradient_steps}: at most --num_inference_steps, {num_steps}")
    if args.method == "refl":
        low, high = args.refl_range
        if not 0 <= low < high <= num_steps:
            raise ValueError(f"--refl_range {low} {high}: 0 {num_steps} is the widest range of {num_steps} steps")
        if args.gradient_steps > 1:
            raise ValueError(f"--gradient_steps {args.gradient_steps}: --method refl has one, within --refl_range")
    if args.reward_failure == "mask":
        raise ValueError("--reward_failure mask: a gradient has no image to leave out; stop is what DRaFT does")
    return replace(args, micro_batch_size=micro_batch_size)


def check_of_pixels(rewards: dict[str, Reward], num_frames: int = 1) -> None:
    """ValueError: a reward has no `of_pixels`, or none of videos; or it is one number of several (.KEY)."""
    for name, function in rewards.items():
        if num_frames > 1 and name in built_in_rewards():
            raise ValueError(
                f"--reward {name}: its of_pixels takes images, not the videos of --num_frames {num_frames}"
            )
        if not hasattr(function, "of_pixels"):
            raise ValueError(f"--reward {name}: has no of_pixels, a form with a gradient (docs/rewards.md)")
        if "." in name:
            raise ValueError(f"--reward {name}: of_pixels gives one score, without a key")


def workload(args: Args) -> Workload:
    """What a training step samples, trains and keeps: for the plan, the sizes that fit, and perf/mfu."""
    last_step = args.refl_range[1] if args.method == "refl" else args.num_inference_steps
    return Workload(
        num_images=args.num_prompts,
        num_prompts=args.num_prompts,
        sampled_steps=last_step - args.gradient_steps,
        trained_steps=args.gradient_steps,
        policies=tuple(policy_names(args)),
        guidance_scale=args.guidance_scale,
        trained_guidance=args.guidance_scale,
        chained_steps=args.gradient_steps,
    )


def prepare(args: Args) -> Inputs:
    """Load and check all but the model: rewards, prompts, the LoRA, which checkpoint. An error names what is wrong."""
    rewards = load_rewards(args.reward, args.reward_weights, args.num_frames, args.reward_frames)
    if not args.eval_only:
        check_of_pixels(rewards, args.num_frames)
    eval_rewards = load_rewards(  # the trained ones, without those that only compare a group, then its own
        args.eval_reward, None, args.num_frames, args.reward_frames, option="--eval_reward", trained=rewards
    )
    trained_on = () if args.eval_only else args.train_prompts  # read with the rewards, which a record may name
    train_set = read_prompts(trained_on, rewards, others=eval_rewards, shares=args.train_shares)
    eval_set = read_prompts(args.eval_prompts, eval_rewards, args.max_prompts, others=rewards)
    eval_rewards = with_preservation(eval_rewards, eval_set, args.num_frames)  # where images are edited
    checkpoint = checkpoint_to_resume(args.run_folder, args.resume, args.eval_only)  # or None
    # diffusers and peft, which take seconds to import, come last
    height, width = args.image_size
    length = args.max_sequence_length
    family = find_family(args.model, height, width, args.num_frames, args.guidance_scale, length, args.family)
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
    inputs = Inputs(family, rewards, eval_rewards, train_set, eval_set, lora=lora, checkpoint=checkpoint)
    check_inputs(
        args,
        inputs,
        workload(args),
        schedules={"--num_inference_steps": args.num_inference_steps},
        guidance_scale=args.guidance_scale,
    )
    return inputs


# ==== 3 DATA ==========================================================================================================
def make_request(
    args: Args, model: Family, prompts: PromptSet, prompt_index: Tensor, seeds: list[int]
) -> RolloutRequest:
    """A request for B images of U prompts, encoded: prompt_index (B,) says which prompt, seeds (B) which noise."""
    height, width = args.image_size
    length = args.max_sequence_length
    negatives = prompts.negatives(args.negative_prompt)
    timesteps, sigmas, latent_shape = model.schedule(args.num_inference_steps, height, width, args.num_frames)
    return RolloutRequest(
        conditioning=model.encode(prompts, length, args.image_size, args.num_frames),
        negative_conditioning=model.encode_negative(negatives, args.guidance_scale, length),  # None: no second pass
        prompt_index=prompt_index,
        seeds=seeds,
        timesteps=timesteps.to(model.device),  # (T,), 1000 sigma, which predict_velocity takes
        sigmas=sigmas,  # (T + 1,), on the CPU, as they become Python's floats
        latent_shape=latent_shape,  # (C, h, w); (C, f, h, w) for a video
        height=height,
        width=width,
        guidance_scale=args.guidance_scale,
    )


def trained_steps(args: Args, step: int) -> tuple[int, ...]:
    """The sampling steps that keep their graph: the last K (DRaFT-K), or a random one (ReFL), behind which none follow.

    step: the training step, whose random step is the same for every image and rank.
    """
    if args.method == "draft":
        return tuple(range(args.num_inference_steps - args.gradient_steps, args.num_inference_steps))
    low, high = args.refl_range
    return (random.Random(args.seed + step).randint(low, high - 1),)


# ==== 4 MODEL =========================================================================================================
def policy_names(args: Args) -> list[str]:
    """The policies that a run keeps (common/weights/policy.py)."""
    names = ["default"]  # peft's name for the trained one
    if args.ema_decay > 0:
        names.append("ema")
    return names


def load_policy(args: Args, inputs: Inputs, device: torch.device) -> tuple[Family, list[torch.nn.Parameter]]:
    """The pipeline and its policies, sharded; and the parameters that are trained."""
    prompts = inputs.drawn_prompts(args.num_steps, args.num_prompts, args.order_seed, args.negative_prompt)
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
# None: an engine keeps no graph, so the training transformer samples.


# ==== 6 ROLLOUT =======================================================================================================
def sample(model: Family, request: RolloutRequest, trained_steps: Sequence[int] = ()) -> Tensor:
    """The final latents (B, ...) of the request's B images, by the ODE: x' = x + v dt, dt = sigma_next - sigma < 0.

    trained_steps: consecutive sampling steps that keep their graph. The last of them goes to sigma 0: where it is not
    the schedule's last, x' is the model's estimate x - sigma v of the image, as in ReFL.
    """
    generators = [torch.Generator().manual_seed(seed) for seed in request.seeds]
    x = request.first_latents(generators, model.device)  # (B, C, h, w)
    last = trained_steps[-1] if trained_steps else len(request.timesteps) - 1
    for i in range(last + 1):
        with torch.set_grad_enabled(i in trained_steps):
            v = model.predict_velocity(
                x, request.timesteps[i], request.conditioning, request.negative_conditioning, request.guidance_scale
            )
            sigma, sigma_next = request.sigmas[i : i + 2].tolist()
            x = sde_step(x, v, sigma, sigma_next if i < last else 0.0, noise_level=0.0).prev_sample
    return x


@torch.no_grad()
def rollout(args: Args, model: Family, request: RolloutRequest, scorer: Scorer) -> None:
    """Sample the request's images, micro_batch_size at once; the scorer gets images as they are finished."""
    gathers_once = not {"cpu_offload", "gather_blocks"} & set(args.train_with)  # all weights, not a block in each pass
    with sampling(model, gathers_once):  # and the VAE stays on the device
        for rows in torch.arange(len(request.seeds)).split(args.micro_batch_size):
            scorer.add(rows.tolist(), model.decode(sample(model, request.select(rows))))


# ==== 7 ADVANTAGE =====================================================================================================
# None: the gradient of the score itself says how an image becomes better.


# ==== 8 LOG PROB ======================================================================================================
# None: sampling steps draw nothing, so that they have no density.


# ==== 9 LOSS ==========================================================================================================
def score_pixels(rewards: dict[str, Reward], pixels: Tensor, prompt_set: PromptSet) -> Tensor:
    """Scores (B, R) in fp64 as score_images gives them, with the gradient, by the `of_pixels` of each reward.

    pixels: B images, (B, 3, H, W) in [0, 1], or B videos (B, 3, F, H, W), of the B prompts of a PromptSet.

    Raises:
        RunError: naming the reward whose of_pixels raised, or gave something else than a finite number, with a
            gradient, for each image.
    """
    scores = pixels.new_full((len(pixels), len(rewards)), NOT_ASKED, dtype=torch.float64)
    for column, (name, function) in enumerate(rewards.items()):
        rows = prompt_set.asking(name)
        if not rows:
            continue
        asking = prompt_set.select(rows)
        of_pixels = function.of_pixels  # type: ignore[attr-defined]
        try:
            returned = of_pixels(pixels[rows], list(asking.prompts), asking.for_rewards())
        except (Exception, SystemExit) as error:
            told = describe(error, of_pixels)
            raise RunError(f"reward {name}: its of_pixels raised {told}") from error
        if not isinstance(returned, Tensor) or returned.shape != (len(rows),):
            shape = tuple(returned.shape) if isinstance(returned, Tensor) else type(returned).__name__
            raise RunError(f"reward {name}: its of_pixels returned {shape} in place of a tensor ({len(rows)},)")
        if not returned.requires_grad:
            raise RunError(f"reward {name}: what its of_pixels returned has no gradient by the pixels")
        if not returned.isfinite().all():
            raise RunError(f"reward {name}: its of_pixels gave the scores {truncate(str(returned.tolist()))}")
        scores[rows, column] = returned.double()
    return scores


def reward_loss(scores: Tensor, reward_weights: Sequence[float]) -> tuple[Tensor, dict[str, Tensor]]:
    """Minus the mean over images of the weighted sum of scores (B, R): of those that a prompt asks for.

    Returns the loss, to be minimised, and its metrics, scalars without gradient.
    """
    totals = weighted_totals(scores, reward_weights)  # (B,)
    loss = -totals.where(totals != NOT_ASKED, 0.0).mean()
    return loss, {"actor/loss": loss.detach()}


def accumulate_gradients(
    args: Args,
    model: Family,
    rewards: dict[str, Reward],
    prompts: PromptSet,
    request: RolloutRequest,
    trained_steps: Sequence[int],
) -> tuple[list[dict[str, Tensor]], Tensor]:
    """Add up the gradient of reward_loss over this rank's B images, of the B prompts, which are sampled for it.

    A pass, forward and backward, is one micro-batch. Micro-batches of one size and FSDP's average over ranks weigh
    images alike. Returns the metrics of every pass, and the scores (B, R), NOT_ASKED where a prompt asks for none.
    """
    micro_batches = torch.arange(len(request.seeds)).split(args.micro_batch_size)
    # FSDP averages gradients over the ranks in every backward pass; the last pass alone is enough, so we switch it off
    # until then. Not for full weights: their unsharded fp32 gradients are as large as the model and would not fit
    model.transformer.set_requires_gradient_sync(not model.is_lora)
    passes: list[dict[str, Tensor]] = []
    all_scores = []
    with on_device(model, "vae"):  # until the backward pass is done, which needs the VAE's weights as well
        for rows in micro_batches:
            if len(passes) == len(micro_batches) - 1:
                model.transformer.set_requires_gradient_sync(True)
            pixels = model.pixels(sample(model, request.select(rows), trained_steps))  # (b, 3, H, W), in [0, 1]
            scores = score_pixels(rewards, pixels, prompts.select(rows))  # (b, R)
            loss, metrics = reward_loss(scores, args.reward_weights)
            (loss / len(micro_batches)).backward()
            passes.append(metrics)
            all_scores.append(scores.detach().cpu())
    return passes, torch.cat(all_scores)


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
    rewards: dict[str, Reward],
    prompts: PromptSet,
    request: RolloutRequest,
    trained_steps: Sequence[int],
) -> tuple[dict[str, float], Tensor]:
    """One optimizer step on this rank's B images. Returns metrics over all ranks, and this rank's scores (B, R)."""
    passes, scores = accumulate_gradients(args, model, rewards, prompts, request, trained_steps)
    offload_rewards(rewards)  # networks of rewards leave the GPU, if asked
    grad_norm = optimizer_step(args, model, optimizer)
    metrics: dict[str, float] = {}
    metrics["actor/skipped_steps"] = 0
    metrics["actor/lr"] = optimizer.param_groups[0]["lr"]
    if math.isfinite(grad_norm):  # it is over all ranks: they skip together
        metrics["actor/grad_norm"] = grad_norm
        metrics |= mean_over_ranks(passes)
    else:
        metrics["actor/skipped_steps"] = 1
    return metrics, scores


def score_metrics(args: Args, scores: Tensor, rewards: dict[str, Reward]) -> dict[str, float]:
    """Means of the scores (N, R) of all ranks' images over those that ask for a reward, and of the weighted total."""
    metrics = {}
    totals = weighted_totals(scores, args.reward_weights)  # (N,)
    names = [f"critic/rewards/{name}/mean" for name in rewards]
    for name, values in zip([*names, "critic/rewards/mean"], [*scores.T, totals], strict=True):
        asked = values[values != NOT_ASKED]
        if len(asked):
            metrics[name] = asked.mean().item()
    return metrics


# ==== 10 EVAL =========================================================================================================
def evaluate(args: Args, run: Run, model: Family, inputs: Inputs) -> tuple[dict, list | None]:
    """Images of every held-out prompt, from the same seeds every time, shared by the ranks, and scored as PIL images.

    Returns their metrics (rewards, failures, diversity, drift) and, on rank 0, up to 32 images as (PIL image, caption).
    Except with --eval_only, the policy of the best evaluation is saved.
    """
    with run.timed("testing"):
        places, prompts, seeds = share_eval_images(inputs.eval_set, args.eval_images_per_prompt)  # B each: this rank's
        eval_guidance = args.eval_guidance_scale or args.guidance_scale  # at least 1, or None
        eval_args = replace(args, num_inference_steps=args.eval_num_inference_steps, guidance_scale=eval_guidance)
        prompt_index = torch.arange(len(places))  # a prompt for each image; prompts may repeat
        request = make_request(eval_args, model, prompts, prompt_index, seeds)
        with acting(model, args.evaluated_policy):
            scorer = Scorer(inputs.eval_rewards, prompts, args.reward_failure)
            rollout(eval_args, model, request, scorer)
            scores = scorer.scores(places, args.eval_images_per_prompt)  # (B, R), of inputs.eval_rewards
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
    sampler = GroupSampler(inputs.train_set.parts, args.num_prompts, group_size=1, seed=args.order_seed)
    run.print_message(f"{sampler}; {'LoRA' if model.is_lora else 'full weights'}, {len(parameters)} tensors")

    # RUN LOGIC, the same in all scripts: resume; evaluate first, or redo the evaluation that failed (run.unlogged)
    if run.checkpoint:
        load(args, run, model, optimizer, sampler)
    if args.eval_only or run.unlogged or not run.checkpoint:
        run.log(*evaluate(args, run, model, inputs))
    last_step = run.step if args.eval_only else args.num_steps  # --eval_only takes no training step

    for step in range(run.step + 1, last_step + 1):
        run.begin_step(step, sampler, lambda: save(args, run, model, optimizer, sampler))  # saves if a rollout fails

        # sample an image for each prompt, score its pixels, and follow the scores' gradient (DRaFT-K, or ReFL)
        with run.updating():
            prompt_rows, prompt_index, image_index = sampler.draw()  # B each: a prompt has one image
            prompts = inputs.train_set.select(prompt_rows)
            seeds = [image_seed(args.seed, step, index) for index in image_index.tolist()]
            request = make_request(args, model, prompts, prompt_index, seeds)
            steps = trained_steps(args, step)
            metrics, scores = update(args, model, optimizer, inputs.rewards, prompts, request, steps)
            metrics |= score_metrics(args, gather_rows(scores, image_index), inputs.rewards)

        # RUN LOGIC, the same in all scripts: evaluate, log, save, stop
        metrics |= {"training/epoch": sampler.epoch}
        run.end_step(metrics, has_gradient="actor/grad_norm" in metrics)  # keeps them until `log`
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
