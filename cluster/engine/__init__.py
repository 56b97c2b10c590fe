"""One step at a time: schedule, run, commit."""
