"""What becomes of images that a reward could not score, where --reward_failure is mask: they are left out.

In scores NaN says that a reward failed, and only common/rewards, where no reward's own NaN passes, puts it there. An
image that any trained reward failed on is left out whole: of its group's mean and deviation, of the loss, of their
means in an evaluation and of the pairs for DPO. A group that keeps fewer than two has nothing to compare, and is left
out, too.
"""

from common.errors import RunError

import torch


def leave_out_failed(scores, names, group_size):
    """The scores (N, R) of a rollout, group by group, with NaN in all columns of the images that are left out.

    Returns them with metrics: of each reward the number of images that it failed on, and the number of groups that are
    left out whole.

    Raises:
        RunError: no group is kept.
    """
    has_failed = scores.isnan()  # (N, R)
    is_kept = ~has_failed.any(1).view(-1, group_size)  # (P, G)
    is_kept = is_kept & (is_kept.sum(1, keepdim=True) >= 2)
    metrics = {f"critic/rewards/{name}/failed": has_failed[:, r].sum() for r, name in enumerate(names)}
    metrics["critic/rewards/skipped_groups"] = (~is_kept).all(1).sum()
    if not is_kept.any():
        raise RunError(f"no prompt of the rollout has two images with scores: {_count(has_failed, names)}")
    return scores.where(is_kept.view(-1, 1), torch.nan), metrics


def loss_weights(scores, num_updates):
    """Weights (N,) in fp32 that make a mean over the images of a mini-batch one over those that are kept, on any ranks.

    scores (N, R): leave_out_failed's. A mini-batch, of an optimizer step, is N / num_updates images that follow each
    other (GroupSampler): with n of them kept, each weighs N / (num_updates n), the others 0. Without failures all are
    exactly 1; where none is kept all are 0, and so is the gradient.
    """
    is_kept = (~scores.isnan().any(1)).double().view(num_updates, -1)  # (U, N / U)
    share_kept = is_kept.mean(1, keepdim=True)
    return torch.where(share_kept > 0, is_kept / share_kept, 0.0).flatten().float()


def count_failed(scores, names, num_trained):
    """The scores (M, R) of an evaluation with NaN in the columns of the first num_trained rewards where one of them
    failed, and metrics: the number of images that each reward failed on. Those behind, which nothing is trained on, are
    each on its own: what they failed on stays among the images of the others.

    Raises:
        RunError: a reward has no image with a score left.
    """
    has_failed = scores.isnan()
    is_left_out = has_failed[:, :num_trained].any(1)
    scores = scores.clone()
    scores[is_left_out, :num_trained] = torch.nan
    if scores.isnan().all(0).any():
        raise RunError(f"no image of the evaluation has its scores: {_count(has_failed, names)}")
    metrics = {f"val/{name}/failed": has_failed[:, r].sum() for r, name in enumerate(names)}
    return scores, metrics


def best_and_worst(totals):
    """Places of the highest and the lowest of totals (G,), NaN: left out; None where none is higher than another."""
    kept = (~totals.isnan()).nonzero().flatten()
    if len(kept) == 0:
        return None
    best = kept[totals[kept].argmax()].item()
    worst = kept[totals[kept].argmin()].item()
    return None if totals[best] == totals[worst] else (best, worst)


def _count(has_failed, names):
    counts = zip(names, has_failed.sum(0).tolist(), strict=True)
    return ", ".join(f"reward {name} failed on {count} of {len(has_failed)}" for name, count in counts)
