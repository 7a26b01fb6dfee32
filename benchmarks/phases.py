"""The ocr reward, in a run that says which phase it is in: benchmarks/kill_campaign.py passes it as --reward.

Imported by every rank before the model loads, it wraps the clock of the run's phases. Each rank's phase stands in the
file phase_rankR of the folder that the run was started in: `loading` from here to the first phase, then a phase's name
in metrics.jsonl ("gen", "update_actor" ...) or, from one to the next, `between`.
"""

import os
import time
from contextlib import contextmanager

from common.rewards.ocr import ocr  # noqa: F401  (what --reward phases.py:ocr names)
from common.run import RunLog

SHORTEST_S = 0.005  # that a phase lasts at least, to be seen by who polls the file
file = os.open(f"phase_rank{os.environ.get('RANK', '0')}", os.O_WRONLY | os.O_CREAT)
timed = RunLog.timed


def say(phase):
    os.pwrite(file, phase.ljust(20).encode(), 0)  # in one write: a reader never finds a half of it
    time.sleep(SHORTEST_S)


@contextmanager
def timed_and_said(self, name):
    say(name)
    with timed(self, name):
        yield
    say("between")


RunLog.timed = timed_and_said
say("loading")
