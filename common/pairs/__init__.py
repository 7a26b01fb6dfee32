"""Preference pairs of offline DPO: files, made pairs, cached latents."""
