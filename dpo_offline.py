"""Offline DPO (Diffusion-DPO, arXiv 2311.12908) for flow matching: preference pairs, the whole algorithm in one file.

    torchrun --standalone dpo_offline.py                            # makes pairs with the embedded model, then trains
    torchrun --standalone dpo_offline.py --pairs pairs.jsonl        # {"prompt", "chosen", "rejected"} of your own
    torchrun --standalone --nproc_per_node 2 dpo_offline.py         # the same pairs, shared by two ranks

How it works, and where it departs from the paper's code:
1. The two images of a pair share noise and timestep, stay in one micro-batch and on one rank.
2. The reference is the base model, by switching the adapters off.
3. Without --pairs the model's own best and worst image of each prompt are the pairs: written to the run folder first.
"""
# ==== 1 ARGS ==========================================================================================================
import gc
import hashlib
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from common.data import GroupSampler, check_at_least, read_pairs, read_prompts
from common.distributed import gather, gather_objects, launched_world_size, setup_distributed, timed
from common.models import find_family, load_model
from common.rewards import load_rewards, score_images
from common.rollout import RolloutRequest, Trajectories
from common.run import (
    MetricLog,
    atomic_file,
    check_run_folder,
    create_run_folder,
    save_adapter,
    save_checkpoint,
    speed_metrics,
)
from common.sde import draw_noise, image_seed, sde_step

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from peft import LoraConfig, get_peft_model_state_dict
from PIL import Image
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from tqdm import tqdm

ASSETS = Path(__file__).parent / "assets"
MAX_SKIPPED = 3  # optimizer steps in a row without a finite gradient before the run stops


@dataclass
class Args:
    name: str = "dpo_offline"
    """everything is written to runs/<name>, which must not hold a run yet"""
    seed: int = 1
    """seed of the data order, the noise and the LoRA's initial weights"""
    track: bool = False
    """log to wandb too, with the validation images"""
    model: str = str(ASSETS / "embedded")
    """diffusers pipeline: a folder or a hub id"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of the frozen weights and the forward passes; LoRA, Adam, sampling arithmetic and the VAE are fp32 always"""
    lora_rank: int = 16
    """rank of the LoRA on the attention projections"""
    lora_alpha: int = 32
    """the LoRA acts with weight lora_alpha / lora_rank"""
    height: int = 32
    """image height in pixels"""
    width: int = 96
    """image width in pixels"""
    max_sequence_length: int = 16
    """T5 tokens per prompt, longer ones are cut (SD3.5: 256)"""
    train_prompts: str = str(ASSETS / "train_prompts.txt")
    """.txt, one prompt a line, or .jsonl, {"prompt": ...} with any metadata for the rewards"""
    eval_prompts: str = str(ASSETS / "eval_prompts.txt")
    """held-out prompts, one image each at every evaluation"""
    reward: tuple[str, ...] = ("ocr",)
    """ocr, ocr_contains, jpeg_compressibility, jpeg_incompressibility, path/to/file.py:function; several are added"""
    reward_weights: tuple[float, ...] = (1.0,)
    """weight of each reward in the sum"""
    pairs: str | None = None
    """.jsonl of {"prompt", "chosen", "rejected"} (image files, relative to it; "chosen_score" and "rejected_score" are
    checked where given), or a folder with a pairs.jsonl; None: pairs are made from train_prompts, else unused"""
    cache: str = "cache"
    """folder of encoded pairs, kept between runs and seen by all ranks; a changed model or image is encoded anew"""
    num_pair_prompts: int = 512
    """without --pairs: prompts to make pairs for"""
    group_size: int = 8
    """without --pairs: images per prompt, of which the best and the worst become the pair"""
    num_pairs: int = 64
    """pairs per optimizer step, over all ranks"""
    guidance_scale: float = 1.0
    """classifier-free guidance of the images sampled for pairs and evaluation; 1 is none. Training is without"""
    num_inference_steps: int = 3
    """sampling steps of the images that pairs are made of"""
    num_steps: int = 40
    """optimizer steps of the run"""
    micro_batch_size: int = 64
    """pairs per forward and backward pass on a rank, and images per sampling batch; lowered to what a rank has"""
    learning_rate: float = 1e-3
    """AdamW's, constant"""
    weight_decay: float = 1e-4
    """AdamW's"""
    adam_eps: float = 1e-15
    """AdamW's; small, because gradients of a mean over all latent elements are (5e-9 RMS has been seen)"""
    max_grad_norm: float = 1.0
    """gradient norm above which it is scaled down"""
    dpo_beta: float = 100.0
    """weight of the errors' differences in the logit: larger stays closer to the reference (paper: 2000 and more)"""
    eval_every: int = 5
    """steps between evaluations and checkpoints; there is one of each at the end, and an evaluation at step 0"""
    eval_num_inference_steps: int = 3
    """ODE steps per evaluation image (the paper: 40)"""


# ==== 2 SETUP =========================================================================================================
def check_args(args):
    """Refuse what cannot work before any model loads. Returns the model family, the rewards and the two prompt sets."""
    family, rewards = find_family(args.model), load_rewards(args.reward)
    check_run_folder(Path("runs") / args.name)
    if len(args.reward_weights) != len(args.reward):
        raise ValueError(f"--reward_weights: {len(args.reward_weights)} weights for {len(args.reward)} rewards")
    check_at_least(vars(args), num_pairs=1, group_size=2, num_pair_prompts=1, num_inference_steps=1, eval_every=1,
                   eval_num_inference_steps=1, micro_batch_size=1)
    world_size = launched_world_size()
    args.micro_batch_size = min(args.micro_batch_size, args.num_pairs // world_size or 1)
    if args.num_pairs % (world_size * args.micro_batch_size):
        raise ValueError(f"--num_pairs {args.num_pairs} does not divide into ranks x --micro_batch_size = "
                         f"{world_size * args.micro_batch_size}")
    if args.dpo_beta <= 0:
        raise ValueError(f"--dpo_beta {args.dpo_beta}: must be above 0")
    pairs = read_pairs(args.pairs) if args.pairs else None
    return family, rewards, read_prompts(args.train_prompts, rewards), read_prompts(args.eval_prompts, rewards), pairs


# ==== 3 DATA ==========================================================================================================
def make_request(args, model, prompts, prompt_index, seeds, num_inference_steps):
    """Ask for B ODE images of `prompts`, each encoded once: prompt_index (B,) says which one, seeds (B) its noise."""
    timesteps, sigmas, latent_shape = model.schedule(num_inference_steps, args.height, args.width)  # (T,), (T + 1,)
    conditioning = model.encode_prompts(prompts, args.max_sequence_length)
    negative = model.encode_prompts([""], args.max_sequence_length) if args.guidance_scale > 1 else None
    return RolloutRequest(conditioning, negative, prompt_index, seeds, timesteps, sigmas, latent_shape, sde_steps=(),
                          sde_type="sde", noise_level=0.0, guidance_scale=args.guidance_scale, height=args.height,
                          width=args.width)


def make_pairs(args, model, rewards, prompts, metadata, folder):
    """Sample group_size images for each of the first num_pair_prompts prompts and write best and worst as a pair.

    Ranks share the prompts; prompts whose images all score the same make no pair. Returns the path of pairs.jsonl.
    """
    rank, world_size, records = dist.get_rank(), dist.get_world_size(), []
    num_prompts, weights = min(args.num_pair_prompts, len(prompts)), torch.tensor(args.reward_weights).double()
    (folder / "pairs").mkdir(parents=True, exist_ok=True)
    for place in range(rank, math.ceil(num_prompts / world_size) * world_size, world_size):
        row = place % num_prompts  # as many on every rank: a surplus wraps, and makes no pair
        seeds = [image_seed(args.seed, "pairs", row * args.group_size + i) for i in range(args.group_size)]
        index = torch.zeros(args.group_size, dtype=torch.long)
        request = make_request(args, model, prompts[row : row + 1], index, seeds, args.num_inference_steps)
        images = sample(args, model, request).images
        totals = score_images(rewards, images, [prompts[row]] * len(images), [metadata[row]] * len(images)) @ weights
        best, worst = totals.argmax().item(), totals.argmin().item()
        if totals[best] > totals[worst] and place < num_prompts:
            record = {"prompt": prompts[row]}
            for kind, i in (("chosen", best), ("rejected", worst)):
                images[i].save(folder / "pairs" / f"{row:05d}_{kind}.png")
                record |= {kind: f"pairs/{row:05d}_{kind}.png", f"{kind}_score": totals[i].item()}
            records.append((row, record))
    records = [record for _, record in sorted(sum(gather_objects(records), []), key=lambda item: item[0])]
    if not records:
        raise RuntimeError(f"--num_pair_prompts {args.num_pair_prompts}: the images of every prompt score the same")
    if rank == 0:
        print(f"{len(records)} pairs of {num_prompts} prompts")
        with atomic_file(folder / "pairs.jsonl") as temporary:
            temporary.write_text("".join(json.dumps(record) + "\n" for record in records))
    dist.barrier()
    return folder / "pairs.jsonl"


def encode_pairs(args, model, pairs):
    """Encode what the cache lacks: latents of a pair's two images, (2, C, h, w), and its prompt's conditioning.

    A pair's key covers the prompt, both files' bytes, the size, and the bits of VAE and text encoders. Returns the
    files of all pairs; ranks share the work.
    """
    bits = [torch.hash_tensor(t).view(torch.int64).item() for t in model.encoder_tensors()]
    frozen = hashlib.blake2b(repr(bits).encode())
    files = []
    for prompt, chosen, rejected in pairs:
        key = frozen.copy()
        key.update(repr((prompt, args.height, args.width, args.max_sequence_length)).encode())
        key.update(chosen.read_bytes() + rejected.read_bytes())
        files.append(Path(args.cache) / f"{key.hexdigest()[:32]}.pt")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    distinct = dict(zip(files, pairs, strict=True))  # a pair that stands twice is encoded once
    for file, (prompt, *images) in list(distinct.items())[rank::world_size]:
        if not file.exists():
            images = [Image.open(image).convert("RGB") for image in images]
            encoded = {"latents": model.encode_images(images, args.height, args.width),
                       **model.encode_prompts([prompt], args.max_sequence_length)}
            with atomic_file(file) as temporary:
                torch.save({k: v.cpu() for k, v in encoded.items()}, temporary)
    dist.barrier()
    return files


def draw_training_noise(args, step, pair_index, latent_shape):
    """Of each pair of the step sigma (B,), logit-normal, and noise (B, ...), seeded by (seed, step, global place)."""
    generators = [torch.Generator().manual_seed(image_seed(args.seed, step, i)) for i in pair_index.tolist()]
    sigmas = torch.stack([torch.sigmoid(torch.randn((), generator=generator)) for generator in generators])
    return sigmas, draw_noise((len(generators), *latent_shape), generators)


# ==== 4 MODEL =========================================================================================================
def load_policy(args, family, device):
    """The frozen pipeline, with a trainable LoRA on its transformer, which is sharded block by block (FSDP2)."""
    dtype = getattr(torch, args.dtype)
    model = load_model(family, args.model, dtype, device)
    torch.manual_seed(args.seed)  # the same initial LoRA on every rank
    model.transformer.add_adapter(LoraConfig(r=args.lora_rank, lora_alpha=args.lora_alpha, init_lora_weights="gaussian",
                                             target_modules=list(family.lora_target_modules)))
    for p in model.transformer.parameters():
        p.data = p.data.float() if p.requires_grad else p.data
    # FSDP must not cast the inputs: it would round the timesteps to bf16. predict_velocity casts what is to be cast
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    blocks = [m for m in model.transformer.modules() if type(m).__name__ in model.transformer._no_split_modules]
    for module in (*blocks, model.transformer):
        fully_shard(module, mp_policy=policy)
    return model, [p for p in model.transformer.parameters() if p.requires_grad]


def use_adapter(transformer, on):
    """With the adapter the transformer is the policy, without it the reference; what is trainable stays so."""
    (transformer.enable_adapters if on else transformer.disable_adapters)()
    for name, p in transformer.named_parameters():
        p.requires_grad_("lora_" in name)  # peft freezes what it disables


def full_adapter(transformer):
    """The LoRA on the CPU, whole: {"module.lora_A.weight": tensor}, and its LoraConfig. A collective."""
    tensors = {name: p.full_tensor().detach().cpu() for name, p in get_peft_model_state_dict(transformer).items()}
    return tensors, transformer.peft_config["default"]


# ==== 5 ENGINE ========================================================================================================
# None: the pairs are given, and images are sampled for evaluation (and without --pairs) only, by the training model.


# ==== 6 ROLLOUT =======================================================================================================
@torch.no_grad()
def sample(args, model, request):
    """Sample the request's B images with the training transformer, by the ODE, micro_batch_size at once."""
    parts, sigmas = [], request.sigmas.tolist()
    for rows in torch.arange(len(request.seeds)).split(args.micro_batch_size):
        part = request.select(rows)
        generators = [torch.Generator().manual_seed(seed) for seed in part.seeds]
        x = draw_noise((len(generators), *part.latent_shape), generators, model.transformer.device)  # (B, C, h, w)
        for i in range(len(part.timesteps)):
            v = model.predict_velocity(x, part.timesteps[i], part.conditioning, part.negative_conditioning,
                                       part.guidance_scale)
            x = sde_step(x, v, sigmas[i], sigmas[i + 1], 0.0).prev_sample
        parts.append(Trajectories.from_steps(x, [], model.decode(x)))
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
    x = (1 - s) * latents + s * noise  # (2, B, ...)
    both = {k: torch.cat([v, v]) for k, v in conditioning.items()}
    v = model.predict_velocity(x.flatten(0, 1), torch.cat([sigmas, sigmas]) * 1000, both).view_as(x)
    return ((v - (noise - latents)) ** 2).flatten(2).mean(2)


# ==== 9 LOSS ==========================================================================================================
def dpo_loss(errors, ref_errors, dpo_beta):
    """-log sigmoid(-dpo_beta / 2 ((e_w - e_w_ref) - (e_l - e_l_ref))), mean over pairs (arXiv 2311.12908, eq. 14).

    errors, ref_errors: (2, B), chosen first. Returns the loss and its metrics, scalars without gradient.
    """
    implicit_rewards = -dpo_beta / 2 * (errors - ref_errors)  # (2, B)
    logits = implicit_rewards[0] - implicit_rewards[1]
    loss = -F.logsigmoid(logits).mean()
    accuracy = ((logits > 0).double() + 0.5 * (logits == 0)).mean()  # a tie counts one half
    metrics = {"loss": loss, "implicit_accuracy": accuracy, "margin": logits.mean(), "logit_scale": logits.abs().mean(),
               "chosen_reward": implicit_rewards[0].mean(), "rejected_reward": implicit_rewards[1].mean()}
    return loss, {f"actor/{name}": value.detach().double() for name, value in metrics.items()}


def update(args, model, params, optimizer, files, sigmas, noise):
    """One optimizer step on this rank's B pairs, cached in `files`. Returns metrics, means over passes and ranks."""
    passes, device = [], model.transformer.device
    micro_batches = torch.arange(len(files)).split(args.micro_batch_size)
    for rows in micro_batches:
        model.transformer.set_requires_gradient_sync(rows is micro_batches[-1])
        cached = [torch.load(files[row], map_location="cpu", weights_only=True) for row in rows.tolist()]
        latents = torch.stack([pair.pop("latents") for pair in cached], 1).to(device)  # (2, B, ...)
        conditioning = {k: torch.cat([pair[k] for pair in cached]).to(device) for k in cached[0]}
        inputs = conditioning, latents, sigmas[rows].to(device), noise[rows].to(device)
        use_adapter(model.transformer, False)
        with torch.no_grad():
            ref_errors = flow_matching_errors(model, *inputs)
        use_adapter(model.transformer, True)
        loss, metrics = dpo_loss(flow_matching_errors(model, *inputs), ref_errors, args.dpo_beta)
        (loss / len(micro_batches)).backward()
        passes.append(metrics)
    grad_norm = torch.nn.utils.clip_grad_norm_(params, args.max_grad_norm).full_tensor().item()
    finite = math.isfinite(grad_norm)  # it is over all ranks: they skip together
    if finite:
        optimizer.step()
    optimizer.zero_grad()
    counts = {"actor/skipped_steps": 1 - finite, "actor/lr": args.learning_rate}
    if not finite:
        return counts
    means = gather(torch.stack([torch.stack([m[name] for m in passes]).mean() for name in passes[0]])).mean(0).tolist()
    return {**counts, "actor/grad_norm": grad_norm, **dict(zip(passes[0], means, strict=True))}


# ==== 10 EVAL =========================================================================================================
def evaluate(args, model, rewards, prompts, metadata):
    """One ODE image of every held-out prompt, from the same seeds every time, shared by the ranks.

    Returns each reward's mean and standard error, and the first 32 images as (PIL image, caption).
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    places = torch.arange(math.ceil(len(prompts) / world_size)) * world_size + rank
    rows = (places % len(prompts)).tolist()  # as many on every rank: a surplus wraps, and is dropped below
    mine, seeds = [prompts[row] for row in rows], [image_seed("eval", 0, row) for row in rows]
    request = make_request(args, model, mine, torch.arange(len(rows)), seeds, args.eval_num_inference_steps)
    images = sample(args, model, request).images
    scores = score_images(rewards, images, mine, [metadata[row] for row in rows])  # (B, R)
    scores = gather(scores).transpose(0, 1).flatten(0, 1)[: len(prompts)]  # (prompts, R), in the prompts' order
    kinds = {"mean": scores.mean(0), "stderr": scores.std(0, correction=0) / len(prompts) ** 0.5}  # (R,) each
    metrics = {f"val/{name}/{kind}": values[r] for r, name in enumerate(rewards) for kind, values in kinds.items()}
    shown = dict(sum(gather_objects(list(zip(places.tolist(), images, strict=True))[:32]), []))
    return metrics, [(shown[i], f"{prompts[i]}  {scores[i, 0]:.2f}") for i in range(min(32, len(prompts)))]


# ==== 11 CHECKPOINT ===================================================================================================
def save(args, folder, model, optimizer, sampler, step):
    """Write the adapter as diffusers does, and a checkpoint of all that changes. A collective; rank 0 writes."""
    whole, (adapter, config) = StateDictOptions(full_state_dict=True, cpu_offload=True), full_adapter(model.transformer)
    state = {"step": step, "args": asdict(args), "adapter": adapter, "sampler": sampler.state_dict(),
             "optimizer": get_optimizer_state_dict(model.transformer, optimizer, options=whole)}
    if dist.get_rank() == 0:
        save_adapter(folder / "adapter", type(model.pipe), adapter, config)
        save_checkpoint(folder / "checkpoint", state)


# ==== 12 MAIN =========================================================================================================
def main(args, family, rewards, train_set, eval_set, pairs):
    rank, world_size, device, began = *setup_distributed(), time.perf_counter()
    folder = Path("runs") / args.name
    if rank == 0:
        create_run_folder(folder, args, __file__)
    log = MetricLog(folder, args, args.track) if rank == 0 else None
    model, params = load_policy(args, family, device)
    optimizer = torch.optim.AdamW(params, lr=args.learning_rate, weight_decay=args.weight_decay, eps=args.adam_eps)
    timing = {"startup": time.perf_counter() - began}
    if pairs is None:
        with timed(timing, "make_pairs"):
            pairs = read_pairs(make_pairs(args, model, rewards, *train_set, folder))
    with timed(timing, "encode_pairs"):
        files = encode_pairs(args, model, pairs)
    sampler = GroupSampler(len(pairs), args.num_pairs, 1, args.seed, 1, rank, world_size)
    latent_shape = model.schedule(1, args.height, args.width)[2]
    skipped_in_a_row = 0
    for step in (bar := tqdm(range(args.num_steps + 1), disable=rank > 0)):
        metrics, grid, start = {}, None, time.perf_counter()
        if step:  # step 0 only evaluates
            with timed(timing, "update_actor"):
                rows, places, _ = sampler.draw()  # (num_pairs,), (B,): our B of them
                sigmas, noise = draw_training_noise(args, step, places, latent_shape)
                metrics |= update(args, model, params, optimizer, [files[row] for row in rows[places]], sigmas, noise)
            skipped_in_a_row = (skipped_in_a_row + 1) * metrics["actor/skipped_steps"]
            if skipped_in_a_row == MAX_SKIPPED:
                raise RuntimeError(f"step {step}: no finite gradient in {MAX_SKIPPED} steps: lower --learning_rate")

            timing["step"] = time.perf_counter() - start
            metrics["training/epoch"] = sampler.position / len(pairs)
            bar.set_postfix(accuracy=f"{metrics.get('actor/implicit_accuracy', math.nan):.2f}")

        if step % args.eval_every == 0 or step == args.num_steps:
            with timed(timing, "testing"):
                val, grid = evaluate(args, model, rewards, *eval_set)
                metrics |= val
            if step:
                with timed(timing, "save_checkpoint"):
                    save(args, folder, model, optimizer, sampler, step)
        if log:
            log.log(step, metrics | speed_metrics(timing, step, 2 * args.num_pairs, world_size), grid)
        timing = {}

    if log:
        log.close()
    del model, params, optimizer
    gc.collect()  # FSDP's threads end with their modules: without this about half of the CPU runs abort at exit
    dist.destroy_process_group()


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__, use_underscores=True, config=(tyro.conf.FlagConversionOff,))
    try:
        checked = check_args(args)
    except ValueError as error:
        raise SystemExit(f"{Path(__file__).name}: error: {error}") from None
    main(args, *checked)
