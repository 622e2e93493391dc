"""`python -m interop`, the command that is installed as `fbuf`."""

import sys

from interop.command.app import main

if __name__ == "__main__":
    sys.exit(main())
