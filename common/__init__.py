"""What the scripts share: SDE steps, rewards, data, model families, rollout engines, the run folder."""

import os

# who started this process: noted here, before any file of the folder imports torch, which takes seconds
PARENT = os.getppid()
