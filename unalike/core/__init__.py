"""The protocol between server and clients: clients, operations, federation, privacy. Knows no task, model or method."""
