"""The rollouts of a step: which prompts are drawn, and which groups are drawn again.

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) replaces groups whose images all score the same. Nothing is
learned from such a group: its advantages are 0. With --max_rollouts, a further rollout of the same step makes groups of
other prompts in their place, as often as that option lets it. The replaced groups and their prompts are the same on any
number of ranks, as the sampler counts them over all ranks.
"""

import math
from collections.abc import Iterator, Sequence

from common.data import GroupSampler, PromptSet, Redrawn
from common.files import digest_records
from common.optional import optional_part
from common.rollout import RolloutRequest, Trajectories
from common.scoring import Reward, Scorer, has_spread, weighted_totals

import torch


class StepRollouts:
    """The rollouts of a training step: one of all its images and, while some groups are equal, further ones for these.

        rollouts = StepRollouts(sampler, args.max_rollouts, train_set)
        for prompt_rows, prompt_index, numbers in rollouts.draw(step):
            request = ...  # of all B images of this rank
            scorer = rollouts.scorer(rewards, prompts, reward_failure)
            trajectories = rollouts.merge(rollout(rollouts.part(request), scorer))
            scores = ...  # (N, R)
            rollouts.judge(scores, reward_weights, group_size)

    After the last one, request, scorer, trajectories and scores are those of the step's B images, or N.
    """

    def __init__(
        self, sampler: GroupSampler, max_rollouts: int, train_set: PromptSet, curriculum: str | None = None
    ) -> None:
        """curriculum: the user's function that gives each step's weights (common/curriculum.py)."""
        self.sampler = sampler
        self.max_rollouts = max_rollouts
        self.train_set = train_set
        self.curriculum = curriculum
        if curriculum:
            sampler.begin_curriculum(digest_records(zip(train_set.prompts, train_set.metadata, strict=True)))
        self.redrawn: Redrawn | None = None  # None: this rollout makes all images
        self._is_equal = torch.ones(sampler.prompts_per_step, dtype=torch.bool)  # (P,)
        self._scorer: Scorer | None = None
        self._trajectories: Trajectories | None = None

    def draw(self, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """The draws of training step `step`, one for each rollout.

        Each gives the rows (U,) of this rank's prompts in the train set; which of these U each image is of (B,); and
        the images' numbers (B,), which seed their noise: those of a further rollout count on from N.
        """
        self.redrawn = None
        sampler = self.sampler
        if self.curriculum and sampler.scores is not None and sampler.weights is not None:
            part = optional_part("curriculum", "--curriculum")
            sampler.weights = part.next_weights(self.curriculum, step, self.train_set, sampler.scores, sampler.weights)
        sampler.draw()
        yield *sampler.drawn_prompts(), sampler.image_numbers
        while self._is_equal.any() and sampler.num_rollouts < self.max_rollouts:
            self.redrawn = sampler.redraw(self._is_equal)
            yield *sampler.drawn_prompts(), sampler.image_numbers
        self._scorer = self._trajectories = None

    def scorer(self, rewards: dict[str, Reward], prompt_set: PromptSet, reward_failure: str) -> Scorer:
        """The Scorer of this rollout, for the prompts of all B images."""
        self._scorer = Scorer(rewards, prompt_set, reward_failure, self._scorer, self.redrawn)
        return self._scorer

    def part(self, request: RolloutRequest) -> RolloutRequest:
        """The part of the request for B images that this rollout makes."""
        return request.select(self.redrawn.rows) if self.redrawn else request

    def merge(self, trajectories: Trajectories) -> Trajectories:
        """The trajectories of all B images: this rollout's, and beside them those that earlier ones have left."""
        if self.redrawn and self._trajectories:
            rows = torch.arange(len(self._trajectories.images))
            rows[self.redrawn.rows[: self.redrawn.num_new]] = len(rows) + torch.arange(self.redrawn.num_new)
            trajectories = Trajectories.cat([self._trajectories, trajectories]).select(rows)
        self._trajectories = trajectories
        return trajectories

    def judge(
        self,
        scores: torch.Tensor,
        reward_weights: Sequence[float],
        group_size: int,
        aggregation: str = "sum_then_normalize",
    ) -> None:
        """See which groups are equal, by the scores (N, R) of all ranks.

        group_size: that of images that a loss compares, of which a prompt's group may have several. aggregation: of
        several rewards. With "normalize_then_sum" a group of equal totals is learned from where a reward differs.
        """
        sampler = self.sampler
        if sampler.scores is not None:
            totals = weighted_totals(scores, reward_weights)
            totals = totals.where(totals.isfinite(), torch.nan).view(sampler.prompts_per_step, -1).nanmean(1)  # (P,)
            for row, total in zip(sampler.group_rows.tolist(), totals.tolist(), strict=True):
                if not math.isnan(total):
                    sampler.scores[row] = total  # of a prompt that was drawn twice, the last
        each_reward = aggregation == "normalize_then_sum"
        is_spread = has_spread(scores, reward_weights, group_size, each_reward=each_reward)
        self._is_equal = ~is_spread.view(sampler.prompts_per_step, -1).any(1)
