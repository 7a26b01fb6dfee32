"""Rewards: one file each, found by the file's name. common/scoring.py says what a reward is, and calls them."""
