"""GenEval2: a reward that asks a vision-language model which vLLM serves, by vlm_judge's settings.

    vllm serve Qwen/Qwen3-VL-8B-Instruct --port 8000
    export VLM_JUDGE_URL=http://127.0.0.1:8000/v1 VLM_JUDGE_MODEL=Qwen/Qwen3-VL-8B-Instruct
    python -m tools.bench ... --prompts geneval2_data.jsonl --reward tools/geneval2.py:geneval2

The records are those of facebookresearch/GenEval2, whose evaluation.py we read at a6e82d2. It was tried with a stand-in
for the server, never with this model.
"""

import math
from typing import Any

from common.rewards import vlm_judge as judge
from common.rewards._json_http import RefusedRequest, ServerError, ask, ask_for_each, png_base64

from PIL.Image import Image

NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
NUM_TOKENS = 20  # the most probable first tokens of an answer that are asked for: vLLM gives no more by default


def geneval2(images: list[Image], prompts: list[str], metadata: list[dict]) -> list[dict | Exception]:
    """Soft-TIFA: the geometric mean over a record's questions of the probability of the right answer, in [0, 1].

    The arithmetic mean is the detail `am`. The probability is that of the answer's first token. As in the paper's code
    a number may be a word or digits. Unlike there, a token that is not among the NUM_TOKENS most probable counts 0, so
    that one such answer makes the geometric mean 0.
    """
    asked: list[tuple[Image, str]] = []
    for image, record in zip(images, metadata, strict=True):
        asked += [(image, f"{question} Answer in one word.") for question, _ in record["vqa_list"]]
    choices = iter(ask_all(asked, {"max_tokens": 1, "logprobs": True, "top_logprobs": NUM_TOKENS}))
    scores: list[dict | Exception] = []
    for record in metadata:
        own = [(next(choices), right_answers(*pair)) for pair in record["vqa_list"]]
        refused = [choice for choice, _ in own if isinstance(choice, Exception)]
        right = [probability(choice, answers) for choice, answers in own if isinstance(choice, dict)]
        if refused:
            scores.append(refused[0])
        else:
            scores.append({"score": math.prod(right) ** (1 / len(right)), "am": sum(right) / len(right)})
    return scores


def right_answers(question: str, answer: str) -> set[str]:
    """The words that answer a question: the number, as a word or in digits, or yes to any other question."""
    if not question.startswith("How many"):
        return {"yes", "Yes"}
    digits = {str(NUMBERS.index(answer) + 1)} if answer in NUMBERS else set()
    return {answer, answer.capitalize()} | digits


def probability(choice: dict, answers: set[str]) -> float:
    """Of the first token of an answer to be one of these words, with or without a space before it."""
    try:
        tokens = [(token["token"], token["logprob"]) for token in choice["logprobs"]["content"][0]["top_logprobs"]]
    except (KeyError, IndexError, TypeError):
        raise ServerError(f"{judge.read_settings().server.url}: an answer without top_logprobs") from None
    return min(1.0, math.fsum(math.exp(logprob) for token, logprob in tokens if token.removeprefix(" ") in answers))


def ask_all(asked: list[tuple[Image, str]], more: dict) -> list[dict | Exception]:
    """The server's choice for each (image, question) at temperature 0, or its refusal of this one."""
    settings = judge.read_settings()

    async def ask_one(one: tuple[Image, str]) -> dict | Exception:
        image, question = one
        url = f"data:image/png;base64,{await png_base64(image)}"
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
        messages = [{"role": "user", "content": content}]
        try:
            payload = {"model": settings.model, "messages": messages, "temperature": 0, **more}
            answer: Any = await ask(settings.server, "/chat/completions", payload)
            return {"message": answer["choices"][0]["message"], "logprobs": answer["choices"][0].get("logprobs")}
        except RefusedRequest as error:
            return error
        except (KeyError, IndexError, TypeError, AttributeError):
            raise ServerError(f"{settings.server.url}: no chat completion: {str(answer)[:200]}") from None

    return ask_for_each(ask_one, asked, settings.server.concurrency)


def check_questions(record: dict) -> None:
    """Raise ValueError for a record without GenEval2's questions."""
    pairs = record.get("vqa_list")
    if not isinstance(pairs, list) or not pairs or not all(map(is_pair, pairs)):
        raise ValueError('the reward geneval2 needs "vqa_list", pairs of question and answer, as GenEval2 has it')


def is_pair(value: object) -> bool:
    """Whether it is a list of two strings."""
    return isinstance(value, list) and len(value) == 2 and all(isinstance(text, str) for text in value)


# what a reward may carry (common/scoring.py); mypy does not know that functions can have attributes
geneval2.settings = ("VLM_JUDGE_URL", "VLM_JUDGE_MODEL")  # type: ignore[attr-defined]
geneval2.load = judge.load  # type: ignore[attr-defined]
geneval2.check_metadata = check_questions  # type: ignore[attr-defined]
