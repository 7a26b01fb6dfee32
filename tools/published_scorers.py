"""ImageReward and HPSv3 behind HTTP, for --reward http_scorer, each in an environment of its own packages.

    python -m tools.published_scorers 8080 image_reward       # beside the package image-reward
    python -m tools.published_scorers 8080 hpsv3              # beside the package hpsv3, on a GPU
    export HTTP_SCORER_URL=http://127.0.0.1:8080 HTTP_SCORER_REWARD=image_reward
    python -m tools.bench ... --prompts drawbench.txt --reward http_scorer

Start it in the checkout's root; of this repository it needs tools/scorer_server.py alone. The packages load their
published weights. We read them at THUDM/ImageReward c0b9080 and MizzenAI/HPSv3 72b7eba, and tried this file with
stand-ins for both: never with their weights.
"""

import sys
import threading
from collections.abc import Callable

from tools.scorer_server import Scorer, Server

from PIL.Image import Image

one_at_a_time = threading.Lock()  # the server has threads; the networks have one device


def image_reward() -> Scorer:
    """ImageReward-v1.0: about -2 to 2, higher is better. A prompt is cut to 35 tokens."""
    import ImageReward
    import torch

    model = ImageReward.load("ImageReward-v1.0")

    def score(image: Image, prompt: str, metadata: dict) -> float:
        with one_at_a_time, torch.inference_mode():
            return model.score(prompt, image)

    return score


def hpsv3() -> Scorer:
    """HPSv3's mean mu of its two outputs, mu and sigma."""
    from hpsv3 import HPSv3RewardInferencer

    inferencer = HPSv3RewardInferencer(device="cuda")

    def score(image: Image, prompt: str, metadata: dict) -> float:
        with one_at_a_time:  # by name: the order of the two has changed
            return inferencer.reward(prompts=[prompt], image_paths=[image])[0][0].item()

    return score


SCORERS: dict[str, Callable[[], Scorer]] = {"image_reward": image_reward, "hpsv3": hpsv3}

if __name__ == "__main__":
    if len(sys.argv) != 3 or not sys.argv[1].isdigit() or sys.argv[2] not in SCORERS:
        sys.exit(__doc__)
    Server(int(sys.argv[1]), sys.argv[2], SCORERS[sys.argv[2]]()).serve_forever()
