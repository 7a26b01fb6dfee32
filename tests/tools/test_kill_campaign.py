"""benchmarks/kill_campaign.py on a toy script. The real ones are killed in tests/robustness/test_resume.py."""

from benchmarks import kill_campaign
from benchmarks.kill_campaign import PHASES, Kill, campaign, plan, table
from tests.conftest import ROOT, SCRIPTS, new_run

import pytest

# it says its phase, logs and saves as a script does
SCRIPT = """
import json, sys, time
sys.path.insert(0, {root!r})
from common.checkpoints import load_checkpoint, save_checkpoint
from common.resuming import find_checkpoint
from common.resuming import rewind
from common.process import end_with_parent
from pathlib import Path
import torch

def say(phase):
    Path("phase_rank0").write_text(phase)
    time.sleep(0.05)

end_with_parent()
say("loading")
run = Path("runs") / sys.argv[sys.argv.index("--name") + 1]
run.mkdir(parents=True, exist_ok=True)
path = find_checkpoint(run) if {resumes} else None
done = load_checkpoint(path)["step"] if path else -1
rewind(run, done)
for step in range(done + 1, 1000):
    say("gen")
    say("between")
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({{"training/global_step": step, "timing_s/gen": 0.05, "loss": time.time()}}) + "\\n")
    if step:
        save_checkpoint(run, step, {{"step": step, "a": torch.ones(2_000_000)}}, 2)
"""


def test_campaign(tmp_path):
    script = str(tmp_path / "script.py")
    (tmp_path / "script.py").write_text(SCRIPT.format(root=str(ROOT), resumes=True))
    kills = [Kill(script, "local", 1, "torchrun", "gen"), Kill(script, "local", 1, "everything", "writing")]
    kept = []
    records = campaign(kills, tmp_path, new_checkpoints=(1, 1), keep=kept.append)
    assert kept == records and [record["problems"] for record in records] == [[], []]
    assert [record["victim"] for record in records] == ["torchrun", "everything"]
    assert all(record["found"] >= record["seen"] >= 1 and record["exit_code"] for record in records)
    assert records[1]["writing"] and records[1]["seen"] > records[0]["found"]
    assert "| phase: writing | 1 | 1 | 1 | 0 |" in table(records)


def test_campaign_notices_a_run_that_begins_again(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT.format(root=str(ROOT), resumes=False))
    kill = Kill(str(tmp_path / "script.py"), "local", 1, "rank 0", "gen")
    (record,) = campaign([kill], tmp_path, new_checkpoints=(1, 1))
    assert len(record["problems"]) == 1 and "did not continue from step" in record["problems"][0]


def test_the_plan_is_the_same_every_time_and_covers_everything():
    kills = [kill for run in plan(0) for kill in run]
    assert kills == [kill for run in plan(0) for kill in run] and len(set(kills)) == len(kills) >= 200
    for script in SCRIPTS:
        own = [kill for kill in kills if kill.script == script]
        assert {kill.victim for kill in own} >= {"rank 0", "rank 1", "torchrun", "everything"}
        assert {kill.phase for kill in own} == set(PHASES[script])
        assert {kill.engine for kill in own} == ({"local"} if script == "dpo_offline.py" else {"local", "vllm"})
    assert {kill.phase for kill in kills if kill.victim == "engine"} >= {"starting", "loading", "reward", "writing"}


@pytest.mark.fast
def test_a_run_says_its_phase(tmp_path, monkeypatch):
    Run = kill_campaign.runs.Run
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(Run, "timed", Run.timed)  # restored at the end
    kill_campaign.ocr_and_phases.load()
    phases = [kill_campaign.phase_of(tmp_path, 1)]
    with new_run(tmp_path / "run").timed("gen"):
        phases.append(kill_campaign.phase_of(tmp_path, 1))
    phases.append(kill_campaign.phase_of(tmp_path, 1))
    assert phases == ["loading", "gen", "between"]
