"""Rewards: a file each, found by its name. common/scoring.py says what a reward is, and calls them."""

from common.rewards._loading import built_in_rewards, find_reward, load_rewards, reward_settings, with_preservation
from common.rewards._trial import try_rewards

__all__ = [
    "built_in_rewards",
    "find_reward",
    "load_rewards",
    "reward_settings",
    "try_rewards",
    "with_preservation",
]
