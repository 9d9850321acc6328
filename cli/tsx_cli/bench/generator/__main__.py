"""`python -m tsx_cli.bench.generator`: what `measure` starts, for who wants to by hand."""

from tsx_cli.bench.generator.child import main

if __name__ == "__main__":
    main()
