"""One line for each library: `register()`, `activate()` or `install()`. Nothing is done or imported before it."""
