"""Performance targets. `python -m benchmarks` runs all and prints a table; `python -m benchmarks NAME` one."""
