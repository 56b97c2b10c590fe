"""The workers' gRPC: legs from routers, link signalling between workers."""
