"""`python -m tsx_cli` runs `tsx`."""

import sys

from tsx_cli.main import main

if __name__ == "__main__":
    sys.exit(main())
