"""Drills: what goes wrong where people train, done on purpose to real runs, and what must be so afterwards."""
