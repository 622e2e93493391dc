"""The host engine: rows in memory and files, where the ring stands, what samplers know. State and plain functions."""
