"""The half of a worker that takes prompts and exports their KV."""
