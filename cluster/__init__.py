"""What several processes must agree on, and the engine that every worker runs."""
