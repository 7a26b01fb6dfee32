"""How far the ratio leaves 1 where images are sampled in other batches than the update's.

    OMP_NUM_THREADS=1 python -m benchmarks.other_batches docs/lab/records/other_batches.md

Of the tiny families, on a CPU: 4 images are sampled at once, and their log-probs are computed again 2 at a time, as an
update with --micro_batch_size 2 does after --rollout local --rollout_batch_size 4. The ratio is exp(log_prob - the
rollout's). Both log-probs are means over the elements of the latents. No run starts from this ratio: it takes the
micro-batches' log-probs as the old ones, and its first ratio is exactly 1.
"""

import io
import sys
import tempfile
from pathlib import Path

import flow_grpo
from common.data import PromptSet
from common.files.pictures import StoredImage
from common.models.loading import family_class, load_model
from common.weights.lora import make_lora
from common.weights.policy import add_policies
from tests.tiny_models import EMBEDDED, FAMILIES, make_checkpoint

import torch
from PIL import Image

PROMPTS = ['a red sign that says "123"', "a sign"]


def prompt_set(num_pictures: int) -> PromptSet:
    """The two prompts, each with so many pictures of one colour."""
    records = []
    for i in range(len(PROMPTS)):
        file = io.BytesIO()
        Image.new("RGB", (64, 32), (80 * i, 160, 40)).save(file, "PNG")
        records.append({"image": [StoredImage(PROMPTS[i], file.getvalue())] * num_pictures} if num_pictures else {})
    return PromptSet(PROMPTS, records)


@torch.no_grad()
def largest_difference(folder: Path, dtype: torch.dtype, guidance_scale: float) -> tuple[float, int]:
    """max |log_prob - the rollout's log_prob| over 4 images and 3 SDE steps, and the number of elements of a latent."""
    model = load_model(family_class(folder), folder, dtype, "cpu")
    add_policies(model, make_lora(type(model), rank=4, alpha=8), ["default"], seed=7)
    for name, parameter in model.transformer.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    prompts = prompt_set(model.num_sources[0])
    args = flow_grpo.Args(
        rollout="local",
        rollout_batch_size=4,
        micro_batch_size=2,
        image_size=(32, 64),
        num_frames=5 if model.makes_videos else 1,
        max_sequence_length=160,  # the tiny tokenizers spell out Qwen's templates
        num_inference_steps=4,
        guidance_scale=guidance_scale,
    )
    rows = torch.tensor([0, 0, 1, 1])  # two images of each prompt
    request = flow_grpo.make_request(args, model, prompts, rows, seeds=[3, 4, 5, 6], sde_steps=(0, 1, 2))
    sampled = flow_grpo.rollout(args, model, None, request)
    recomputed = flow_grpo.recompute_log_probs(args, model, request, sampled)
    return (recomputed.log_probs - sampled.log_probs).abs().max().item(), sampled.latents[0, 0].numel()


def row(name: str, folder: Path) -> str:
    """The largest difference in both dtypes, without and with guidance."""
    cells = []
    for dtype in (torch.float32, torch.bfloat16):
        found = [largest_difference(folder, dtype, guidance_scale) for guidance_scale in (1.0, 3.0)]
        difference = max(difference for difference, _ in found)
        cells.append(f"{difference:.1e}" if difference else "0")
    return f"| {name} | {found[0][1]:,} | {' | '.join(cells)} |"


def main() -> None:
    rows = [row("stable_diffusion_3, the embedded model", EMBEDDED)]
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as scratch:
            rows.append(row(family, make_checkpoint(family, Path(scratch))))
    head = [
        "# Log-probs of 4 images at once and of 2 at once",
        f"On a CPU ({torch.get_num_threads()} thread), torch {torch.__version__}: the largest |difference| over 4\n"
        "images, 3 SDE steps, and guidance 1 and 3. The ratio is 1 plus or minus it.",
        "| family | elements of a latent | float32 | bfloat16 |\n|---|---|---|---|",
    ]
    Path(sys.argv[1]).write_text("\n\n".join(head) + "\n" + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
