"""Rewards: one file each, found by the file's name. scoring.py says what a reward is, loads rewards and calls them."""
