"""tools/watch.py: what it reports of samples and metrics written here."""

import json
import sys

from tools import watch

import pytest
from PIL import Image

pytestmark = pytest.mark.fast


def write_evaluation(run, step, colours, seed=0):
    """Samples of two prompts, whose images have these grey levels."""
    folder = run / "samples" / f"{step:04d}"
    folder.mkdir(parents=True)
    lines = []
    for place, colour in enumerate(colours):
        Image.new("RGB", (96, 32), (colour,) * 3).save(folder / f"{place}.png")
        lines.append(json.dumps({"file": f"{place}.png", "prompt": f"{place // 2}", "seed": seed + place, "ocr": 1.0}))
    (folder / "samples.jsonl").write_text("\n".join(lines) + "\n")


def write_run(run, images_per_prompt=2, resume=None):
    run.mkdir()
    options = {"eval_images_per_prompt": images_per_prompt, "resume": resume}
    (run / "args.json").write_text(json.dumps({"args": options}))
    rows = [{"training/global_step": step, "val/ocr/mean": 0.1 * step} for step in (0, 5, 10)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def run(tmp_path):
    """A run of three evaluations; a grey level is 1 / 255 of the range."""
    write_run(tmp_path / "run")
    write_evaluation(tmp_path / "run", 0, [0, 255, 0, 0])
    write_evaluation(tmp_path / "run", 5, [51, 204, 0, 0])
    write_evaluation(tmp_path / "run", 10, [51, 51, 51, 51], seed=7)  # other seeds: nothing to compare with
    return tmp_path / "run"


def test_diversity_and_drift_by_hand(run, tmp_path):
    """Differences between the images of a prompt 1, 0; 0.6, 0; 0, 0; from before training 0.2, 0.2, 0, 0."""
    found = watch.watch_samples(run)
    assert [(one.step, one.num_images) for one in found] == [(0, 4), (5, 4), (10, 4)]
    assert [one.diversity for one in found] == pytest.approx([0.5, 0.3, 0.0])
    assert [one.drift for one in found[:2]] == pytest.approx([0.0, 0.1]) and found[2].drift is None
    # a run that resumes it is compared with its images
    write_run(tmp_path / "next", images_per_prompt=1, resume=str(run))
    write_evaluation(tmp_path / "next", 15, [0, 255, 0, 51])
    (resumed,) = watch.watch_samples(tmp_path / "next")
    assert resumed.diversity is None and resumed.drift == pytest.approx(0.05)


def test_rules_are_met_or_not(run):
    assert watch.met_rules(run, ["val/ocr/mean>0.4", "val/ocr/mean<-1"]) == [
        "val/ocr/mean>0.4: met at step 5 (0.5), step 10 (1)",
        "val/ocr/mean<-1: not met by 3 evaluations",
    ]
    with pytest.raises(ValueError, match="^val/x>1: no evaluation logs val/x; there are val/ocr/mean$"):
        watch.met_rules(run, ["val/x>1"])
    with pytest.raises(ValueError, match="must be like"):
        watch.met_rules(run, ["ocr>1"])


def test_the_command(run, monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["watch", *map(str, arguments)])
        watch.main()
        return capsys.readouterr().out.splitlines()

    lines = call(run, "val/ocr/mean>0.9")
    assert lines[0].split() == ["step", "images", "diversity", "drift"]
    assert [line.split() for line in lines[2:4]] == [["5", "4", "0.3000", "0.1000"], ["10", "4", "0.0000", "-"]]
    assert lines[4] == "val/ocr/mean>0.9: met at step 10 (1)"
    (run / "samples" / "0005" / "1.png").write_bytes(b"no png")
    for folder in (run, run / "samples"):  # a broken file, and no run
        with pytest.raises(SystemExit, match="^tools.watch: error: .*(0005/1.png: |has no samples of an evaluation)"):
            call(folder)
