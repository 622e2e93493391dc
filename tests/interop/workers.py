"""What worker processes of the tests run."""


def extend_and_edit(buffer, rows):
    buffer.extend(rows)
    buffer[:]["a"][1] = 5j
