"""DMD2 (arXiv 2405.14867): a model that needs many steps and guidance becomes one that needs few and none, in one file.

The student samples in few steps. Its images, noised again, should have the teacher's distribution: the gradient of the
KL between the two is the difference of their scores. The teacher is the model before training, with guidance; the score
of the student's own images is learned beside it, by a fake-score network. There are no rewards in training, no images
of yours and no engine. Read `main`, at the end, first. With x_s = (1 - s) x0 + s noise, v = noise - x0, and so an
estimate x0 = x_s - s v of an image from any velocity:

  1. The student samples from noise in T steps. One of an image's steps is trained, drawn at random; its x0 is the image
     (section 4.5, multi-step generator, trained on its own sampling as in inference): `sample`, `draw_trained_steps`.
  2. x0 is noised to a random level. Teacher and fake score each say which image it was: `estimates_of`.
  3. The student goes by their difference, divided by how far the teacher's is from x0 (eq. 2, and DMD's weight):
     `distribution_matching_loss`, `update`.
  4. The fake score learns from the same images, several updates for one of the student (section 4.2, two time-scale
     update rule): `update_fake`.

A step, or training step, is one update of the student and those of the fake score. A rank has B of the N = num_prompts
images; a micro-batch has b. An image takes T sampling steps.

    torchrun --standalone -m contrib.dmd2 --reward ocr               # which scores evaluations alone
    torchrun --standalone --nproc_per_node 2 -m contrib.dmd2         # the same images, shared by two ranks

Parent: contrib/draft.py

The formulas are those of main/sd_guidance.py and main/sd_unified_model.py of the authors' code (tianweiy/DMD2 at
8d8fa55, CC BY-NC-SA 4.0), read and not copied; of the paper we read what they name. Where it departs from them:
  - The student samples by the ODE's Euler steps, as any pipeline does with its weights. Theirs puts new noise on its
    estimate between steps, which its pipeline must do as well.
  - The trained step is drawn for each image; theirs is one for all images of an update.
  - The fake score learns the velocity, theirs the noise; it learns from one rollout, theirs from one per update; and
    at the levels of --noise_range, as the student does, theirs at all.
  - The GAN loss on real images (section 4.3) is left out, and so is DMD's regression loss, as in the paper.
"""

# ==== 1 ARGS ==========================================================================================================
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

from common.data import GroupSampler, PromptSet, fit_micro_batch, share_eval_images
from common.distributed import mean_over_ranks, setup_distributed, shard_mesh
from common.errors import error_prefix
from common.files import read_prompts
from common.models import Family, find_family
from common.options import (
    Bound,
    CodeOrName,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    SharedArgs,
    lr_factor,
)
from common.rewards import load_rewards, with_preservation
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
from common.scoring import Scorer
from common.sde import draw_noise, image_seed
from common.weights import (
    acting,
    choose_adam_kernel,
    follow,
    load_policies,
    load_training_state,
    make_lora,
    parameters_of,
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
    name: str = "dmd2"
    """the run's folder is runs/<name>, or an absolute path; it must not hold a run yet, unless you resume it"""

    # ---- reward
    reward: tuple[CodeOrName, ...] = ()
    """rewards that score evaluations, and by their weighted total choose best_adapter/; none of them is trained on, and
    there may be none. Their names are those of other scripts (docs/rewards.md)"""

    # ---- rollout
    num_prompts: PositiveInt = 64
    """prompts per training step, over all ranks, an image each"""
    num_inference_steps: PositiveInt = 2
    """sampling steps of the student"""
    eval_num_inference_steps: PositiveInt = 2
    """sampling steps of an evaluation image; give as many as num_inference_steps"""
    guidance_scale: Annotated[float, Bound(at_least=1)] = 1.0
    """the student's own guidance, in training and evaluation alike; 1 turns it off, but for FLUX.1's guidance
    embedding"""

    # ---- algorithm
    teacher_guidance: Annotated[float, Bound(at_least=1)] = 4.0
    """the teacher's guidance, which the student learns to do without (DMD2: 1.75 for SD1.5, 8 for SDXL)"""
    fake_updates: PositiveInt = 5
    """updates of the fake score for one of the student (DMD2: 5, and 10 without a GAN loss)"""
    fake_learning_rate: NonNegativeFloat = 1e-3
    """constant learning rate of the fake score's AdamW"""
    noise_range: Annotated[tuple[float, float], Bound(at_least=0, at_most=1)] = (0.02, 0.98)
    """an image is noised to a level between these two, drawn evenly, of which the model's own scheduler then makes what
    it does when it samples"""

    # ---- optimization
    num_steps: NonNegativeInt = 100
    """training steps of the run, each of them one update of the student"""
    micro_batch_size: NonNegativeInt = 64
    """images per pass on a rank, and per sampling batch; at most what a rank has; 0: what fits on a GPU"""
    learning_rate: NonNegativeFloat = 5e-4
    """learning rate of the student's AdamW"""
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
    low, high = args.noise_range
    if low >= high:
        raise ValueError(f"--noise_range {low:g} {high:g}: the first must be smaller")
    micro_batch_size = fit_micro_batch(
        args.num_prompts, 1, args.micro_batch_size, "--num_prompts", ranks_per_image=args.ranks_per_image
    )
    return replace(args, micro_batch_size=micro_batch_size)


def workload(args: Args) -> Workload:
    """What a training step samples, trains and keeps: for the plan, the sizes that fit, and perf/mfu."""
    trained_steps = 1 + args.fake_updates
    branches = 2 if args.guidance_scale > 1 else 1  # of a pass by the student or the fake score
    acting_passes = 1 + (2 if args.teacher_guidance > 1 else 1) / branches  # by the fake score, and by the teacher
    return Workload(
        num_images=args.num_prompts,
        num_prompts=args.num_prompts,
        sampled_steps=args.num_inference_steps,
        trained_steps=trained_steps,
        policies=tuple(policy_names(args)),
        trained_policies=len(TRAINED),
        acting_passes=acting_passes / trained_steps,
        guidance_scale=args.guidance_scale,
        trained_guidance=args.guidance_scale,
    )


def prepare(args: Args) -> Inputs:
    """Load and check all but the model: rewards, prompts, the LoRA, which checkpoint. An error names what is wrong."""
    rewards = load_rewards(args.reward, args.reward_weights, args.num_frames, args.reward_frames)
    eval_rewards = load_rewards(  # the trained ones, without those that only compare a group, then its own
        args.eval_reward, None, args.num_frames, args.reward_frames, option="--eval_reward", trained=rewards
    )
    train_set = read_prompts(() if args.eval_only else args.train_prompts, shares=args.train_shares)
    for record in train_set.metadata:
        record.pop("rewards", None)  # no reward sees what is trained on
    eval_set = read_prompts(args.eval_prompts, eval_rewards, args.max_prompts, others=rewards)
    eval_rewards = with_preservation(eval_rewards, eval_set, args.num_frames)  # where images are edited
    checkpoint = checkpoint_to_resume(args.run_folder, args.resume, args.eval_only)  # or None
    # diffusers and peft, which take seconds to import, come last
    height, width = args.image_size
    length = args.max_sequence_length
    family = find_family(args.model, height, width, args.num_frames, args.guidance_scale, length, args.family)
    teacher_guidance = 1.0 if args.eval_only else args.teacher_guidance
    with error_prefix(f"--teacher_guidance {teacher_guidance:g}"):
        family.check(args.model, height, width, args.num_frames, teacher_guidance)
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
        kl_guidance_scale=teacher_guidance,
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
        # None: no second pass, neither of the student nor of the teacher
        negative_conditioning=model.encode_negative(negatives, max(args.guidance_scale, args.teacher_guidance), length),
        prompt_index=prompt_index,
        seeds=seeds,
        timesteps=timesteps.to(model.device),  # (T,), 1000 sigma, which predict_velocity takes
        sigmas=sigmas,  # (T + 1,), on the CPU, as they become Python's floats
        latent_shape=latent_shape,  # (C, h, w); (C, f, h, w) for a video
        height=height,
        width=width,
        guidance_scale=args.guidance_scale,
    )


def draw_trained_steps(args: Args, step: int, image_index: Tensor) -> Tensor:
    """Which of an image's T sampling steps is trained (B,), drawn evenly, seeded by (seed, step, image)."""
    generators = [torch.Generator().manual_seed(image_seed(args.seed, f"{step} step", i)) for i in image_index.tolist()]
    return torch.cat([torch.randint(args.num_inference_steps, (1,), generator=g) for g in generators])


def draw_training_noise(
    args: Args, purpose: str, image_index: Tensor, schedule: list[float], latent_shape: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """For each image a level sigma (B,) within noise_range and noise (B, ...), seeded by (seed, purpose, image).

    purpose: names the training step and the update. schedule: sigmas of the model's own, from 1 to 0. In Python's fp64:
    an image's number does not depend on which others are drawn.
    """
    low, high = args.noise_range
    generators = [torch.Generator().manual_seed(image_seed(args.seed, purpose, i)) for i in image_index.tolist()]
    sigmas = []
    for generator in generators:
        s = low + (high - low) * torch.rand((), generator=generator).item()
        place = (1 - s) * (len(schedule) - 1)  # sampling goes from 1 to 0
        i = min(int(place), len(schedule) - 2)
        sigmas.append(schedule[i] + (place - i) * (schedule[i + 1] - schedule[i]))
    return torch.tensor(sigmas), draw_noise((len(generators), *latent_shape), generators)


# ==== 4 MODEL =========================================================================================================
TRAINED = ("default", "fake")  # the student, by peft's name, and the fake score


def policy_names(args: Args) -> list[str]:
    """The policies that a run keeps (common/weights/policy.py)."""
    names = ["default"]
    if args.ema_decay > 0:
        names.append("ema")
    if not args.eval_only:
        names += ["fake", "reference"]  # the latter is the teacher: of a new LoRA the base model
    return names


def load_policy(args: Args, inputs: Inputs, device: torch.device) -> Family:
    """The pipeline and its policies, sharded."""
    prompts = inputs.drawn_prompts(args.num_steps, args.num_prompts, args.order_seed, args.negative_prompt)
    model = load_policies(args, inputs.family, inputs.lora, policy_names(args), prompts, device, trained=TRAINED)
    shard(args, model, device)
    return model


def make_optimizer(args: Args, model: Family, policy: str, learning_rate: float) -> AdamW:
    """AdamW of a policy that is trained."""
    parameters = parameters_of(model, policy)
    optimizer = AdamW(
        parameters, lr=learning_rate, betas=args.adam_betas, eps=args.adam_eps, weight_decay=args.weight_decay
    )
    return choose_adam_kernel(optimizer, model, args.adam_bits)  # foreach, fused, or torchao's of 8 bits


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
# None: the few steps of a student are cheap, and no weights have to be pushed.


# ==== 6 ROLLOUT =======================================================================================================
def estimate(x: Tensor, v: Tensor, sigma: Tensor) -> Tensor:
    """The image x0 = x - sigma v (B, ...) that a velocity v (B, ...) at x sees; sigma (B,)."""
    return x - sigma.view(-1, *[1] * (x.dim() - 1)).to(x.device) * v


@torch.no_grad()
def sample(model: Family, request: RolloutRequest) -> tuple[Tensor, Tensor]:
    """Sample B images by the ODE, x' = x + v dt, dt = sigma_next - sigma < 0.

    Returns what each of the T steps began with, and the image that it saw (`estimate`), (B, T, ...) each. The last
    step's is the image.
    """
    generators = [torch.Generator().manual_seed(seed) for seed in request.seeds]
    x = request.first_latents(generators, model.device)  # (B, C, h, w)
    inputs = []
    estimates = []
    for i in range(len(request.timesteps)):
        v = model.predict_velocity(
            x, request.timesteps[i], request.conditioning, request.negative_conditioning, request.guidance_scale
        )
        sigma, sigma_next = request.sigmas[i : i + 2].tolist()
        inputs.append(x)
        estimates.append(x - sigma * v)
        x = x + (sigma_next - sigma) * v
    return torch.stack(inputs, 1), torch.stack(estimates, 1)


@torch.no_grad()
def rollout(args: Args, model: Family, request: RolloutRequest, scorer: Scorer) -> None:
    """Sample the request's images, micro_batch_size at once; the scorer gets images as they are finished."""
    gathers_once = not {"cpu_offload", "gather_blocks"} & set(args.train_with)  # all weights, not a block in each pass
    with sampling(model, gathers_once):  # and the VAE stays on the device
        for rows in torch.arange(len(request.seeds)).split(args.micro_batch_size):
            _, estimates = sample(model, request.select(rows))
            scorer.add(rows.tolist(), model.decode(estimates[:, -1]))


class Batch(NamedTuple):
    """A rollout as the updates take it: B images of this rank."""

    request: RolloutRequest
    image_index: Tensor  # (B,), the images' numbers over all ranks
    x: Tensor  # (B, ...), what the trained step began with
    sigma: Tensor  # (B,), there
    x0: Tensor  # (B, ...), the student's image


def make_batch(args: Args, model: Family, request: RolloutRequest, image_index: Tensor, step: int) -> Batch:
    """Sample the request's images, micro_batch_size at once, and take each at its trained step."""
    steps = draw_trained_steps(args, step, image_index)  # (B,)
    x = []
    x0 = []
    gathers_once = not {"cpu_offload", "gather_blocks"} & set(args.train_with)  # all weights, not a block in each pass
    with sampling(model, gathers_once):
        for rows in torch.arange(len(request.seeds)).split(args.micro_batch_size):
            inputs, estimates = sample(model, request.select(rows))  # (b, T, ...)
            own = torch.arange(len(rows)), steps[rows]
            x.append(inputs[own])
            x0.append(estimates[own])
    return Batch(request, image_index, torch.cat(x), request.sigmas[steps], torch.cat(x0))


# ==== 7 ADVANTAGE =====================================================================================================
# None: no image is compared with another.


# ==== 8 LOG PROB ======================================================================================================
# None: two scores take the place of densities, as the images that they see in a noised one.
def noised(x0: Tensor, sigma: Tensor, noise: Tensor) -> Tensor:
    """x_s = (1 - s) x0 + s noise (B, ...), of levels s = sigma (B,)."""
    s = sigma.view(-1, *[1] * (x0.dim() - 1)).to(x0.device)
    return (1 - s) * x0 + s * noise.to(x0.device)


@torch.no_grad()
def estimates_of(args: Args, model: Family, policy: str, batch: Batch, sigmas: Tensor, noise: Tensor) -> Tensor:
    """The images (B, ...) that `fake`, or the teacher with its guidance (`reference`), sees in the noised x0."""
    guidance = args.teacher_guidance if policy == "reference" else args.guidance_scale
    parts = []
    with acting(model, policy):
        for rows in torch.arange(len(batch.x0)).split(args.micro_batch_size):
            request = batch.request.select(rows)
            x_s = noised(batch.x0[rows], sigmas[rows], noise[rows])
            v = model.predict_velocity(
                x_s, sigmas[rows] * 1000, request.conditioning, request.negative_conditioning, guidance
            )
            parts.append(estimate(x_s, v, sigmas[rows]))
    return torch.cat(parts)


# ==== 9 LOSS ==========================================================================================================
def distribution_matching_loss(x0: Tensor, real: Tensor, fake: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss whose gradient by x0 is (fake - real) / w / number of elements: DMD2's eq. 2 by images in place of scores,
    with DMD's weight, w = mean |x0 - real| of each image.

    x0 (B, ...): the student's images. real and fake: those that the teacher and the fake score see in it, noised.
    Returns the loss, to be minimised, and its metrics, scalars without gradient.
    """
    with torch.no_grad():
        # in fp64, in which a difference of two alike images keeps its digits
        distance = (x0.double() - real.double()).abs().flatten(1).mean(1).clamp(min=1e-8)  # (B,)
        direction = (fake.double() - real.double()) / distance.view(-1, *[1] * (x0.dim() - 1))
    target = (x0.double() - direction).detach()
    loss = 0.5 * ((x0.double() - target) ** 2).mean()
    metrics = {"loss": loss, "teacher_distance": distance.mean(), "score_difference": direction.abs().mean()}
    return loss, {f"actor/{name}": value.detach() for name, value in metrics.items()}


def accumulate_gradients(
    args: Args, model: Family, batch: Batch, real: Tensor, fake: Tensor
) -> list[dict[str, Tensor]]:
    """Add up the student's gradient of distribution_matching_loss over this rank's B images, at their trained steps.

    real and fake (B, ...): estimates_of. A pass, forward and backward, is one micro-batch. Micro-batches of one size
    and FSDP's average over ranks weigh images alike. Returns the metrics of every pass.
    """
    micro_batches = torch.arange(len(batch.x0)).split(args.micro_batch_size)
    # FSDP averages gradients over the ranks in every backward pass; the last pass alone is enough, so we switch it off
    # until then. Not for full weights: their unsharded fp32 gradients are as large as the model and would not fit
    model.transformer.set_requires_gradient_sync(not model.is_lora)
    passes: list[dict[str, Tensor]] = []
    for rows in micro_batches:
        if len(passes) == len(micro_batches) - 1:
            model.transformer.set_requires_gradient_sync(True)
        request = batch.request.select(rows)
        x, sigma = batch.x[rows], batch.sigma[rows]
        v = model.predict_velocity(
            x, sigma * 1000, request.conditioning, request.negative_conditioning, request.guidance_scale
        )
        loss, metrics = distribution_matching_loss(estimate(x, v, sigma), real[rows], fake[rows])
        (loss / len(micro_batches)).backward()
        passes.append(metrics)
    return passes


def accumulate_fake_gradients(
    args: Args, model: Family, batch: Batch, sigmas: Tensor, noise: Tensor
) -> list[dict[str, Tensor]]:
    """Add up the fake score's gradient of mean((v - (noise - x0))^2), flow matching on the student's B images.

    `fake` acts. sigmas (B,), noise (B, ...). Passes and ranks as in accumulate_gradients.
    """
    micro_batches = torch.arange(len(batch.x0)).split(args.micro_batch_size)
    model.transformer.set_requires_gradient_sync(not model.is_lora)
    passes: list[dict[str, Tensor]] = []
    for rows in micro_batches:
        if len(passes) == len(micro_batches) - 1:
            model.transformer.set_requires_gradient_sync(True)
        request = batch.request.select(rows)
        x0, eps = batch.x0[rows], noise[rows].to(batch.x0.device)
        v = model.predict_velocity(
            noised(x0, sigmas[rows], eps),
            sigmas[rows] * 1000,
            request.conditioning,
            request.negative_conditioning,
            request.guidance_scale,
        )
        loss = ((v - (eps - x0)) ** 2).mean()
        (loss / len(micro_batches)).backward()
        passes.append({"actor/fake_loss": loss.detach().double()})
    return passes


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
    args: Args, model: Family, optimizer: AdamW, batch: Batch, sigmas: Tensor, noise: Tensor
) -> dict[str, float]:
    """One optimizer step of the student on this rank's B images. Returns metrics over all ranks."""
    fake = estimates_of(args, model, "fake", batch, sigmas, noise)
    real = estimates_of(args, model, "reference", batch, sigmas, noise)
    passes = accumulate_gradients(args, model, batch, real, fake)
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


def update_fake(
    args: Args, model: Family, optimizer: AdamW, batch: Batch, levels: Iterable[tuple[Tensor, Tensor]]
) -> dict[str, float]:
    """An optimizer step of the fake score on this rank's B images for each of `levels`, sigmas (B,) and noise (B, ...).

    A step is left out where the gradient's norm is not finite, or is 0. Returns metrics over all ranks.
    """
    group = optimizer.param_groups[0]
    grad_norms = []
    finite_passes = []  # of the optimizer steps whose gradient is finite
    num_skipped = 0
    for sigmas, noise in levels:
        with acting(model, "fake"):
            passes = accumulate_fake_gradients(args, model, batch, sigmas, noise)
        norm = torch.nn.utils.clip_grad_norm_(group["params"], args.max_grad_norm)
        grad_norm = norm.full_tensor().item()  # type: ignore[attr-defined]  # FSDP's is a DTensor
        if 0 < grad_norm < math.inf:
            optimizer.step()
        optimizer.zero_grad()
        if math.isfinite(grad_norm):  # it is over all ranks: they skip together
            grad_norms.append(grad_norm)
            finite_passes += passes
        else:
            num_skipped += 1
    metrics: dict[str, float] = {"actor/skipped_fake_steps": num_skipped}
    if grad_norms:
        metrics["actor/fake_grad_norm"] = sum(grad_norms) / len(grad_norms)
        metrics |= mean_over_ranks(finite_passes)
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
def save(args: Args, run: Run, model: Family, optimizers: dict[str, AdamW], sampler: GroupSampler) -> None:
    """Write all that training changes, for any number of ranks to resume from; and the policy for diffusers, of full
    weights only at the end."""
    state = training_state(model, optimizers, run.checkpoint_path)  # full weights are written now, beside this path
    state["sampler"] = sampler.state_dict()
    run.save_checkpoint(state, model, args.evaluated_policy)


def load(args: Args, run: Run, model: Family, optimizers: dict[str, AdamW], sampler: GroupSampler) -> None:
    """Restore what `save` wrote, on any number of ranks; and the run's step, best score and unlogged metrics."""
    state = run.load_checkpoint()
    load_training_state(model, optimizers, state)
    sampler.load_state_dict(state["sampler"])
    for optimizer in optimizers.values():
        adam = optimizer.param_groups[0]
        adam["weight_decay"] = args.weight_decay  # this run's; the student's rate is set at every optimizer step
        adam["betas"] = args.adam_betas
        adam["eps"] = args.adam_eps
    if "fake" in optimizers:
        optimizers["fake"].param_groups[0]["lr"] = args.fake_learning_rate
    run.repair_adapter(model, args.evaluated_policy)  # of a run that has all its steps


# ==== 12 MAIN =========================================================================================================
def main(args: Args, inputs: Inputs) -> None:
    device = setup_distributed(args.shard_ranks, args.ranks_per_image)
    args = choose_sizes(args, inputs, workload(args))  # what fits, where an option is 0; rank and alpha of --lora_path
    run = Run(args, inputs.all_rewards, script=__file__, checkpoint=inputs.checkpoint, workload=workload(args))
    model = load_policy(args, inputs, device)
    optimizers = {"default": make_optimizer(args, model, "default", args.learning_rate)}
    if not args.eval_only:
        optimizers["fake"] = make_optimizer(args, model, "fake", args.fake_learning_rate)
    sampler = GroupSampler(inputs.train_set.parts, args.num_prompts, group_size=1, seed=args.order_seed)
    num_tensors = len(optimizers["default"].param_groups[0]["params"])
    run.print_message(f"{sampler}; {'LoRA' if model.is_lora else 'full weights'}, {num_tensors} tensors")
    _, schedule, latent_shape = model.schedule(model.level_steps, *args.image_size, args.num_frames)

    # RUN LOGIC, the same in all scripts: resume; evaluate first, or redo the evaluation that failed (run.unlogged)
    if run.checkpoint:
        load(args, run, model, optimizers, sampler)
    if args.eval_only or run.unlogged or not run.checkpoint:
        run.log(*evaluate(args, run, model, inputs))
    last_step = run.step if args.eval_only else args.num_steps  # --eval_only takes no training step

    for step in range(run.step + 1, last_step + 1):
        run.begin_step(step, sampler, lambda: save(args, run, model, optimizers, sampler))  # saves if a rollout fails

        # the student samples an image for each prompt, and one of its steps is trained (DMD2, section 4.5)
        with run.timed("gen", per_image=True):
            prompt_rows, prompt_index, image_index = sampler.draw()  # B each: a prompt has one image
            prompts = inputs.train_set.select(prompt_rows)
            seeds = [image_seed(args.seed, step, index) for index in image_index.tolist()]
            request = make_request(args, model, prompts, prompt_index, seeds)
            batch = make_batch(args, model, request, image_index, step)

        with run.updating():
            # the student goes from what the fake score sees to what the teacher sees (DMD2, eq. 2)
            levels = draw_training_noise(args, f"{step} update", image_index, schedule.tolist(), latent_shape)
            metrics = update(args, model, optimizers["default"], batch, *levels)
            # the fake score learns what the student draws (DMD2, section 4.2)
            of_fake = (
                draw_training_noise(args, f"{step} fake {k}", image_index, schedule.tolist(), latent_shape)
                for k in range(args.fake_updates)
            )
            metrics |= update_fake(args, model, optimizers["fake"], batch, of_fake)

        # RUN LOGIC, the same in all scripts: evaluate, log, save, stop
        metrics |= {"training/epoch": sampler.epoch}
        # keeps them until `log`
        run.end_step(metrics, has_gradient={"actor/grad_norm", "actor/fake_grad_norm"} <= metrics.keys())
        is_due = step % args.eval_every == 0 or step == args.num_steps
        val_metrics, grid = evaluate(args, run, model, inputs) if is_due else ({}, None)
        run.log(val_metrics, grid)  # ends the run at a NaN, or after three steps in a row without a finite gradient
        stopping = run.should_stop()  # asked before `save`, which writes more at the end
        if step % (args.save_every or args.eval_every) == 0 or step == args.num_steps or stopping:
            save(args, run, model, optimizers, sampler)
        if stopping:
            break

    run.close()


if __name__ == "__main__":
    with friendly_errors():  # an expected error ends the script in one line, without a traceback
        args = check(parse_args(Args, __doc__))
        main(args, prepare(args))
