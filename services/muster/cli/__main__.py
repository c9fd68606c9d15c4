"""`python -m muster.cli`."""

from muster.cli.main import main

main()
