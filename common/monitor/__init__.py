"""What only some runs need: options from files, --help, resuming, bars, trackers, traces, ranks that are missing."""
