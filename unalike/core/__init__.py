"""The protocol between server and clients: clients, operations, federation, privacy.

Nothing here depends on a particular task, model or method.
"""
