"""The vLLM-Omni engine in its own process: the trainer's policy to round-off, and no way to hang."""
import os
import signal
import subprocess
import sys
import time

import flow_grpo
from common.rollout import EngineError, VLLMEngine
from tests.conftest import EMBEDDED, ROOT
from tests.test_flow_grpo import policy_without_fsdp

import pytest
import torch

PROMPTS = ['a red sign that says "123"', 'a blue sign that says "456789"', 'a white sign that says "0000"']


def start(folder, timeout_s=120.0):
    return VLLMEngine(EMBEDDED, "float32", 4, folder / "engine.log", timeout_s, num_threads=1)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    engine = start(tmp_path_factory.mktemp("engine"))
    yield engine
    engine.close()
    assert engine.process.returncode == 0


def request_for(model, args, sde_steps=(0, 1, 2, 3, 4), seeds=range(7)):
    index = torch.arange(len(seeds)) % len(PROMPTS)
    return flow_grpo.make_request(args, model, PROMPTS, index, list(seeds), 6, sde_steps)


def assert_parity(engine, model, args, request, lora):
    """Engine's latents rescored by the trainer give the engine's log-probs; the trainer's own rollout is the same."""
    theirs, ours = engine.generate(request, lora=lora), flow_grpo.rollout(args, model, None, request)
    log_probs = flow_grpo.recompute_log_probs(args, model, request, theirs.latents)
    assert theirs.log_probs.shape == (7, len(request.sde_steps))
    torch.testing.assert_close(log_probs, theirs.log_probs, rtol=0, atol=1e-6)
    # two rollouts of their own: round-off of each step is the next step's input, and guidance enlarges it
    torch.testing.assert_close(theirs.latents, ours.latents, rtol=0, atol=1e-4)
    torch.testing.assert_close(theirs.prev_sample_means, ours.prev_sample_means, rtol=0, atol=1e-4)
    torch.testing.assert_close(theirs.transition_stds, ours.transition_stds, rtol=0, atol=0)
    for a, b in zip(theirs.images, ours.images, strict=True):
        pixels = [torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).int() for image in (a, b)]
        assert (pixels[0] - pixels[1]).abs().max() <= 1  # rounding to 8 bits


@pytest.mark.parametrize("sde_type", ["sde", "cps"])
@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
def test_parity_base_and_after_a_push(engine, guidance_scale, sde_type):
    base, args, _ = policy_without_fsdp(trained=False, guidance_scale=guidance_scale, sde_type=sde_type)  # lora_B is 0
    request = request_for(base, args)
    assert_parity(engine, base, args, request, lora=False)
    model, args, config = policy_without_fsdp(guidance_scale=guidance_scale, sde_type=sde_type)
    adapter = flow_grpo.get_peft_model_state_dict(model.transformer)
    before = {k: v.clone() for k, v in adapter.items()}
    assert engine.push_lora(adapter, config) == len(adapter) // 2 == 31
    assert all(torch.equal(before[k], v) for k, v in adapter.items())  # the pushed tensors are not scaled in place
    assert_parity(engine, model, args, request, lora=True)
    assert_parity(engine, base, args, request, lora=False)  # the reference policy is still there


def test_parity_with_a_window_and_other_batches(engine):
    """ODE steps around the window draw no noise, and an image does not depend on the images sampled with it."""
    model, args, config = policy_without_fsdp()
    engine.push_lora(flow_grpo.get_peft_model_state_dict(model.transformer), config)
    request = request_for(model, args, sde_steps=(2, 3))
    assert_parity(engine, model, args, request, lora=True)
    whole, part = engine.generate(request), engine.generate(request.select(torch.tensor([5, 1])))
    # another batch size sums in another order; 3.6e-6 was measured after six steps on one machine
    torch.testing.assert_close(part.latents, whole.latents[[5, 1]], rtol=0, atol=1e-5)


def test_first_push_is_verified(engine, monkeypatch):
    model, args, config = policy_without_fsdp(trained=False)
    adapter, request = flow_grpo.get_peft_model_state_dict(model.transformer), request_for(model, args, (), range(1))
    engine.verify_push(adapter, config, request)
    assert_parity(engine, model, args, request_for(model, args), lora=True)  # it leaves the real adapter
    monkeypatch.setattr(engine, "push_lora", lambda tensors, config: 30)
    with pytest.raises(EngineError, match="bound 30 of the adapter's 31 modules"):
        engine.verify_push(adapter, config, request)
    monkeypatch.setattr(engine, "push_lora", lambda tensors, config: 31)
    with pytest.raises(EngineError, match="changes nothing"):
        engine.verify_push(adapter, config, request)


def test_a_failing_call_brings_its_traceback_and_the_engine_lives_on(engine):
    model, args, config = policy_without_fsdp()
    adapter = {k.replace("transformer_blocks.0", "transformer_blocks.9"): v
               for k, v in flow_grpo.get_peft_model_state_dict(model.transformer).items()}
    with pytest.raises(EngineError, match="failed during push_lora"):
        engine.push_lora(adapter, config)
    engine.push_lora(flow_grpo.get_peft_model_state_dict(model.transformer), config)
    assert_parity(engine, model, args, request_for(model, args), lora=True)


def test_a_dead_and_a_stuck_engine_are_errors_within_their_time(tmp_path):
    model, args, _ = policy_without_fsdp()
    engine = start(tmp_path)
    engine.wait_ready()
    engine.process.send_signal(signal.SIGSTOP)
    engine.timeout_s, began = 2.0, time.monotonic()
    with pytest.raises(EngineError, match=r"did not answer to generate within 2 s \(--engine_timeout_s\)"):
        engine.generate(request_for(model, args))
    assert time.monotonic() - began < 10
    with pytest.raises(EngineError, match="the rollout engine died"):
        engine.generate(request_for(model, args))

    engine = start(tmp_path)
    os.kill(engine.process.pid, signal.SIGKILL)  # while it loads
    with pytest.raises(EngineError, match="died during start .*exit code -9"):
        engine.wait_ready()


def test_an_engine_that_cannot_load_says_why(tmp_path):
    engine = VLLMEngine(tmp_path, "float32", 4, tmp_path / "engine.log", 120, num_threads=1)
    with pytest.raises(EngineError, match="(?s)failed during start.*Traceback"):
        engine.wait_ready()
    engine.close()


def test_the_engine_does_not_outlive_its_parent(tmp_path):
    """A trainer that raises, or is killed, leaves no process behind and is not kept from exiting."""
    code = ("import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
            "from tests.test_engine import start\n"
            "engine = start(Path(sys.argv[2])); print(engine.process.pid, flush=True)\n"
            "engine.wait_ready(); raise KeyError('x')")
    done = subprocess.run([sys.executable, "-c", code, ROOT, tmp_path], capture_output=True, text=True, timeout=120)
    assert "KeyError" in done.stderr
    deadline = time.monotonic() + 20
    while os.path.exists(f"/proc/{int(done.stdout)}"):
        assert time.monotonic() < deadline, "the engine is still alive"
        time.sleep(0.2)
