"""What the scripts share: SDE steps, rewards, data, model families, rollout engines, the run folder."""
