"""python -m fusion_compiler"""

import sys

from fusion_compiler.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
