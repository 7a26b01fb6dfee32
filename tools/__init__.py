"""What people run by hand, `python -m tools.NAME`; no script imports it."""
