"""The replay engine of the torch side: state in plain arrays, and functions on it."""
