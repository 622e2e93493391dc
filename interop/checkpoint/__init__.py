"""The state of components, and how values, layouts and the content of storages are saved."""
