"""``python -m fusion_advisor``."""

from __future__ import annotations

import sys

from fusion_advisor.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
