"""The vLLM-Omni engine in its own process samples the trainer's policy to round-off, and cannot hang.

Where the start of its process is not what a test looks at, the engine is forked from tests/warm_engine.py.
"""

import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from multiprocessing import Pipe
from pathlib import Path

import flow_grpo
from common.data import PromptSet
from common.engine import client, environment, messages
from common.engine.client import EngineError, VLLMEngine
from common.errors import RolloutError, RunError
from common.models.loading import load_model
from common.models.stable_diffusion_3 import StableDiffusion3
from common.process import catch_stop_signals
from common.rollout import Trajectories
from common.scoring import Scorer
from common.weights.adapter_files import read_lora
from common.weights.lora import make_lora, save_weights
from common.weights.policy import add_policies, tensors_on_rank_0
from tests.broken_engine import shifted_sigmas
from tests.conftest import (
    EMBEDDED,
    ROOT,
    assert_same,
    embedded_model,
    forked_engines,
    needs_engine,
    on_ranks,
    policy_without_fsdp,
    prompt_set,
    skip_without_engine,
)

import psutil
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

PROMPTS = ['a red sign that says "123"', 'a blue sign that says "456789"', 'a white sign that says "0000"']


def start(folder, timeout_s=120.0, dtype="float32", **options):
    skip_without_engine()
    return VLLMEngine(
        EMBEDDED, dtype, max_num_seqs=4, log_file=folder / "engine.log", timeout_s=timeout_s, num_threads=1, **options
    )


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with forked_engines():
        engine = start(tmp_path_factory.mktemp("engine"))
    yield engine
    engine.close()
    assert engine.process.returncode == 0


@pytest.fixture(scope="module")
def bf16_engine(tmp_path_factory):
    with forked_engines():
        engine = start(tmp_path_factory.mktemp("bf16"), dtype="bfloat16")
    yield engine
    engine.close()


def request_for(model, args, sde_steps=(0, 1, 2, 3, 4), seeds=range(7)):
    prompt_index = torch.arange(len(seeds)) % len(PROMPTS)
    drawn = prompt_set(PROMPTS)
    return flow_grpo.make_request(args, model, drawn, prompt_index, list(seeds), sde_steps=sde_steps)


def pixels(image):
    """The bytes of a PIL image as ints, so that differences of either sign can be taken."""
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).int()


def assert_parity(engine, model, args, request, lora):
    """The trainer gives the engine's latents the engine's log-probs, and its own rollout equals the engine's."""
    theirs = engine.generate(request, lora=lora)
    ours = flow_grpo.rollout(args, model, None, request)
    assert theirs.log_probs.shape == (len(request.seeds), len(request.sde_steps))
    rescored = flow_grpo.recompute_log_probs(args, model, request, theirs)
    torch.testing.assert_close(rescored.log_probs, theirs.log_probs, rtol=0, atol=1e-6)
    # each samples by itself: the round-off of a step is input of the next step, and guidance enlarges it
    torch.testing.assert_close(theirs.latents, ours.latents, rtol=0, atol=1e-4)
    torch.testing.assert_close(theirs.prev_sample_means, ours.prev_sample_means, rtol=0, atol=1e-4)
    # one function computes them from the schedule alone: allow for the last bit of fp32
    torch.testing.assert_close(theirs.transition_stds, ours.transition_stds, rtol=2e-7, atol=0)
    for one, other in zip(theirs.images, ours.images, strict=True):
        assert (pixels(one) - pixels(other)).abs().max() <= 1  # rounding to 8 bits


@pytest.mark.parametrize(("guidance_scale", "sde_type"), [(1.0, "cps"), (3.0, "sde")])
def test_parity_base_and_after_a_push(engine, guidance_scale, sde_type):
    base, args, _ = policy_without_fsdp(trained=False, guidance_scale=guidance_scale, sde_type=sde_type)  # lora_B is 0
    request = request_for(base, args)
    assert_parity(engine, base, args, request, lora=False)
    model, args, config = policy_without_fsdp(guidance_scale=guidance_scale, sde_type=sde_type)
    adapter = tensors_on_rank_0(model)[0]
    before = {k: v.clone() for k, v in adapter.items()}
    engine.push(adapter, config)
    assert len(adapter) // 2 == 31
    assert all(torch.equal(before[k], v) for k, v in adapter.items())  # the pushed tensors are not scaled in place
    assert_parity(engine, model, args, request, lora=True)
    assert_parity(engine, base, args, request, lora=False)  # the reference policy is still there


def test_parity_with_a_negative_prompt_for_each_prompt(engine):
    """Guidance moves each image away from its own prompt's; and it is another image without them."""
    model, args, _ = policy_without_fsdp(trained=False, guidance_scale=3.0)
    records = [{"negative_prompt": text} for text in ("a blue sign", "", "text")]
    negatives = PromptSet(PROMPTS, records).negatives(args.negative_prompt)
    plain = request_for(model, args)
    negative_conditioning = model.encode_negative(negatives, args.guidance_scale, args.max_sequence_length)
    assert all(len(tensor) == len(PROMPTS) for tensor in negative_conditioning.values())
    request = replace(plain, negative_conditioning=negative_conditioning)
    assert_parity(engine, model, args, request, lora=False)
    with_them, without = (flow_grpo.rollout(args, model, None, one).latents[:, -1] for one in (request, plain))
    is_alike = (with_them - without).abs().amax((1, 2, 3)) < 1e-4
    assert is_alike.tolist() == (request.prompt_index == 1).tolist()


def test_parity_of_a_step_from_a_users_file(engine, tmp_path):
    """The engine's process also reads `--sde_type path/to/file.py:function`."""
    (tmp_path / "steps.py").write_text(
        "import math\n\n\ndef small(x, v, sigma, sigma_next, noise_level, sigma_max=None):\n"
        "    return x + v * (sigma_next - sigma), 0.3 * noise_level * math.sqrt(sigma - sigma_next)\n"
    )
    model, args, config = policy_without_fsdp(sde_type=f"{tmp_path / 'steps.py'}:small")
    engine.push(tensors_on_rank_0(model)[0], config)
    assert_parity(engine, model, args, request_for(model, args), lora=True)


def test_parity_with_a_window_and_other_batches(engine):
    """ODE steps around the window draw no noise, and an image does not depend on the images sampled with it."""
    model, args, _ = policy_without_fsdp()
    engine.push_policy(model)
    request = request_for(model, args, sde_steps=(2, 3))
    assert_parity(engine, model, args, request, lora=True)
    seven = engine.generate(request)
    two = engine.generate(request.select(torch.tensor([5, 1])))
    # another batch size sums in another order; 3.6e-6 was measured after six steps on one machine
    torch.testing.assert_close(two.latents, seven.latents[[5, 1]], rtol=0, atol=1e-5)


def replace_calls(monkeypatch, engine):
    """The engine's real `_call`, and a dict: a function put there under an operation's name answers in its place."""
    ask = engine._ask
    answer = engine._answer
    replaced = {}
    answers = []

    def ask_or_replace(operation, *args, **kwargs):
        if operation not in replaced:
            return ask(operation, *args, **kwargs)
        answers.append(replaced[operation](operation, *args, **kwargs))
        return None

    def real(operation, *args, **kwargs):
        return answer(ask(operation, *args, **kwargs), operation)

    monkeypatch.setattr(engine, "_ask", ask_or_replace)
    monkeypatch.setattr(engine, "_answer", lambda n, operation: answers.pop(0) if n is None else answer(n, operation))
    return real, replaced


def weight_fingerprints(tensors):
    """The fingerprints that an engine reports if it holds these full weights."""
    return {name: messages.fingerprint(tensor) for name, tensor in tensors.items()}


def adapter_fingerprints(tensors, config):
    """The fingerprints that an engine reports if this adapter acts in its layers."""
    scale = config["lora_alpha"] / config["r"]
    return weight_fingerprints({name: t * scale if "lora_B" in name else t for name, t in tensors.items()})


def test_first_push_is_verified(engine, monkeypatch):
    model, args, config = policy_without_fsdp(trained=False)
    adapter = tensors_on_rank_0(model)[0]
    request = request_for(model, args, sde_steps=(), seeds=range(1))
    with monkeypatch.context() as patched:
        patched.setattr(type(model), "decode", None)  # the VAE stays out of the memory of a GPU with an engine
        engine.verify_policy(model, request, flow_grpo.sample_locally)
    assert_parity(engine, model, args, request_for(model, args), lora=True)  # it leaves the real adapter
    _, replaced = replace_calls(monkeypatch, engine)
    replaced["push_lora"] = lambda operation, tensors, config: {}
    with pytest.raises(EngineError, match=r"\(62 of 62 "):
        engine.verify_push(adapter, config, request)
    replaced["push_lora"] = lambda operation, tensors, config: adapter_fingerprints(tensors, config)
    with pytest.raises(EngineError, match=r"^[^(]*\.log$"):
        engine.verify_push(adapter, config, request)


# ---- the script's own sampling ---------------------------------------------------------------------------------------
@torch.no_grad()
def heun(model, request):
    """flow_grpo.sample_locally with Heun's second evaluation, where the next sigma is not 0."""
    generators = [torch.Generator().manual_seed(seed) for seed in request.seeds]
    first_latents = x = request.first_latents(generators, model.device)
    outputs = []
    for i, (sigma, sigma_next) in enumerate(pairwise(request.sigmas.tolist())):
        out = flow_grpo.policy_step(model, request, x, i, generator=generators)
        if sigma_next > 0 and out.log_prob is None:
            ahead = flow_grpo.policy_step(model, request, out.prev_sample, i + 1)
            dt_ahead = (request.sigmas[i + 2] - request.sigmas[i + 1]).item()
            v = (out.prev_sample - x) / (sigma_next - sigma) / 2 + (ahead.prev_sample - out.prev_sample) / dt_ahead / 2
            out = out._replace(prev_sample=x + v * (sigma_next - sigma))
        outputs.append(out)
        x = out.prev_sample
    return Trajectories.from_steps(first_latents, outputs, model.decode(x))


def sample_changed(change):
    """flow_grpo.sample_locally of a request that `change` has changed."""
    return lambda model, request: flow_grpo.sample_locally(model, change(request))


OWN_SAMPLING = {
    "heun": ("ODE", heun),
    "schedule": ("ODE", sample_changed(shifted_sigmas)),
    "guidance": ("ODE", sample_changed(lambda request: replace(request, guidance_scale=request.guidance_scale + 1.5))),
    "noise": ("SDE", sample_changed(lambda request: replace(request, noise_level=request.noise_level / 2))),
}


@pytest.mark.parametrize(("dtype", "guidance_scale"), [("float32", 1.0), ("bfloat16", 4.5)])
def test_a_scripts_own_sampling_ends_the_run(engine, bf16_engine, dtype, guidance_scale):
    """The rounding of either dtype does not; each change of section 6 does."""
    engine = {"float32": engine, "bfloat16": bf16_engine}[dtype]
    model, args, _ = policy_without_fsdp(guidance_scale=guidance_scale, dtype=dtype)
    request = request_for(model, replace(args, num_inference_steps=10), sde_steps=(), seeds=range(1))
    engine.verify_policy(model, request, flow_grpo.sample_locally)
    for name, (kind, own) in OWN_SAMPLING.items():
        if name == "guidance" and guidance_scale == 1:  # it has no negative prompt
            continue
        told = f" {kind} .* sample_locally, "
        with pytest.raises(RunError, match=told) as error:
            engine.verify_policy(model, request, own)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(("dtype", "lora_alpha"), [("float32", 16), ("bfloat16", 20)])  # of rank 16: as it is, scaled
def test_an_adapter_that_is_stale_in_one_element_is_an_error(engine, bf16_engine, monkeypatch, dtype, lora_alpha):
    """One unit in the last place of the engine's dtype is enough. A difference that its dtype rounds away is none."""
    engine = {"float32": engine, "bfloat16": bf16_engine}[dtype]
    model, _, config = policy_without_fsdp(lora_alpha=lora_alpha)
    adapter = tensors_on_rank_0(model)[0]
    engine.push(adapter, config)
    ask = engine._ask

    def push_but_keep(name, change):
        """Push the adapter changed by `change` in one element of `name`, to an engine that keeps the one it has."""
        changed = adapter | {name: adapter[name].clone()}
        changed[name][1, 2] = change(changed[name][1, 2])
        with monkeypatch.context() as patch:
            patch.setattr(engine, "_ask", lambda operation, tensors, config: ask(operation, kept, config))
            engine.push(changed, config)

    kept = {name: tensor.to(engine.dtype) for name, tensor in adapter.items()}
    for name in ("transformer_blocks.1.attn.to_k.lora_A.weight", "transformer_blocks.0.attn.to_out.0.lora_B.weight"):
        with pytest.raises(EngineError, match=rf" {name} .*\(1 of 62 "):
            push_but_keep(name, lambda x: next_number(x.to(engine.dtype)).float())
        push_but_keep(name, lambda x: x.to(engine.dtype).float() * (1 + torch.finfo(engine.dtype).eps / 256))


def next_number(x):
    """The next number of its dtype, away from 0."""
    integers = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
    return (x.view(integers[x.dtype]) + 1).view(x.dtype)


def test_an_adapter_that_does_not_act_is_an_error(engine, monkeypatch):
    """The engine reports the adapter that acts in its layers, not what it was sent. Nothing else may act in them."""
    model, _, config = policy_without_fsdp()
    adapter = tensors_on_rank_0(model)[0]
    engine.push(adapter, config)
    fewer = {name: tensor for name, tensor in adapter.items() if ".to_q." in name}
    real = engine._call
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_call", lambda operation, tensors, config: real(operation, fewer, config))
        with pytest.raises(EngineError, match=r" transformer_blocks.0.attn.to_k.lora_A.weight .*\(54 of 62 "):
            engine.push(adapter, config)
        patch.setattr(engine, "_call", lambda operation, tensors, config: real(operation, adapter, config))
        with pytest.raises(EngineError, match=r" transformer_blocks.0.attn.to_k.lora_A.weight .*\(54 of 62 "):
            engine.push(fewer, config)


def test_modules_that_the_engine_has_no_lora_for_are_named(engine):
    """As --lora_target_modules all-linear asks for; without them it takes all, the feed-forward ones too."""
    model = embedded_model()
    lacking = ("norm1.linear", "norm1_context.linear", "norm_out.linear", *EMBEDDERS)
    excluded = [f"not:{end}" for end in lacking]
    for left_out in ([], excluded):
        lora = make_lora(type(model), model=str(EMBEDDED), rank=4, alpha=8, target_modules=["all-linear", *left_out])
        add_policies(model, lora, ["default"], seed=1)
        adapter, config = tensors_on_rank_0(model)
        if left_out:
            engine.push(adapter, config)
            assert len(adapter) // 2 == 47
        else:
            advice = f" {' '.join(excluded)} .*--lora_target_modules, .*--rollout local"
            with pytest.raises(EngineError, match=advice):
                engine.push(adapter, config)
        model = embedded_model()


EMBEDDERS = [f"time_text_embed.{name}_embedder.linear_{i}" for name in ("text", "timestep") for i in (1, 2)]


def test_an_adapter_read_from_a_file_is_pushed(engine, tmp_path):
    """Its modules are listed by their whole names, and may be fewer than those of the script's own LoRA."""
    model, args, config = policy_without_fsdp()
    fewer = (".to_q.", ".add_v_proj.")
    adapter = {
        name: tensor for name, tensor in tensors_on_rank_0(model)[0].items() if any(module in name for module in fewer)
    }
    for name, p in model.transformer.named_parameters():
        if "lora_B" in name and not any(module in name for module in fewer):
            torch.nn.init.zeros_(p)
    save_weights(tmp_path, model.pipe, adapter, config)
    engine.push(*read_lora(tmp_path))
    assert adapter
    assert_parity(engine, model, args, request_for(model, args), lora=True)


# ---- chunks ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sde_steps", [(0, 1, 2), ()])
def test_chunks_give_the_numbers_of_one_large_call(engine, monkeypatch, sde_steps):
    """To the bit. One large call samples its 10 images in batches of 4, just as the chunks are cut."""
    model, args, config = policy_without_fsdp(guidance_scale=3.0)
    engine.push(tensors_on_rank_0(model)[0], config)
    request = request_for(model, args, sde_steps, range(10))
    whole = engine._call("generate", request.cpu(), lora=True, is_last=True)
    seen = []
    chunked = engine.generate(request, finished=lambda rows, images: seen.append((rows, images)))
    for name in ("latents", "prev_sample_means", "log_probs", "transition_stds"):
        assert torch.equal(getattr(chunked, name), whole[name]), name
    assert [rows for rows, _ in seen] == [range(4), range(4, 8), range(8, 10)]
    assert [image for _, images in seen for image in images] == chunked.images
    for image, expected in zip(chunked.images, whole["images"], strict=True):
        assert torch.equal(pixels(image), expected.flatten().int())


def test_a_chunk_is_on_its_way_before_the_one_before_it_is_done(engine, monkeypatch):
    model, args, _ = policy_without_fsdp()
    prompt_index = torch.tensor([2, 2, 0, 2, 1, 1, 1, 1, 0, 2])
    request = replace(request_for(model, args, (0,), range(10)), prompt_index=prompt_index)
    events = []
    ask = engine._ask
    answer = engine._answer

    def recorded_ask(operation, part, **kwargs):
        events.append(f"ask {len(part.seeds)}")
        is_last.append(kwargs["is_last"])
        return ask(operation, part, **kwargs)

    def recorded_answer(number, operation):
        events.append("answer")
        return answer(number, operation)

    is_last = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("freed"))
    monkeypatch.setattr(engine, "_ask", recorded_ask)
    monkeypatch.setattr(engine, "_answer", recorded_answer)
    chunked = engine.generate(request, lora=False, finished=lambda rows, images: events.append("finished"))
    chunks = ["ask 4", "ask 4", "answer", "finished", "ask 2", "answer", "finished", "answer", "finished"]
    assert events == ["freed", *chunks]  # the trainer's cached memory, for the engine
    assert is_last == [False, False, True]  # when the engine frees its own
    alone = engine.generate(replace(request.select(torch.tensor([9])), seeds=[9]), lora=False)
    torch.testing.assert_close(alone.latents, chunked.latents[9:], rtol=0, atol=1e-5)  # of its own prompt


def test_an_exception_of_finished_leaves_a_usable_engine(engine):
    model, args, _ = policy_without_fsdp()
    request = request_for(model, args, (0, 1), range(10))
    expected = engine.generate(request, lora=False)

    def fail(rows, images):
        raise KeyError("a reward's error")

    with pytest.raises(KeyError, match="a reward's error"):
        engine.generate(request, lora=False, finished=fail)
    again = engine.generate(request, lora=False)
    assert torch.equal(again.latents, expected.latents) and torch.equal(again.log_probs, expected.log_probs)


def test_each_chunk_has_its_own_bound(engine, monkeypatch):
    """All three together take longer than timeout_s."""
    model, args, _ = policy_without_fsdp()
    request = request_for(model, args, (0,), range(12))
    engine.generate(request, lora=False)
    monkeypatch.setattr(engine, "timeout_s", 2.5)
    began = time.monotonic()
    engine.generate(request, lora=False, finished=lambda rows, images: time.sleep(1.0))
    assert time.monotonic() - began > 2.5


# ---- what passes between the processes -------------------------------------------------------------------------------
@pytest.mark.fast
def test_a_message_brings_back_what_was_sent_and_leaves_no_file():
    """Tensors of all kinds, in memory without a name, inside of Python's containers or a request."""
    sent = {
        "bf16": torch.arange(6).view(2, 3).bfloat16(),
        "part": torch.arange(10.0)[::3],
        "int": torch.tensor([2**40]),
        "bool": torch.tensor(True),
        "empty": torch.zeros(3, 0),
        "others": [1, ("a", None), 0.5, {"b": True}],
    }
    ours, theirs = Pipe()
    before = set(os.listdir("/dev/shm"))
    messages.send(ours, sent)
    messages.send(ours, "the next")
    received = messages.receive(theirs)
    assert_same(received, sent)
    assert messages.receive(theirs) == "the next"
    request = request_for(*policy_without_fsdp(trained=False)[:2])
    messages.send(ours, request)
    assert_same(vars(messages.receive(theirs)), vars(request))
    received["bf16"].add_(1)  # it may be written to
    maps = Path("/proc/self/maps")
    assert "memfd:cleanflow" in maps.read_text() and set(os.listdir("/dev/shm")) == before
    del received
    assert "memfd:cleanflow" not in maps.read_text()
    ours.close()
    with pytest.raises(EOFError):
        messages.receive(theirs)


class Call:
    """Pickled, it is a call that its receiver makes."""

    def __reduce__(self):
        return print, ("called",)


@pytest.mark.fast
def test_a_message_runs_nothing(capsys):
    """Neither end imports or calls what a message names; the engine's process runs the code of a model's pipeline."""
    ours, theirs = Pipe()
    messages.send(theirs, [Call()])
    with pytest.raises(pickle.UnpicklingError, match="print"):
        messages.receive(ours)
    assert capsys.readouterr().out == ""


@pytest.mark.fast
def test_fingerprint():
    """Equal in every dtype that holds the numbers. One unit in the last place changes it; zeros do not count."""
    x = torch.randn(50, 70, generator=torch.Generator().manual_seed(0)).bfloat16()
    value = messages.fingerprint(x)
    assert value == messages.fingerprint(x.float()) == messages.fingerprint(torch.nn.functional.pad(x, (0, 3, 2, 0)))
    assert value == messages.fingerprint(x[:20]) ^ messages.fingerprint(x[20:])
    assert messages.fingerprint(torch.tensor([1.5])) == 0x3FF8000000000000  # float64's bits
    for dtype in (torch.bfloat16, torch.float32):
        changed = x.to(dtype).clone()
        changed[7, 5] = next_number(changed[7, 5])
        assert messages.fingerprint(changed) != value


# ---- full weights ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def full_engine(tmp_path_factory):
    """An engine that takes full weights. It starts with those of the embedded model."""
    with forked_engines():
        engine = start(tmp_path_factory.mktemp("full"))
    yield engine
    engine.close()


def with_noise(model):
    """Move every weight of the model's transformer. Returns a copy of its state dict."""
    generator = torch.Generator().manual_seed(3)
    for p in model.transformer.parameters():
        p.add_(torch.randn(p.shape, generator=generator) * 0.1 * p.std().nan_to_num())
    return {name: tensor.clone() for name, tensor in model.transformer.state_dict().items()}


def test_first_push_of_full_weights_is_verified(full_engine, monkeypatch):
    model = embedded_model()
    args = replace(flow_grpo.Args(), num_inference_steps=6)
    tensors = model.transformer.state_dict()
    request = request_for(model, args, sde_steps=(), seeds=range(1))
    full_engine.verify_push(tensors, None, request)
    assert_parity(full_engine, model, args, request_for(model, args), lora=True)

    real, replaced = replace_calls(monkeypatch, full_engine)

    def without_one(operation, part):
        held = real(operation, part)
        held.pop("proj_out.bias", None)
        return held

    replaced["push_weights"] = lambda operation, part: weight_fingerprints(part)
    with pytest.raises(EngineError, match=r"^[^(]*\.log$"):
        full_engine.verify_push(tensors, None, request)
    replaced["push_weights"] = without_one
    with pytest.raises(EngineError, match=rf" proj_out.bias .*\(1 of {len(tensors)} "):
        full_engine.push(tensors, None)


@torch.no_grad()
def test_parity_after_a_push_of_full_weights(full_engine):
    """With guidance; the test above has none."""
    args = replace(flow_grpo.Args(), num_inference_steps=6, guidance_scale=3.0)
    original = embedded_model()
    request = request_for(original, args)
    full_engine.push(original.transformer.state_dict(), None)
    assert_parity(full_engine, original, args, request, lora=True)
    before = full_engine.generate(request)
    model = embedded_model()
    tensors = with_noise(model)
    full_engine.push(tensors, None)
    assert_parity(full_engine, model, args, request, lora=True)
    assert not torch.allclose(full_engine.generate(request).latents, before.latents, rtol=0, atol=1e-2)


def test_an_unknown_weight_is_an_error_and_the_engine_lives_on(full_engine):
    with pytest.raises(EngineError, match="(?s) push_weights: .*'transformer_blocks.9.attn"):
        full_engine.push({"transformer_blocks.9.attn.to_q.weight": torch.zeros(4, 4)}, None)
    with pytest.raises(EngineError, match=" push_weights: "):
        full_engine.push({"proj_out.bias": torch.zeros(3)}, None)  # of another shape
    full_engine.push({"proj_out.bias": embedded_model().transformer.proj_out.bias}, None)


class OneAtATime(Mapping):
    """Like the weights of a sharded model: gathered when asked for."""

    def __init__(self, tensors):
        self.tensors = tensors
        self.gathered = []

    def __getitem__(self, name):
        self.gathered.append(name)
        return self.tensors[name].clone()

    def __iter__(self):
        return iter(self.tensors)

    def __len__(self):
        return len(self.tensors)


def test_full_weights_are_gathered_one_at_a_time_and_go_in_buckets(full_engine, monkeypatch):
    tensors = OneAtATime(with_noise(embedded_model()))
    monkeypatch.setattr(client, "BUCKET_BYTES", 1e6)
    buckets = []
    ask = full_engine._ask

    def asking(operation, bucket):
        buckets.append([tensor.nbytes for tensor in bucket.values()])
        return ask(operation, bucket)

    monkeypatch.setattr(full_engine, "_ask", asking)
    full_engine.push(tensors, None)
    assert tensors.gathered == list(tensors)  # each once, in order
    assert len(buckets) > 5 and all(sum(bucket[:-1]) < 1e6 for bucket in buckets)
    assert all(sum(bucket) >= 1e6 for bucket in buckets[:-1])
    assert sum(buckets, []) == [tensor.nbytes for tensor in tensors.tensors.values()]


def test_a_weight_that_is_stale_in_one_element_is_an_error(full_engine, monkeypatch):
    """This includes a weight of k, which the engine holds between q and v in one tensor."""
    tensors = with_noise(embedded_model())
    ask = full_engine._ask
    for name in ("transformer_blocks.0.attn.to_k.weight", "transformer_blocks.1.ff.net.2.bias"):
        stale = tensors[name].clone()
        stale.view(-1)[5] = next_number(stale.view(-1)[5])

        def keeping(operation, part, name=name, stale=stale):
            return ask(operation, part | {name: stale})

        with monkeypatch.context() as patch:
            patch.setattr(full_engine, "_ask", keeping)
            with pytest.raises(EngineError, match=rf" {name} .*\(1 of {len(tensors)} "):
                full_engine.push(tensors, None)
    full_engine.push(tensors, None)


def test_bf16_engine_takes_the_trainers_weights(tmp_path):
    """The trainer's model may be in fp32, or in bf16 with its table of positions, a buffer, rounded as well. Both are
    the weights that the engine loaded, so the image comes back to the bit."""
    with forked_engines():
        engine = start(tmp_path, dtype="bfloat16")
    args = replace(flow_grpo.Args(), num_inference_steps=6)
    for dtype in (torch.bfloat16, torch.float32):
        model = embedded_model(dtype)
        assert model.transformer.pos_embed.pos_embed.dtype == dtype
        request = request_for(model, args, sde_steps=(), seeds=range(1))
        request.conditioning = {name: tensor.bfloat16() for name, tensor in request.conditioning.items()}
        weights = OneAtATime({name: tensor.float() for name, tensor in model.transformer.state_dict().items()})
        base = engine.generate(request, lora=False).latents
        engine.verify_push(weights, None, request)
        assert len(weights.gathered) == len(weights) + 1  # the probe's
        assert torch.equal(engine.generate(request).latents, base)
    engine.close()


def test_a_bf16_engine_decodes_with_the_trainers_vae(bf16_engine):
    """It is fp32 in both. With its weights rounded to bf16 in between, a sixth of the pixels would differ."""
    model, args, _ = policy_without_fsdp(trained=False, dtype="bfloat16")
    theirs = bf16_engine.generate(request_for(model, args, sde_steps=()), lora=False)
    with torch.no_grad():
        ours = model.decode(theirs.latents[:, -1])
    distances = [(pixels(one) - pixels(other)).abs() for one, other in zip(theirs.images, ours, strict=True)]
    assert max(distance.max() for distance in distances) <= 1
    assert torch.cat(distances).float().mean() < 0.001


# ---- the engine's memory and its end ---------------------------------------------------------------------------------
def test_an_engine_that_sleeps_is_woken_before_it_is_asked(tmp_path, capfd, monkeypatch):
    """Its weights leave the GPU after each rollout and push, so that the trainer's text encoders find room there."""
    with forked_engines():
        engine = start(tmp_path, engine_with=["sleep"])
    told = "--engine_with sleep: "
    assert capfd.readouterr().err.count(told) == 1
    model, args, config = policy_without_fsdp()
    request = request_for(model, args, (0,), range(5))
    send = messages.send
    operations = []

    def recorded(connection, value):
        operations.append(value[1])
        send(connection, value)

    monkeypatch.setattr(messages, "send", recorded)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: operations.append("freed"))  # the trainer's
    adapter = tensors_on_rank_0(model)[0]
    engine.push(adapter, config)
    one = engine.generate(request)
    other = engine.generate(request)
    engine.push(adapter, config)
    pushed = ["push_lora", "sleep"]
    sampled = ["freed", "freed", "wake_up", "generate", "generate", "sleep"]
    assert operations == [*pushed, *sampled, *sampled, "freed", "wake_up", *pushed]
    assert torch.equal(one.latents, other.latents)
    engine.close()


def test_an_engine_of_compiled_blocks_samples_the_trainers_policy(tmp_path):
    """Before a push and after it: the LoRA's layers come into blocks that were compiled without them."""
    engine = start(tmp_path, timeout_s=600.0, engine_with=["compile"])
    model, args, config = policy_without_fsdp()
    base, _, _ = policy_without_fsdp(trained=False)
    request = request_for(base, args, seeds=range(4))  # one batch, hence one graph of each kind of block
    assert_parity(engine, base, args, request, lora=False)
    engine.push(tensors_on_rank_0(model)[0], config)
    assert_parity(engine, model, args, request, lora=True)
    assert "Regional compilation applied" in engine.log_file.read_text()
    engine.close()


@pytest.mark.parametrize("plain_beside", [False, True])
def test_an_engine_loads_a_variant_where_there_is_nothing_else(tmp_path, plain_beside):
    """Weights that are there as *.fp16.safetensors alone. Where plain ones are beside them vLLM-Omni, which takes every
    file of a folder that has no index, would load those of the variant as well; theirs are other numbers here."""
    skip_without_engine()
    folder = Path(shutil.copytree(EMBEDDED, tmp_path / "model"))
    for name in ("transformer", "vae"):
        (file,) = (folder / name).glob("*.safetensors")
        tensors = {key: tensor.half() * (1.5 if plain_beside else 1) for key, tensor in load_file(file).items()}
        save_file(tensors, file.with_name(f"{file.stem}.fp16.safetensors"), {"format": "pt"})
        if not plain_beside:
            file.unlink()
    base, args, _ = policy_without_fsdp(trained=False)  # lora_B is 0
    if not plain_beside:
        loaded = load_model(StableDiffusion3, folder, torch.float32, "cpu")
        base.transformer.load_state_dict(base_names(base.transformer, loaded.transformer.state_dict()), strict=False)
        base.pipe.vae.load_state_dict(loaded.pipe.vae.state_dict())
    with forked_engines():
        engine = VLLMEngine(
            folder, "float32", max_num_seqs=4, log_file=tmp_path / "engine.log", timeout_s=120.0, num_threads=1
        )
    try:
        assert_parity(engine, base, args, request_for(base, args), lora=False)
    finally:
        engine.close()


def base_names(transformer, state):
    """The state with the names that a transformer with a LoRA has for its base weights."""
    wrapped = {
        name.removesuffix(".base_layer") for name, _ in transformer.named_modules() if name.endswith(".base_layer")
    }
    named = {}
    for name, tensor in state.items():
        module, _, kind = name.rpartition(".")
        named[f"{module}.base_layer.{kind}" if module in wrapped else name] = tensor
    return named


def test_a_dead_and_a_stuck_engine_are_errors_within_their_time(tmp_path):
    model, args, _ = policy_without_fsdp()
    with forked_engines():
        engine = start(tmp_path)
    engine.wait_ready()
    os.kill(engine.process.pid, signal.SIGSTOP)
    engine.timeout_s = 2.0
    began = time.monotonic()
    with pytest.raises(RolloutError, match=" generate .* 2 s "):
        engine.generate(request_for(model, args))
    assert time.monotonic() - began < 10
    with pytest.raises(RolloutError, match=r" generate \("):
        engine.generate(request_for(model, args))

    engine = start(tmp_path)
    os.kill(engine.process.pid, signal.SIGKILL)  # while it loads
    with pytest.raises(EngineError, match=" start .* -9"):
        engine.wait_ready()


@pytest.mark.fast
def test_an_engine_that_fails_on_one_rank_is_an_error_on_all(monkeypatch):
    """The others raise it where they ask for scores, and all can save; but a rank may sample alone."""
    image = Image.new("RGB", (4, 2))

    def sample(engine, request, lora, finished):
        if engine.rank == 1:
            raise EngineError("the rollout engine died")
        finished(range(1), [image])

    def on_rank(rank):
        engine = object.__new__(VLLMEngine)
        engine.rank = rank
        if rank == 1:
            with pytest.raises(EngineError):
                engine.generate(None, alone=True)
        scorer = Scorer({"reward": lambda images, prompts, metadata: [1.0]}, PromptSet(["a"], [{}]))
        with pytest.raises(RolloutError) as caught:
            engine.generate(None, finished=scorer.add)
            assert rank == 0
            scorer.scores([0])
        return str(caught.value)

    monkeypatch.setattr(VLLMEngine, "_generate", sample)
    assert on_ranks(monkeypatch, 2, on_rank)[0] == ["", "the rollout engine died"]


def test_a_vllm_that_cannot_be_imported_is_named(tmp_path, monkeypatch):
    (tmp_path / "vllm_omni.py").write_text("raise ImportError('libcuda.so.1: cannot open')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    engine = start(tmp_path)
    with pytest.raises(EngineError, match=r" start .* 1, ImportError: libcuda.so.1: cannot open\)"):
        engine.wait_ready()


def test_a_stop_signal_is_obeyed_while_an_engine_loads(tmp_path, own_handlers, capfd):
    catch_stop_signals(0)
    engine = start(tmp_path)
    engine.process.send_signal(signal.SIGSTOP)  # it loads for ever
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    began = time.monotonic()
    with pytest.raises(SystemExit) as ended:
        engine.wait_ready()
    assert ended.value.code == 0 and time.monotonic() - began < 5
    assert engine.process.wait(10) == -signal.SIGKILL
    last = capfd.readouterr().err.splitlines()[-1]
    assert "--resume latest" in last


@pytest.mark.fast
def test_a_stop_while_one_rank_waits_for_its_engine_ends_all(monkeypatch):
    """--max_minutes ends on rank 1. The engine of rank 0 has loaded before."""

    def on_rank(rank):
        engine = VLLMEngine.__new__(VLLMEngine)
        engine.is_ready = False
        engine.timeout_s = 60.0
        engine.connection, child = Pipe()
        monkeypatch.setattr(engine, "_kill", child.close)
        if rank == 0:
            messages.send(child, (0, True, None))
        with pytest.raises(SystemExit) as ended:
            engine.wait_ready()
        return ended.value.code

    monkeypatch.setattr(client, "stop_requested", lambda: torch.distributed.get_rank() == 1)
    assert on_ranks(monkeypatch, 2, on_rank)[0] == [0, 0]


def test_an_engine_that_cannot_load_says_why(tmp_path):
    with forked_engines():
        engine = VLLMEngine(
            tmp_path, "float32", max_num_seqs=4, log_file=tmp_path / "engine.log", timeout_s=120, num_threads=1
        )
    with pytest.raises(EngineError, match="(?s) start.*Traceback"):
        engine.wait_ready()
    engine.close()


@pytest.mark.fast
def test_gpus_of_the_engines_own(monkeypatch):
    """Two ranks train on GPUs 0 and 1 of six. The second rank's engine gets the second of the two GPUs named."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    environment.check_devices((5, 2))
    environment.check_devices((5, 2, 3, 4))
    assert environment.engine_gpus((5, 2), torch.device("cuda", 1)) == (2,)
    assert environment.engine_gpus((5, 2, 3, 4), torch.device("cuda", 1)) == (3, 4)  # two workers for each rank
    assert environment.engine_gpus((5, 2, 3, 4), torch.device("cpu")) == (None, None)
    assert environment.engine_gpus((), torch.device("cuda", 1)) == (1,)
    assert environment.engine_gpus((), torch.device("cpu")) == (None,)
    refused = {
        (2,): "2: .* 2 ",
        (3, 3): "3 3: .* 2 ",
        (2, 6): "2 6: .* 6 GPUs .* 2 .*; 6 ",
        (1, 2): "1 2: .* 6 GPUs .*; 1 ",
    }
    for devices, reason in refused.items():
        with pytest.raises(ValueError, match=f"^--engine_devices {reason}"):
            environment.check_devices(devices)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    environment.check_devices((1, 2))  # on a CPU they count workers


def test_environment_of_the_engine(monkeypatch):
    """It has none of torchrun's variables and none of the user's keys. This repository is first on the path, and the
    rank's own GPU is the only visible one. Its workers meet on the loopback. The hub's token is there for a hub id
    alone."""
    torchruns = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
    keys = {"WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "GITHUB_TOKEN", "SSH_AUTH_SOCK", "VLLM_API_KEY"}
    keys |= {"VLLM_PORT"}  # all engines of a machine would look for a free port from there on
    tokens = {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}
    passed_on = {"HF_HOME", "VLLM_CACHE_ROOT", "VLLM_PORTABLE", "LD_LIBRARY_PATH"}
    for name in torchruns | keys | tokens | passed_on | {"OMP_NUM_THREADS"}:
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    on_cpu = environment.engine_environment(EMBEDDED, (None,), num_threads=2)
    assert on_cpu.keys().isdisjoint(torchruns | keys | tokens)
    assert {on_cpu[name] for name in passed_on} == {"7"} and on_cpu["PATH"] == os.environ["PATH"]
    assert on_cpu["OMP_NUM_THREADS"] == "2" and on_cpu["MALLOC_ARENA_MAX"] == "1" and on_cpu["HF_HUB_OFFLINE"] == "1"
    assert on_cpu["PYTHONPATH"].split(os.pathsep) == [str(ROOT), str(ROOT / "common/engine/plugin"), "/elsewhere"]
    for gpus, device in (((0,), "4"), ((1,), "6"), ((2,), "2"), ((1, 0), "6,4")):
        on_gpu = environment.engine_environment("a/hub-id", gpus, num_threads=2)
        assert on_gpu["CUDA_VISIBLE_DEVICES"] == device and "OMP_NUM_THREADS" not in on_gpu
        assert on_gpu["GLOO_SOCKET_IFNAME"] == on_cpu["GLOO_SOCKET_IFNAME"] == "lo"
        assert on_gpu["VLLM_OMNI_FUSED_QK_NORM_ROPE_MIN_TOKENS"] == "0"
        assert {on_gpu[name] for name in tokens} == {"7"} and on_gpu.keys().isdisjoint(torchruns | keys)


@pytest.mark.fast
def test_vllm_sees_the_allocators_settings(monkeypatch):
    """Its memory pool for sleep turns off segments that grow, where the older name of the variable asks for them."""
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment.engine_environment("a/hub-id", (0,), num_threads=1)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    env = environment.engine_environment("a/hub-id", (0,), num_threads=1)
    assert env["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True" and "PYTORCH_ALLOC_CONF" not in env


@needs_engine
def test_an_engine_listens_on_the_loopback_imports_nothing_of_the_run_and_ends_with_its_parent(tmp_path):
    """By default torch's store listens on all interfaces, and `python -m` puts the run's folder first on the path. A
    trainer that raises leaves no process behind, and nothing keeps it from exiting."""
    (tmp_path / "numpy.py").write_text("raise SystemExit('imported from the working directory')\n")
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
        "from common.cpu import repair_torchvision; repair_torchvision()\n"
        "from tests.engine.test_engine import start\n"
        "os.chdir(sys.argv[2]); os.environ['PYTHONPATH'] = os.pathsep  # the working directory, twice\n"
        "engine = start(Path(sys.argv[2])); engine.wait_ready(); print(engine.process.pid, flush=True)\n"
        "input(); raise KeyError('x')"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", code, ROOT, tmp_path],
        cwd=ROOT,  # the trainer has imported numpy before it comes into the folder
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    timer = threading.Timer(120.0, trainer.kill)
    timer.start()
    pid = trainer.stdout.readline()
    if pid:
        process = psutil.Process(int(pid))
        sockets = [c for p in (process, *process.children(recursive=True)) for c in p.net_connections(kind="inet")]
        assert {c.laddr.ip for c in sockets if c.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
    _, errors = trainer.communicate("\n")
    timer.cancel()
    assert "KeyError" in errors, errors
    deadline = time.monotonic() + 20
    while os.path.exists(f"/proc/{int(pid)}"):
        assert time.monotonic() < deadline, "the engine is still alive"
        time.sleep(0.2)
