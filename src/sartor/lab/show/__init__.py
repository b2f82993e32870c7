"""What is made of records: tables, plots, reports."""
