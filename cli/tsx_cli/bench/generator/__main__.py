"""`python -m tsx_cli.bench.generator`."""

from tsx_cli.bench.generator.child import main

main()
