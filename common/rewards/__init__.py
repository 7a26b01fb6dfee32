"""Rewards: one file each, found by the file's name. common/scoring.py says what a reward is, loads them and calls them."""
