"""The run folder: atomic writes, metrics, curves, grids."""

import contextlib
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import asdict

import flow_grpo
from common.checkpoints import open_run, save_checkpoint
from common.data import PromptSet
from common.distributed import gather, gather_objects, gather_objects_on_rank_0
from common.errors import RunError
from common.files import atomic_file
from common.lora import read_lora
from common.options import recorded
from common.pictures import plot_curves, save_grid
from common.rewards import Scorer
from common.run import RunLog, create_run_folder, save_samples
from tests.conftest import ROOT, read_metrics

import pytest
import torch
import torch.distributed as dist
from PIL import Image


# ---- atomic_file -----------------------------------------------------------------------------------------------------
def write_version(path, text, fail=False):
    with atomic_file(path) as temporary:
        temporary.write_text(text)
        if fail:
            raise KeyboardInterrupt


def test_atomic_file_creates_and_replaces(tmp_path):
    path = tmp_path / "deep" / "state.pt"
    for text in ("old", "new", "third"):
        write_version(path, text)
        assert path.read_text() == text
        assert [p.name for p in path.parent.iterdir()] == ["state.pt"]  # nothing left beside it


def test_atomic_file_that_raises_leaves_the_previous_one(tmp_path):
    path = tmp_path / "state.pt"
    with pytest.raises(KeyboardInterrupt):
        write_version(path, "old", fail=True)
    assert not path.exists()
    write_version(path, "old")
    with pytest.raises(KeyboardInterrupt):
        write_version(path, "new", fail=True)
    assert path.read_text() == "old"
    write_version(path, "third")
    assert path.read_text() == "third"


def test_a_kill_at_the_rename_leaves_the_previous_file(tmp_path, monkeypatch):
    path = tmp_path / "state.pt"
    write_version(path, "old")

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(path), "replace", killed)
    with contextlib.suppress(KeyboardInterrupt):
        write_version(path, "new")
    assert path.read_text() == "old"


# ---- RunLog ----------------------------------------------------------------------------------------------------------
def metrics_of(folder):
    """metrics.jsonl without the process's memory, which stands in every line."""
    rows = read_metrics(folder)
    assert all(0.1 < row.pop("perf/max_memory_gb") < 100 for row in rows)  # of this process, which has imported torch
    return rows


def test_run_log_writes_one_line_per_step(tmp_path):
    log = RunLog(tmp_path)
    log.write(0, {"val/ocr/mean": 0.25})
    log.write(1, {"a": torch.tensor(0.5), "b": 3, "c": True})
    log.close()
    assert metrics_of(tmp_path) == [
        {"training/global_step": 0, "val/ocr/mean": 0.25},
        {"training/global_step": 1, "a": 0.5, "b": 3.0, "c": 1.0},
    ]
    RunLog(tmp_path).write(2, {"a": 1})  # appends
    assert len(read_metrics(tmp_path)) == 3


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, torch.tensor(math.nan)])
def test_run_log_refuses_what_is_not_finite(tmp_path, value):
    log = RunLog(tmp_path)
    log.write(6, {"actor/loss": 1.0})
    with pytest.raises(RunError) as error:
        log.write(7, {"actor/loss": 1.0, "actor/grad_norm": value})
    assert "step 7" in str(error.value)
    assert "actor/grad_norm" in str(error.value)
    assert "actor/loss" not in str(error.value)
    assert len(read_metrics(tmp_path)) == 1


def test_run_log_draws_a_grid_and_curves_after_an_evaluation(tmp_path):
    log = RunLog(tmp_path)
    log.write(0, {"val/ocr/mean": 0.25, "val/ocr/stderr": 0.01}, [(Image.new("RGB", (96, 32)), "caption")] * 3)
    assert {p.name for p in tmp_path.iterdir()} == {"metrics.jsonl", "grid_0000.png", "curves.png"}
    log.write(1, {"critic/rewards/mean": 0.25})
    assert not (tmp_path / "grid_0001.png").exists()


class Clock:
    """time.perf_counter, which passes when it is told to."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def spend(self, log, name, seconds):
        with log.timed(name):
            self.now += seconds


def test_speed_metrics_by_hand(tmp_path, monkeypatch):
    """Two ranks, 128 images a step; what the seconds of each phase become, and into which line."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    log = RunLog(tmp_path, num_images=128)
    clock.now += 5.0  # until the first phase
    clock.spend(log, "testing", 2.0)
    log.write(0, {})
    for step in log.steps(range(5, 7)):
        clock.spend(log, "gen", 1.2)
        clock.spend(log, "reward", 0.32)
        clock.spend(log, "gen", 2.0)
        clock.spend(log, "update_actor", 4.0)
        clock.now += 0.48  # between the phases
        log.show(reward=0.5)
        if step == 6:
            clock.spend(log, "testing", 3.0)
        log.write(step, {})
        clock.spend(log, "save_checkpoint", 7.0)
    assert "reward=0.500" in str(log.bar)
    log.write(7, {})  # the steps are over
    evaluated, first, second, after = metrics_of(tmp_path)
    assert evaluated == {"training/global_step": 0, "timing_s/startup": 5.0, "timing_s/testing": 2.0}
    trained = {
        "timing_s/gen": 3.2,
        "timing_s/reward": 0.32,
        "timing_s/update_actor": 4.0,
        "timing_s/step": 8.0,
        "timing_per_image_ms/gen": 25.0,
        "timing_per_image_ms/reward": 2.5,
        "timing_per_image_ms/update_actor": 31.25,
        "perf/time_per_step": 8.0,
        "perf/throughput": 8.0,
    }
    assert first == pytest.approx(trained | {"training/global_step": 5, "perf/total_num_images": 640})
    later = {"training/global_step": 6, "perf/total_num_images": 768}
    later |= {"timing_s/testing": 3.0, "timing_s/save_checkpoint": 7.0}  # of which the step's 8 s have none
    assert second == pytest.approx(trained | later)
    assert after == {"training/global_step": 7, "timing_s/save_checkpoint": 7.0}


def test_a_step_may_have_few_phases(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    log = RunLog(tmp_path, num_images=10)
    for step in log.steps(range(1, 2)):
        clock.spend(log, "encode_pairs", 0.5)
        log.write(step, {})
    assert metrics_of(tmp_path) == [
        {
            "training/global_step": 1,
            "timing_s/startup": 0.0,
            "timing_s/encode_pairs": 0.5,
            "timing_s/step": 0.5,
            "perf/time_per_step": 0.5,
            "perf/throughput": 20.0,
            "perf/total_num_images": 10,
        }
    ]


def test_the_other_ranks_write_nothing(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    create_run_folder(tmp_path / "run", OPTIONS, __file__)
    log = RunLog(tmp_path, track=True, num_images=4, profile_steps=(1,))
    log.say("of rank 0")
    for step in log.steps(range(1, 3)):
        with log.timed("gen"):
            pass
        log.show(reward=0.5)
        log.write(step, {"actor/loss": math.nan}, [(Image.new("RGB", (96, 32)), "caption")])
        assert log.timing == {}
    log.close()
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_steps_go_over_the_range_under_a_bar(tmp_path, capfd):
    log = RunLog(tmp_path)
    log.say("4 prompts x 2 images")
    assert capfd.readouterr().out == "4 prompts x 2 images\n"
    seen = []
    for step in log.steps(range(3, 10)):
        seen.append(step)
        if step == 5:
            break
    assert seen == [3, 4, 5]
    assert "/9 [" in capfd.readouterr().err
    assert log.step_began is None
    assert list(log.steps(range(3, 3))) == []


@pytest.mark.parametrize("left_by", ["end", "break"])
def test_profile_steps_are_traced_alone(tmp_path, left_by):
    log = RunLog(tmp_path, profile_steps=(4, 6))
    for step in log.steps(range(3, 8)):
        torch.ones(step).cumsum(0)
        if left_by == "break" and step == 6:
            break
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace_0004.json", "trace_0006.json"]
    for step in (4, 6):
        trace = json.loads((tmp_path / f"trace_{step:04d}.json").read_text())
        names = [event.get("name", "") for event in trace["traceEvents"]]
        assert names.count("aten::cumsum") == 1
        assert {name for name in names if name.startswith("ProfilerStep")} == {f"ProfilerStep#{step}"}


# ---- pictures --------------------------------------------------------------------------------------------------------
def test_plot_curves(tmp_path):
    log = RunLog(tmp_path)
    log.write(0, {"val/ocr/mean": 0.2, "val/ocr/stderr": 0.02})
    plot_curves(tmp_path)
    sparse = Image.open(tmp_path / "curves.png").convert("RGB").tobytes()
    for step in range(1, 11):
        metrics = {
            "critic/rewards/mean": 0.2 + step / 20,
            "critic/rewards/zero_std_ratio": 0,
            "actor/pg_clipfrac": 0.1,
            "actor/grad_norm": 1 / step,
            "rollout_corr/logprob_abs_diff_mean": 1e-7,
        }
        if step % 5 == 0:
            metrics |= {"val/ocr/mean": 0.3 + step / 20, "val/ocr/stderr": 0.02}
            metrics |= {"val/jpeg/mean": 0.5, "val/jpeg/stderr": 0.0}
        log.write(step, metrics)
    plot_curves(tmp_path)
    picture = Image.open(tmp_path / "curves.png")
    assert picture.format == "PNG"
    assert picture.size == (1210, 770)  # 11 x 7 inches of 110 dots
    assert picture.convert("RGB").tobytes() != sparse


@pytest.mark.parametrize(
    ("size", "count", "options", "expected"),
    [
        ((96, 32), 32, {}, (8 * 196, 4 * 82)),  # enlarged 200 // 96 = 2 times; a line of 14 below each, gaps of 4
        ((32, 16), 10, {}, (8 * 196, 2 * 114)),  # enlarged 6 times
        ((512, 512), 1, {}, (8 * 516, 530)),
        ((10, 10), 3, {"columns": 2, "scale": 2}, (2 * 24, 2 * 38)),
        ((96, 32), 3, {"caption": "a prompt\nits scores"}, (8 * 196, 96)),
    ],
)
def test_save_grid_size(tmp_path, size, count, options, expected):
    captions = ["caption"] * (count - 1) + [options.pop("caption", "caption")]
    save_grid(tmp_path / "grid.png", [Image.new("RGB", size, "red")] * count, captions, **options)
    assert Image.open(tmp_path / "grid.png").size == expected


def test_save_grid_places_images_row_by_row(tmp_path):
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    save_grid(tmp_path / "grid.png", [Image.new("RGB", (10, 10), c) for c in colours], [""] * 3, columns=2, scale=1)
    grid = Image.open(tmp_path / "grid.png")  # cells of 14 x 28
    assert [grid.getpixel(place) for place in ((5, 5), (19, 5), (5, 33), (19, 33))] == [*colours, (255, 255, 255)]
    with pytest.raises(ValueError):
        save_grid(tmp_path / "grid.png", [Image.new("RGB", (10, 10))], ["a", "b"])


# ---- the rest --------------------------------------------------------------------------------------------------------
OPTIONS = {"name": "test", "learning_rate": 0.5, "reward": ("ocr",)}


def test_create_run_folder(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('the source')\n")
    folder = tmp_path / "runs" / "test"
    create_run_folder(folder, OPTIONS, script)
    record = json.loads((folder / "args.json").read_text())
    assert record["args"] == {"name": "test", "learning_rate": 0.5, "reward": ["ocr"]}
    assert record["git_hash"] is None  # not in a repository
    assert record["command"]
    assert (folder / "source.py").read_text() == "print('the source')\n"
    open_run(folder, None)  # nothing was measured yet
    RunLog(folder).write(0, {"a": 1})
    with pytest.raises(ValueError, match=f"{folder} already holds a run"):
        open_run(folder, None)
    assert json.loads((folder / "args.json").read_text()) == record
    open_run(tmp_path / "runs" / "another", None)
    (folder / "traceback_rank1.txt").write_text("what ended the run")
    create_run_folder(folder, OPTIONS, script)  # goes on, mended
    assert not (folder / "traceback_rank1.txt").exists()


@pytest.mark.fast
def test_the_settings_of_rewards_are_recorded_and_no_key(tmp_path, monkeypatch):
    mine = tmp_path / "mine.py"
    mine.write_text("def mine(images, prompts, metadata):\n    return []\n\n\nmine.settings = ('MINE',)\n")
    variables = {"VLM_JUDGE_URL": "http://judge/v1", "VLM_JUDGE_RANGE": "", "VLM_JUDGE_API_KEY": "secret", "MINE": "7"}
    variables |= {"VLM_JUDGE_MODEL": "tiny", "PICKSCORE_MODEL": "folder", "CLIP_SCORE_MODEL": "not asked"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PICKSCORE_PROCESSOR", raising=False)
    args = flow_grpo.Args(reward=("ocr", "vlm_judge", f"{mine}:mine"), eval_reward=("pickscore",))
    create_run_folder(tmp_path / "run", recorded(args), __file__)
    text = (tmp_path / "run" / "args.json").read_text()
    options = json.loads(text)["args"]
    assert options.pop("reward_settings") == {
        "vlm_judge": {"VLM_JUDGE_URL": "http://judge/v1", "VLM_JUDGE_MODEL": "tiny"},
        f"{mine}:mine": {"MINE": "7"},
        "pickscore": {"PICKSCORE_MODEL": "folder"},
    }
    assert options == json.loads(json.dumps(asdict(args)))
    assert "secret" not in text and "not asked" not in text


def test_create_run_folder_records_the_git_hash(tmp_path):
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "script.py").write_text("")
    git = ["git", "-C", str(repository), "-c", "user.name=test", "-c", "user.email=test@example.com"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    create_run_folder(tmp_path / "run", OPTIONS, repository / "script.py")
    assert json.loads((tmp_path / "run" / "args.json").read_text())["git_hash"] == head


def test_a_run_that_goes_on_keeps_the_first_record(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("first = True\n")
    folder = tmp_path / "run"
    create_run_folder(folder, OPTIONS, script, "another/step_000002.pt")
    assert {path.name for path in folder.iterdir()} == {".lock", "args.json", "source.py"}  # the first of this folder
    script.write_text("first = False\n")
    save_checkpoint(folder, 4, {"step": 4}, 1)
    create_run_folder(folder, OPTIONS | {"learning_rate": 0.25}, script, folder / "checkpoints" / "step_000004.pt")
    rates = [
        json.loads((folder / f"args{end}.json").read_text())["args"]["learning_rate"] for end in ("", "_step_000004")
    ]
    assert rates == [0.5, 0.25]
    assert (folder / "source.py").read_text() == "first = True\n"
    assert (folder / "source_step_000004.py").read_text() == "first = False\n"


# ---- images and weights ----------------------------------------------------------------------------------------------
def of_rank(places):
    """What a rank that has made the images of these places gives to save_samples."""
    images = [Image.new("RGB", (4, 2), (place, 0, 0)) for place in places]
    records = [{"prompt": f"p{place}", "seed": place, "ocr": place / 4, "jpeg": -1.0} for place in places]
    return places, images, records


def test_save_samples_puts_every_ranks_images_in_order(tmp_path, monkeypatch):
    """Two ranks share five images, and each writes its own; the last place of the second is one that fills up."""
    given = {}  # by rank: what it hands to rank 0

    def gather_object(value, parts):
        given[dist.get_rank()] = value
        if parts:
            parts[:] = [value, given[1]]

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "gather_object", gather_object)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    places, images, records = of_rank([1, 3, 0])
    images[2] = Image.new("RGB", (4, 2), (99, 0, 0))  # made by another rank, and so not to the bit
    assert save_samples(tmp_path / "samples", places, images, records) is None
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == ["00001.png", "00003.png"]
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    shown = save_samples(tmp_path / "samples", *of_rank([0, 2, 4]))
    scores = ["0.00", "0.25", "0.50", "0.75", "1.00"]
    assert [caption for _, caption in shown] == [f"p{i}\nocr {score}  jpeg -1.00" for i, score in enumerate(scores)]
    assert [image.getpixel((0, 0))[0] for image, _ in shown] == [0, 1, 2, 3, 4]
    lines = [json.loads(line) for line in (tmp_path / "samples" / "samples.jsonl").read_text().splitlines()]
    assert [list(line) for line in lines] == [["file", "prompt", "seed", "ocr", "jpeg"]] * 5
    assert lines[3] == {"file": "00003.png", "prompt": "p3", "seed": 3, "ocr": 0.75, "jpeg": -1.0}
    for place, line in enumerate(lines):
        assert Image.open(tmp_path / "samples" / line["file"]).getpixel((0, 0)) == (place, 0, 0)
    given[1] = {place: (record, None) for place, (record, _) in given[1].items()}  # none of its images is shown
    assert len(save_samples(tmp_path / "samples", *of_rank([0, 2, 4]), shown=1)) == 1


def test_a_saved_video_has_all_its_frames_and_a_grid_shows_three(tmp_path, one_rank):
    """Also where a frame is the one before it."""
    levels = [10, 20, 20, 30, 40, 50]
    video = [Image.new("RGB", (4, 2), (level, 0, level)) for level in levels]
    shown = save_samples(tmp_path / "samples", [0], [video], [{"prompt": "p", "seed": 1}])
    saved = Image.open(tmp_path / "samples" / "00000.png")
    assert saved.n_frames == len(video)
    for number, frame in enumerate(video):
        saved.seek(number)
        assert saved.convert("RGB").tobytes() == frame.tobytes()
    ((picture, caption),) = shown
    assert picture.size == (4, 6) and caption == "p"
    assert [picture.getpixel((0, y))[0] for y in (0, 2, 4)] == [levels[0], levels[3], levels[5]]


SAVE = """
import sys
import common
from common.run import save_weights
import torch
from diffusers import StableDiffusion3Pipeline
from peft import LoraConfig

modules = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj"]
config = LoraConfig(r=2, lora_alpha=4, target_modules=modules, exclude_modules=["proj_out", "proj_in", "norm"])
tensors = {f"a.{name}.lora_{side}.weight": torch.ones(2, 2) for name in modules for side in "AB"}
for number in range(8):
    save_weights(f"{sys.argv[1]}/{number}", StableDiffusion3Pipeline, tensors, config)
"""


def test_equal_adapters_are_equal_bytes_in_every_process(tmp_path):
    """Sets of names are in another order under another hash seed, and a safetensors header is in every file: of its two
    entries either one may come first, by chance."""
    files = set()
    for seed in ("1", "2", "3"):
        command = [sys.executable, "-c", SAVE, str(tmp_path / seed)]
        subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": seed})
        files |= {path.read_bytes() for path in (tmp_path / seed).glob("*/pytorch_lora_weights.safetensors")}
    assert len(files) == 1
    tensors, config = read_lora(tmp_path / "1" / "0")  # it is a LoRA still
    # trained with alpha / rank = 4 / 2, which stands in the B matrices, so that nobody has to read the metadata
    for name, tensor in tensors.items():
        assert torch.equal(tensor, torch.full((2, 2), 2.0 if ".lora_B." in name else 1.0))
    assert len(tensors) == 12 and (config.r, config.lora_alpha) == (2, 2)


# ---- one rank alone --------------------------------------------------------------------------------------------------
@pytest.fixture
def two_threads():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.ones(2**20).sqrt()  # the main thread's second one has begun
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.fast
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads as Linux lists them")
def test_one_rank_alone_gets_its_own_and_starts_no_thread(one_rank, two_threads):
    """Gloo's threads would copy a tensor of 2^20 elements with OpenMP threads of their own, beyond the cores."""
    rows = torch.rand(2**20)
    before = set(os.listdir("/proc/self/task"))
    assert torch.equal(gather(rows), rows[None])
    assert gather_objects(rows.numpy().tobytes()) == [rows.numpy().tobytes()]
    assert gather_objects_on_rank_0(rows.numpy().tobytes()) == [rows.numpy().tobytes()]
    assert set(os.listdir("/proc/self/task")) <= before


@pytest.mark.fast
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads as Linux lists them")
def test_the_thread_that_scores_has_openmp_threads_while_it_lives_and_no_longer(two_threads):
    """With them there are more than cores, so that those of the rollout leave it theirs (common/distributed.py)."""

    def started():
        return len(set(os.listdir("/proc/self/task")) - before)

    before = set(os.listdir("/proc/self/task"))
    scorer = Scorer(
        {"width": lambda images, prompts, metadata: [image.width for image in images]}, PromptSet(["a"], [{}])
    )
    deadline = time.monotonic() + 60
    while started() < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert started() == 2  # the thread, and its second one
    scorer.add([0], [Image.new("RGB", (7, 3))])
    assert scorer.scores().tolist() == [[7.0]]
    while started() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert started() == 0
