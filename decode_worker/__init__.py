"""The half of a worker that imports KV and streams tokens."""
