"""Evidence: what passed on a GPU, and which records it covers."""
