"""Benchmarks of one layer (`python -m titan_megamoe.bench layer`) and the records of measurements."""
