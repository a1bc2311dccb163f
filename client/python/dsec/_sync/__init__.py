"""The client for threads: blocking sockets."""
