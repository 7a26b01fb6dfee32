"""benchmarks/gradient_agreement.py: what of a gradient repeats from rollout to rollout, in all and by layer."""

import re
import subprocess
import sys

from benchmarks import gradient_agreement
from benchmarks.comparison import ROOT
from benchmarks.gradient_agreement import agreement, layer_of, print_layers

import pytest
import torch


@pytest.mark.fast
@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("transformer_blocks.3.attn.to_q.lora_A.default.weight", "transformer_blocks.N.attn.to_q"),
        ("transformer_blocks.12.ff.net.0.proj.bias", "transformer_blocks.N.ff.net.N.proj"),
        ("time_text_embed.timestep_embedder.linear_1.weight", "time_text_embed.timestep_embedder.linear_1"),
        ("transformer_blocks.0.attn.norm_q.weight", "transformer_blocks.N.attn.norm_q"),
    ],
)
def test_layers_of_all_blocks_are_one(name, layer):
    assert layer_of(name) == layer


@pytest.mark.fast
def test_the_cosine_is_the_share_of_the_squared_length_that_is_signal(monkeypatch, capsys):
    torch.manual_seed(0)
    signal = torch.randn(4000)
    rollouts = []
    for _ in range(12):
        noisy = signal + 3**0.5 * torch.randn(4000)  # a quarter of its squared length is signal
        rollouts.append({"blocks.0.text.weight": signal, "blocks.1.image.weight": noisy, "blocks.2.image.bias": noisy})
    monkeypatch.setattr(gradient_agreement, "gradients", rollouts)
    cosine, error, length = agreement(["blocks.1.image.weight"])
    assert cosine == pytest.approx(0.25, abs=0.02) and error < 0.02
    assert length == pytest.approx((4 * 4000) ** 0.5, rel=0.05)
    assert agreement(["blocks.0.text.weight"])[0] == pytest.approx(1)
    print_layers()
    rows = capsys.readouterr().out.strip().splitlines()[2:]
    assert re.match(r"\| blocks\.N\.text \| 4,000 \| .* \| 1\.000", rows[0])  # the surest first
    assert re.match(r"\| blocks\.N\.image \| 8,000 \| .* \| 0\.2", rows[1])


def test_a_run_prints_every_layer(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gradient_agreement", "by_layer", "--rollout", "local"]
    command += [
        "--num_steps",
        "2",
        "--num_prompts",
        "2",
        "--group_size",
        "4",
        "--eval_every",
        "2",
        "--max_prompts",
        "1",
    ]
    command += ["--lora_rank", "0", "--reward", "jpeg_compressibility", "--name", str(tmp_path / "run")]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.search(r"^cosine -?\d\.\d{3} \+- .*, 2 rollouts of 8 images$", printed, re.MULTILINE)
    layers = re.findall(r"^\| (\S+) \| [\d,]+ \| ", printed, re.MULTILINE)
    assert len(layers) == len(set(layers)) > 20
    assert {"transformer_blocks.N.attn.to_q", "context_embedder", "proj_out"} <= set(layers)
