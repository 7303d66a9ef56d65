"""Deliberate bugs, to show that the gate catches them: `distbench.faults.base.Fault` is the extension point."""
