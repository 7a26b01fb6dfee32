"""Rewards: plain functions `(images, prompts, metadata) -> scores`.

images: list of B PIL images (RGB), of a model that makes videos list of B videos, lists of PIL frames; the built-in
rewards are of images. prompts: list of B strings; metadata: list of B dicts (the other fields of a .jsonl
prompt file). scores: B floats, higher is better. A reward that fails raises: it never returns 0 instead. Where it fails
on one image alone it may return the exception in the place of that score: --reward_failure says what follows.

Rewards run in a thread beside the rollout, batch by batch as images are finished: an image's score may not depend on
the others of the call. The function may have attributes:

    whole_batch     True: it is called once, with all images of the rank
    check           a function (prompt), run on every prompt before any model loads: raises ValueError for one that the
                    reward cannot score
    check_metadata  such a function (dict), run on every prompt's metadata
    load            a function (), run before the model that is trained loads: loads the reward's own network, or raises
                    ValueError for what is missing
    offload         a function (), run when all images of a rollout are scored
    settings        names of the environment variables that its scores depend on, whose values a run records

On GPUs the rank's own is the current device, in the thread that scores too: a network goes there by `.to("cuda")`, best
in fp32, and takes a fixed number of images at a time (common/rewards/clip_score.py shows how and why).

The built-in reward NAME is function NAME of the file common/rewards/NAME.py; a user's own is path/to/file.py:function.
"""

import copy
import importlib
import math
import os
import queue
import threading
from pathlib import Path

from common.distributed import leave_cores_to_this_thread, use_own_gpu
from common.errors import RunError
from common.failures import count_failed
from common.refusals import brief, reason, refusing
from common.sampler import gather_shares
from common.stops import say
from common.user_code import describe, load_function, own_folder

import torch

TOTAL = "weighted_total"  # what is logged of an evaluation beside each reward


def built_in_rewards():
    """Names of the rewards of this folder, in order."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem != "__init__")


def load_rewards(names, reward_weights, num_frames=1, option="--reward", load=True):
    """Reward functions by name, {log name: function}; `path/to/file.py:function` loads a user's own.

    load: call the `load` of those that have one.

    Raises:
        ValueError: naming the reward that is unknown, or the file or function that is not there; or as many weights; or
            a built-in reward, all of which are of images, where videos of several frames are made; or what its `load`
            raises.
    """
    functions = {}
    use_own_gpu()  # before a user's file is imported, which may load a network
    if len(reward_weights) != len(names):
        raise ValueError(f"--reward_weights: {len(reward_weights)} weights for {len(names)} rewards; give one for each")
    for name in names:
        if name in built_in_rewards() and num_frames > 1:
            raise ValueError(f"{option} {name}: scores images, not the videos of --num_frames {num_frames}")
        functions[name.rpartition(":")[2]] = find_reward(name, option)
    if len(functions) < len(names):
        raise ValueError(f"{option} {' '.join(names)}: two rewards of the same name")
    if TOTAL in functions:
        raise ValueError(f"{option} {' '.join(names)}: {TOTAL} is what their weighted sum is logged as")
    for name, function in functions.items():
        if load and hasattr(function, "load"):
            with refusing(f"{option} {name}", Exception):
                function.load()
    return functions


def find_reward(name, option="--reward"):
    """The function of one reward; raises load_rewards' ValueError where there is none."""
    if ":" in name:
        return load_function(name, option)
    if name not in built_in_rewards():
        known = ", ".join(built_in_rewards())
        raise ValueError(f"{option} {name}: unknown; use one of {known}, or path/to/file.py:function")
    module = importlib.import_module(f"common.rewards.{name}")
    if not hasattr(module, name):
        raise ValueError(f"{option} {name}: common/rewards/{name}.py has no function {name}")
    return getattr(module, name)


def reward_settings(names):
    """{name of a reward: {variable: value}} of those that have `settings`; variables that are not set are left out."""
    found = {}
    for name in names:
        variables = getattr(find_reward(name), "settings", ())
        values = {variable: os.environ[variable] for variable in variables if os.environ.get(variable)}
        if variables:
            found[name] = values
    return found


def load_eval_rewards(names, rewards, num_frames=1, load=True):
    """`rewards`, which are trained on, and behind them those of --eval_reward, by which evaluations are scored, too.

    Raises:
        ValueError: as load_rewards; or one of them has the name of one that is trained on.
    """
    watched = load_rewards(names, [1.0] * len(names), num_frames, option="--eval_reward", load=load)
    for name in watched:
        if name in rewards:
            raise ValueError(f"--eval_reward {' '.join(names)}: a reward of --reward is named {name} already")
    return rewards | watched


class Scorer:
    """Scores the images of a rollout in a thread of its own, while the others are being sampled.

    scorer = Scorer(rewards, prompts, "stop")
    scorer.add([0, 1], images)  # as often as images are finished
    scores = scorer.scores()
    """

    def __init__(self, rewards, prompt_set, reward_failure="stop"):
        """rewards: {name: function}; prompt_set: the prompts of all B images; reward_failure: stop or mask."""
        self.rewards = rewards
        self.prompt_set = prompt_set
        self.reward_failure = reward_failure
        self.early = {name: f for name, f in rewards.items() if not getattr(f, "whole_batch", False)}
        self.images = [None] * len(prompt_set)
        self.scores_of_early = torch.full((len(prompt_set), len(self.early)), torch.nan, dtype=torch.float64)
        self.finished = queue.SimpleQueue()  # of (rows, images), and None at the end
        self.error = None  # what ended the thread early
        # a daemon: a reward that hangs must not keep a run from ending that has failed elsewhere
        self.thread = threading.Thread(target=self._score, daemon=True)
        self.thread.start()

    def add(self, rows, images):
        """Hand over finished images: `rows`, their numbers among the B, and the images."""
        for row, image in zip(rows, images, strict=True):
            self.images[row] = image
        self.finished.put((list(rows), images))

    def scores(self):
        """Wait for all scores: (B, R) in fp64, a column for each reward, in their order; NaN as in score_images.

        Raises:
            RunError: what score_images raises; or an image was never handed over, whose NaN would say that it failed.
        """
        self.finished.put(None)
        self.thread.join()
        if self.error:
            raise self.error
        missing = sum(image is None for image in self.images)
        if missing:
            raise RunError(f"{missing} of {len(self.images)} images were never handed to the rewards")
        early = iter(self.scores_of_early.T)
        columns = []
        for name, function in self.rewards.items():
            if name in self.early:
                columns.append(next(early))
            else:
                alone = {name: function}
                columns.append(score_images(alone, self.images, self.prompt_set, self.reward_failure)[:, 0])
        offload_rewards(self.rewards)
        return torch.stack(columns, 1)

    def _score(self):
        use_own_gpu()  # which is set for each thread
        if self.early:
            leave_cores_to_this_thread()
        try:
            for rows, images in iter(self.finished.get, None):
                if self.early:
                    prompts = self.prompt_set.select(rows)
                    self.scores_of_early[rows] = score_images(self.early, images, prompts, self.reward_failure)
        except Exception as error:  # raised in `scores`, in the thread that waits for them
            self.error = error


@torch.no_grad()
def score_images(rewards, images, prompt_set, reward_failure="stop"):
    """Scores (B, R) in fp64 of B images of the B prompts of a PromptSet: a column for each reward, in their order.

    NaN, with reward_failure "mask", where a reward gave an exception in the place of a score.

    Raises:
        RunError: naming the reward that raised, gave the wrong number of scores, or a score that is not finite; with
            "stop" also one that gave an exception in the place of a score.
    """
    columns = []
    for name, function in rewards.items():
        began_in = os.getcwd()
        try:
            # copies: what one reward does to them the next one does not see
            copies = copy.deepcopy(images)
            returned = function(copies, list(prompt_set.prompts), copy.deepcopy(prompt_set.metadata))
        except (Exception, SystemExit) as error:  # sys.exit(0) would else end the run as a success
            told = describe(error, own_folder(function))
            raise RunError(f"reward {name} raised {told}") from error
        if os.getcwd() != began_in:
            raise RunError(
                f"reward {name} changed the working directory to {os.getcwd()}, and paths of the run with it"
            )
        columns.append(_as_scores(name, returned, prompt_set.prompts, reward_failure))
    return torch.stack(columns, 1)


def _as_scores(name, returned, prompts, reward_failure):
    """What reward `name` returned of B images as (B,) in fp64, with NaN for the exceptions in it."""
    failures = {}  # by the image's place
    if isinstance(returned, list | tuple):
        failures = {i: value for i, value in enumerate(returned) if isinstance(value, Exception)}
        returned = [math.nan if i in failures else value for i, value in enumerate(returned)]
    try:
        scores = torch.as_tensor(returned, dtype=torch.float64, device="cpu")
    except Exception as error:  # whatever the object that it returned raises
        fault = f"what it returned, a {type(returned).__name__}, is not {len(prompts)} numbers"
        raise RunError(f"reward {name}: {fault} ({type(error).__name__})") from None
    if scores.shape != (len(prompts),):
        shape = tuple(scores.shape)
        raise RunError(f"reward {name}: expected {len(prompts)} scores, got shape {shape}")
    for i, score in enumerate(scores.tolist()):
        if not math.isfinite(score) and i not in failures:
            told = f"reward {name}: score {score} for image {i} (prompt: {prompts[i]})"
            raise RunError(f"{told}; of an image that it fails on it may return an exception: --reward_failure")
    if failures:
        i, error = next(iter(failures.items()))
        first = f"image {i} (prompt: {prompts[i]}): {reason(error)}"
        if reward_failure == "stop":
            raise RunError(f"reward {name} failed on {first}; --reward_failure mask leaves such images out") from error
        say(brief(f"reward {name} failed on {len(failures)} of {len(prompts)} images, which are left out: {first}"))
    return scores


def offload_rewards(rewards):
    """Run the `offload` of those rewards that have one: {name: function}."""
    for function in rewards.values():
        if hasattr(function, "offload"):
            function.offload()


def sample_records(prompt_set, seeds, scores, rewards):
    """What is written of B images of an evaluation: [{"prompt": ..., "seed": ..., "<reward>": score ...}].

    A score is None where the reward failed.
    """
    records = []
    for prompt, seed, row in zip(prompt_set.prompts, seeds, scores.tolist(), strict=True):
        by_name = {name: None if math.isnan(score) else score for name, score in zip(rewards, row, strict=True)}
        records.append({"prompt": prompt, "seed": seed, **by_name})
    return records


def eval_metrics(scores, rewards, reward_weights, num_prompts, images_per_prompt):
    """Mean and standard error over held-out prompts of each reward and, of those that have a weight, the first ones, of
    their weighted total, from this rank's share of the scores (B, R), and on how many images each reward failed; a
    prompt all of whose images it left is left out.
    """
    scores = gather_shares(scores, num_prompts * images_per_prompt)
    scores, metrics = count_failed(scores, rewards, len(reward_weights))
    scores = scores.view(num_prompts, images_per_prompt, -1).nanmean(1)  # (prompts, R)
    weights = torch.tensor(reward_weights, dtype=scores.dtype)
    totals = scores[:, : len(weights)] @ weights  # (prompts,)
    for name, of_prompts in zip([*rewards, TOTAL], [*scores.T, totals], strict=True):
        kept = of_prompts[~of_prompts.isnan()]
        metrics[f"val/{name}/mean"] = kept.mean()
        metrics[f"val/{name}/stderr"] = kept.std(correction=0) / len(kept) ** 0.5
    return metrics


def reward_metrics(scores, totals, advantages, names, group_size):
    """Statistics of a rollout, group by group: scores (N, R) by reward, their weighted sums (N,), advantages (N,).

    std_mean is the mean over groups of the population standard deviation; zero_std_ratio the share of groups whose
    images all score the same, from which nothing is learned. All are of the images whose scores are not NaN.
    """
    is_kept = ~scores.isnan().any(1)  # (N,)
    group_of = torch.arange(len(scores)) // group_size
    groups = [totals[is_kept & (group_of == number)] for number in group_of[is_kept].unique()]
    scores = scores[is_kept]
    totals = totals[is_kept]
    advantages = advantages[is_kept]
    deviations = torch.stack([group.std(correction=0) for group in groups])
    all_equal = torch.stack([group.amax() == group.amin() for group in groups])  # the std of equal values can be 1e-17
    metrics = {
        "critic/rewards/mean": totals.mean(),
        "critic/rewards/max": totals.max(),
        "critic/rewards/min": totals.min(),
        "critic/rewards/std_mean": deviations.mean(),
        "critic/rewards/zero_std_ratio": all_equal.double().mean(),
        "critic/rewards/group_size": group_size,
    }
    for r, name in enumerate(names):
        metrics[f"critic/rewards/{name}/mean"] = scores[:, r].mean()
    metrics["critic/advantages/mean"] = advantages.mean()
    metrics["critic/advantages/max"] = advantages.max()
    metrics["critic/advantages/min"] = advantages.min()
    return metrics
