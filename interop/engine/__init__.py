"""The engine below the storages: what the items of a storage are, where their bytes are, and what guards a write."""
