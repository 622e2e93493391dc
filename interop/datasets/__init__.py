"""Datasets of others as replay buffers: downloaded, verified and converted once, then memory-mapped."""
