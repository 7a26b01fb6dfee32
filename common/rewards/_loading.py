"""From --reward to functions: built-in rewards, users' own, and rewards of images over the frames of videos."""

import functools
import importlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.data import PromptSet
from common.distributed import use_own_gpu
from common.errors import error_prefix
from common.optional import optional_part
from common.process import print_message
from common.scoring import TOTAL, Reward, as_scalar, is_relative, split_key
from common.user_code import (
    call_user_code,
    describe,
    find_namesakes,
    in_user_thread,
    load_function,
    own_file,
)

REWARDS = Path(__file__).parent  # a reward a file; those that begin with _ are helpers
# in samples.jsonl, beside the rewards
RECORDED = {"file", "prompt", "seed", "image", "details", "advantage", "step", "group", "prompt_file", "metadata"}


def built_in_rewards() -> list[str]:
    """Names of the rewards of common/rewards/, sorted."""
    return sorted(path.stem for path in REWARDS.glob("*.py") if not path.stem.startswith("_"))


def load_rewards(
    names: Sequence[str],
    reward_weights: Sequence[float] | None = None,
    num_frames: int = 1,
    reward_frames: int = 0,
    *,
    option: str = "--reward",
    trained: dict[str, Reward] | None = None,
    load: bool = True,
) -> dict[str, Reward]:
    """Reward functions by the name under which they are logged; `path/to/file.py:function` loads your own.

    reward_weights: one for each, whose number is checked; None for rewards that only score evaluations. trained: those
    of --reward, which come first in the result, but for relative ones. reward_frames: of how many frames a built-in
    reward scores a video of num_frames; 0: of none. load: call the `load` of those that have one.

    Raises:
        ValueError: in one line, for an unknown reward, a missing file or function, a wrong number of weights, two
            rewards of one name, a built-in reward where videos are made, or the error of a reward's `load`.
    """
    functions: dict[str, Reward] = {}
    in_user_thread(use_own_gpu)  # before a user's file is imported, which may load a network
    if reward_frames and not reward_frames <= num_frames > 1:
        told = f"needs videos of as many frames; --num_frames is {num_frames}"
        raise ValueError(f"--reward_frames {reward_frames}: {told}")
    if reward_weights is not None and len(reward_weights) != len(names):
        raise ValueError(f"--reward_weights: {len(reward_weights)} weights for {len(names)} rewards; give one for each")
    for name in names:
        of_images = split_key(name)[0].partition(":")[0] in built_in_rewards() and num_frames > 1
        if of_images and not reward_frames:
            advice = "--reward_frames 3 takes the mean over three frames"
            raise ValueError(f"{option} {name}: scores images, not the videos of --num_frames {num_frames}; {advice}")
        log_name = name.rpartition(":")[2]
        if log_name in functions or log_name in (trained or {}):
            raise ValueError(f"{option} {' '.join(names)}: two rewards are named {log_name}")
        functions[log_name] = find_reward(name, option)
        if of_images:
            functions[log_name] = of_frames(functions[log_name], reward_frames)
            print_message(f"{option} {name}: of a video, the mean over {reward_frames} of its {num_frames} frames")
    for name in (RECORDED | {TOTAL}) & functions.keys():  # the first, if any
        raise ValueError(f"{option} {' '.join(names)}: a run records something else as {name}: rename the function")
    for name, function in functions.items() if load else ():
        same = [other for other, of in {**(trained or {}), **functions}.items() if of is function]
        if same[0] == name and hasattr(function, "load"):  # once for a function, under the first of its names
            with error_prefix(f"{option} {name}", (Exception, SystemExit)):
                file = own_file(function)
                try:
                    call_user_code(function.load, f"{option} {name} ({file}): its load", file)
                except (ImportError, AttributeError) as error:  # with what is beside its file
                    raise ValueError(describe(error, function)) from error
                if namesakes := find_namesakes():
                    raise ValueError(namesakes)
    absolute = {name: function for name, function in (trained or {}).items() if not is_relative(function)}
    return absolute | functions


def with_preservation(eval_rewards: dict[str, Reward], eval_set: PromptSet, num_frames: int = 1) -> dict[str, Reward]:
    """The rewards of an evaluation, and behind them `preservation` where images are edited, although no option names
    it: a reward of what was asked for does not see what else has changed."""
    is_edit = num_frames == 1 and any("image" in record for record in eval_set.metadata)
    if not is_edit or "preservation" in eval_rewards or not eval_set.asking("preservation"):
        return eval_rewards
    why = 'edits are scored by preservation, unless their records have "rewards" without it'
    return eval_rewards | {"preservation": optional_part("rewards.preservation", why).preservation}


@functools.cache  # one function for each, as several scores of a reward share a call
def of_frames(reward: Reward, count: int) -> Reward:
    """A reward of videos: the mean of a reward of images over `count` frames, the middles of as many equal parts.

    Strings beside the scores are joined by " | ". A video of which one frame failed has failed.
    """

    @functools.wraps(reward)  # with its `check`, `load` and other attributes
    def of_videos(videos: Any, prompts: list[str], metadata: list[dict]) -> list[dict | Exception]:
        rows = [row for row in range(len(videos)) for _ in range(count)]
        frames = [video[(2 * i + 1) * len(video) // (2 * count)] for video in videos for i in range(count)]
        returned = reward(frames, [prompts[row] for row in rows], [metadata[row] for row in rows])
        return [_mean_of_frames(returned[i : i + count]) for i in range(0, len(rows), count)]

    return of_videos


def _mean_of_frames(returned: Sequence) -> dict | Exception:
    """What a video gets of what a reward returned for its frames."""
    for entry in returned:
        if isinstance(entry, Exception):
            return entry
    given = [entry if isinstance(entry, dict) else {"score": entry} for entry in returned]
    found: dict = {}
    for key in [key for key in given[0] if all(key in entry for entry in given)]:
        values = [as_scalar(entry[key]) for entry in given]
        found[key] = " | ".join(values) if isinstance(values[0], str) else sum(values) / len(values)
    return found


def find_reward(name: str, option: str = "--reward") -> Reward:
    """The function of one reward; raises load_rewards' ValueError where there is none."""
    file = split_key(name)[0]
    built_in, colon, own_name = file.partition(":")
    if built_in in built_in_rewards():
        with error_prefix(f"{option} {name}", ValueError):
            function: Reward = _built_in(built_in, own_name if colon else None)
            key, parts = split_key(name)[1], getattr(function, "parts", None)  # None: not known
            if parts is not None and key not in ("score", *parts):
                raise ValueError(f"{built_in} returns no {key}; it returns {', '.join(('score', *parts))}")
    elif colon:
        function = load_function(file, option)
    else:
        known = ", ".join(built_in_rewards())
        raise ValueError(f"{option} {name}: unknown; use one of {known}, or path/to/file.py:function")
    if option == "--eval_reward" and is_relative(function):
        raise ValueError(f"{option} {name}: is relative, so it says nothing of an evaluation")
    if is_relative(function) and not getattr(function, "whole_group", False):
        told = "is relative, and compares images of a group, which come together with whole_group = True"
        raise ValueError(f"{option} {name}: {told}")
    return function


def _built_in(name: str, own_name: str | None) -> Reward:
    """The function of common/rewards/NAME.py, or where `own_name` is given, such as the style of vlm_judge:style, the
    same function with the settings of this name. ValueError: there are none, or the file cannot be imported, or has no
    function of its name."""
    file = REWARDS / f"{name}.py"
    try:
        module = call_user_code(lambda: importlib.import_module(f"common.rewards.{name}"), f"importing reward {name}")
    except (ImportError, SyntaxError, NameError, AttributeError) as error:
        raise ValueError(describe(error, file)) from error
    if not hasattr(module, name):
        raise ValueError(f"{file} has no function {name}")
    return getattr(module, name) if own_name is None else _named(module, name, own_name)


@functools.cache  # one function for each, as several scores of a judge share a call
def _named(module: Any, name: str, own_name: str) -> Reward:
    if not hasattr(module, "PREFIX"):
        raise ValueError(f"{name} has no settings by name, as vlm_judge and http_scorer have")
    if not re.fullmatch("[a-z][a-z0-9_]*", own_name):
        raise ValueError(f"{own_name!r} must be of small letters, digits and _")
    function, prefix = getattr(module, name), f"{module.PREFIX}_{own_name.upper()}"
    named: Any = functools.update_wrapper(functools.partial(function, prefix=prefix), function)  # with its attributes
    named.settings = module.variables(prefix)
    for attribute in ("load", "offload", "offloads_together"):
        if hasattr(function, attribute):
            setattr(named, attribute, functools.partial(getattr(function, attribute), prefix))
    return named


def reward_settings(rewards: dict[str, Reward]) -> dict[str, dict[str, str]]:
    """The environment variables that scores depend on, {reward: {variable: value}}, of rewards that have `settings`."""
    found = {}
    for name, function in rewards.items():
        if variables := getattr(function, "settings", ()):
            found[name] = {variable: os.environ[variable] for variable in variables if os.environ.get(variable)}
    return found
