"""Rules that end a run: --stop_if 'val/aesthetic/mean<5.2'."""

import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from common.errors import truncate
from common.run.plots import VAL_TOTAL
from common.scoring import TOTAL, split_key
from common.user_code import code_file

WITH_PARTS = ("vlm_judge", "geneval")  # built-in rewards that return numbers beside their score


class StopRule(NamedTuple):
    """The run ends after an evaluation whose `metric` is below, or above, `limit`."""

    metric: str
    sign: str  # < or >
    limit: float

    def holds(self, value: float) -> bool:
        """Whether the value ends the run."""
        return value < self.limit if self.sign == "<" else value > self.limit

    def __str__(self) -> str:
        return f"{self.metric}{self.sign}{self.limit:g}"


def read_stop_rules(texts: Sequence[str]) -> list[StopRule]:
    """The StopRules of --stop_if.

    Raises:
        ValueError: a text is not a metric of an evaluation, < or >, and a finite number.
    """
    rules = []
    for text in texts:
        match = re.fullmatch(r"\s*(val/[^<>]+?)\s*([<>])\s*([-+.\d][^\s<>]*)\s*", text)
        try:
            limit = float(match[3]) if match else math.nan
        except ValueError:
            limit = math.nan
        if not match or not math.isfinite(limit):
            must = "must be like 'val/ocr/mean<0.5': a metric of val/, < or >, a number; in quotes"
            raise ValueError(truncate(f"--stop_if {text}: {must}"))
        rules.append(StopRule(match[1], match[2], limit))
    return rules


def check_stop_rules(
    texts: Sequence[str],
    rewards: Sequence[str],
    num_images: int,
    eval_by: str | None = None,
    best_by: str | None = None,
    files: Sequence[str] = (),
) -> None:
    """Raises ValueError for a rule that cannot be read, or where an evaluation does not log its metric, or `best_by`.

    rewards: of the evaluation, as the options name them; that of edits has `preservation` as well. num_images: of each
    prompt. A user's own reward, judges and geneval return sub-scores, which are not known yet; the values of `eval_by`
    are in the prompts' records. files: the names of the held-out files, if there are several.
    """
    names = [name.rpartition(":")[2] for name in rewards]
    known = [*(f"val/{name}/mean" for name in names), VAL_TOTAL, "val/drift_from_base"]
    if num_images > 1:
        known.append("val/diversity")
    more = [f"val/{name}/failed" for name in (*names, "preservation")] + ["val/preservation/mean"]
    known += [f"val/{file}/{name}/mean" for file in files for name in (*names, TOTAL)]
    more += [name.removesuffix("mean") + "stderr" for name in (*known, *more) if name.endswith("/mean")]
    has_parts = [bool(code_file(name)) or split_key(name)[0].partition(":")[0] in WITH_PARTS for name in rewards]
    own = tuple(f"val/{name}/" for name, has in zip(names, has_parts, strict=True) if has)
    kinds = ("mean", "best") if num_images > 1 else ("mean",)
    ends = tuple(f"/{name}/{kind}@{num_images}" for name in (*names, TOTAL) for kind in kinds)
    asked = [(f"--stop_if {rule}", rule.metric) for rule in read_stop_rules(texts)]
    if best_by is not None:
        asked.append((f"--best_by {best_by}", best_by))
    for option, metric in asked:
        of_a_value = metric.removeprefix("val/")  # VALUE/REWARD/mean@n
        is_of_field = eval_by is not None and of_a_value.endswith(ends) and not of_a_value.startswith("/")
        if metric not in known + more and not is_of_field and not metric.startswith(own):
            raise ValueError(truncate(f"{option}: no evaluation logs {metric}; there are {', '.join(known)}"))


def met_rules(
    rules: Sequence[StopRule], step: int, metrics: dict, print_message: Callable[[str], None]
) -> tuple[dict[str, float], str | None]:
    """The rules that a step's metrics meet, as metrics, and why the run ends; ({}, None) where there is no evaluation.

    print_message: called with a line, which names an evaluation that lacks the metric of a rule.
    """
    if not any(name.startswith("val/") for name in metrics):
        return {}, None
    missing = [rule for rule in rules if rule.metric not in metrics]
    for rule in missing:
        print_message(f"step {step}: --stop_if {rule} cannot end the run: the evaluation lacks {rule.metric}")
    met = [rule for rule in rules if rule not in missing and rule.holds(float(metrics[rule.metric]))]
    told = [f"{rule.metric} is {float(metrics[rule.metric]):.4g} (--stop_if {rule})" for rule in met]
    return {f"training/stop_if/{rule}": 1.0 for rule in met}, ", ".join(told) or None
