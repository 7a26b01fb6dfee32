"""A model and its LoRAs on benchmarks: the same prompts and noise for each, a table with intervals, and its protocol.

    python -m tools.bench assets/embedded --run runs/flow_grpo --prompts assets/eval_prompts.txt --reward ocr
    torchrun --standalone --nproc_per_node 8 -m tools.bench stabilityai/stable-diffusion-3.5-medium --lora mine \\
        --prompts evaluation_metadata.jsonl --reward geneval --images_per_prompt 4 \\
        --image_size 512 512 --num_inference_steps 40 --guidance_scale 4.5 --max_sequence_length 256

The output folder gets table.md, bench.json and the scores of each image. The same command continues after a kill, which
loses a batch of each rank; with further LoRAs it adds them. A mean is that of the prompts' means. Where all records
have GenEval's `tag` it is the mean of the parts' means; a field `part` only adds a row for each part. Intervals are
95 % over prompts, of which equal records are one, and those of differences are of prompts paired with the base's; a
part of one prompt has none. Results whose protocols differ never stand in one table. An image that a reward fails on is
counted, and left out of the means of all policies of the same noise. A record's "rewards" names those that its prompt
asks for, so that one command has files of several tasks.
"""

import argparse
import json
import os
import statistics
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common.data import PromptSet
from common.distributed import ONE_RANK, gather_objects, on_rank_0, setup_distributed
from common.errors import error_prefix
from common.files import atomic_file, read_prompts
from common.models import Family, count_long_prompts, on_device
from common.options import SharedArgs
from common.rewards import load_rewards, try_rewards
from common.run import friendly_errors
from common.run.evaluation import sample_records
from common.run.record import find_contents, git_state, versions
from common.scoring import Details, Reward, is_relative, offload_rewards, score_images
from common.sde import check_step_kind, image_seed
from common.user_code import code_file
from tools.compare import labels_of, mean_interval
from tools.protocol import (
    Protocol,
    check_match,
    digest_prompts,
    digest_tensors,
    reward_protocol,
    sampling_protocol,
    short_digest,
)
from tools.sample import (
    add_sampling_options,
    as_evaluated,
    as_given,
    check_model,
    load,
    positive,
    read_options,
    read_policies,
    sample,
    use,
)

import torch
from tqdm import tqdm

NEEDED = ("image_size", "num_inference_steps", "guidance_scale", "max_sequence_length")  # where no --run has them
OF_FOLDER = ("model", "batch_size")  # one for all of a folder; they may differ between the results of a table
# of a policy: its "seeds", and by reward its "scores", a mean for each prompt, those of its "images", and "failed"
Result = dict[str, Any]


class Bench(NamedTuple):
    """A prompt file, what is asked of it, and where its scores lie."""

    label: str
    prompts: PromptSet
    protocol: Protocol
    folder: Path

    @property
    def parts(self) -> dict[str, list[int]]:
        """{part: the rows of its prompts}; {} where a record has none."""
        found: dict[str, list[int]] = {}
        for row, record in enumerate(self.prompts.metadata):
            found.setdefault(str(record.get("part") or record.get("tag") or ""), []).append(row)
        return {} if "" in found else found

    @property
    def clusters(self) -> list[int]:
        """Of each row the first one that is equal: a record that stands several times is one prompt for an interval."""
        firsts: dict[str, int] = {}
        digests = [digest_prompts(self.prompts.select([row])) for row in range(len(self.prompts))]
        return [firsts.setdefault(digest, row) for row, digest in enumerate(digests)]

    def folder_of(self, key: str) -> Path:
        """The folder of a policy's scores, LABEL-DIGEST: another label of the same weights may have made it."""
        same = sorted(self.folder.glob(f"*-{key.rpartition('-')[2]}"))
        return self.folder / key if self.folder / key in same or not same else same[0]

    def batches(self, key: str) -> list[tuple[Path, range]]:
        """The file of each batch of a policy's scores, and its images' numbers, which count prompt by prompt."""
        total, size = len(self.prompts) * self.protocol["images_per_prompt"], self.protocol["batch_size"]
        starts = range(0, total, size)
        folder = self.folder_of(key)
        return [(folder / f"{i:06d}.json", range(i, min(i + size, total))) for i in starts]


# ---- results ---------------------------------------------------------------------------------------------------------
def read_result(bench: Bench, policy: str, key: str) -> Result:
    """A policy's result, from the files of all its batches. A prompt's score is None where the reward always failed,
    or was not asked for."""
    files = [file for file, _ in bench.batches(key)]
    records = [record for file in files for record in json.loads(file.read_text(encoding="utf-8"))]
    result: Result = {"policy": policy, "key": bench.folder_of(key).name, "seeds": bench.protocol["seeds"]}
    result |= {"scores": {}, "images": {}, "failed": {}}
    group_size = bench.protocol["images_per_prompt"]
    for name in bench.protocol["rewards"]:
        scores = [record.get(name) for record in records]
        groups = [scores[first : first + group_size] for first in range(0, len(scores), group_size)]
        kept = [[score for score in group if score is not None] for group in groups]
        result["scores"][name] = [statistics.fmean(group) if group else None for group in kept]
        result["images"][name] = scores
        result["failed"][name] = sum(name in record and record[name] is None for record in records)
    return result


def find_others(files: Sequence[Path], bench: Bench) -> list[Result]:
    """The results on the same prompts in the bench.json of others. ValueError: their protocol is another one."""
    results = []
    for label, file in zip(labels_of([str(file.parent) for file in files]), files, strict=True):
        with error_prefix(f"--with {file}", (ValueError, OSError, KeyError, TypeError, IndexError)):
            benches = json.loads(file.read_text(encoding="utf-8"))["benches"]
            prompts = bench.protocol["prompts"]
            found = next((one for one in benches if one["protocol"]["prompts"] == prompts), benches[0])
            check_match(found["protocol"], bench.protocol, ignore=(*OF_FOLDER, "seeds"))
            if not all("images" in one for one in found["results"]):
                raise ValueError("an older version wrote it, without each image's score: give its command again")
            results += [one | {"policy": f"{one['policy']} of {label}"} for one in found["results"]]
    return results


def row_means(scores: Sequence[float | None], left_out: Collection[int], images_per_prompt: int) -> list[float | None]:
    """The mean of each row's images; None where no image is left.

    scores: of all images, None where the reward failed. left_out: images by their numbers.
    """
    means: list[float | None] = []
    for first in range(0, len(scores), images_per_prompt):
        images = [image for image in range(first, first + images_per_prompt) if image not in left_out]
        kept = [score for image in images if (score := scores[image]) is not None]
        means.append(statistics.fmean(kept) if kept else None)
    return means


def has_scores(scores: Sequence[float | None], base: Sequence[float | None], rows: Sequence[int]) -> bool:
    """Whether any of the rows has a score, or none has one of the base, as none asks for the reward."""
    return any(scores[row] is not None for row in rows) or all(base[row] is None for row in rows)


def summarise(bench: Bench, results: Sequence[Result]) -> list[dict[str, Any]]:
    """A row for each reward, part and result: its mean and, from the same noise, its difference from the first's.

    Equal records are one prompt for the intervals. Results of the same noise have the same images. One that a reward
    fails on is left out of all of these, so that a difference is that of two means in the table. A result without any
    score of a part that the first one has is not compared.
    """
    is_geneval = all(record.get("tag") and not record.get("part") for record in bench.prompts.metadata)
    groups = {"": list(bench.parts.values()) if is_geneval else [list(range(len(bench.prompts)))]}
    groups |= {part: [rows] for part, rows in bench.parts.items()}
    clusters, size = bench.clusters, bench.protocol["images_per_prompt"]
    parts = [*bench.parts.values(), list(range(len(bench.prompts)))]
    table = []
    for name in bench.protocol["rewards"]:
        own = [row_means(result["images"][name], (), size) for result in results]
        # a policy that the reward has failed on for a whole part takes no image from the others
        is_paired = [
            result["seeds"] == bench.protocol["seeds"] and all(has_scores(scores, own[0], rows) for rows in parts)
            for result, scores in zip(results, own, strict=True)
        ]
        paired = [result["images"][name] for result, is_one in zip(results, is_paired, strict=True) if is_one]
        failed = {image for scores in paired for image, score in enumerate(scores) if score is None}
        means = [
            row_means(result["images"][name], failed if is_one else set(), size)
            for result, is_one in zip(results, is_paired, strict=True)
        ]
        for part, rows in groups.items():
            for number, (result, scores) in enumerate(zip(results, means, strict=True)):
                mean = mean_interval(scores, rows, clusters)
                row = {"reward": name, "part": part, "policy": result["policy"], "mean": mean}
                if number and is_paired[number]:
                    pairs = zip(scores, means[0], strict=True)
                    differences = [None if a is None or b is None else a - b for a, b in pairs]
                    row["difference"] = mean_interval(differences, rows, clusters)
                table.append(row | {"failed": result["failed"][name]})
    return table


def as_markdown(label: str, protocol: Protocol, table: Sequence[dict[str, Any]], policies: Sequence[str]) -> str:
    """A row for each reward and part, a column for each policy; the protocol stands above."""
    told = "; ".join(f"{name} {json.dumps(value)}" for name, value in protocol.items())
    lines = [f"## {label}\n\n{told}\n", f"| | {' | '.join(policies)} |", f"|{'---|' * (len(policies) + 1)}"]
    for first in range(0, len(table), len(policies)):
        cells = [f"{table[first]['reward']} {table[first]['part']}".strip()]
        for row in table[first : first + len(policies)]:
            cell = f"{row['mean'][0]:.3f}" if row["mean"] else "-"
            if row.get("difference"):
                mean, low, high = row["difference"]
                cell += f", {mean:+.3f}" + (" (no interval)" if low is None else f" [{low:+.3f}, {high:+.3f}]")
            cells.append(cell + (f" ({row['failed']} images failed)" if row["failed"] and not row["part"] else ""))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


# ---- the program -----------------------------------------------------------------------------------------------------
def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options of sampling: those given, otherwise the first run's evaluation's. ValueError: one is missing."""
    for name in NEEDED:
        if not args.runs and getattr(args, name) is None:
            raise ValueError(f"--{name}: needed where no --run has it, as scores depend on it")
    options = vars(SharedArgs()) | {"dtype": "bfloat16"} | as_given(args.family)
    if args.runs:
        options |= read_options(args.runs[0], args.family, args.trust_code == "True")
    options = as_evaluated(options, args.image_size, args.num_inference_steps, args.guidance_scale)
    for name in ("max_sequence_length", "negative_prompt", "dtype"):
        if getattr(args, name) is not None:
            options[name] = getattr(args, name)
    last = options["num_inference_steps"] - 1
    sde_steps: tuple[int, ...] = ()
    if args.sde_type:
        check_step_kind(args.sde_type, args.noise_level)
        sde_steps = tuple(range(min(args.sde_steps or last, last)))
    sampling = {"sde_type": args.sde_type or "sde", "noise_level": args.noise_level, "sde_steps": sde_steps}
    return options | sampling | {"model": args.model}


def make_bench(
    args: argparse.Namespace, folder: Path, options: dict[str, Any], label: str, prompts: PromptSet, rest: Protocol
) -> Bench:
    """The bench of a prompt file; rest: the protocol of rewards and model. ValueError: it was begun with another."""
    protocol: Protocol = {"prompts": digest_prompts(prompts)} | sampling_protocol(options)
    protocol |= {"images_per_prompt": args.images_per_prompt, "seeds": args.seeds, "batch_size": args.batch_size}
    protocol |= rest
    protocol["rewards"] = [name for name in rest["rewards"] if prompts.asking(name)]
    bench = Bench(label, prompts, protocol, folder / "scores" / label.replace("/", "_"))
    file = bench.folder / "protocol.json"
    if file.is_file():
        with error_prefix(f"--output: {file}"):
            check_match(json.loads(file.read_text(encoding="utf-8")), protocol)
    return bench


def score_batch(
    model: Family, bench: Bench, places: range, rewards: dict[str, Reward], options: dict[str, Any]
) -> list[dict]:
    """The records of images by their numbers, with their scores; by default the noise is a run's evaluation's."""
    group_size, name = bench.protocol["images_per_prompt"], bench.protocol["seeds"]
    prompts = bench.prompts.select(place // group_size for place in places)
    seeds = [image_seed(name, place % group_size, place // group_size) for place in places]
    images = sample(model, prompts, seeds, options, options["sde_steps"], batch_size=len(places))
    details: list[Details] = [{} for _ in images]
    scores = score_images(rewards, images, prompts, "mask", details)
    return sample_records(prompts, seeds, scores, rewards, details)


def write(
    folder: Path, benches: Sequence[Bench], keys: dict[str, str], others: Sequence[list[Result]], model: str
) -> str:
    """Write table.md, which is returned, and bench.json, of all results: those of `keys`, and the others'."""
    texts = []
    parts = []
    for bench, of_others in zip(benches, others, strict=True):
        results = [read_result(bench, policy, key) for policy, key in keys.items()] + of_others
        table = summarise(bench, results)
        texts.append(as_markdown(bench.label, bench.protocol, table, [result["policy"] for result in results]))
        parts.append({"label": bench.label, "protocol": bench.protocol, "table": table, "results": results})
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    commit, _, _ = git_state(Path(__file__).parent)
    recorded = {"model": model, "commit": commit, "versions": versions(), "card": card, "engine": "local"}
    files = {"table.md": "\n".join(texts), "bench.json": json.dumps({"recorded": recorded, "benches": parts}, indent=1)}
    for name, text in files.items():
        with atomic_file(folder / name) as temporary:
            temporary.write_text(text)
    return files["table.md"]


def run(args: argparse.Namespace) -> str:
    """Sample and score what is missing, each rank its share. Returns the tables, on rank 0, which writes them."""
    options = options_of(args)
    rewards = load_rewards(args.reward, None, options["num_frames"], options["reward_frames"])
    for name, function in rewards.items():
        if is_relative(function) or getattr(function, "whole_group", False):
            raise ValueError(f"--reward {name}: compares the images of a group; a bench scores each image alone")
    prompt_sets = [(f"--prompts {file}", read_prompts(file, rewards, args.max_prompts)) for file in args.prompts]
    family = check_model(options, prompt_sets)
    policies = read_policies([*args.lora, *args.runs], args.model, "base")
    whole = PromptSet([], [])
    for _, prompts in prompt_sets:
        whole = PromptSet(whole.prompts + prompts.prompts, whole.metadata + prompts.metadata)
    for name in rewards:
        if not whole.asking(name):
            raise ValueError(f'--reward {name}: no prompt of --prompts asks for it in its "rewards"')
    own = {name: rewards[name] for name in (given.rpartition(":")[2] for given in args.reward if code_file(given))}
    if own:
        try_rewards(own, whole, options["image_size"], options["num_frames"])
    offload_rewards(rewards)  # networks leave the GPU to the model that loads now, if asked
    contents = " ".join(find_contents({"model": args.model}).values()) or args.model
    rest = reward_protocol(args.reward, rewards) | {"model": contents}
    folder = args.output or Path("runs") / f"bench_{Path(args.model).name}"
    benches = []
    for label, (_, prompts) in zip(labels_of(args.prompts), prompt_sets, strict=True):
        benches.append(make_bench(args, folder, options, label, prompts, rest))
    others = [find_others(args.others, bench) for bench in benches]
    keys = {"base": f"base-{short_digest(contents)}"}  # names of folders: other weights have another folder
    for name, (tensors, config) in policies.items():
        content = digest_tensors(tensors.items(), config and (config.r, config.lora_alpha))
        keys[name] = f"{name.strip('/').replace('/', '_')}-{content}"

    device = setup_distributed()
    for bench in benches:
        with atomic_file(bench.folder / "protocol.json", shared=True) as temporary:
            temporary.write_text(json.dumps(bench.protocol, indent=1))
    jobs: list[tuple[str, int, Path, range]] = []  # batches do not depend on the number of ranks
    for policy, key in keys.items():
        for number, bench in enumerate(benches):
            jobs += [(policy, number, file, places) for file, places in bench.batches(key) if not file.is_file()]
    share = gather_objects(jobs)[0][int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])]
    if share:
        model = load(family, options, device)
        for bench in benches:
            count_long_prompts(model.pipe, bench.prompts.prompts, options["max_sequence_length"])
        current = "base"
        with on_device(model, "text_encoder"), on_device(model, "image_encoder"), on_device(model, "vae"):
            for policy, number, file, places in tqdm(share, desc="batches of rank 0", disable=not on_rank_0()):
                if policy != current:
                    with error_prefix(policy, Exception):  # of another model
                        use(model, *policies[policy])
                    current = policy
                records = score_batch(model, benches[number], places, rewards, options)
                with atomic_file(file, shared=True) as temporary:
                    temporary.write_text(json.dumps(records, default=str))  # pictures of an edit by their places
    gather_objects(None)  # until every rank has scored its share
    return write(folder, benches, keys, others, args.model) if on_rank_0() else ""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="diffusers pipeline: a folder or a hub id")
    parser.add_argument("--lora", nargs="+", default=[], type=Path, metavar="DIR", help="adapters or checkpoints")
    parser.add_argument(
        "--runs", "--run", nargs="+", default=[], type=Path, help="the first one's options are defaults"
    )
    parser.add_argument("--prompts", nargs="+", required=True, metavar="FILE", help="each file has a table of its own")
    parser.add_argument("--reward", nargs="+", required=True, metavar="NAME", help="as the scripts take them")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="default: runs/bench_MODEL")
    parser.add_argument("--with", nargs="+", default=[], type=Path, dest="others", help="further bench.json files")
    add_sampling_options(parser)
    parser.add_argument("--max_sequence_length", type=int, help="tokens of a prompt (default: the run's)")
    parser.add_argument("--negative_prompt", help="default: the run's, or none")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: the run's, or bfloat16")
    parser.add_argument("--sde_type", help="sample by SDE steps of this kind, as in training (default: by the ODE)")
    parser.add_argument("--noise_level", type=float, default=0.7, help="of SDE steps (%(default)s)")
    parser.add_argument("--sde_steps", type=positive, help="how many, from the first (default: all but the last)")
    parser.add_argument("--seeds", default="eval", help="another word is other noise (default: a run's evaluations')")
    parser.add_argument("--batch_size", type=positive, default=16, help="images at a time (%(default)s)")
    args = parser.parse_args(argv)
    if "WORLD_SIZE" not in os.environ:
        os.environ |= ONE_RANK
    with friendly_errors():
        tables = run(args)
        if on_rank_0():
            print(tables)


if __name__ == "__main__":
    main()
