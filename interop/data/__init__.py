"""Between torch, JAX and the user's types: layouts of items, crossings, indices, random keys. Nothing here has state."""
