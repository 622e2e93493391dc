"""Threads, processes and crashes: no other module knows fork, locks between processes, or files that survive a kill."""
