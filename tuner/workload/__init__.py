"""Workloads: documents, data sets, traces and arrival processes turned into a frozen list of requests."""
