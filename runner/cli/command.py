"""Entry point of the command ``outrider``. Helper processes import it too, so it imports the command line only in main."""

from __future__ import annotations

import sys


def main() -> None:
    # Imported inside the try: Ctrl-C may come during the import.
    try:
        from outrider.runner.cli.main import main as run

        run()
    except KeyboardInterrupt:
        from outrider.runner.exit_codes import INTERRUPTED

        print("stopped", file=sys.stderr)
        sys.exit(INTERRUPTED)
