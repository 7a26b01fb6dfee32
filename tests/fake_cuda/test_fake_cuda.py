"""The scripts on a CUDA device made of host memory: they end as on the CPU, with its numbers, and ask for no more than
ratchets.json allows. README.md says how the device works."""

import json
import math
import os
from pathlib import Path
from unittest import mock

from tests.conftest import ROOT, brightness_reward, read_metrics, run_here, run_warm
from tests.fake_cuda import build
from tests.fake_cuda.runs import (
    LAUNCH,
    NAME,
    PHASES,
    distances,
    last_lines,
    phase_peak,
    phase_sum,
    planned_bytes,
    report,
)

import pytest
import torch

RATCHETS = json.loads(Path(__file__).with_name("ratchets.json").read_text())
SIZES = ["--num_steps", "1", "--num_prompts", "4", "--group_size", "2", "--updates_per_rollout", "2"]
SIZES += ["--micro_batch_size", "2", "--max_prompts", "2", "--rollout", "local", "--kl_coef", "0"]
ROUND_OFF = 1e-5


@pytest.fixture(scope="module", autouse=True)
def device():
    """The device, built; every test of this file is skipped where it cannot be, but never in .ci/run."""
    reason = build.why_not()
    if reason and os.environ.get(build.REQUIRED):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    build.built_library()


def run_script(folder, script, *options, ranks=1):
    """Run a script on the device, in ranks that a warm process forks. Their reports are in `folder`.

    Returns the finished process, its output as text.
    """
    given = [str(ROOT / script), "--name", NAME, *map(str, options)]
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1", "FAKE_CUDA_REPORT": str(folder)}):
        # launch.py installs the device, before which nothing of the project is imported: the run draws its curves
        return run_warm(folder, str(LAUNCH), given, ranks, 900, draw_curves=True, library=build.built_library())


def run(folder, script, *options, ranks=1):
    """The metrics of a run on the device that must succeed, and rank 0's report."""
    folder.mkdir(exist_ok=True)
    done = run_script(folder, script, *options, ranks=ranks)
    assert done.returncode == 0, last_lines(done.stdout)
    return read_metrics(folder / "runs" / NAME), report(folder)


def run_on_cpu(folder, script, *options):
    """The metrics of the same run on the CPU, in this process and in one thread, as the device's kernels run."""
    folder.mkdir(exist_ok=True)
    with mock.patch.object(os, "sched_getaffinity", lambda process: {0}):
        assert run_here(folder, script, "--name", NAME, *options) is None
    return read_metrics(folder / "runs" / NAME)


# ---- the device itself -----------------------------------------------------------------------------------------------
CHECKS = """
import json
import torch
import torch.nn.functional as F

told = {}

def refusal(function):
    try:
        function()
    except (RuntimeError, TypeError) as error:
        return str(error).splitlines()[0]

cuda = torch.arange(6.0).reshape(2, 3).to("cuda")
told["devices"] = refusal(lambda: cuda + torch.ones(3))
told["matmul"] = refusal(lambda: cuda @ torch.ones(3, 2))
told["index"] = refusal(lambda: torch.ones(3)[torch.tensor([1], device="cuda")])
told["generator"] = refusal(lambda: torch.randn(3, device="cuda", generator=torch.Generator()))
told["numpy"] = refusal(lambda: cuda.numpy())
told["other device"] = refusal(lambda: cuda + torch.ones(3, device="cuda:1"))
told["a number"] = (cuda + torch.tensor(1.0)).tolist()
told["rows"] = cuda[torch.tensor([1])].tolist()

view = cuda[1]
view += 10
told["view"] = [cuda.tolist(), view.untyped_storage().data_ptr() == cuda.untyped_storage().data_ptr()]
out = torch.empty(0, device="cuda")
torch.cat([cuda, cuda], out=out)
told["out"] = [list(out.shape), out.sum().item()]
weight = torch.ones(4, 3, device="cuda", requires_grad=True)
F.linear(cuda, weight).square().mean().backward()
told["gradient"] = [str(weight.grad.device), weight.grad.cpu().tolist()]
told["pinned"] = [torch.ones(2).is_pinned(), torch.ones(2).pin_memory().is_pinned()]

before = torch.cuda.memory_allocated()
block = torch.empty(1000, dtype=torch.float32, device="cuda")
told["bytes"] = [torch.cuda.memory_allocated() - before]
block.untyped_storage().resize_(0)
told["bytes"].append(torch.cuda.memory_allocated() - before)
del block
told["bytes"].append(torch.cuda.memory_allocated() - before)
print(json.dumps(told))
"""


def counted(script):
    """The body of a program whose report is read: what it asks for behind its first two lines."""
    return f"import torch\ncuda = torch.ones(4, device='cuda')\n{script}\n"


def of_program(folder, text):
    """A program's output on the device, and its report."""
    path = folder / "program.py"
    path.write_text(text)
    done = run_script(folder, path)
    assert done.returncode == 0, done.stdout
    return done.stdout, report(folder)


def test_the_device_refuses_what_a_gpu_refuses_and_computes_what_the_cpu_computes(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "2")
    told = json.loads(of_program(tmp_path, CHECKS)[0].splitlines()[-1])
    for what in ("devices", "matmul", "other device"):
        assert "same device" in told[what], (what, told[what])
    assert "indices should be either on cpu" in told["index"] or "same device" in told["index"]
    assert "'cuda' device type for generator" in told["generator"]
    assert "can't convert cuda" in told["numpy"]
    assert told["a number"] == [[1, 2, 3], [4, 5, 6]] and told["rows"] == [[3, 4, 5]]
    assert told["view"] == [[[0, 1, 2], [13, 14, 15]], True]
    assert told["out"] == [[4, 3], 2 * (0 + 1 + 2 + 13 + 14 + 15)]
    x = torch.tensor([[0.0, 1, 2], [13, 14, 15]])
    weight = torch.ones(4, 3, requires_grad=True)
    torch.nn.functional.linear(x, weight).square().mean().backward()
    assert told["gradient"] == ["cuda:0", weight.grad.tolist()]
    assert told["pinned"] == [False, True]
    assert told["bytes"] == [4000, 0, 0]


COUNTED = {
    # what the program does: the kinds in its report, in any order
    "cuda.sum().item()": ["read (aten::_local_scalar_dense)"],
    "cuda[cuda > 0]": ["read (aten::nonzero)"],
    "cuda.cpu()": ["down, waits (aten::copy_)"],
    "torch.ones(4).to('cuda')": ["up, waits (aten::copy_)"],
    "torch.ones(4).pin_memory().to('cuda')": ["up, waits (aten::copy_)"],
    "torch.ones(4).pin_memory().to('cuda', non_blocking=True)": ["up (aten::copy_)"],
    "cuda[torch.tensor([1, 2])]": ["up, waits (aten::copy_)"],
    "cuda[torch.tensor([1, 2])] = 0": ["index (aten::_index_put_impl_)"],
    "cuda[1:3] = 0": [],
    "torch.cuda.synchronize()": ["synchronize (torch.cuda.synchronize)"],
}


def test_each_wait_and_copy_is_counted_at_its_line(tmp_path):
    lines = list(COUNTED)
    found = {line: [] for line in lines}
    for row in of_program(tmp_path, counted("\n".join(lines)))[1]["lines"]:
        name, number = row["line"].split(":")
        assert name == "program.py"
        found[lines[int(number) - 3]] += [row["kind"]] * row["times"]
    assert found == COUNTED


def test_a_foreach_operator_is_one_kernel_and_a_view_is_none(tmp_path):
    program = "some = [cuda + 1 for _ in range(5)]\ntorch._foreach_add_(some, 1)\ncuda.view(2, 2).t()"
    _, told = of_program(tmp_path, counted(program))
    assert phase_sum(told, "start", "kernels") == 1 + 5 + 1  # ones, five sums, and one for all of them


def test_without_a_compiler_the_reason_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing is built there
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert build.why_not() == "no C++ compiler: the fake CUDA device is built with g++ (apt install g++)"
    with pytest.raises(RuntimeError, match="no C"):
        build.built_library()


PUSH = """
from common.engine import messages
from common.engine import VLLMEngine

made = []
on_cpu = {}
fingerprint = messages.fingerprint

def recorded(tensor):
    made.append(tensor.device.type)
    return fingerprint(tensor)

messages.fingerprint = recorded
engine = object.__new__(VLLMEngine)
engine.dtype = torch.bfloat16
engine.sleeps = False

def take(operation, bucket):
    on_cpu.update(bucket)
    return {name: fingerprint(tensor) for name, tensor in bucket.items()}

engine._call = take
tensors = {"a": torch.arange(6.0).view(2, 3) / 7, "b": torch.ones(5)}
engine.push({name: tensor.to("cuda") for name, tensor in tensors.items()}, None)
print(len(on_cpu))
assert made == ["cuda", "cuda"], made
assert all(torch.equal(on_cpu[name], tensor.bfloat16()) for name, tensor in tensors.items())
assert {tensor.device.type for tensor in on_cpu.values()} == {"cpu"}
"""


def test_full_weights_get_their_fingerprints_on_the_device(tmp_path):
    """And the engine, which has got them through the host's memory, finds the same."""
    path = f"import sys\nsys.path.insert(0, {str(LAUNCH.parents[2])!r})"
    output, _ = of_program(tmp_path, counted(f"{path}\n{PUSH}"))
    assert output.splitlines()[-1] == "2"


# ---- the scripts -----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    return ["--reward", brightness_reward(tmp_path_factory.mktemp("reward"))]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, reward, device):
    """flow_grpo.py on the device and one rank, in fp32: its metrics and its report."""
    return run(tmp_path_factory.mktemp("one_rank"), "flow_grpo.py", *SIZES, *reward)


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory, reward):
    """The metrics of the same run on the CPU."""
    return run_on_cpu(tmp_path_factory.mktemp("on_cpu"), "flow_grpo.py", *SIZES, *reward)


def assert_close(rows, expected, tolerance=ROUND_OFF):
    far = {name: distance for name, distance in distances(rows, expected).items() if not distance <= tolerance}
    assert not far


def test_one_rank_has_the_cpus_numbers(one_rank, on_cpu):
    assert_close(one_rank[0], on_cpu)


@pytest.mark.parametrize("shard_ranks", [0, 2])
def test_two_ranks_have_the_cpus_numbers(tmp_path, reward, on_cpu, shard_ranks):
    """By default each holds a copy of the weights, as there is room for it, and args.json says so."""
    rows, _ = run(tmp_path, "flow_grpo.py", *SIZES, *reward, "--shard_ranks", shard_ranks, ranks=2)
    assert_close(rows, on_cpu)
    recorded = json.loads((tmp_path / "runs" / NAME / "args.json").read_text())
    assert recorded["args"]["shard_ranks"] == (shard_ranks or 1)


def test_full_weights_offloaded_with_a_prompt_cache_have_the_cpus_numbers(tmp_path, reward):
    """Each option that sends bytes between the CPU and the device. The cache would take all training prompts."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f'a sign that says "{number}"\n' for number in range(100, 108)))
    options = [*SIZES, *reward, "--lora_rank", "0", "--learning_rate", "1e-5", "--kl_coef", "0.04"]
    options += ["--guidance_scale", "2", "--ema_decay", "0.9", "--prompt_cache", "cache", "--train_prompts", prompts]
    options += ["--train_with", "cpu_offload", "activation_checkpointing"]
    rows, told = run(tmp_path / "cuda", "grpo_guard.py", *options)
    assert_close(rows, run_on_cpu(tmp_path / "cpu", "grpo_guard.py", *options))
    assert phase_sum(told, "gen", "empty_cache") <= RATCHETS["a rollout"]["empty_cache"]


def test_edits_have_the_cpus_numbers(tmp_path, reward):
    """Pictures are encoded on the device, and their latents go with each image's prompt."""
    options = [*SIZES, *reward, "--model", ROOT / "assets/embedded_edit"]
    options += ["--train_prompts", ROOT / "assets/edit_train.jsonl", "--eval_prompts", ROOT / "assets/edit_eval.jsonl"]
    rows, _ = run(tmp_path / "cuda", "flow_grpo.py", *options)
    # the gradient's norm is 1.1e-5 off: it sums over the picture's tokens too
    assert_close(rows, run_on_cpu(tmp_path / "cpu", "flow_grpo.py", *options), 5 * ROUND_OFF)


def test_a_sibling_in_bf16_begins_on_policy(tmp_path, reward):
    """bf16 rounds otherwise where attention is computed otherwise: some things hold to the bit, others to a percent."""
    options = [*SIZES, *reward, "--dtype", "bfloat16", "--kl_coef", "0.04"]
    rows, _ = run(tmp_path / "cuda", "mix_grpo.py", *options)
    expected = run_on_cpu(tmp_path / "cpu", "mix_grpo.py", *options)
    assert rows[1]["actor/on_policy_ratio_mean"] == 1 and rows[1]["actor/on_policy_ratio_std"] == 0
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert rows[0]["val/brightness/mean"] == pytest.approx(expected[0]["val/brightness/mean"], rel=1e-2)
    assert rows[1]["actor/grad_norm"] == pytest.approx(expected[1]["actor/grad_norm"], rel=0.1)


# ---- ratchets --------------------------------------------------------------------------------------------------------
def assert_at_most(found, allowed):
    """A count above its ratchet is a step back; lower the ratchet in the commit that lowers a count."""
    over = {name: (found[name], limit) for name, limit in allowed.items() if found[name] > limit}
    assert not over, f"counted, and allowed by ratchets.json: {over}"


def test_an_update_waits_no_more_than_it_did(one_rank):
    told = one_rank[1]
    passes = phase_sum(told, "update_actor", "passes")
    assert passes == 4  # 8 images, 2 at a time, one trained step
    found = {name: phase_sum(told, "update_actor", name) / passes for name in ("waits", "kernels")}
    assert_at_most(found, RATCHETS["a pass of the update"])


def test_a_rollout_copies_no_more_than_it_did(one_rank):
    told = one_rank[1]
    found = {name: phase_sum(told, "gen", name) for name in ("waits", "copies", "empty_cache", "bytes_down")}
    found["kernels a pass"] = phase_sum(told, "gen", "kernels") / phase_sum(told, "gen", "passes")
    assert_at_most(found, RATCHETS["a rollout"])


def test_a_prompt_sets_encoding_copies_no_more_than_it_did(one_rank):
    told = one_rank[1]
    encodings = 4  # of the prompts that are compared at the start, two evaluations and a rollout
    found = {name: phase_sum(told, "encode", name) / encodings for name in ("waits", "empty_cache")}
    assert_at_most(found, RATCHETS["an encoding"])


def test_each_phase_holds_what_the_plan_says(one_rank, reward):
    """Live bytes at a phase's peak, over those of tools/plan.py. Kernels' scratch is in neither."""
    planned = planned_bytes("flow_grpo.py", [*SIZES, *reward])
    found = {phase: phase_peak(one_rank[1], of_run) / planned[phase] for of_run, phase in PHASES.items()}
    assert_at_most(found, RATCHETS["live bytes over the plan's"])
    assert min(found.values()) > 0.5, found  # a plan of twice what a run takes refuses runs that fit
