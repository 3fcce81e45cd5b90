"""What the command ``outrider`` begins with; helper processes import it again, so the command line itself comes later."""

from __future__ import annotations

import sys


def main() -> None:
    # Nothing is imported before: an interrupt may come as soon as there is anything to interrupt.
    try:
        from outrider.runner.cli.main import main as run

        run()
    except KeyboardInterrupt:
        from outrider.runner.cli.ending import INTERRUPTED

        print("stopped", file=sys.stderr)
        sys.exit(INTERRUPTED)
