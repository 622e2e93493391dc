"""Several processes, and crashes: the locks of storages, undo records, folders that survive a kill."""
