"""Benchmarks: one layer (`python -m titan_megamoe.bench layer`), and the records every measurement is kept in."""
