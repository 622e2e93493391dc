"""Replay buffers in other processes: shards, and the batches that are drawn over several of them."""
