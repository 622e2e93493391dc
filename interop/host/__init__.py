"""The host engine: it runs buffers on a CPU in NumPy and torch, as `fbuf` does on accelerators.

State and plain functions: rows in memory and files, where the ring stands, what samplers know. The rows and priorities of a
buffer on an accelerator go through jitted programs of `fbuf`.
"""
