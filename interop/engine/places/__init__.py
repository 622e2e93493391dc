"""Where the bytes of rows are: one class for each kind of memory."""
