"""The ladder: rungs, what they are launched with, and what the compilers make of them."""
