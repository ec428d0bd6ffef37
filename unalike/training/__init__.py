"""The training loop, training of several models at once, CUDA graphs, batch-norm statistics.

Knows models, losses and rows; nothing of clients or servers.
"""
