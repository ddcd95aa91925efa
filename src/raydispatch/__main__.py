"""`python -m raydispatch` is `raydispatch`."""

from raydispatch.cli.main import main

main()
