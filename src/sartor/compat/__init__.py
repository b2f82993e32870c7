"""Faces: the signatures of other libraries over `sartor.attention`. They rename, and hold no mathematics."""
