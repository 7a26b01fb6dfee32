"""A tiny random vision-language model that answers in scores, for vLLM to serve:  python tests/tiny_judge.py FOLDER

Nothing is downloaded. It is a Qwen2.5-VL of two layers and random weights, whose vocabulary has a token for each answer
of `Score: 0` to `Score: 10`, and for one without a score. Of all tokens these alone can come first, and the end of the
answer alone can come after them: what it says depends on the image, more than on the prompt, and means nothing.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.cpu import repair_torchvision

repair_torchvision()
from tests.tiny_models import qwen_tokenizer

import torch
from transformers import (
    GenerationConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

WIDTH = 128
VISION_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
ANSWERS = [*(f"Score: {score}" for score in range(11)), "I cannot say."]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if 'text' in part %}{{ part['text'] }}"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


@torch.no_grad()
def make_judge(folder):
    """Write the model, its processor and its chat template to `folder`, as transformers and vLLM load them."""
    tokens = qwen_tokenizer()
    tokens.add_special_tokens({"additional_special_tokens": ["<|endoftext|>", "<|im_start|>", *VISION_TOKENS]})
    tokens.add_tokens(ANSWERS)
    tokens.eos_token = "<|im_end|>"
    token_id = tokens.convert_tokens_to_ids
    vision_start, vision_end, image, video = (token_id(name) for name in VISION_TOKENS)
    text = {
        "vocab_size": len(tokens),
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]},
        "bos_token_id": token_id("<|endoftext|>"),
        "eos_token_id": token_id("<|im_end|>"),
    }
    vision = {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": WIDTH,
        "fullatt_block_indexes": [0],
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=vision_start,
        vision_end_token_id=vision_end,
    )
    torch.manual_seed(1)  # with it images of one prompt differ in their scores, and some get none
    model = Qwen2_5_VLForConditionalGeneration(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # of the size that keeps the size of what goes through, so that the image matters
            parameter.normal_(std=parameter[0].numel() ** -0.5)
    for layer in model.model.language_model.layers:
        layer.self_attn.q_proj.weight *= 8  # few of the image's tokens are looked at, not all of them a little
        layer.self_attn.o_proj.weight *= 8  # and they count for more than the last word
    answers = token_id(ANSWERS)
    direction = torch.nn.functional.normalize(torch.randn(WIDTH), dim=0)  # of an answer's embedding, and of its end
    rows = torch.randn(len(answers), WIDTH)
    rows = rows - (rows @ direction)[:, None] * direction
    head = model.lm_head.weight
    head.zero_()
    head[answers] = rows
    head[token_id("<|im_end|>")] = direction
    model.model.language_model.embed_tokens.weight[answers] = 10000 * direction  # more than all that is added to it
    model.generation_config = GenerationConfig(eos_token_id=token_id("<|im_end|>"))
    model.save_pretrained(folder)
    sizes = {"size": {"shortest_edge": 224 * 224, "longest_edge": 448 * 448}}  # 64 tokens of an image, or more
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**sizes),
        tokenizer=tokens,
        video_processor=Qwen2VLVideoProcessor(**sizes),
        chat_template=CHAT_TEMPLATE,
    )
    processor.save_pretrained(folder)


if __name__ == "__main__":
    make_judge(sys.argv[1])
