"""Offline DPO (Diffusion-DPO, arXiv 2311.12908v1) for flow matching: preference pairs, the whole algorithm in one file.

A pair says which of two images of a prompt is better. Training makes the better one likelier than the worse one,
relative to the model before training. It needs no reward, no rollout and no engine; without pairs of your own, the
model's best and worst image of a prompt become one. Read `main`, at the end, first. With x_s = (1 - s) x0 + s noise and
v = noise - x0:

  1. A pair says which of two images of a prompt is preferred (Bradley-Terry model, eq. 3): `read_pairs`, `make_pairs`.
  2. Latents and prompts are encoded once, whatever the number of epochs (no equation): `encode_pairs`.
  3. Both images of a pair are noised alike, as in the paper's code (x_t of eq. 14): `draw_training_noise`.
  4. An error of the velocity stands for minus the log-prob of an image (eq. 13, 14): `flow_matching_errors`.
  5. The loss raises the chosen image's log-prob over the rejected one's, relative to the reference, the model before
     training (eq. 14), as a mean over pairs: `dpo_loss`, `update`.

    torchrun --standalone dpo_offline.py                            # makes pairs with the embedded model, then trains
    torchrun --standalone dpo_offline.py --pairs pairs.jsonl        # {"prompt", "chosen", "rejected"} of your own
    torchrun --standalone --nproc_per_node 2 dpo_offline.py         # the same pairs, shared by two ranks

Where it departs from the paper: the error is flow matching's, a mean over elements, instead of the noise prediction's;
s is the sigmoid of a standard normal, instead of a uniform timestep.
"""

# ==== 1 ARGS ==========================================================================================================
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from common.data import GroupSampler, PromptSet, fit_micro_batch, share_eval_images
from common.distributed import (
    mean_over_ranks,
    setup_distributed,
    shard_mesh,
)
from common.files import read_prompts
from common.metrics import norm_ratio
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
from common.pairs import Pairs, encode_pairs, load_pairs, read_pairs, rows_to_make, save_pair, write_pairs
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
from common.scoring import Scorer, offload_rewards, weighted_totals
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
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.optim import AdamW


@dataclass
class Args(SharedArgs):  # and the shared options, in common/options.py; parse_args refuses values beyond a Bound
    # ---- run
    name: str = "dpo_offline"
    """the run's folder is runs/<name>, or an absolute path; it must not hold a run yet, unless you resume it"""

    # ---- data
    pairs: CodeOrName | None = None
    """.jsonl of {"prompt", "chosen", "rejected"} (image files relative to it; "chosen_score" and "rejected_score" are
    checked if given), a .parquet with TRL's or pick-a-pic's columns, a pattern or folder of such, or a folder with a
    pairs.jsonl; "image" is the picture of an edit. None: pairs are made from train_prompts, otherwise unused"""
    cache: FileOrName = "cache"
    """folder of encoded pairs, kept between runs and seen by all ranks; a changed model or image is encoded again"""
    num_pair_prompts: PositiveInt = 1024
    """without --pairs: prompts to make pairs for"""
    group_size: Annotated[int, Bound(at_least=2)] = 8
    """without --pairs: images per prompt, of which the best and the worst become the pair"""

    # ---- rollout
    guidance_scale: Annotated[float, Bound(at_least=1)] = 1.0
    """classifier-free guidance of the images sampled for pairs and evaluation; 1 turns it off. Training
    has none, and gives 1 to FLUX.1's guidance embedding"""
    num_inference_steps: PositiveInt = 3
    """sampling steps of the images that become pairs"""

    # ---- algorithm
    dpo_beta: PositiveFloat = 135.0
    """twice the factor of the errors' differences in the logit; a larger one keeps nearer to the reference (paper: from
    2000)"""

    # ---- optimization
    num_steps: NonNegativeInt = 24
    """optimizer steps of the run"""
    num_pairs: PositiveInt = 256
    """pairs per optimizer step, over all ranks"""
    micro_batch_size: NonNegativeInt = 64
    """pairs per pass on a rank, and images per sampling batch; at most what a rank has; 0: what fits on a GPU"""
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
        args.num_pairs, 1, args.micro_batch_size, "--num_pairs", ranks_per_image=args.ranks_per_image
    )
    return replace(args, micro_batch_size=micro_batch_size)


def workload(args: Args) -> Workload:
    """What a training step samples, trains and keeps: for the plan, the sizes that fit, and perf/mfu."""
    return Workload(
        num_images=2 * args.num_pairs,
        num_prompts=1,  # a pair's embeddings are read from its file
        sampled_steps=0,  # pairs are made before the first step
        trained_steps=1,
        policies=tuple(policy_names(args)),
        acting_passes=1,  # the reference's
        guidance_scale=args.guidance_scale,  # of the pairs; a trained pass has none
        row_images=2,
        drawn_prompts=0 if args.pairs else args.num_pair_prompts,
    )


def prepare(args: Args) -> Inputs:
    """Load and check all but the model: rewards, prompts, the LoRA, which checkpoint. An error names what is wrong."""
    rewards = load_rewards(args.reward, args.reward_weights, args.num_frames, args.reward_frames)
    eval_rewards = load_rewards(  # the trained ones, without those that only compare a group, then its own
        args.eval_reward, None, args.num_frames, args.reward_frames, option="--eval_reward", trained=rewards
    )
    pairs = None
    if args.pairs and not args.eval_only:
        pairs = read_pairs(args.pairs)
    train_set = PromptSet([], [])
    if not pairs:
        trained_on = () if args.eval_only else args.train_prompts  # read with the rewards, which a record may name
        train_set = read_prompts(trained_on, rewards, others=eval_rewards, shares=args.train_shares)
    if args.train_shares:  # pairs are made of the first prompts of the set, so these have each file's share
        train_set = train_set.first_drawn(args.num_pair_prompts, args.order_seed)
    eval_set = read_prompts(args.eval_prompts, eval_rewards, args.max_prompts, others=rewards)
    eval_rewards = with_preservation(eval_rewards, eval_set, args.num_frames)  # where images are edited
    checkpoint = checkpoint_to_resume(args.run_folder, args.resume, args.eval_only)  # or None
    # diffusers and peft, which take seconds to import, come last
    height, width = args.image_size
    length = args.max_sequence_length
    family = find_family(args.model, height, width, args.num_frames, args.guidance_scale, length, args.family)
    if family.makes_videos:
        raise ValueError(f"--model {args.model}: makes videos, and dpo_offline.py takes pairs of images")
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
    inputs = Inputs(family, rewards, eval_rewards, train_set, eval_set, lora=lora, checkpoint=checkpoint, pairs=pairs)
    check_inputs(
        args,
        inputs,
        workload(args),
        schedules={"--num_inference_steps": args.num_inference_steps},
        guidance_scale=args.guidance_scale,
        group_size=args.group_size,
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
    timesteps, sigmas, latent_shape = model.schedule(args.num_inference_steps, height, width)
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


def find_pairs(args: Args, run: Run, model: Family, inputs: Inputs) -> Pairs:
    """The pairs: given, those that this run's checkpoints were trained on, or made now, by the model before any step;
    what an interrupted start has made is taken."""
    if inputs.pairs:
        return inputs.pairs
    with run.timed("make_pairs"):
        if args.resume != "latest" or not run.checkpoint or not (run.folder / "pairs.jsonl").exists():
            make_pairs(args, run, model, inputs)
        else:
            run.print_message("the pairs are those that this run has made: options of making pairs have no effect")
        return read_pairs(run.folder)


def encode_drawn(args: Args, run: Run, model: Family, pairs: Pairs, rows: set[int]) -> dict[int, Path]:
    """Encode the pairs that the run will draw, and no others. Returns their files, by row."""
    with run.timed("encode_pairs"), on_device(model, "text_encoder"), on_device(model, "vae"):
        files = encode_pairs(
            model,
            pairs,
            rows,
            folder=args.cache,
            image_size=args.image_size,
            max_sequence_length=args.max_sequence_length,
        )
    run.print_message(
        f"{len(pairs)} pairs; of the {len(files)} that are drawn, {len(set(files.values()))} are distinct"
    )
    return files


def make_pairs(args: Args, run: Run, model: Family, inputs: Inputs) -> None:
    """Sample group_size images for each of the first num_pair_prompts prompts; the best and the worst become a pair.

    Ranks share the prompts; a prompt whose images all score the same makes no pair.
    """
    num_prompts = min(args.num_pair_prompts, len(inputs.train_set))
    sampling = {"steps": args.num_inference_steps, "guidance": args.guidance_scale, "group": args.group_size}
    for row, is_own in rows_to_make(run.folder, num_prompts, run.config, run.contents, sampling):
        seeds = [image_seed(args.seed, "pairs", row * args.group_size + i) for i in range(args.group_size)]
        prompts = inputs.train_set.select([row] * args.group_size)
        prompt_index = torch.zeros(args.group_size, dtype=torch.long)
        request = make_request(args, model, prompts.select([0]), prompt_index, seeds)
        images = sample(args, model, request).images
        if not is_own:
            continue  # another rank's prompt, which was sampled only to keep the ranks together
        scorer = Scorer(inputs.rewards, prompts, args.reward_failure)
        scorer.add(range(args.group_size), images)
        scores = scorer.scores()  # (G, R), NaN where one failed
        totals = weighted_totals(scores, args.reward_weights)  # (G,), NaN for failed images
        save_pair(run.folder, row, prompts, images, totals)
    offload_rewards(inputs.rewards)  # networks of rewards leave the GPU to the training, if asked
    run.print_message(write_pairs(run.folder, num_prompts))


def draw_training_noise(
    args: Args, step: int, pair_index: Tensor, latent_shape: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """For each pair sigma (B,), the sigmoid of a normal, and noise (B, ...), seeded by (seed, step, global place)."""
    seeds = [image_seed(args.seed, step, i) for i in pair_index.tolist()]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    # a sigmoid of each number alone: that of a vector rounds otherwise
    sigmas = torch.stack([torch.randn((), generator=generator).sigmoid() for generator in generators])
    return sigmas, draw_noise((len(generators), *latent_shape), generators)


# ==== 4 MODEL =========================================================================================================
def policy_names(args: Args) -> list[str]:
    """The policies that a run keeps (common/weights/policy.py)."""
    names = ["default"] if args.eval_only else ["default", "reference"]  # peft's name for the trained one
    if args.ema_decay > 0:
        names.append("ema")
    return names


def load_policy(args: Args, inputs: Inputs, device: torch.device) -> tuple[Family, list[torch.nn.Parameter]]:
    """The pipeline and its policies, sharded; and the parameters that are trained."""
    num_made = min(args.num_pair_prompts, len(inputs.train_set))
    drawn = inputs.train_set.select(range(num_made))  # of the pairs to be made
    if inputs.pairs:
        num_drawn = inputs.num_drawn(args.num_steps, args.num_pairs)
        of_pairs = PromptSet([pair.prompt for pair in inputs.pairs], [{}] * len(inputs.pairs))
        drawn = of_pairs.first_drawn(num_drawn, args.order_seed)
    prompts = drawn.prompts + drawn.negatives(args.negative_prompt).prompts
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
# None: the pairs are given, and images are sampled for evaluation (and without --pairs) only, by the training model.


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
# None: a pair says which of its images is better, not by how much.


# ==== 8 LOG PROB ======================================================================================================
def flow_matching_errors(
    model: Family, conditioning: dict[str, Tensor], latents: Tensor, sigmas: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """e (2, B): mean over elements of (v - (noise - x0))^2 of chosen and rejected latents (2, B, ...), in fp32; and v.

    It stands for minus the log-prob. Both share sigmas (B,) and noise (B, ...). No guidance: the plain conditional
    prediction, as the paper trains it.
    """
    s = sigmas.view(-1, *[1] * (noise.dim() - 1))
    x_s = (1 - s) * latents + s * noise  # (2, B, ...)
    pair_conditioning = {name: torch.cat([tensor, tensor]) for name, tensor in conditioning.items()}
    timesteps = torch.cat([sigmas, sigmas]) * 1000
    v = model.predict_velocity(x_s.flatten(0, 1), timesteps, pair_conditioning).view_as(x_s)
    return ((v - (noise - latents)) ** 2).flatten(2).mean(2), v


# ==== 9 LOSS ==========================================================================================================
def dpo_loss(errors: Tensor, ref_errors: Tensor, dpo_beta: float) -> tuple[Tensor, dict[str, Tensor]]:
    """-log sigmoid(-dpo_beta / 2 ((e_w - e_w_ref) - (e_l - e_l_ref))), mean over pairs (eq. 14); w chosen, l rejected.

    errors, ref_errors: (2, B), chosen first. Returns the loss, to be minimised, and its metrics, without gradient.
    """
    implicit_rewards = -dpo_beta / 2 * (errors - ref_errors)  # (2, B)
    chosen, rejected = implicit_rewards
    logits = chosen - rejected
    loss = -F.logsigmoid(logits).mean()
    is_tie = logits == 0
    accuracy = torch.where(is_tie, 0.5, (logits > 0).double()).mean()  # a tie counts one half
    metrics = {"loss": loss, "implicit_accuracy": accuracy}
    metrics["margin"] = logits.mean()
    metrics["logit_scale"] = logits.abs().mean()
    metrics["chosen_reward"] = chosen.mean()
    metrics["rejected_reward"] = rejected.mean()
    return loss, {f"actor/{name}": value.detach().double() for name, value in metrics.items()}


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
    args: Args, model: Family, optimizer: AdamW, files: list[Path], sigmas: Tensor, noise: Tensor
) -> dict[str, float]:
    """One optimizer step on this rank's B pairs, cached in `files`. Returns metrics over all ranks."""
    micro_batches = torch.arange(len(files)).split(args.micro_batch_size)
    # FSDP averages gradients over the ranks in every backward pass; the last pass alone is enough, so we switch it off
    # until then. Not for full weights: their unsharded fp32 gradients are as large as the model and would not fit
    model.transformer.set_requires_gradient_sync(not model.is_lora)
    passes: list[dict[str, Tensor]] = []
    for rows in micro_batches:
        if len(passes) == len(micro_batches) - 1:
            model.transformer.set_requires_gradient_sync(True)
        latents, conditioning = load_pairs([files[row] for row in rows.tolist()], model.device)  # (2, b, ...)
        s = sigmas[rows].to(model.device)  # (b,)
        eps = noise[rows].to(model.device)  # (b, ...)

        with torch.no_grad(), acting(model, "reference"):
            ref_errors, v_ref = flow_matching_errors(model, conditioning, latents, s, eps)  # (2, b)
        errors, v = flow_matching_errors(model, conditioning, latents, s, eps)
        loss, pass_metrics = dpo_loss(errors, ref_errors, args.dpo_beta)
        pass_metrics["actor/velocity_norm"] = norm_ratio(v.flatten(0, 1), v_ref.flatten(0, 1))
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
        eval_args = replace(args, num_inference_steps=args.eval_num_inference_steps, guidance_scale=eval_guidance)
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
    pairs = None if args.eval_only else find_pairs(args, run, model, inputs)
    num_found = len(pairs) if pairs else 0
    sampler = GroupSampler(num_found, args.num_pairs, group_size=1, seed=args.order_seed)  # of pairs
    _, _, latent_shape = model.schedule(1, *args.image_size)

    # RUN LOGIC, the same in all scripts: resume; evaluate first, or redo the evaluation that failed (run.unlogged)
    if run.checkpoint:
        load(args, run, model, optimizer, sampler)
    files = {}
    if pairs:
        files = encode_drawn(args, run, model, pairs, sampler.upcoming(args.num_steps - run.step))
    if args.eval_only or run.unlogged or not run.checkpoint:
        run.log(*evaluate(args, run, model, inputs))
    last_step = run.step if args.eval_only else args.num_steps  # --eval_only takes no training step

    for step in range(run.step + 1, last_step + 1):
        run.begin_step(step, sampler, lambda: save(args, run, model, optimizer, sampler))  # saves if a rollout fails

        # make the chosen images likelier than the rejected ones, relative to the reference (eq. 14)
        with run.updating():
            pair_rows, _, pair_index = sampler.draw()  # this rank's B pairs; their numbers among the step's
            sigmas, noise = draw_training_noise(args, step, pair_index, latent_shape)
            files_of_step = [files[row] for row in pair_rows.tolist()]
            metrics = update(args, model, optimizer, files_of_step, sigmas=sigmas, noise=noise)

        # RUN LOGIC, the same in all scripts: evaluate, log, save, stop
        metrics |= {"training/epoch": sampler.epoch}
        shown = {"accuracy": "actor/implicit_accuracy"}
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
