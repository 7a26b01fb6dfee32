"""Make the prompts of two tasks for one run of the embedded model: numbers, and plain signs of a colour.

    python -m assets.make_mixed mixed     # writes mixed/train/ and mixed/eval/, each with numbers.jsonl and plain.jsonl

Numbers are the prompts of assets/train_prompts.txt and assets/eval_prompts.txt, and ask for the reward `ocr`. Plain
signs name a colour and no number, and ask for `sign_colour` (assets/sign_colour.py). The model was made with prompts of
one form, and mistakes the colour in other ones. The held-out forms are not among the trained ones. docs/rewards.md has
the run and its curve.
"""

import json
import sys
from pathlib import Path

from assets.sign_colour import COLOURS

ASSETS = Path(__file__).parent
FORMS = {
    "train": ("{} sign", "a {} sign", "sign {}", "a sign that says {}"),
    "eval": ("{}", "that {} sign", "a sign {}", "a sign that says a {}"),
}


def main(folder: Path) -> None:
    for part, forms in FORMS.items():
        prompts = {
            "numbers": ((ASSETS / f"{part}_prompts.txt").read_text().splitlines(), "ocr"),
            "plain": ([form.format(colour) for form in forms for colour in COLOURS], "sign_colour"),
        }
        (folder / part).mkdir(parents=True, exist_ok=True)
        for name, (lines, reward) in prompts.items():
            records = [json.dumps({"prompt": line, "rewards": [reward]}) + "\n" for line in lines]
            (folder / part / f"{name}.jsonl").write_text("".join(records))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
