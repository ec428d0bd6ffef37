"""The training loop, stacked training and CUDA graphs. Knows models, losses and rows; nothing of clients or servers."""
