"""Cross-silo runs: the server's program goes to the engine's server, clients stay with their owners."""
