"""What a training step of a script samples, trains and keeps. Each script's `workload(args)` says it.

common/ knows no algorithm: the plan, the sizes that fit a GPU and the share of a GPU's peak come from this and from the
options that all scripts share.
"""

from dataclasses import dataclass


@dataclass
class Workload:
    """A training step as far as memory and time depend on the algorithm."""

    num_images: int
    """images that a step samples over all ranks; offline, those that it trains on"""
    num_prompts: int
    """their prompts"""
    sampled_steps: int
    """passes without gradient that make an image of a rollout; 0: a step makes no images"""
    trained_steps: int
    """passes with gradient per trained image and epoch"""
    policies: tuple[str, ...]
    """the policies that are kept: `default`, the trained one, and others, of which `reference` never changes"""
    trained_policies: int = 1
    """how many of them an optimizer trains"""
    acting_passes: float = 0
    """passes without gradient that the update makes for each trained one: by `old`, a reference or teachers"""
    acting_epochs: int = 1
    """epochs in which they are made; 1: once per rollout"""
    trained_images: int | None = None
    """images that a step trains on over all ranks, where they are fewer than it samples; None: all"""
    updates: int = 1
    """mini-batches that the trained images are cut into, an optimizer step each"""
    epochs: int = 1
    """how often each mini-batch is trained on"""
    guidance_scale: float = 1.0
    """guidance of the sampling"""
    trained_guidance: float = 1.0
    """guidance of the trained passes"""
    row_images: int = 1
    """images of a row of a micro-batch, which --micro_batch_size counts: 2 for a pair"""
    recomputes_log_probs: bool = False
    """whether the trainer takes a trained pass's log-prob once more after a rollout that was not in its own batches"""
    chained_steps: int = 0
    """trained passes whose activations an image holds at once, as its gradient comes through them and the VAE; 0: each
    pass has a backward pass of its own, and no gradient comes through the VAE"""
    frozen_adapters: int = 0
    """LoRAs beside the policies that are kept and never trained, such as teachers"""
    drawn_prompts: int | None = None
    """prompts that the whole run draws, for --prompt_cache; None: num_prompts a step; 0: it reads pairs instead"""

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of a training step."""
        return self.updates * self.epochs

    @property
    def num_trained_images(self) -> int:
        """Images that a step trains on, over all ranks."""
        return self.num_images if self.trained_images is None else self.trained_images
