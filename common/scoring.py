"""Rewards: plain functions `(images, prompts, metadata) -> scores`.

images: list of B PIL images (RGB), or of B videos, lists of PIL frames, where the model makes videos; built-in rewards
score images, and with --reward_frames K a video by the mean over K frames. prompts: list of B strings. metadata: list
of B dicts, the other fields of a .jsonl prompt file. scores: B floats, higher is better. A reward that fails raises an
exception: it never returns 0 instead. A reward that fails on one image alone may return the exception as that image's
score; --reward_failure says what follows. A score may also be a dict, {"score": 0.5, "read": "4711"}: its other numbers
and strings are kept with the image and stand below it in pictures, and means of the numbers are logged.

A reward is called with those images whose prompts ask for it: a prompt's record may name them, "rewards": ["ocr"].

Rewards run in one thread, which also imports a user's file and calls `load` and the checks (common/user_code/). It
scores beside the rollout, batch by batch as images are finished, so an image's score may not depend on the other images
of the call. The function may have attributes:

    whole_group     True: it is called when all images are sampled, once for each group with all images of it
    relative        True: it only compares the images of a group, so it scores no evaluation, and chooses no best one;
                    it needs whole_group
    check           a function (prompt), run on every prompt that asks for the reward, before the trained model loads;
                    raises ValueError for a prompt that the reward cannot score
    check_metadata  a function (dict), run on the metadata of these prompts in the same way
    load            a function (), run before the trained model loads: loads the reward's own network, or raises
                    ValueError and says what is missing
    offload         a function (), run before the trained model loads, and when all images of a rollout are scored
    offloads_together   a function () that says whether `offload` waits for all ranks, as what it frees is theirs, and
                    ranks wait for it
    settings        names of the environment variables that its scores depend on; a run records their values
    parts           names of the numbers that its dicts may have beside the score, of a reward in common/rewards/: then
                    a mistyped NAME.KEY is an error before the trained model loads
    of_pixels       the reward as a differentiable function (pixels, prompts, metadata) -> scores, for contrib/draft.py:
                    pixels (B, 3, H, W) in [0, 1], scores (B,), both tensors. It must agree with the reward of the same
                    images, as near as their rounding to bytes allows

On GPUs the rank's own GPU is the current device, in the scoring thread as well. Move a network there by `.to("cuda")`,
best in fp32, and give it a fixed number of images at a time (common/rewards/_clip.py shows how and why).

The built-in reward NAME is function NAME of common/rewards/NAME.py; your own is path/to/file.py:function. With .KEY at
its end, a name takes this number of the reward's dicts as the score. Several such names of a function share one call.
"""

import copy
import functools
import math
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from common.data import PromptSet, Redrawn
from common.distributed import (
    data_rank,
    failing_together,
    gather_groups,
    gather_objects,
    ranks_per_image,
    sequence_rank,
    use_own_gpu,
)
from common.errors import RolloutError, RunError, reason, truncate
from common.images import as_images
from common.process import print_message
from common.rollout import Images
from common.user_code import call_user_code, describe, in_user_thread, own_file

import numpy as np
import torch

TOTAL = "weighted_total"  # logged for an evaluation beside each reward
# in a score's place there may also be NaN: the reward failed, or its image did
NOT_ASKED = -math.inf  # in the place of a score that the prompt does not ask for; no reward may return it
NOT_SCORED = math.inf  # in the place of a score until the reward has been called
LOGGED = ("mean", "stderr", "failed")  # of each reward, which no detail may be called
Reward = Callable[[Images, list[str], list[dict]], Sequence[float | dict | Exception]]
Details = dict[str, dict[str, float | str]]  # of an image: what a reward said beside its score, by reward


def is_relative(reward: Reward) -> bool:
    """Whether a reward only compares the images of a group, as a win rate does."""
    return getattr(reward, "relative", False)


def split_key(name: str) -> tuple[str, str]:
    """A reward's name without .KEY, and the key of its score in the dicts that it returns, by default "score"."""
    file, colon, function = name.rpartition(":")
    function, dot, key = function.partition(".")
    return f"{file}{colon}{function}", key if dot else "score"


class Scorer:
    """Scores the images of a rollout beside it, in the thread of users' files, while the others are being sampled.

    scorer = Scorer(rewards, prompts, "stop")
    scorer.add([0, 1], images)  # as often as images are finished
    scores = scorer.scores(places, group_size)
    """

    def __init__(
        self,
        rewards: dict[str, Reward],
        prompt_set: PromptSet,
        reward_failure: str = "stop",
        earlier: "Scorer | None" = None,
        redrawn: Redrawn | None = None,
    ) -> None:
        """prompt_set: the prompts of all B images; reward_failure: stop or mask. earlier: that of the step's rollout
        before this one, which makes only the redrawn images; the others keep their images and scores."""
        self.rewards = rewards
        self.prompt_set = prompt_set
        self.reward_failure = reward_failure
        self.early = {name: f for name, f in rewards.items() if not getattr(f, "whole_group", False)}
        self.images: list = [None] * len(prompt_set)
        self.details: list[Details] = [{} for _ in self.images]
        self.scored = torch.full((len(prompt_set), len(rewards)), NOT_SCORED, dtype=torch.float64)  # (B, R)
        self.new = list(range(len(prompt_set)))  # the rows of those images that `add` gets
        if earlier and redrawn:
            self.new = redrawn.rows[: redrawn.num_new].tolist()
            for row in set(range(len(prompt_set))) - set(self.new):
                self.images[row] = earlier.images[row]
                self.details[row] = earlier.details[row]
                self.scored[row] = earlier.scored[row]
        self.finished: queue.SimpleQueue = queue.SimpleQueue()  # of (rows, images), and None at the end
        self.error: BaseException | None = None  # that ended the thread early
        # It hands batch after batch to the thread of users' files, which lives on. A daemon: a reward that hangs must
        # not keep a run from ending that has failed elsewhere
        self.thread = threading.Thread(target=self._score, daemon=True)
        self.thread.start()

    def add(self, rows: Sequence[int], images: Images) -> None:
        """Hand over finished images: `rows`, their numbers in the rollout, and the images."""
        added = {self.new[row]: image for row, image in zip(rows, images, strict=True) if row < len(self.new)}
        for row, image in added.items():
            self.images[row] = image
        # only one score of an image counts, as a judge may not give it twice: that of a sequence group's first rank
        if ranks_per_image() == 1 or sequence_rank() == 0:
            self.finished.put((list(added), list(added.values())))

    def scores(self, places: Sequence[int] | torch.Tensor | None = None, group_size: int = 0) -> torch.Tensor:
        """Wait for all scores: (B, R) in fp64, a column for each reward, in their order; NaN as in score_images.

        places (B,): the images' numbers over all ranks, of which group_size in a row are a group. Then the `offload` of
        those rewards that have one is run. A collective. None: the images are a group of one prompt, for which the
        other ranks do not wait; more will follow, so there is no `offload`.

        Raises:
            RolloutError: on all ranks, as score_images on one; or an image was never handed over.
        """
        alone = places is None
        self.finished.put(None)
        self.thread.join()
        with failing_together(alone):
            if self.error:
                raise self.error
            missing = sum(image is None for image in self.images)
            if missing:
                raise RunError(f"{missing} of {len(self.images)} images were never handed to the rewards")
        if ranks_per_image() > 1 and not alone:
            of_ranks = gather_objects((self.scored, self.details) if sequence_rank() == 0 else None)
            self.scored, self.details = of_ranks[data_rank() * ranks_per_image()] or (self.scored, self.details)
        of_groups = {name: function for name, function in self.rewards.items() if name not in self.early}
        if of_groups:
            own_places = list(range(len(self.images))) if places is None else torch.as_tensor(places).tolist()
            self._score_groups(of_groups, own_places, group_size, alone=alone)
        if not alone:
            offload_rewards(self.rewards)
        return self.scored

    def _score_groups(self, rewards: dict[str, Reward], places: list[int], group_size: int, *, alone: bool) -> None:
        """Score whole groups, each on the rank that has its first image, which brings the scores back to the others."""
        groups = {0: self.images}  # by the place of the first image
        if not alone:
            pixels = torch.from_numpy(np.stack([np.asarray(image) for image in self.images]))  # (B, [F,] H, W, 3)
            of_groups, firsts = gather_groups(pixels, torch.tensor(places), group_size)
            new_places = {places[row] for row in self.new}
            firsts_and_groups = zip(firsts.tolist(), of_groups, strict=True)
            groups = {first: as_images(group.numpy()) for first, group in firsts_and_groups if first in new_places}
        scored: dict[int, tuple[torch.Tensor, Details]] = {}  # by place, of this rank's groups; then of all
        with failing_together(alone):
            for first, images in groups.items():
                prompts = self.prompt_set.select([places.index(first)] * len(images))
                details: list[Details] = [{} for _ in images]
                scores = score_images(rewards, images, prompts, self.reward_failure, details)
                scored |= {first + i: (scores[i], details[i]) for i in range(len(images))}
        if not alone:
            scored = {place: result for of_rank in gather_objects(scored) for place, result in of_rank.items()}
        columns = [r for r, name in enumerate(self.rewards) if name in rewards]
        for row in self.new:
            scores, detail = scored[places[row]]
            self.scored[row, columns] = scores
            self.details[row] |= detail

    def _score(self) -> None:
        columns = torch.tensor([r for r, name in enumerate(self.rewards) if name in self.early])
        try:
            in_user_thread(use_own_gpu)  # which is set for each thread
            if self.early and not torch.cuda.is_available():
                # Large enough for the users' thread to start OpenMP threads of its own. Where there are more threads
                # than cores, libgomp lets those of the rollout sleep while they wait, not spin on that thread's core
                in_user_thread(lambda: torch.ones(2**20))
            for rows, images in iter(self.finished.get, None):
                if self.early:
                    prompts = self.prompt_set.select(rows)
                    details = [self.details[row] for row in rows]
                    scores = score_images(self.early, images, prompts, self.reward_failure, details)
                    self.scored[torch.tensor(rows, dtype=torch.long)[:, None], columns] = scores
        except BaseException as error:  # raised in `scores`, in the thread that waits for them
            self.error = error


def score_images(
    rewards: dict[str, Reward],
    images: Images,
    prompt_set: PromptSet,
    reward_failure: str = "stop",
    details: Sequence[Details] | None = None,
) -> torch.Tensor:
    """Scores (B, R) in fp64 of B images of the B prompts of a PromptSet: a column for each reward, in their order. The
    rewards are called in the thread of users' files.

    NOT_ASKED where the prompt does not ask for the reward, which does not see the image then. NaN, with reward_failure
    "mask", where a reward gave an exception instead of a score. What a reward returned beside the scores, in dicts, is
    added to the B details, where they are given; of a function with several names, to the first that a prompt asks for.

    Raises:
        RunError: naming the reward that raised, gave the wrong number of scores, or a score that is not finite; with
            "stop" also one that gave an exception instead of a score.
    """
    asked: list[str] = []
    call = functools.partial(_score_images, rewards, images, prompt_set, reward_failure, details, asked)
    return in_user_thread(call, running=lambda: f"reward {asked[-1]}" if asked else "what runs beside the rewards")


@torch.no_grad()
def _score_images(
    rewards: dict[str, Reward],
    images: Images,
    prompt_set: PromptSet,
    reward_failure: str,
    details: Sequence[Details] | None,
    asked: list[str],
) -> torch.Tensor:
    scores = torch.full((len(prompt_set), len(rewards)), NOT_ASKED, dtype=torch.float64)
    for function in {id(function): function for function in rewards.values()}.values():  # each once
        columns = {name: column for column, name in enumerate(rewards) if rewards[name] is function}
        rows = sorted({row for name in columns for row in prompt_set.asking(name)})
        if not rows:
            continue
        asking = prompt_set.select(rows)
        names = ", ".join(columns)
        asked.append(names)
        file = own_file(function)
        try:
            # copies, so that no reward sees what another one did to them
            copies = copy.deepcopy([images[row] for row in rows])
            call = functools.partial(_call, function, copies, list(asking.prompts), asking.for_rewards())
            returned, has_moved = call_user_code(call, f"reward {names} ({file})", file, beside_sampling=True)
        except BaseException as error:  # sys.exit(0) and asyncio's CancelledError are no Exception
            told = describe(error, function)
            raise RunError(f"reward {names} raised {told}") from error
        if has_moved:  # the sampling beside it has seen that
            raise RunError(f"reward {names} changed the working directory, which the run's paths begin at")
        if hasattr(returned, "tolist"):  # an array of NumPy, a tensor
            returned = returned.tolist()
        if not isinstance(returned, list | tuple) or len(returned) != len(rows):
            raise RunError(f"reward {names}: it returned {_wrong_form(returned, len(rows))}")
        entries = dict(zip(rows, returned, strict=True))
        keys = {split_key(name)[1] for name in columns}
        for name, column in columns.items():
            own = prompt_set.asking(name)
            prompts = prompt_set.select(own).prompts
            scores[own, column], found = _read_scores(name, [entries[row] for row in own], prompts, reward_failure)
            for row, values in zip(own, found, strict=True):
                beside = {key: value for key, value in values.items() if key not in keys}
                # once for a function, under the first of its names that this prompt asks for
                if details is not None and beside and not columns.keys() & details[row].keys():
                    details[row][name] = beside
    return scores


def _call(reward: Reward, images: Images, prompts: list[str], metadata: list[dict]) -> tuple[Sequence, bool]:
    """What a reward returned, and whether it changed the working directory."""
    began_in = os.getcwd()
    return reward(images, prompts, metadata), os.getcwd() != began_in


def _read_scores(name: str, returned: Sequence, prompts: list[str], reward_failure: str) -> tuple[torch.Tensor, list]:
    """What reward `name` returned for B images: the scores (B,) in fp64, NaN for the exceptions among them; and a dict
    of what stands beside each score."""
    key = split_key(name)[1]
    what = "the score" if key == "score" else f'"{key}"'
    scores = torch.full((len(prompts),), math.nan, dtype=torch.float64)
    details: list[dict] = [{} for _ in prompts]
    failures = {}  # by the image's place
    for i, entry in enumerate(returned):
        if isinstance(entry, Exception):
            failures[i] = entry
            continue
        given = entry if isinstance(entry, dict) else {"score": entry}
        values = {key: as_scalar(value) for key, value in given.items()}
        score = values.pop(key, None)
        image = f"reward {name}: image {i} (prompt: {prompts[i]})"
        if key not in given:
            lacks = f"its dict has no {key!r}; it has {', '.join(map(str, given)) or 'nothing'}"
            if not isinstance(entry, dict):
                lacks = f"it is scored by {truncate(repr(entry))}, no dict with {key!r}"
            raise RunError(f"{image}: {lacks}; NAME.KEY at the end of --reward names another")
        if not _is_number(score):
            found = f"{truncate(repr(score))}, a {type(score).__name__}"
            raise RunError(f"{image}: {what} must be a finite number or an exception, got {found}")
        for other, value in values.items():
            if other in LOGGED:
                raise RunError(f'{image}: "{other}" is logged of each reward; give it another name')
            if not (_is_number(value) or isinstance(value, str)):
                raise RunError(f'{image}: "{other}" must be a finite number or a string, got {truncate(repr(value))}')
        scores[i] = score
        details[i] = values
    if failures:
        i, failure = next(iter(failures.items()))
        first = f"image {i} (prompt: {prompts[i]}): {reason(failure)}"
        if reward_failure == "stop":
            advice = "--reward_failure mask continues without such images"
            raise RunError(f"reward {name} failed on {first}; {advice}") from failure
        print_message(truncate(f"reward {name} failed on {len(failures)} of {len(prompts)} images: {first}"))
    return scores, details


def _wrong_form(returned: object, num_images: int) -> str:
    """What a message says of a return that is no list of an entry for each image."""
    what = "a list of a number for each image"
    if not isinstance(returned, list | tuple):
        return f"a {type(returned).__name__} for {num_images} images; return {what}"
    kinds = " and ".join(dict.fromkeys(type(entry).__name__ for entry in returned)) or "nothing"
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict):
        what = "the scores alone, as in flow_grpo's `scores, _ =`"
    return f"{len(returned)} things for {num_images} images: a {type(returned).__name__} of {kinds}; return {what}"


def as_scalar(value: Any) -> Any:
    """A scalar of NumPy or torch as Python's own number; anything else as it is."""
    with suppress(Exception):  # an array of several numbers has none
        return value.item()
    return value


def _is_number(value: object) -> bool:
    """Whether it is a finite number that a float can hold."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def offload_rewards(rewards: dict[str, Reward]) -> None:
    """Run the `offload` of those rewards that have one. A collective where one is of all ranks.

    Raises:
        RolloutError: one of all ranks failed.
    """
    once = {id(function): (name, function) for name, function in rewards.items() if hasattr(function, "offload")}
    for name, function in once.values():
        file = own_file(function)
        offload = functools.partial(call_user_code, function.offload, f"the offload of reward {name} ({file})", file)
        if getattr(function, "offloads_together", lambda: False)():
            gather_objects(None)  # all have their scores
            with failing_together():  # and go on when it is done
                offload()
        else:
            offload()


# ---- groups: images that a reward failed on or was not asked for, and equal rewards ---------------------------------
def asked_parts(scores: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The parts of a rollout whose prompts ask for the same rewards, as (rows (n,), columns (r,)) of its scores (N, R).

    There is one part, everything, where no record has "rewards". scores[rows[:, None], columns] are a part's own.
    """
    is_asked = scores != NOT_ASKED  # (N, R)
    return [((is_asked == asked).all(1).nonzero()[:, 0], asked.nonzero()[:, 0]) for asked in is_asked.unique(dim=0)]


def weighted_totals(scores: torch.Tensor, reward_weights: Sequence[float]) -> torch.Tensor:
    """Weighted sums (N,) of those scores (N, R) that were asked for: NaN where one failed, NOT_ASKED without any."""
    is_asked = scores != NOT_ASKED
    totals = (scores.where(is_asked, 0.0) * scores.new_tensor(reward_weights)).sum(1)
    return totals.where(is_asked.any(1), NOT_ASKED)


def fill_failed(scores: torch.Tensor, names: Iterable[str], group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill the images that a reward could not score, so that eq. 4 needs no exception for them.

    scores (N, R), group by group, holds NaN where a reward failed. Such an image gets, in every reward that its prompt
    asks for, the mean of its group's whole images; in a group without any, the mean of all whole images whose prompts
    ask for the same rewards. Scores without NaN stay as they are, and so does NOT_ASKED.

    Returns the filled scores, and is_compared (N,): False for filled images and for the images of a group with fewer
    than two whole ones. After eq. 4 their advantages must be set to exactly 0.

    Raises:
        RolloutError: no group has two whole images.
    """
    is_failed = scores.isnan()  # (N, R)
    is_whole = ~is_failed.any(1)  # (N,)
    filled = scores.clone()
    is_compared = is_whole.clone()
    for part, columns in asked_parts(scores):
        for rows in part.split(group_size):
            whole = scores[rows[:, None], columns][is_whole[rows]]  # (whole images, r)
            if len(whole) < 2:
                is_compared[rows] = False
            if len(whole) < group_size:
                source = whole if len(whole) else scores[part[:, None], columns][is_whole[part]]
                # clamped, as the rounded mean of equal scores may differ from them
                fill = source.mean(0).clamp(source.amin(0), source.amax(0)) if len(source) else 0.0
                filled[rows[~is_whole[rows]][:, None], columns] = fill
    if not is_compared.any():
        raise RolloutError(f"no prompt of the rollout has two images with scores: {count_by_reward(is_failed, names)}")
    return filled, is_compared


def all_equal(rewards: torch.Tensor) -> torch.Tensor:
    """Whether the rewards of a group, (G,) or (P, G), differ by round-off at most: max - min <= 1e-6 max |r|. (1,) or
    (P, 1)."""
    spread = rewards.amax(-1, keepdim=True) - rewards.amin(-1, keepdim=True)
    return spread <= 1e-6 * rewards.abs().amax(-1, keepdim=True)


def has_spread(
    scores: torch.Tensor, reward_weights: Sequence[float], group_size: int, *, each_reward: bool = False
) -> torch.Tensor:
    """Whether the weighted totals of a group's whole images differ, and there are at least two of them: (P,) of scores
    (N, R), group by group, NaN where a reward failed. Otherwise nothing is learned from the group.

    each_reward: whether the advantages are each reward's own. Then it is enough that one of their scores differs.
    """
    totals = weighted_totals(scores, reward_weights)  # (N,)
    compared = [totals]
    if each_reward:
        weighted = [column for column, weight in zip(scores.T, reward_weights, strict=True) if weight]
        compared += [column.where(totals.isfinite(), torch.nan) for column in weighted]
    is_spread = []  # (P,) each
    for values in compared:
        whole = [group[group.isfinite()] for group in values.view(-1, group_size)]
        is_spread.append(torch.tensor([len(group) >= 2 and not bool(all_equal(group)) for group in whole]))
    return torch.stack(is_spread).any(0)


def count_by_reward(has_failed: torch.Tensor, names: Iterable[str]) -> str:
    """What a message says of has_failed (N, R): how many of the N images each reward failed on."""
    counts = zip(names, has_failed.sum(0).tolist(), strict=True)
    return ", ".join(f"reward {name} failed on {count} of {len(has_failed)}" for name, count in counts)
