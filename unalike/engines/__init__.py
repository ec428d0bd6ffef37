"""What carries calls between server and clients. Knows messages and the federation, never an algorithm."""
