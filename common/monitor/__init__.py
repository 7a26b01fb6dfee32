"""What surrounds a run: options from files and --help, bars, trackers, traces, ranks that are missing."""
