"""What a GPU, several ranks, --track and --profile_steps add to a run's log. Each is imported when it is asked for."""
