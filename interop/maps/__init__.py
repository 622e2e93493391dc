"""Maps from keys to tensordicts."""
