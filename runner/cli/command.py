"""What the command ``outrider`` begins with; helper processes import it again, so the command line itself comes later."""

from __future__ import annotations

import sys

from outrider.runner.cli.ending import INTERRUPTED


def main() -> None:
    try:
        from outrider.runner.cli.main import main as run

        run()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(INTERRUPTED)
