"""Cross-silo runs: the program of the server goes to an engine's server, clients stay at home."""
