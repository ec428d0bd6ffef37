"""Runs between organisations: the server's program goes where an engine's server is, clients stay with their owners. Knows no method."""
