"""tools/bench.py: its scores are the evaluation's, and the same after kills and on any ranks; protocols must match."""

import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from common.data import PromptSet
from common.files.pictures import StoredImage
from common.rewards._nanodet import read_nanodet
from common.weights.lora import save_weights
from common.weights.policy import tensors_on_rank_0
from tests.conftest import (
    EMBEDDED,
    ROOT,
    brightness_and_redness,
    brightness_reward,
    few_eval_prompts,
    policy_without_fsdp,
    run_here,
    torchrun,
)
from tools import bench, protocol

import pytest
import torch
import torch.distributed as dist

SMALL = ["--image_size", "32", "48", "--num_inference_steps", "2", "--guidance_scale", "1", "--dtype", "float32"]
SMALL += ["--max_sequence_length", "8", "--batch_size", "3", "--images_per_prompt", "2"]


def run_bench(*words: object) -> dict:
    """What tools.bench writes to out/bench.json, or the line that it ends with as a SystemExit."""
    words = [str(word) for word in words]
    with (
        mock.patch.dict(os.environ, OMP_NUM_THREADS="1"),  # as of two ranks on two cores; more round otherwise
        mock.patch("sys.argv", ["tools/bench.py"]),
        mock.patch.dict(protocol.LOADED, clear=True),  # what other tests loaded
    ):
        try:
            bench.main([*words])
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    folder = Path(words[words.index("--output") + 1])
    return json.loads((folder / "bench.json").read_text())


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder with prompts, two rewards, and two LoRAs, of which `idle` adds exactly nothing."""
    folder = tmp_path_factory.mktemp("inputs")
    for name, trained in (("acting", True), ("idle", False)):
        model, _, config = policy_without_fsdp(trained)
        save_weights(folder / name, model.pipe, tensors_on_rank_0(model)[0], config)
    (folder / "own.txt").write_text("\n".join(f'a red sign that says "{n}"' for n in (4711, 25, 8, 333)))
    return folder


@pytest.fixture(scope="module")
def words(inputs):
    """A command without LoRAs."""
    return [EMBEDDED, "--prompts", inputs / "own.txt", "--reward", *brightness_and_redness(inputs), *SMALL]


@pytest.fixture(scope="module")
def whole(words, inputs):
    """A command with both LoRAs."""
    return [*words, "--lora", inputs / "acting", inputs / "idle"]


@pytest.fixture(scope="module")
def done(whole, tmp_path_factory):
    """The folder of that command, which has ended."""
    folder = tmp_path_factory.mktemp("done") / "out"
    run_bench(*whole, "--output", folder)
    return folder


@pytest.mark.fast
def test_a_lora_that_adds_nothing_differs_by_exactly_nothing(done):
    (one,) = json.loads((done / "bench.json").read_text())["benches"]
    of = {row["policy"]: row for row in one["table"] if row["reward"] == "redness"}
    assert "difference" not in of["base"]
    assert of["idle"]["difference"] == [0.0, 0.0, 0.0]
    mean, low, high = of["acting"]["difference"]
    assert low < mean < high and mean == pytest.approx(of["acting"]["mean"][0] - of["base"]["mean"][0])
    table = (done / "table.md").read_text().splitlines()
    assert table[0] == "## own.txt" and '; sampler "ode"; image_size [32, 48]; ' in table[2]
    assert table[4] == "| | base | acting | idle |"
    assert table[7].startswith(f"| redness | {of['base']['mean'][0]:.3f} | {of['acting']['mean'][0]:.3f}, ")
    assert table[7].endswith(", +0.000 [+0.000, +0.000] |")


@pytest.mark.fast
def test_a_kill_loses_a_batch_and_no_byte(whole, done, tmp_path, monkeypatch):
    scored = []
    score_batch = bench.score_batch

    def counted(*args):
        if len(scored) == 4:
            raise KeyboardInterrupt
        scored.append(args)
        return score_batch(*args)

    monkeypatch.setattr(bench, "score_batch", counted)
    with pytest.raises(KeyboardInterrupt):
        run_bench(*whole, "--output", tmp_path / "out")
    assert not (tmp_path / "out" / "bench.json").exists()
    scored.append("a place more")
    run_bench(*whole, "--output", tmp_path / "out")
    assert len(scored) == 9 + 1  # of 3 policies x 8 images, in batches of 3
    assert bytes_of(tmp_path / "out") == bytes_of(done)
    monkeypatch.setattr(bench, "load", None)
    run_bench(*whole, "--output", tmp_path / "out")  # nothing is missing: no model loads


def test_two_ranks_give_the_bytes_of_one(whole, done, tmp_path):
    torchrun(tmp_path, "tools/bench.py", *whole, "--output", tmp_path / "out", nproc=2)
    assert bytes_of(tmp_path / "out") == bytes_of(done)


@pytest.mark.fast
def test_a_policy_is_found_by_its_weights_whatever_its_label(words, done, inputs, tmp_path, monkeypatch):
    """A second adapter of the same name turns the labels into paths."""
    shutil.copytree(done, tmp_path / "out")
    shutil.copytree(inputs / "acting", tmp_path / "again" / "acting")
    monkeypatch.setattr(bench, "load", None)  # nothing is missing: no model loads
    loras = [inputs / "acting", tmp_path / "again" / "acting"]
    (one,) = run_bench(*words, "--lora", *loras, "--output", tmp_path / "out")["benches"]
    assert [result["policy"] for result in one["results"][1:]] == [str(lora) for lora in loras]
    assert {result["key"].partition("-")[0] for result in one["results"][1:]} == {"acting"}


@pytest.mark.fast
def test_results_of_folders_of_one_name_have_names_of_their_own(words, done, tmp_path):
    files = [tmp_path / name / "bench" / "bench.json" for name in "ab"]
    for file in files:
        shutil.copytree(done, file.parent)
    (one,) = run_bench(*words, "--output", shutil.copytree(done, tmp_path / "out"), "--with", *files)["benches"]
    names = [result["policy"] for result in one["results"]]
    assert len(set(names)) == len(names) == 1 + 2 * 3 and f"acting of {files[0].parent}" in names


CHANGES = {
    "prompts": ["--max_prompts", "3"],
    "image_size": ["--image_size", "48", "32"],
    "num_inference_steps": ["--num_inference_steps", "3"],
    "guidance_scale": ["--guidance_scale", "2"],
    "negative_prompt": ["--negative_prompt", "blue"],
    "max_sequence_length": ["--max_sequence_length", "9"],
    "sampler": ["--sde_type", "sde"],
    "images_per_prompt": ["--images_per_prompt", "1"],
    "dtype": ["--dtype", "bfloat16"],
    "rewards": ["--reward", "jpeg_compressibility"],
    "seeds": ["--seeds", "other"],
    "batch_size": ["--batch_size", "4"],
}


@pytest.mark.fast
@pytest.mark.parametrize("field", CHANGES)
def test_another_protocol_is_one_line(words, done, tmp_path, monkeypatch, field):
    monkeypatch.setattr(bench, "check_model", lambda *args: None)  # which takes a second
    told = f"(.*; )?{field}: .* -> .*"
    with pytest.raises(SystemExit, match=f"^bench.py: error: --output: .*/protocol.json: .*{told}$"):
        run_bench(*words, *CHANGES[field], "--output", done)
    if field not in ("seeds", "batch_size"):
        with pytest.raises(SystemExit, match=f"^bench.py: error: --with .*/bench.json: .*{told}$"):
            run_bench(*words, *CHANGES[field], "--output", tmp_path / "out", "--with", done / "bench.json")


@pytest.mark.fast
def test_a_reward_of_the_same_name_with_other_weights_is_another_protocol(monkeypatch):
    network = torch.nn.Linear(2, 2)
    monkeypatch.setattr(protocol, "LOADED", {("some/network", "read_clip"): network})
    before = protocol.reward_protocol(["jpeg_compressibility"], {})
    with torch.no_grad():
        network.weight[0, 0] += 1e-3
    with pytest.raises(ValueError, match=": reward_networks: "):
        protocol.check_match(before, protocol.reward_protocol(["jpeg_compressibility"], {}))


@pytest.mark.fast
def test_a_detector_with_other_thresholds_or_classes_is_another_protocol(tmp_path, monkeypatch):
    """Which stand in detector.json, beside weights that are the same."""
    monkeypatch.setattr(protocol, "LOADED", {})
    found = []
    for number, changes in enumerate([{}, {"other_threshold": 0.2}, {"competing": ["car"]}]):
        folder = tmp_path / str(number)
        shutil.copytree(ROOT / "assets" / "nanodet", folder)
        settings = json.loads((folder / "detector.json").read_text())
        (folder / "detector.json").write_text(json.dumps(settings | changes))
        protocol.LOADED.clear()
        protocol.LOADED[str(folder), "read_detector"] = read_nanodet(str(folder))
        found.append(protocol.reward_protocol(["geneval"], {}))
    for other in found[1:]:
        with pytest.raises(ValueError, match=": reward_networks: "):
            protocol.check_match(found[0], other)


@pytest.mark.fast
def test_ocr_with_other_networks_is_another_protocol(tmp_path, monkeypatch):
    """Which are files of its package."""
    monkeypatch.setattr(protocol, "LOADED", {})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "read.onnx").write_bytes(b"one")
    before = protocol.reward_protocol(["ocr"], {})
    (tmp_path / "models" / "read.onnx").write_bytes(b"two")
    with pytest.raises(ValueError, match=": reward_networks: "):
        protocol.check_match(before, protocol.reward_protocol(["ocr"], {}))


@pytest.mark.fast
def test_another_comparison_of_texts_or_decoding_of_pictures_is_another_protocol(monkeypatch):
    monkeypatch.setattr(protocol, "LOADED", {})
    texts, pictures = PromptSet(["a"], [{}]), PromptSet(["a"], [{"image": [StoredImage("x.png", b"one")]}])
    before = [protocol.digest_prompts(prompts) for prompts in (texts, pictures)]
    rewards = [protocol.reward_protocol([name], {}) for name in ("jpeg_compressibility", "ocr")]
    monkeypatch.setattr(protocol, "COMPARISON", "")
    monkeypatch.setattr(protocol, "DECODING", "")
    after = [protocol.digest_prompts(prompts) for prompts in (texts, pictures)]
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False]
    protocol.check_match(rewards[0], protocol.reward_protocol(["jpeg_compressibility"], {}))
    with pytest.raises(ValueError, match=": ocr_comparison: "):
        protocol.check_match(rewards[1], protocol.reward_protocol(["ocr"], {}))


@pytest.mark.fast
def test_a_judge_in_a_folder_is_named_in_the_protocol(tmp_path, monkeypatch):
    """vLLM serves it, so that nothing here has its weights."""
    monkeypatch.setenv("VLM_JUDGE_MODEL", str(tmp_path))
    reward = lambda images, prompts, metadata: [0.0]
    reward.settings = ("VLM_JUDGE_MODEL",)
    assert protocol.reward_protocol([], {"judge": reward})["reward_settings"] == {"VLM_JUDGE_MODEL": str(tmp_path)}


@pytest.mark.fast
def test_another_question_of_the_default_judge_is_another_protocol(tmp_path, monkeypatch):
    """Not where a setting names a question, whose file has a digest of its own."""
    monkeypatch.setattr(protocol, "QUESTION", question := tmp_path / "vlm_judge.txt")
    reward = lambda images, prompts, metadata: [0.0]
    reward.settings = ("VLM_JUDGE_PROMPT",)
    (tmp_path / "mine.txt").write_text("{prompt}!")

    def found(name):
        question.write_text("{prompt}?")
        before = protocol.reward_protocol([], {name: reward})
        question.write_text("{prompt}??")
        return before == protocol.reward_protocol([], {name: reward})

    assert found("ocr") and not found("vlm_judge") and not found("vlm_judge:style")
    monkeypatch.setenv("VLM_JUDGE_PROMPT", str(tmp_path / "mine.txt"))
    assert found("vlm_judge")


@pytest.mark.fast
def test_a_processor_of_other_contents_in_the_same_folder_is_another_protocol(tmp_path, monkeypatch):
    monkeypatch.setenv("PICKSCORE_PROCESSOR", str(tmp_path))
    reward = lambda images, prompts, metadata: [0.0]
    reward.settings = ("PICKSCORE_PROCESSOR",)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    before = protocol.reward_protocol([], {"one": reward})
    (tmp_path / "preprocessor_config.json").write_text('{"do_resize": false}')
    with pytest.raises(ValueError, match=": reward_files: "):
        protocol.check_match(before, protocol.reward_protocol([], {"one": reward}))


@pytest.mark.fast
def test_a_reward_of_the_same_name_with_other_code_is_another_protocol(words, done, tmp_path):
    other = Path(brightness_reward(tmp_path).partition(":")[0])
    other.write_text(other.read_text() + "\n\n# changed\n")
    redness = words[5]
    with pytest.raises(SystemExit, match="reward_files: .*brightness.py"):
        run_bench(*words, "--reward", f"{other}:brightness", redness, "--output", done)


@pytest.mark.fast
@pytest.mark.parametrize("option", ["sde_type", "family"])
def test_own_code_that_samples_is_part_of_the_protocol(tmp_path, option):
    """Edited, or another class of a family's file. A shared one of another place is the same."""
    options = dict.fromkeys(protocol.OF_SAMPLING) | {"sde_type": "cps", "noise_level": 0.7, "sde_steps": (0,)}
    plain = protocol.sampling_protocol(options)
    assert "sampling_files" not in plain and "family" not in plain and plain["sampler"] == "cps, noise 0.7, steps (0,)"
    found = []
    for place, text, name in (("a", "1", "F"), ("b", "1", "F"), ("c", "2", "F"), ("d", "1", "G")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "own.py").write_text(text)
        found.append(protocol.sampling_protocol(options | {option: f"{tmp_path / place}/own.py:{name}"}))
    protocol.check_match(found[0], found[1])
    assert str(tmp_path) not in json.dumps(found)
    for other, named in ((plain, "sampling_files"), (found[2], "sampling_files"), (found[3], "family|sampler")):
        with pytest.raises(ValueError, match=f"({named}): "):
            protocol.check_match(found[0], other)
    unused = options | {"sde_type": f"{tmp_path}/a/own.py:F", "sde_steps": ()}  # by the ODE
    assert "sampling_files" not in protocol.sampling_protocol(unused)


@pytest.mark.fast
def test_rows_of_others_stand_beside_and_are_paired_where_the_noise_is_the_same(words, done, tmp_path):
    paired = run_bench(*words, "--output", tmp_path / "same", "--with", done / "bench.json")
    rows = {row["policy"]: row for row in paired["benches"][0]["table"] if row["reward"] == "redness"}
    assert list(rows) == ["base", "base of out", "acting of out", "idle of out"]
    assert rows["base of out"]["difference"] == rows["idle of out"]["difference"] == [0.0, 0.0, 0.0]
    older = json.loads((done / "bench.json").read_text())
    del older["benches"][0]["results"][0]["images"]
    (tmp_path / "older.json").write_text(json.dumps(older))
    with pytest.raises(SystemExit, match="--with .*/older.json: "):
        run_bench(*words, "--output", tmp_path / "same", "--with", tmp_path / "older.json")
    noise = run_bench(*words, "--output", tmp_path / "new", "--seeds", "new", "--with", done / "bench.json")
    rows = {row["policy"]: row for row in noise["benches"][0]["table"] if row["reward"] == "redness"}
    assert "difference" not in rows["acting of out"]
    assert rows["base"]["mean"] != rows["base of out"]["mean"]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (["--reward", "own.py:f"], "--reward f: "),
        (["--lora", "nowhere"], "nowhere: "),
        (["--prompts", "nowhere.txt"], "nowhere.txt: "),
        (["--sde_type", "heun"], "--sde_type heun: unknown"),
        (["--with", "nowhere.json"], "--with nowhere.json: No such file"),
    ],
)
def test_a_fault_is_one_line_before_a_model_loads(words, tmp_path, monkeypatch, changes, told):
    (tmp_path / "own.py").write_text(
        "def f(images, prompts, metadata):\n    return [0] * 8\n\n\nf.whole_group = True\n"
    )
    monkeypatch.setattr(bench, "load", None)
    with pytest.raises(SystemExit, match=f"^bench.py: error: {told}"):
        run_bench(*words, *changes, "--output", tmp_path / "out")


@pytest.mark.fast
def test_what_no_run_has_must_be_given(words, tmp_path):
    without = [word for word in words if word != "--guidance_scale"]
    del without[without.index("--num_inference_steps") + 2]
    with pytest.raises(SystemExit, match="^bench.py: error: --guidance_scale: .*--run "):
        run_bench(*without, "--output", tmp_path / "out")


@pytest.mark.fast
def test_an_evaluation_in_a_run_and_the_bench_agree_to_the_bit(tmp_path):
    options = [
        "--rollout",
        "local",
        "--num_prompts",
        2,
        "--group_size",
        2,
        "--updates_per_rollout",
        1,
        "--num_steps",
        1,
    ]
    options += ["--eval_images_per_prompt", 2, "--name", "mine", "--reward", brightness_reward(tmp_path)]
    eval_prompts = few_eval_prompts(tmp_path, 2)
    assert run_here(tmp_path, "flow_grpo.py", *options, *eval_prompts, "--learning_rate", 0.01) is None
    words = [EMBEDDED, "--run", "runs/mine", "--prompts", eval_prompts[1], "--reward", options[-1]]
    found = run_bench(*words, "--images_per_prompt", 2, "--batch_size", 4, "--output", "out")["benches"][0]["results"]
    for step, result in zip(("0000", "0001"), found, strict=True):
        lines = (tmp_path / "runs" / "mine" / "samples" / step / "samples.jsonl").read_text().splitlines()
        scores = [record["brightness"] for record in map(json.loads, lines)]
        of_bench = [
            record["brightness"]
            for file in sorted((tmp_path / "out" / "scores" / "eval.txt" / result["key"]).iterdir())
            for record in json.loads(file.read_text())
        ]
        assert of_bench == scores
    assert found[0]["scores"] != found[1]["scores"]


@pytest.mark.fast
@pytest.mark.parametrize(("field", "score"), [("tag", 0.75), ("part", 2 / 3)])
def test_genevals_score_is_the_mean_of_its_parts(tmp_path, field, score):
    """By hand: parts of four and two prompts, whose means are 0.5 and 1; a failed prompt is left out of its part."""
    parts = ["one", "one", "one", "one", "two", "two", "two"]
    null = {"part": None} if field == "tag" else {}  # as a table's empty column: no field
    prompts = PromptSet(list("abcdefg"), [{field: part} | null for part in parts])
    shared = {"rewards": ["geneval"], "seeds": "eval", "images_per_prompt": 1}
    base = {"policy": "base", "seeds": "eval", "images": {"geneval": [0.0] * 7}, "failed": {"geneval": 0}}
    scores = [0.0, 1.0, 0.0, 1.0, 1.0, 1.0, None]
    other = {"policy": "other", "seeds": "eval", "images": {"geneval": scores}, "failed": {"geneval": 4}}
    made = bench.Bench("set", prompts, shared, tmp_path)
    table = bench.summarise(made, [base, other])
    means = {row["part"]: row["difference"][0] for row in table if row["policy"] == "other"}
    assert means == pytest.approx({"": score, "one": 0.5, "two": 1.0})
    lines = bench.as_markdown(made.label, made.protocol, table, ["base", "other"]).splitlines()
    assert re.search(r" \(4 .*\) \|$", lines[-3])
    assert lines[-1] == "| geneval two | 0.000 | 1.000, +1.000 [+1.000, +1.000] |"


@pytest.mark.fast
def test_a_part_of_one_prompt_has_a_mean_and_no_interval(tmp_path):
    """And so has their mean; the other part keeps its own."""
    prompts = PromptSet(list("abc"), [{"tag": part} for part in ("one", "two", "two")])
    results = [
        {"policy": policy, "seeds": "eval", "images": {"geneval": scores}, "failed": {"geneval": 0}}
        for policy, scores in (("base", [0.0, 0.0, 0.0]), ("other", [0.5, 0.0, 1.0]))
    ]
    shared = {"rewards": ["geneval"], "seeds": "eval", "images_per_prompt": 1}
    made = bench.Bench("set", prompts, shared, tmp_path)
    table = bench.summarise(made, results)
    assert json.loads(json.dumps(table[1]))["mean"] == [0.5, None, None]
    whole, one, two = bench.as_markdown(made.label, made.protocol, table, ["base", "other"]).splitlines()[-3:]
    assert whole.startswith("| geneval | 0.000 | 0.500, +0.500 (")
    assert one.startswith("| geneval one | 0.000 | 0.500, +0.500 (")
    assert two.startswith("| geneval two | 0.000 | 0.500, +0.500 [-5.853, +6.853]")


@pytest.mark.fast
def test_a_prompt_has_the_rewards_that_it_asks_for(inputs, tmp_path):
    """In one command: a file for one reward, and a file of which a part asks for the other one as well."""
    asked = [["redness", "brightness"], ["redness", "brightness"], ["redness"], ["redness"]]
    lines = [json.dumps({"prompt": f"a sign {n}", "rewards": names}) for n, names in enumerate(asked)]
    (tmp_path / "both.jsonl").write_text("\n".join(lines))
    (tmp_path / "one.jsonl").write_text("\n".join(lines[2:]))
    rewards = brightness_and_redness(inputs)
    words = [EMBEDDED, "--reward", *rewards, *SMALL, "--prompts"]
    found = run_bench(*words, tmp_path / "both.jsonl", tmp_path / "one.jsonl", "--output", tmp_path / "out")["benches"]
    assert [bench["protocol"]["rewards"] for bench in found] == [["brightness", "redness"], ["redness"]]
    scores = found[0]["results"][0]["scores"]
    assert scores["brightness"][2:] == [None, None] and None not in scores["brightness"][:2] + scores["redness"]
    assert found[0]["results"][0]["failed"] == {"brightness": 0, "redness": 0}
    assert found[0]["table"][0]["mean"][0] == pytest.approx(sum(scores["brightness"][:2]) / 2)
    assert "| brightness | " in (tmp_path / "out" / "table.md").read_text().split("## ")[1]
    assert "brightness |" not in (tmp_path / "out" / "table.md").read_text().split("## ")[2]
    with pytest.raises(SystemExit, match="--reward brightness: .*--prompts "):
        run_bench(*words, tmp_path / "one.jsonl", "--output", tmp_path / "none")


@pytest.mark.fast
def test_a_reward_that_fails_on_an_image_is_counted(words, tmp_path):
    (tmp_path / "own.py").write_text(
        "def f(images, prompts, metadata):\n    return [1.0 if '8' in p else ValueError('no') for p in prompts]\n"
    )
    failing = [*words, "--reward", f"{tmp_path}/own.py:f", "--max_prompts", "3", "--output", tmp_path / "out"]
    (result, *_) = run_bench(*failing)["benches"][0]["results"]
    assert result["scores"] == {"f": [None, None, 1.0]} and result["failed"] == {"f": 4}


@pytest.mark.fast
def test_equal_records_are_one_prompt_for_an_interval(tmp_path):
    """Another record of the same text is another prompt; so is it in a part. The mean is that of all rows."""
    records = [("a", "x"), ("b", "y"), ("a", "x"), ("a", "z"), ("a", "x")]
    prompts = PromptSet([text for text, _ in records], [{"ground_truth": truth, "part": "p"} for _, truth in records])
    shared = {"rewards": ["mine"], "seeds": "eval", "images_per_prompt": 1}
    results = [
        {"policy": policy, "seeds": "eval", "images": {"mine": scores}, "failed": {"mine": 0}}
        for policy, scores in (("base", [0.0] * 5), ("other", [0.1, 0.5, 0.2, 0.8, 0.6]))
    ]
    # sums off the mean -0.42, 0.06 and 0.36: a variance of 3 / 2 x 0.3096 / 25, and t of two degrees 4.3027
    half = 4.3027 * (1.5 * 0.3096 / 25) ** 0.5
    expected = pytest.approx((0.44, 0.44 - half, 0.44 + half), abs=2e-4)
    for row in bench.summarise(bench.Bench("set", prompts, shared, tmp_path), results):
        if row["policy"] == "other":
            assert row["mean"] == expected and row["difference"] == expected


@pytest.mark.fast
def test_an_image_that_a_reward_fails_on_is_left_out_of_both_sides(tmp_path):
    """By hand, as records of a folder: a LoRA that changes nothing has a mean of its own and a difference without it.
    The third prompt has no image that both have. Other noise keeps all of its images."""
    prompts = PromptSet(list("abc"), [{}, {}, {}])
    shared = {"rewards": ["mine"], "seeds": "eval", "images_per_prompt": 2, "batch_size": 6}
    made = bench.Bench("set", prompts, shared, tmp_path)
    scores = {"base": [None, 0.2, 0.5, 0.7, None, 0.9], "same": [0.1, 0.2, 0.5, 0.7, 0.3, None]}
    for key, of_images in scores.items():
        (tmp_path / key).mkdir()
        (tmp_path / key / "000000.json").write_text(json.dumps([{"mine": score} for score in of_images]))
    base, same = (bench.read_result(made, key, key) for key in scores)
    other = same | {"policy": "other", "seeds": "other"}
    rows = {row["policy"]: row for row in bench.summarise(made, [base, same, other])}
    assert rows["same"]["difference"] == (0.0, 0.0, 0.0)
    assert rows["base"]["mean"][0] == rows["same"]["mean"][0] == pytest.approx((0.2 + 0.6) / 2)
    assert rows["other"]["mean"][0] == pytest.approx((0.15 + 0.6 + 0.3) / 3) and "difference" not in rows["other"]
    assert (rows["base"]["failed"], rows["same"]["failed"]) == (2, 1)
    # one that the reward has failed on everywhere takes nothing from the others
    none = same | {"policy": "none", "images": {"mine": [None] * 6}}
    with_it = {row["policy"]: row for row in bench.summarise(made, [base, same, none])}
    assert with_it["same"] == rows["same"] and with_it["base"] == rows["base"]
    assert with_it["none"]["mean"] is None and "difference" not in with_it["none"]


@pytest.mark.fast
def test_the_sde_of_training_is_another_sampler_on_the_same_noise(words, tmp_path):
    sde = ["--sde_type", "sde", "--sde_steps", "1"]
    ode, noisy, still = (
        run_bench(*words, *options, "--output", tmp_path / str(number))["benches"][0]
        for number, options in enumerate(([], sde, [*sde, "--noise_level", "1e-4"]))
    )
    assert noisy["protocol"]["sampler"] == "sde, noise 0.7, steps (0,)"
    scores = [bench["results"][0]["scores"]["redness"] for bench in (ode, noisy, still)]
    assert scores[2] == pytest.approx(scores[0], abs=1e-3)
    assert all(one != pytest.approx(other, abs=1e-3) for one, other in zip(*scores[:2], strict=True))


def test_a_model_that_edits_is_measured_on_records_with_pictures(tmp_path):
    lines = (ROOT / "assets" / "edit_eval.jsonl").read_text().splitlines()[:2]
    (tmp_path / "edits.jsonl").write_text("\n".join(lines))
    (tmp_path / "edit_signs").symlink_to(ROOT / "assets" / "edit_signs")
    words = [ROOT / "assets" / "embedded_edit", "--prompts", tmp_path / "edits.jsonl", "--reward", "preservation"]
    result = run_bench(*words, *SMALL, "--output", tmp_path / "out")
    (row,) = result["benches"][0]["table"]
    assert 0 < row["mean"][0] < 1
