"""Readers of files that others may have written, held against thousands of damaged and hostile ones (docs/security.md)."""
