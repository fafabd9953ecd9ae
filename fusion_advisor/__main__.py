"""The program: ``fusion-advisor`` and ``python -m fusion_advisor``."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Answer the shell's completion if that needs no command line, else run it; return the exit code."""
    if "_FUSION_ADVISOR_COMPLETE" in os.environ:
        from fusion_advisor.cli.common.completion import complete

        answer = complete(os.environ)
        if answer is not None:
            sys.stdout.write(answer[0] + "\n" if answer[0] else "")
            return answer[1]
    # OpenMP reads it once, when torch is loaded. Threads that spin while they wait take cores from the threads they wait for.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from fusion_advisor.cli.app import main as run
    from fusion_advisor.cli.common.ranks import ended

    return ended(run())


if __name__ == "__main__":
    sys.exit(main())
