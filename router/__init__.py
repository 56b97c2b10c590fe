"""Speaks to clients: the OpenAI and gRPC doors, and the life of one request."""
