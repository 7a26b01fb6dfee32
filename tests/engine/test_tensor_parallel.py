"""An engine whose transformer is split over two workers, on a CPU, samples the policy of one worker to round-off.

The engines are forked from tests/warm_engine.py, and the workers of one of them from itself; the others' workers are
started as a user's are.
"""

import re
import threading
import time
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import flow_grpo
from common.engine import environment
from common.engine.client import EngineError, VLLMEngine
from common.models.krea2 import Krea2
from common.models.loading import family_class, load_model
from common.weights.policy import add_policies, tensors_on_rank_0
from tests.conftest import (
    EMBEDDED,
    forked_engines,
    needs_engine,
    policy_without_fsdp,
    prompt_set,
    run_here,
    skip_without_engine,
)
from tests.tiny_models import make_checkpoint

import psutil
import pytest
import torch
from diffusers import DiffusionPipeline

PROMPTS = ['a red sign that says "123"', 'a blue sign that says "456789"', 'a white sign that says "0000"']
# a request makes the worker of rank 1 import this: from then on it takes its first adapter again and again
STALE = """
import os

from common.engine.pipelines import RolloutWorkerExtension

take = RolloutWorkerExtension._push_lora
first = []


def take_the_first(worker, tensors, config):
    first.append({name: tensor.clone() for name, tensor in tensors.items()})
    return take(worker, first[0], config)


if os.environ["RANK"] == "1":
    RolloutWorkerExtension._push_lora = take_the_first


def euler(x, v, sigma, sigma_next, noise_level, sigma_max=None):
    return x + v * (sigma_next - sigma), noise_level
"""


# each worker that imports it notes whether it has the repair of torchvision
REPAIRED = """
import os
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
import torchvision  # which transformers imports, and vLLM with it

has_nms = hasattr(torch.ops.torchvision, "nms")
folder = Path(__file__).parent
(folder / f"rank{os.environ['RANK']}.txt").write_text(str(has_nms))


def euler(x, v, sigma, sigma_next, noise_level, sigma_max=None):
    return x + v * (sigma_next - sigma), noise_level
"""


# each process that defines the engine's pipeline by it leaves a file
OWN_FAMILY = """
import os
from pathlib import Path

from common.models.stable_diffusion_3 import StableDiffusion3


class Mine(StableDiffusion3):
    @staticmethod
    def engine_pipeline(mixin):
        Path(__file__).with_name(f"rank_{os.environ.get('RANK')}").touch()
        return StableDiffusion3.engine_pipeline(mixin)
"""


def start(folder, model=EMBEDDED, num_workers=2, family=None, fork_workers=False):
    with forked_engines(fork_workers):
        return VLLMEngine(
            model,
            "float32",
            max_num_seqs=4,
            log_file=folder / "engine.log",
            timeout_s=240.0,
            gpus=(None,) * num_workers,
            num_threads=1,
            family=family,
        )


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """An engine of two workers and of a family of one's own, whose file is beside its log."""
    folder = tmp_path_factory.mktemp("engine")
    (folder / "my_family.py").write_text(OWN_FAMILY)
    engine = start(folder, family=f"{folder}/my_family.py:Mine")
    yield engine
    engine.close()


def request_for(model, args):
    drawn = prompt_set(PROMPTS)
    prompt_index = torch.arange(6) % 3
    return flow_grpo.make_request(args, model, drawn, prompt_index, list(range(6)), sde_steps=(0, 1, 2, 3, 4))


def assert_parity(engine, model, args, lora):
    """The trainer gives the engine's latents the engine's log-probs. Returns what the engine sampled."""
    request = request_for(model, args)
    theirs = engine.generate(request, lora=lora)
    with torch.no_grad():
        ours = flow_grpo.recompute_log_probs(args, model, request, theirs)
    torch.testing.assert_close(ours.log_probs, theirs.log_probs, rtol=0, atol=1e-5)
    return theirs


# ---- two workers -----------------------------------------------------------------------------------------------------
def test_a_family_of_ones_own_is_loaded_by_the_engine_and_its_workers(engine):
    engine.wait_ready()
    assert {path.name for path in engine.log_file.parent.glob("rank_*")} == {"rank_None", "rank_0", "rank_1"}


def test_two_workers_sample_as_one_does(engine, tmp_path):
    """The base model and an adapter, with guidance."""
    model, args, config = policy_without_fsdp(guidance_scale=3.0)
    base, _, _ = policy_without_fsdp(trained=False, guidance_scale=3.0)
    adapter = tensors_on_rank_0(model)[0]
    sampled = {}
    one = start(tmp_path, num_workers=1)
    for name, either in (("one", one), ("two", engine)):
        before = assert_parity(either, base, args, lora=False)
        either.push(adapter, config)
        sampled[name] = assert_parity(either, model, args, lora=True)
        assert (sampled[name].latents - before.latents).abs().max() > 1e-2
    one.close()
    torch.testing.assert_close(sampled["two"].log_probs, sampled["one"].log_probs, rtol=0, atol=1e-5)
    torch.testing.assert_close(sampled["two"].latents, sampled["one"].latents, rtol=0, atol=1e-4)


def test_the_workers_listen_on_the_loopback(engine):
    engine.wait_ready()
    processes = [psutil.Process(engine.process.pid)]
    processes += processes[0].children(recursive=True)
    sockets = [socket for process in processes for socket in process.net_connections(kind="inet")]
    assert {s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN} <= {"127.0.0.1"}


def test_each_worker_is_repaired_before_it_imports_vllm(engine, tmp_path):
    """multiprocessing starts a worker by running the engine's program under another name."""
    model, args, _ = policy_without_fsdp()
    (tmp_path / "repaired.py").write_text(REPAIRED)
    args.sde_type = f"{tmp_path / 'repaired.py'}:euler"
    engine.generate(request_for(model, args), lora=False)
    for rank in (0, 1):
        assert (tmp_path / f"rank{rank}.txt").read_text() == "True"


def test_one_stale_worker_is_an_error(engine, tmp_path):
    model, args, config = policy_without_fsdp()
    adapter = tensors_on_rank_0(model)[0]
    engine.verify_push(adapter, config, request_for(model, args))
    (tmp_path / "stale.py").write_text(STALE)
    args.sde_type = f"{tmp_path / 'stale.py'}:euler"
    engine.generate(request_for(model, args))
    engine.push(adapter, config)  # the first one
    newer = {name: tensor * 1.01 for name, tensor in adapter.items()}
    # matrices that are not split are stale as well, as the two workers' copies differ
    with pytest.raises(EngineError, match=r" transformer_blocks.0.attn.* .*\(62 of 62 "):
        engine.push(newer, config)


@pytest.mark.parametrize("family", ["flux2_klein"])
def test_full_weights_of_a_family(family, tmp_path):
    """All weights arrive, are those of the model's files, and act.

    A family whose projections vLLM-Omni fuses, and then splits. The others (stable_diffusion_3, flux, qwen_image, and
    wan with 5 frames) passed at f9bd441 or before; run them after a change of the engine's workers, as each takes 50 s.
    """
    folder = make_checkpoint(family, tmp_path / "model")
    engine = start(tmp_path, folder, fork_workers=True)
    model = load_model(family_class(folder), str(folder), torch.float32, torch.device("cpu"))
    add_policies(model, None, ["default"], 1)
    args = flow_grpo.Args(image_size=(32, 32), max_sequence_length=8, num_inference_steps=3, rollout="local")
    drawn = prompt_set(PROMPTS[:1])
    request = flow_grpo.make_request(args, model, drawn, torch.tensor([0]), [0], sde_steps=(0, 1))
    engine.verify_push(*tensors_on_rank_0(model), request)
    torch.manual_seed(3)
    for parameter in model.transformer.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.02)
    tensors, _ = tensors_on_rank_0(model)
    engine.push(tensors, None)
    theirs = engine.generate(request)
    with torch.no_grad():
        ours = flow_grpo.recompute_log_probs(args, model, request, theirs)
    torch.testing.assert_close(ours.log_probs, theirs.log_probs, rtol=0, atol=1e-5)
    engine.close()


@needs_engine
@pytest.mark.parametrize("error", [None, RuntimeError("out of memory")])
def test_images_that_overtake_the_word_of_their_batch_arrive(error):
    """The executor looks for the batch's requests, they are noted, and it keeps the images under the batch's id."""
    import common.engine.pipelines as pipelines  # loads vLLM-Omni

    from vllm_omni.diffusion.data import DiffusionOutput
    from vllm_omni.diffusion.worker.utils import BatchRunnerOutput, RunnerOutput

    class OfNoWorkers(pipelines.RolloutExecutor):
        def __init__(self):
            self._futures_lock = threading.RLock()
            self._output_futures, self._completed_outputs, self._dropped_output_ids = {}, {}, OrderedDict()
            self._batch_split_map = {"batch": {"batch/7": "7", "batch/8": "8"}}
            self._closed = False

    executor = OfNoWorkers()
    outputs = [DiffusionOutput(output=torch.tensor(number)) for number in (7, 8)]
    sampled = [RunnerOutput(request_id=str(o.output.item()), finished=True, result=o) for o in outputs]
    waits = executor.wait_output_ready("batch/7")  # one asked for before, one after
    with executor._futures_lock:
        executor._finish_output("batch", None if error else BatchRunnerOutput.from_list(sampled), error)
    for number, future in ((7, waits), (8, executor.wait_output_ready("batch/8"))):
        output = future.result(timeout=0)
        assert output.error == "out of memory" if error else output.output == number
    assert not executor._completed_outputs and not executor._batch_split_map


# ---- options ---------------------------------------------------------------------------------------------------------
def test_of_a_hub_id_the_pipelines_own_files_are_downloaded(monkeypatch):
    """By diffusers, as for the trainer. vLLM-Omni would take the whole repository, single files included."""
    skip_without_engine()
    from common.engine import omni  # loads vLLM-Omni

    asked = []
    monkeypatch.setattr(DiffusionPipeline, "download", lambda model: asked.append(model) or EMBEDDED)
    monkeypatch.setattr(omni.pipelines, "use_pipeline_of", lambda model, family: None)
    monkeypatch.setattr(omni.pipelines, "RolloutPipeline", SimpleNamespace(supports_request_batch=True), raising=False)
    monkeypatch.setattr(omni, "Omni", lambda **options: options)
    assert omni.load_engine({"model": "an/id", "family": None}, 1)["model"] == str(EMBEDDED)
    assert omni.load_engine({"model": EMBEDDED, "family": None}, 1)["model"] == str(EMBEDDED)
    assert asked == ["an/id"]


@needs_engine
@pytest.mark.fast
def test_heads_that_cannot_be_dealt_out_are_refused(tmp_path):
    family = family_class(EMBEDDED)
    environment.check_engine(family, str(EMBEDDED), (1, 2, 3, 4))
    line = run_here(tmp_path, "flow_grpo.py", "--engine_devices", 1, 2, 3)
    assert re.match("flow_grpo.py: error: --engine_devices 1 2 3: 3 .* 4 ", line)


@needs_engine
@pytest.mark.fast
def test_a_family_that_vllm_omni_does_not_split_is_refused():
    line = "--engine_devices 1 2: 2 .* vLLM-Omni .* Krea2: .*"
    with pytest.raises(ValueError, match=f"^{line}$"):
        environment.check_engine(Krea2, "a/model", (1, 2))


# ---- the last test: it takes the engine with it ----------------------------------------------------------------------
def test_the_workers_end_with_their_engine(engine):
    """And leave nothing in shared memory. An engine that is killed has no time to end them."""
    engine.wait_ready()
    processes = psutil.Process(engine.process.pid).children(recursive=True)
    assert len(processes) >= 2
    mapped = {mapped.path for process in processes for mapped in process.memory_maps()}
    segments = [Path(path) for path in mapped if path.startswith("/dev/shm/") and Path(path).exists()]
    assert segments
    engine._kill()
    assert not any(path.exists() for path in segments)
    deadline = time.monotonic() + 30
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes):
        assert time.monotonic() < deadline, "a worker is still alive"
        time.sleep(0.2)
