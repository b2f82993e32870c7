"""What is measured: problems as data, and suites of them."""
