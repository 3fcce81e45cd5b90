"""``python -m outrider``: the command, for whoever has the package and not the scripts' folder on the search path."""

from outrider.runner.cli.command import main

# Whoever walks through the package's modules imports this one, too.
if __name__ == "__main__":
    main()
