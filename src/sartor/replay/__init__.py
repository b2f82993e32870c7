"""Launches of a call replayed in C: the library that does it, and the lists that it reads."""
