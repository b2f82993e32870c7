"""The lab: workloads, providers, one timer, records, and the tables and plots made of records."""
