"""Generated protobuf and gRPC code; nothing here is written by hand."""
